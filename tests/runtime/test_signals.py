"""A second signal always takes effect, even if code blocks the event loop.

These tests send real signals to separate processes.
"""

import asyncio
import contextlib
import math
import signal
import subprocess
import sys
import threading
import time

import pytest

from rollweave.runtime.signals import ENDING_S, HELD_S, on_ending_signals, too_late

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
    signaled = []
    def on_signal():
        signaled.append(None)
        print("signaled", flush=True)
        if len(signaled) == held:
            asyncio.get_running_loop().call_soon(hold)
    with on_ending_signals(on_signal):
        try:
            if held == 0:
                hold()
            print("waiting", flush=True)
            while len(signaled) < 3:
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


@pytest.mark.variants
@pytest.mark.parametrize("sent_signals", [0, 1, 2])
def test_a_blocked_loop_is_interrupted(sent_signals: int) -> None:
    """The first signal that it does not handle, if that is at least the second one,
    interrupts it, and the program unwinds in order.
    """
    # two pending signals of one kind are one
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGINT]
    command = [sys.executable, "-c", PROGRAM, str(sent_signals)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None
        output = process.stdout

        def until(*words: str) -> None:
            for word in words:
                assert output.readline() == f"{word}\n"

        if sent_signals:
            until("waiting")
        for number in signals[:sent_signals]:
            process.send_signal(number)
            until("signaled")
        until("held")
        for number in signals[sent_signals : max(2, sent_signals + 1)]:
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
    signaled, main = [], asyncio.current_task()
    def on_signal():
        signaled.append(None)
        print("signaled", flush=True)
        if len(signaled) > 1:
            main.cancel()
    with on_ending_signals(on_signal):
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


@pytest.mark.parametrize("how", ["signaled", "held"])
def test_a_third_signal_does_not_interrupt_the_end(how: str) -> None:
    """Nor does it print a word about unfinished tasks."""
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
            if how == "signaled":
                assert process.stdout.readline() == "signaled\n"
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
    ("received", "beat_at", "ended_at", "ends_at"),
    [
        ([(INT, 0.0)], 0.0, math.inf, math.inf),  # one signal is a request
        ([(INT, 0.0), (INT, 1.0)], 0.0, math.inf, 1.0 + HELD_S),  # the loop is blocked
        ([(TERM, 0.0)], 0.0, math.inf, HELD_S),
        ([(TERM, 0.0)], math.inf, math.inf, math.inf),  # it ends in order
        (
            [(INT, 0.0), (TERM, 1.0)],
            math.inf,
            math.inf,
            1.0 + ENDING_S,
        ),  # it runs, and does not end
        (
            [(INT, 0.0), (INT, 1.0)],
            math.inf,
            2.0,
            2.0 + HELD_S,
        ),  # its work has ended, and the process has not
        (
            [(INT, 0.0), (INT, 1.0), (INT, 9.0)],
            0.0,
            math.inf,
            1.0 + HELD_S,
        ),  # more signals do not delay it
    ],
)
def test_when_the_process_is_ended_at_once(
    received: list[tuple[int, float]], beat_at: float, ended_at: float, ends_at: float
) -> None:
    """An infinite `beat_at` stands for a loop that has just sent a heartbeat."""
    times = [number / 10 for number in range(400)]
    ended = [now for now in times if too_late(received, min(beat_at, now), ended_at, now)]
    assert ended == [now for now in times if now > ends_at]


def test_a_signal_wakes_a_loop_that_waits() -> None:
    """A signal in another thread does not interrupt the wait of the main one, as one
    that arrives just before the wait does not.
    """

    async def signaled_after_s() -> float:
        signaled, loop = asyncio.Event(), asyncio.get_running_loop()

        def send() -> None:
            time.sleep(0.2)
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

        with on_ending_signals(signaled.set):
            started = loop.time()
            loop.call_later(60.0, lambda: None)
            sender = threading.Thread(target=send)
            sender.start()
            await signaled.wait()
            sender.join()
        return loop.time() - started

    assert asyncio.run(signaled_after_s()) < 50.0, "the timer has woken it"
