"""Engines and the trainer on one device: weights that are published there and loaded,
KV that moves from one engine to another, and a whole run.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollweave.engine.clients.client import EngineClient, in_thread
from rollweave.engine.thread import EngineThread
from rollweave.runtime.launch import train
from rollweave.schema.base import EngineId
from rollweave.schema.serving import EngineSpec, GenerateResult, KvTransport
from rollweave.schema.training import (
    Publish,
    Published,
    Restore,
    Restored,
    Save,
    Saved,
    Trained,
    TrainOn,
)
from rollweave.schema.weights import WeightManifest
from rollweave.train.packing import Example
from rollweave.train.trainer import Trainer
from rollweave.weights.publication import read_tensors
from tests.gpu.conftest import CUDA
from tests.support.real_runs import lake
from tests.support.tiny_models import build, request, save
from tests.support.trainers import VOCABULARY, make_batch, make_config
from tests.support.variants import mostly_extended

BLOCK = 16
PROMPT = [(5 * at + 3) % VOCABULARY for at in range(43)]
SMALL_BYTES = 1 << 16
"""More than what is on the device beside weights and KV, and less than either."""

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Maximum difference of two log-probs that are computed in other shapes."""

Start = Callable[..., Awaitable[EngineClient]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save(build("qwen3", vocab_size=VOCABULARY), directory)  # it never ends by itself
    return directory


@pytest.fixture
async def start(path: Path, device: str) -> AsyncIterator[Start]:
    """Starts engines in threads, on the test's device."""
    clients: list[EngineClient] = []
    model_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    model_ready.set_result(None)

    async def begin(**changes: Any) -> EngineClient:
        spec = EngineSpec(
            id=EngineId(f"e{len(clients)}"),
            model=str(path),
            device=device,
            max_slots=8,
            kv_tokens=2048,
            block_tokens=BLOCK,
            **changes,
        )
        link = in_thread(spec, EngineThread, model_ready=model_ready)
        clients.append(EngineClient(str(spec.id), link, start_s=120, reply_s=120))
        await clients[-1].ready()
        return clients[-1]

    yield begin
    for client in clients:
        await client.close()


def new_trainer(
    path: Path, directory: Path, device: str, dtype: str, *, colocated: bool = False
) -> Trainer:
    made = make_config(trainer={"lr": 1e-2, "colocated": colocated}, kl=0.1)
    model = made.model.model_copy(update={"device": device, "dtype": dtype})
    return Trainer(made.model_copy(update={"model": model}), path)


def published(trainer: Trainer, *, release: bool = False) -> WeightManifest:
    reply = trainer.handle(
        Publish(version=trainer.step, publication_id=trainer.step, release=release)
    )
    assert isinstance(reply, Published), reply
    return reply.manifest


def scored(trainer: Trainer, result: GenerateResult) -> list[float]:
    """Return the trainer's own log-probs of the tokens that an engine has sampled."""
    tokens = torch.tensor([*PROMPT, *result.tokens])
    example = Example(tokens=tokens, targets=torch.arange(len(PROMPT), len(tokens)))
    return trainer._passes.logprobs([example], [0], temperature=1.0)[0].tolist()


@pytest.mark.variants
@pytest.mark.parametrize("staged", [False, True], ids=["loaded", "staged"])
@pytest.mark.parametrize("dtype", mostly_extended(["float32", "bfloat16"], {"float32"}))
async def test_an_engine_computes_with_the_weights_that_the_trainer_publishes(
    start: Start, path: Path, tmp_path: Path, device: str, dtype: str, staged: bool
) -> None:
    """It receives them while it is suspended, or while it generates."""
    trainer = new_trainer(path, tmp_path, device, dtype)
    engine = await start(dtype=dtype)
    previous: list[float] = []
    for step in range(2):
        manifest = published(trainer)
        busy = asyncio.ensure_future(
            engine.generate(request(f"busy{step}", PROMPT, max_tokens=200, seed=step))
        )
        if staged:
            await engine.stage(manifest)
        await engine.suspend()
        await engine.load(manifest)
        engine.resume()
        result = await engine.generate(
            request(f"r{step}", PROMPT, max_tokens=16, temperature=1.0, seed=step)
        )
        assert len((await busy).tokens) == 200
        expected = scored(trainer, result)
        assert list(result.logprobs) == pytest.approx(expected, abs=TOLERANCE[dtype])
        assert [span.version for span in result.versions] == [step]
        assert expected != previous
        previous = expected
        assert isinstance(trainer.handle(TrainOn(batch=make_batch(step, step=step))), Trained)
    trainer.close()


async def sampling(engine: EngineClient) -> None:
    """Wait until the engine has sampled a token."""
    async with asyncio.timeout(60):
        while not (await engine.stats()).output_tokens:
            pass


@pytest.mark.extended
async def test_two_engines_generate_while_the_trainer_trains(
    start: Start, path: Path, tmp_path: Path, device: str
) -> None:
    """They share the device. New weights arrive while requests are under way, which
    end with tokens of both versions.
    """
    trainer = new_trainer(path, tmp_path, device, "float32")
    engines = [await start(), await start()]
    for engine in engines:
        await engine.load(published(trainer))
    pending = [
        asyncio.ensure_future(
            engine.generate(
                request(f"{place}.{number}", PROMPT, max_tokens=200, temperature=1.0, seed=number)
            )
        )
        for place, engine in enumerate(engines)
        for number in range(4)
    ]
    for engine in engines:
        await sampling(engine)
        await engine.suspend()
    reply = await asyncio.to_thread(trainer.handle, TrainOn(batch=make_batch()))
    assert isinstance(reply, Trained), reply
    manifest = published(trainer)
    for engine in engines:
        await engine.load(manifest)
        engine.resume()
    training = asyncio.create_task(
        asyncio.to_thread(trainer.handle, TrainOn(batch=make_batch(1, step=1)))
    )
    results = await asyncio.gather(*pending)
    assert all(len(result.tokens) == 200 for result in results)
    versions = [[span.version for span in result.versions] for result in results]
    assert [0, 1] in versions
    assert all(one in ([0], [1], [0, 1]) for one in versions)
    assert isinstance(await training, Trained)
    trainer.close()


def allocated(device: str) -> int:
    """Return the bytes of tensors on a GPU; 0 for the CPU."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


async def test_the_trainer_and_an_engine_take_turns_on_one_device(
    start: Start, path: Path, tmp_path: Path, device: str
) -> None:
    """Each has memory there only in its turn, and the trainer trains the weights of one
    that never leaves the device, also after it was restored.
    """
    nothing = allocated(device)
    engine = await start(released=True)
    trainer = new_trainer(path, tmp_path / "turns", device, "float32", colocated=True)
    assert allocated(device) - nothing < SMALL_BYTES, "neither has begun"
    apart = new_trainer(path, tmp_path / "apart", "cpu", "float32")
    for step in range(3):
        manifest = published(trainer, release=True)
        assert allocated(device) - nothing < SMALL_BYTES, "the trainer has left"
        expected = read_tensors(published(apart))
        for name, tensor in read_tensors(manifest).items():
            assert torch.allclose(tensor, expected[name], atol=1e-4), (step, name)
        if step == 1:
            checkpoint = str(tmp_path / "checkpoint")
            assert isinstance(trainer.handle(Save(path=checkpoint)), Saved)
            trainer.close()
            trainer = new_trainer(path, tmp_path / "again", device, "float32", colocated=True)
            assert isinstance(trainer.handle(Restore(path=checkpoint)), Restored)
            manifest = published(trainer, release=True)
            assert allocated(device) - nothing < SMALL_BYTES, "it was restored on the host"
        await engine.load(manifest)
        assert device == "cpu" or allocated(device) - nothing > SMALL_BYTES
        engine.resume()
        result = await engine.generate(
            request(f"r{step}", PROMPT, max_tokens=16, temperature=1.0, seed=step)
        )
        assert list(result.logprobs) == pytest.approx(scored(apart, result), abs=1e-3)
        assert (await engine.suspend(release=True)).in_flight == 0
        assert allocated(device) - nothing < SMALL_BYTES, "the engine has left"
        for one in (trainer, apart):
            reply = one.handle(TrainOn(batch=make_batch(step, step=step)))
            assert isinstance(reply, Trained), reply
    trainer.close()
    apart.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("over", ["shm", "tcp"])
async def test_kv_moves_between_two_engines_on_one_device(
    start: Start, over: KvTransport, dtype: str
) -> None:
    """A conversation that moves after its first turn continues as one that stays."""
    stays, source, target = [await start(dtype=dtype) for _ in range(3)]
    first = request("first", PROMPT, max_tokens=21, temperature=0.0)
    stayed, moved = await stays.generate(first), await source.generate(first)
    assert moved.tokens == stayed.tokens
    context = [*PROMPT, *moved.tokens]
    manifest = await source.export_kv(context, over)
    assert await target.import_kv(context, manifest) == manifest.tokens == 48
    source.release_kv(manifest.id)
    second = request("second", [*context, 4, 2], max_tokens=12, temperature=0.0)
    after, expected = await target.generate(second), await stays.generate(second)
    assert after.cached_tokens == expected.cached_tokens == 48
    assert after.tokens == expected.tokens
    assert list(after.logprobs) == pytest.approx(list(expected.logprobs), abs=TOLERANCE[dtype])


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), CUDA])
def test_a_run_with_two_engines_on_the_trainers_device(tmp_path: Path, device: str) -> None:
    """They run at the same time, and in turn."""
    for colocated in (False, True):
        config = lake(
            tmp_path / str(colocated),
            model={"device": device},
            rollout={"mode": "sync"},
            engines={"count": 2},
            trainer={"colocated": colocated},
        )
        summary = train(config)
        assert (summary.error, summary.steps) == ("", 2)
        assert summary.account.balanced
