"""A serving engine for tests of lenders: `python serving_engine.py SOCKET` computes
nothing, and keeps the protocol of `rollweave_lending`.

Each line of its standard input is a number of steps of a request that arrives then; 0
asks for the state. It answers with one line for each: the intervals of its steps, in
nanoseconds of the monotonic clock, as JSON, or whether a lender is connected.
"""

import json
import sys
import time
from pathlib import Path

from rollweave_servers import lending

sys.path.insert(0, str(Path(lending.__file__).parent))  # as the plug-in's folder in vLLM

from rollweave_lending import Counts, Row, Serving, Step

STEP_S = 0.002
ABOUT = {"model": "m", "chunk_tokens": 512, "kv_tokens": 4096, "slots": 16}


def main(path: str, step_s: float = STEP_S) -> None:
    """Serve until standard input ends."""
    serving = Serving(path, ABOUT, rows=16)
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    for line in sys.stdin:
        steps = int(line)
        answer = intervals(serving, steps, step_s) if steps else serving.lends
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    serving.close()


def intervals(serving: Serving, steps: int, step_s: float) -> list[tuple[int, int]]:
    """Compute a request of one prompt step and `steps - 1` tokens."""
    arrived, first, done = time.monotonic_ns(), 0, []
    for number in range(1, steps + 1):
        serving.begin_step()
        began = time.monotonic_ns()
        time.sleep(step_s)
        now = time.monotonic_ns()
        first = first or now
        ended = number == steps
        rows = list[Row]() if ended else [Row(arrived, 1, first, now, number)]
        step = Step(now - began, 9 * (number == 1), number > 1, 9 * (number == 1))
        done.append((began, now))
        serving.end_step(step, Counts(not ended, 0, 100 * (not ended), 4096), rows.copy)
    return done


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
