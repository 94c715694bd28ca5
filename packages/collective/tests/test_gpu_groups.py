"""Groups of GPUs over a stand-in for NCCL, which notes what it is told."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from packages.collective.tests.group_member import CPU
from rollweave_collective import group as groups
from rollweave_collective.group import Group, _environment
from rollweave_collective.server import NcclRoot

VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Work:
    """An operation that is complete at the third look, unless it hangs or fails."""

    def __init__(self, *, hangs: bool = False, error: str = "") -> None:
        self.looks, self.waits, self.hangs, self.error = 0, 0, hangs, error

    def is_completed(self) -> bool:
        self.looks += 1
        return not self.hangs and self.looks > 2

    def wait(self, *limit: object) -> None:
        assert not limit, "NCCL's wait takes none"
        self.waits += 1
        if self.error:
            raise RuntimeError(self.error)


class Ranks:
    """The stand-in for torch's `ProcessGroupNCCL`."""

    Options = SimpleNamespace
    made: "Ranks"

    def __init__(self, store: object, rank: int, size: int, options: object) -> None:
        assert isinstance(store, dist.PrefixStore)
        self.rank, self.size, self.variable = rank, size, os.environ.get(VARIABLE)
        self.sent, self.works, self.aborted = list[torch.Tensor](), list[Work](), 0
        self.next = iter(list[Work]())
        Ranks.made = self

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        assert (options.rootRank, options.rootTensor) == (0, 0)
        self.sent += tensors
        self.works.append(next(self.next, Work()))
        return self.works[-1]

    def abort(self) -> None:
        self.aborted += 1
        raise RuntimeError("it is aborted already")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that are made current."""
    current = list[torch.device]()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Ranks, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(groups, "BUCKET_BYTES", 10)
    return current


def group(*works: Work) -> Group:
    made = Group(dist.HashStore(), 1, 3, number=5, host="127.0.0.1", device=CPU, wait_s=2.0)
    Ranks.made.next = iter(works)
    return made


@pytest.mark.parametrize("former", [None, "1"])
def test_a_lost_peer_does_not_end_the_process(
    device: list[torch.device], monkeypatch: pytest.MonkeyPatch, former: str | None
) -> None:
    if former is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, former)
    made = group()
    assert device == [CPU]
    ranks = Ranks.made
    assert (ranks.rank, ranks.size, ranks.variable) == (1, 3, "0")
    assert (made.number, made.size) == (5, 3)
    assert os.environ.get(VARIABLE) == former
    made.close()
    assert ranks.aborted == 1


def test_the_environment_is_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "former")
    with pytest.raises(ValueError, match="no"), _environment(VARIABLE, "0"):
        raise ValueError("no")
    assert os.environ[VARIABLE] == "former"


def test_all_buckets_are_done_in_their_order(device: list[torch.device]) -> None:
    made, done = group(), list[torch.Tensor]()
    payload = torch.arange(25, dtype=torch.uint8)
    under_way = list[int]()

    def take(bucket: torch.Tensor) -> None:
        done.append(bucket)
        under_way.append(len(Ranks.made.works) - len(done))

    made.broadcast(payload, take)
    assert [len(bucket) for bucket in done] == [10, 10, 5]
    assert torch.equal(torch.cat(done), payload)
    assert under_way == [1, 1, 0], "one bucket is sent while the last one is taken"
    assert [work.waits for work in Ranks.made.works] == [1, 1, 1], "each error is raised"
    assert Ranks.made.aborted == 0


@pytest.mark.parametrize("hangs", [True, False])
def test_a_group_that_hangs_or_fails_is_closed(
    device: list[torch.device], monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """The time is injected."""
    now, pauses = 100.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        pauses.append(seconds)
        now += 0.5

    monkeypatch.setattr(groups, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    made = group(Work(), Work(hangs=hangs, error="NCCL error"))
    text = "a peer was silent for 2 s" if hangs else "NCCL error"
    with pytest.raises(RuntimeError, match=text):
        made.broadcast(torch.zeros(30, dtype=torch.uint8))
    assert Ranks.made.aborted == 1
    assert set(pauses) == {groups.POLL_S}
    assert now == 100.0 + (1.0 + 2.5 if hangs else 2.0)


def test_the_trainer_forms_a_group_once_and_sends_each_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The contract is that of vLLM's own engine, which reduces one number first."""
    calls = list[Any]()

    class Stream:
        def __init__(self, device: torch.device) -> None:
            assert device == CPU

        def synchronize(self) -> None:
            calls.append("synchronize")

    @contextmanager
    def stream(made: Stream) -> Iterator[None]:
        calls.append("begin")
        yield
        calls.append("end")

    def reduce(tensors: list[torch.Tensor], streams: list[Any], comms: list[Any]) -> None:
        assert isinstance(streams[0], Stream)
        calls.append(("reduce", [tensor.tolist() for tensor in tensors], comms))

    def broadcast(
        tensors: list[torch.Tensor], root: int, streams: list[Any], comms: list[Any]
    ) -> None:
        assert isinstance(streams[0], Stream)
        calls.append(("broadcast", [tensor.tolist() for tensor in tensors], root, comms))

    def init_rank(size: int, unique_id: bytes, rank: int) -> str:
        calls.append(("rank", size, unique_id, rank))
        return "ranks"

    from torch.cuda import nccl

    monkeypatch.setattr(nccl, "unique_id", lambda: bytearray(b"id"), raising=False)
    for name, function in (
        *(("init_rank", init_rank), ("all_reduce", reduce), ("broadcast", broadcast)),
    ):
        monkeypatch.setattr(nccl, name, function, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(device))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    root = NcclRoot(3, CPU)
    assert root.unique_id == b"id"
    assert calls == []
    one, two = torch.tensor([1.0]), torch.tensor([2.0, 3.0])
    root.send([one, two])
    formed = [("rank", 3, b"id", 0), ("reduce", [[0.0]], ["ranks"])]
    sent = [("broadcast", [values], 0, ["ranks"]) for values in ([1.0], [2.0, 3.0])]
    assert calls == [CPU, "begin", *formed, *sent, "end", "synchronize"]
    calls.clear()
    root.send([two])
    assert calls == [CPU, "begin", sent[1], "end", "synchronize"]
