"""An engine that lends beside a serving engine, on a thread, for tests."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from packages.servers.tests.lending_processes import WAIT_S, until
from rollweave.schema import serving as s
from rollweave.schema.base import EngineId
from rollweave_servers.beside import BesideServing
from tests.support.lending import Replies

PAGE = 16_384


class Lender:
    """An executor on a thread, and the replies to the one that started it."""

    def __init__(self, spec: s.EngineSpec) -> None:
        self.replies = Replies()
        self.executor = BesideServing(spec, self.replies.put, end_s=0.1)
        self.thread = threading.Thread(target=self.executor.run)
        self.thread.start()

    def stats(self) -> s.EngineStats:
        count = len(self.replies._all)
        self.executor.post(s.Stats())
        until(lambda: len(self.replies._all) > count, "the state")
        sampled = self.replies.wait_for(s.Sampled)[-1]
        assert isinstance(sampled, s.Sampled)
        return sampled.stats


@contextlib.contextmanager
def lending(
    model: Path, folder: Path, *, ttft_s: float = 60.0, kv_tokens: int = 2048
) -> Iterator[Lender]:
    lend = s.LendSpec(
        socket=str(folder / "s"),
        ttft_s=ttft_s,
        tpot_s=60.0,
        page_bytes=PAGE,
        beside=str(folder / "serving"),
    )
    spec = s.EngineSpec(id=EngineId("s"), model=str(model), kv_tokens=kv_tokens, lend=lend)
    lender = Lender(spec)
    try:
        lender.replies.wait_for(s.Ready)
        yield lender
    finally:
        lender.executor.post(s.Shutdown())
        lender.thread.join(WAIT_S)
        assert not lender.thread.is_alive()


def borrowed(model: Path, *, kv_tokens: int = 1024) -> s.EngineSpec:
    return s.EngineSpec(id=EngineId("e1"), model=str(model), kv_tokens=kv_tokens, max_slots=4)
