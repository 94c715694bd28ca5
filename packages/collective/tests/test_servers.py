"""A vLLM server gets a version by its own NCCL engine: a fake server and a fake NCCL
keep to the contract of `vllm/distributed/weight_transfer`, and check the other side's.
"""

import asyncio
import base64
import os
import queue
import threading
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec
import pytest
import torch
from aiohttp import web

from packages.collective.tests.group_member import CPU, version, weights
from rollweave.schema.errors import WeightsError
from rollweave.weights.checkpoint import ModelShape
from rollweave.weights.publication import bytes_of
from rollweave.weights.tcp import Tcp
from rollweave.weights.transport import KeepAlive
from rollweave_collective import sender as senders
from rollweave_collective.messages import Begun, JoinServer, Sent, decode, next_answer
from rollweave_collective.sender import Sender
from rollweave_collective.server import Server
from rollweave_servers.control import ControlError, RefusedError
from rollweave_servers.vllm_control import ROUTES
from rollweave_servers.vllm_group import Announced, GroupControl

WIRES: dict[bytes, "queue.Queue[torch.Tensor]"] = {}
"""What crosses each group, by its unique id."""


class FakeRoot:
    """The trainer's rank without NCCL. A group needs all ranks before it sends."""

    breaks = False

    def __init__(self, size: int, device: torch.device) -> None:
        assert (size, device) == (3, CPU)  # two ranks of tensor parallelism, and itself
        self.unique_id = os.urandom(128)
        WIRES[self.unique_id] = queue.Queue()
        self.joined = threading.Event()
        JOINED[self.unique_id] = self.joined

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        assert self.joined.wait(20.0)
        for number, tensor in enumerate(tensors):
            if self.breaks and number == 2:
                WIRES[self.unique_id].put(torch.empty(0))  # NCCL would hang
                raise RuntimeError("NCCL error: remote process exited\nmore lines")
            WIRES[self.unique_id].put(tensor.clone())


JOINED: dict[bytes, threading.Event] = {}


class FakeVllm:
    """The control routes, as vLLM 0.32 answers them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.wire: queue.Queue[torch.Tensor] | None = None
        self.loaded: dict[str, torch.Tensor] = {}
        self.label, self.open = "default", False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(request.path)
        body = await request.json() if request.can_read_body else {}
        match request.path:
            case "/init_weight_transfer_engine":
                info = body["init_info"]
                id = base64.b64decode(info.pop("nccl_unique_id_b64"), validate=True)
                assert info == {"rank_offset": 1, "world_size": 3, "packed": False}
                self.wire = WIRES[id]
                JOINED[id].set()
            case "/start_weight_update":
                assert not self.open
                self.open = True
            case "/update_weights":
                assert self.open
                return await self._receive(**body["update_info"])
            case "/finish_weight_update":
                self.label, self.open = body["weight_version"], False
        return web.json_response({"weight_version": self.label})

    async def _receive(
        self, names: list[str], dtype_names: list[str], shapes: list[list[int]]
    ) -> web.StreamResponse:
        assert self.wire is not None
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            tensor = self.wire.get(timeout=20.0)
            if (tensor.dtype, list(tensor.shape)) != (getattr(torch, dtype), shape):
                return web.json_response({"error": f"{name} is lost"}, status=500)
            self.loaded[name] = tensor
        return web.json_response({})


class AnyShape(ModelShape):
    """Takes all tensors, so that the test chooses them."""

    def __init__(self) -> None: ...

    def check(self, shapes: Any) -> None: ...


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeVllm, GroupControl]]:
    server, app = FakeVllm(), web.Application()
    for route, method in ROUTES.items():
        app.router.add_route(method, route, server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    control = GroupControl(url, token="t", limit_s=30.0, receiver=Server(2))
    yield server, control
    await control.close()
    await runner.cleanup()


async def update(control: GroupControl, sender: Sender, number: int) -> None:
    with version(number) as publication:
        held = Announced(sender.offer(publication.manifest), AnyShape())
        await control.check(held)
        await control.swap(held, str(number))


async def test_each_tensor_arrives_and_the_group_stays(fake: tuple[FakeVllm, GroupControl]) -> None:
    server, control = fake
    sender = Sender("127.0.0.1", CPU, make_root=FakeRoot)
    await control.connect()
    for number in (1, 2):
        await update(control, sender, number)
        expected = weights(number)
        assert list(server.loaded) == list(expected)
        for name, tensor in expected.items():
            assert bytes_of(server.loaded[name]) == bytes_of(tensor)
        assert server.label == str(number)
    sequence = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/weight_info"]
    first = [sequence[0], "/init_weight_transfer_engine", *sequence[1:]]
    assert server.calls == ["/weight_info", *first, *sequence]
    assert sender.doubts() == ()
    sender.close()


async def test_a_broadcast_that_breaks_ends_the_server(
    fake: tuple[FakeVllm, GroupControl], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights may be any, so no label may say otherwise."""
    server, control = fake
    sender = Sender("127.0.0.1", CPU, make_root=FakeRoot)
    monkeypatch.setattr(FakeRoot, "breaks", True)
    with pytest.raises(RefusedError, match="is lost"):
        await update(control, sender, 1)
    assert server.label == "default"
    assert "/finish_weight_update" not in server.calls
    doubts: tuple[str, ...] = ()
    async with asyncio.timeout(20.0):
        while not doubts:
            await asyncio.sleep(0.01)
            doubts = sender.doubts()
    assert doubts == ("a server gets no weights: NCCL error: remote process exited",)
    sender.close()


async def test_a_group_that_hangs_is_given_up_by_name(
    fake: tuple[FakeVllm, GroupControl], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, over = Sender("127.0.0.1", CPU, make_root=FakeRoot), threading.Event()
    monkeypatch.setattr(sender, "_server_s", 0.05)
    monkeypatch.setattr(FakeRoot, "send", lambda root, tensors: over.wait(20.0))
    manifest = sender.offer((publication := version(1)).manifest)

    async def nothing(info: dict[str, Any]) -> None: ...

    text = r"the trainer refused: .* the group did not receive them within 0\.05 s"
    with publication, pytest.raises(WeightsError, match=text):
        await Server(2).bring(manifest, begin=nothing, receive=nothing)
    over.set()
    sender.close()


async def test_a_server_waits_for_the_broadcast_before_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(senders, "KEEPALIVE_S", 0.01)
    monkeypatch.setattr(FakeRoot, "send", lambda root, tensors: None)
    sender = Sender("127.0.0.1", CPU, make_root=FakeRoot)

    async def hold() -> None:
        await sender._turn.acquire()

    async def release() -> None:
        sender._turn.release()

    asyncio.run_coroutine_threadsafe(hold(), sender._loop).result(20.0)
    with version(1) as publication:
        manifest = sender.offer(publication.manifest)
        assert manifest.sender is not None
        join = JoinServer(publication_id=1, digest=manifest.digest, member=b"server", ranks=2)
        for turn in range(2):
            channel = await Tcp(decode=decode).connect(manifest.sender)
            await channel.send(join)
            for _ in range(3 * (not turn)):
                assert (await channel.receive())[0] == KeepAlive()
            if not turn:
                asyncio.run_coroutine_threadsafe(release(), sender._loop).result(20.0)
            begun = await next_answer(channel, Begun)
            assert bool(begun.unique_id) == (not turn), "the group is formed once"
            assert await next_answer(channel, Sent) == Sent()
            channel.close()
    sender.close()


async def test_a_trainer_without_a_gpu_and_a_version_of_another_source(
    fake: tuple[FakeVllm, GroupControl],
) -> None:
    sender = Sender("127.0.0.1", CPU)
    with pytest.raises(ControlError, match="vLLM has not received 1: the trainer refused: "):
        await update(fake[1], sender, 1)
    sender.close()
    with version(1) as publication:
        for manifest, text in (
            (publication.manifest, "from the trainer alone"),
            (
                msgspec.structs.replace(
                    publication.manifest,
                    tensors=publication.manifest.tensors * 2,
                    sender=sender._listener.address,
                ),
                "must be distinct",
            ),
        ):
            with pytest.raises(WeightsError, match=text):
                Announced(manifest, AnyShape())
