"""A real vLLM, if `ROLLWEAVE_VLLM_PYTHON` names an interpreter that has it, behaves as
the golden answers.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.engine.vllm_server import VARIABLE, VllmServer
from rollweave.engine.clients.client import EngineClient
from rollweave.engine.clients.http import HttpEngine, HttpSpec
from rollweave.engine.clients.probe import Logprobs
from rollweave.schema import serving as s
from rollweave.schema.base import EngineId
from rollweave.schema.errors import EngineError, EngineLostError
from tests.support.engines import engine_in_thread, needs_vllm, vllm_checkpoint

pytestmark = list(needs_vllm)
LONG = s.Sampling(max_tokens=480)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def embedded(model: Path) -> AsyncIterator[EngineClient]:
    spec = s.EngineSpec(id=EngineId("e0"), model=str(model), max_slots=4, kv_tokens=1024)
    engine = engine_in_thread(spec, reply_s=20.0)
    await engine.ready()
    yield engine
    await engine.close()


@asynccontextmanager
async def remote(server: VllmServer, dialect: s.DialectName) -> AsyncIterator[HttpEngine]:
    spec = HttpSpec(name="vllm", url=f"http://127.0.0.1:{server.port}", vocab=128, dialect=dialect)
    engine = HttpEngine(spec, start_s=600.0, reply_s=20.0, check_s=1000.0)
    try:
        await engine.ready()
        yield engine
    finally:
        await engine.close()


async def test_both_dialects_work_and_the_loss_is_noticed(
    model: Path, embedded: EngineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # minutes of a C++ compiler in the first request
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    python = os.environ[VARIABLE]
    server = VllmServer(
        python, str(model), kv_bytes=1 << 24, eager=True, scratch=tmp_path, concurrency=1
    )
    with server:
        await asyncio.to_thread(server.wait_ready)
        for dialect in ("vllm", "completions"):
            async with remote(server, dialect) as engine:
                await agrees(engine, embedded, partial=dialect == "vllm")
        async with remote(server, "vllm") as engine:
            pending = engine.generate(s.GenerateRequest(id="r0", tokens=(5,), sampling=LONG))
            while (await engine.stats()).running == 0:  # noqa: ASYNC110 (our own count)
                await asyncio.sleep(0)
            server.__exit__()
            with pytest.raises(EngineLostError, match="does not answer"):
                await pending


async def agrees(engine: HttpEngine, embedded: EngineClient, *, partial: bool) -> None:
    """Assert the same greedy tokens and log-probs, valid sampled ones, and an end on
    request.
    """
    assert engine._logprobs is Logprobs.RAW
    for stops in ((), tuple(range(0, 128, 5))):
        sampling = s.Sampling(temperature=0.0, max_tokens=12, stop_token_ids=stops)
        request = s.GenerateRequest(id="r0", tokens=(5, 6, 7), sampling=sampling)
        there, here = await engine.generate(request), await embedded.generate(request)
        assert (there.tokens, there.finish) == (here.tokens, here.finish)
        assert there.logprobs == pytest.approx(here.logprobs, abs=1e-4)
    masked = s.GenerateRequest(
        id="r1", tokens=(5,), sampling=s.Sampling(max_tokens=12, allowed=(7, 8))
    )
    assert set((await engine.generate(masked)).tokens) <= {7, 8}
    with pytest.raises(EngineError, match=r"must be 0 or 1, got 0\.7"):
        await engine.generate(
            s.GenerateRequest(id="r2", tokens=(5,), sampling=s.Sampling(temperature=0.7))
        )
    out_of_time = await engine.generate(
        s.GenerateRequest(id="r3", tokens=(5,), sampling=LONG, budget_s=0.1)
    )
    assert out_of_time.finish is s.FinishReason.TIME
    assert len(out_of_time.tokens) < (LONG.max_tokens if partial else 1)
