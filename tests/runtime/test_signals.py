"""Whoever asks twice is heard, also where something holds up the event loop.

With real signals, in a process of its own.
"""

import contextlib
import math
import signal
import subprocess
import sys

import pytest

from rollweave.runtime.signals import ENDING_S, HELD_S, too_late

PROGRAM = """
import asyncio, sys, time
from rollweave.runtime.signals import on_ending_signals

def hold():
    try:
        print("held", flush=True)
        while True:
            pass
    finally:
        print("let go", flush=True)

async def main(held):
    heard = []
    def hear():
        heard.append(None)
        print("heard", flush=True)
        if len(heard) == held:
            asyncio.get_running_loop().call_soon(hold)
    with on_ending_signals(hear):
        try:
            if held == 0:
                hold()
            print("waiting", flush=True)
            while len(heard) < 3:
                await asyncio.sleep(1000)
        finally:
            print("closing", flush=True)
            await asyncio.sleep(0)
            print("closed", flush=True)

try:
    asyncio.run(main(int(sys.argv[1])))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("held", [0, 1, 2])
def test_a_loop_that_never_comes_round_is_interrupted(held: int) -> None:
    """By the first signal that it does not hear, if that is at least the second one;
    and the program is unwound in order.
    """
    # two of one kind that nobody has heard are one
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGINT]
    command = [sys.executable, "-c", PROGRAM, str(held)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None
        said = process.stdout

        def until(*words: str) -> None:
            for word in words:
                assert said.readline() == f"{word}\n"

        if held:
            until("waiting")
        for number in signals[:held]:
            process.send_signal(number)
            until("heard")
        until("held")
        for number in signals[held : max(2, held + 1)]:
            process.send_signal(number)
        until("let go", "closing", "closed", "interrupted")
        assert process.wait() == 0


IMPATIENT = """
import asyncio, sys
from rollweave.runtime.signals import on_ending_signals

def hold():
    print("held", flush=True)
    while True:
        pass

async def main():
    heard, main = [], asyncio.current_task()
    def hear():
        heard.append(None)
        print("heard", flush=True)
        if len(heard) > 1:
            main.cancel()
    with on_ending_signals(hear):
        try:
            if sys.argv[1] == "held":
                hold()
            print("waiting", flush=True)
            await asyncio.sleep(1000)
        finally:
            print("closing", flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
            print("closed", flush=True)

try:
    asyncio.run(main())
except (KeyboardInterrupt, asyncio.CancelledError):
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("how", ["heard", "held"])
def test_whoever_asks_thrice_does_not_break_off_the_end(how: str) -> None:
    """Nor has it a word of what was left in the middle."""
    command, pipe = [sys.executable, "-c", IMPATIENT, how], subprocess.PIPE
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == ("held\n" if how == "held" else "waiting\n")
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
            if how == "heard":
                assert process.stdout.readline() == "heard\n"
        assert process.stdout.readline() == "closing\n"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.read().splitlines() == ["closed", "interrupted"]
        assert process.wait() == 0
        assert process.stderr.read() == ""


INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.mark.parametrize(
    ("asked", "beat_at", "ended_at", "ends_at"),
    [
        ([(INT, 0.0)], 0.0, math.inf, math.inf),  # once is a request
        ([(INT, 0.0), (INT, 1.0)], 0.0, math.inf, 1.0 + HELD_S),  # the loop is held up
        ([(TERM, 0.0)], 0.0, math.inf, HELD_S),
        ([(TERM, 0.0)], math.inf, math.inf, math.inf),  # it ends in order
        (
            [(INT, 0.0), (TERM, 1.0)],
            math.inf,
            math.inf,
            1.0 + ENDING_S,
        ),  # it comes round, and does not end
        (
            [(INT, 0.0), (INT, 1.0)],
            math.inf,
            2.0,
            2.0 + HELD_S,
        ),  # its work has ended, and something else has not
        (
            [(INT, 0.0), (INT, 1.0), (INT, 9.0)],
            0.0,
            math.inf,
            1.0 + HELD_S,
        ),  # more do not put it off
    ],
)
def test_when_the_last_resort_is_taken(
    asked: list[tuple[int, float]], beat_at: float, ended_at: float, ends_at: float
) -> None:
    """`beat_at` of infinity: the loop has beaten just now, whenever one looks."""
    times = [number / 10 for number in range(400)]
    found = [now for now in times if too_late(asked, min(beat_at, now), ended_at, now)]
    assert found == [now for now in times if now > ends_at]
