"""The process of a judge of mathematics, started by `math_judge.py`: `python -m
rollweave.envs.handlers.math_worker`.

It reads pairs of an answer and the expected answer, one JSON list per line, and writes
up to two lines for each pair. The first line says why the expected answer cannot be
read, or is "". If it can be read, the second line says whether math-verify accepts the
answer, and why the answer was not compared.

The limits count processor time, so a busy machine changes no verdict. A computation
that the interpreter cannot interrupt, such as a power of a large integer, is ended by
the system, together with this process. The process also ends when its input ends, as at
the end of its parent.
"""

import json
import logging
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

CPU_S = 3.0
"""Maximum seconds of processor time for each of two steps: reading the expected answer,
and comparing.
"""

GRACE_S = 2.0
"""Further seconds after which the system ends the process."""

MEMORY = 2 << 30
"""Maximum bytes of the process's address space."""

KEPT = 512 << 20
"""Bytes of resident memory beyond which the process ends after an answer."""

TOO_LONG = f"comparing the answer takes more than {CPU_S:g} s"
"""Reason of the verdict about an answer that is too complex."""


class _LimitError(BaseException):
    """The time is up. No library mistakes it for one of its errors."""


def main() -> None:
    """Answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGVTALRM, _stop)
    logging.disable()
    judge = _Judge()
    _write("ready")
    for line in sys.stdin.buffer:
        judge.answer(*json.loads(line))
        if _resident() > KEPT:
            return


class _Judge:
    def __init__(self) -> None:
        from math_verify import LatexExtractionConfig, parse, verify

        self._parse, self._verify = parse, verify
        self._config = [LatexExtractionConfig(boxed_match_priority=0)]
        self._compare(self._read("1"), "1")  # imports what is imported on first use

    def answer(self, given: str, expected: str) -> None:
        """Write both lines about a pair."""
        gold, problem = _limited(lambda: self._read(expected))
        _write(problem and f"reading it {problem}")
        if not problem:
            equal, problem = _limited(lambda: self._compare(gold, given))
            _write([equal is True, problem and f"comparing the answer {problem}"])

    def _read(self, text: str) -> Any:
        return self._parse(
            f"\\boxed{{{text}}}",
            extraction_config=self._config,
            extraction_mode="first_match",
            parsing_timeout=None,
        )

    def _compare(self, gold: Any, given: str) -> bool:
        answer = self._read(given)
        return bool(self._verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None))


def _limited(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of a call, or why it has none."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    end, most = int(used.ru_utime + used.ru_stime + CPU_S + GRACE_S) + 1, _most_seconds()
    resource.setrlimit(resource.RLIMIT_CPU, (end if most < 0 else min(end, most), most))
    try:
        # The timer repeats, in case a library catches every exception.
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S, CPU_S / 10)
        try:
            return call(), ""
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _LimitError:
        return None, f"takes more than {CPU_S:g} s"
    except (MemoryError, RecursionError) as error:
        return None, f"exceeds its limits ({type(error).__name__})"


def _resident() -> int:
    """Return the bytes of resident memory. (`getrusage` reports a maximum that includes
    the process from which this process was forked.)
    """
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # on another system
        return 0


def _most_seconds() -> int:
    """Return the hard limit of processor time; negative if there is none."""
    return resource.getrlimit(resource.RLIMIT_CPU)[1]


def _stop(*_: object) -> None:
    raise _LimitError


def _write(value: object) -> None:
    sys.stdout.buffer.write(json.dumps(value).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
