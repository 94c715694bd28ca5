"""Whoever asks twice is heard, also where something holds up the event loop. With real signals, in a process of its own."""

import contextlib
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys, time
from rollweave.live.signals import on_ending_signals

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
    """By the first signal that it does not hear, if that is at least the second one; and the program is unwound in order."""
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGINT]  # two of one kind that nobody has heard are one
    command = [sys.executable, "-c", PROGRAM, str(held)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, contextlib.ExitStack() as stack:
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
