"""New weights in a real vLLM server, and what goes wrong with them (`make
test-vllm`).
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import torch
from openai import AsyncOpenAI
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.engine.vllm_server import START_S, VARIABLE
from benchmarks.harness import free_port
from packages.servers.tests.server_engines import (
    SCALE,
    Weights,
    adapters_are_added_to_the_first_weights,
    agrees,
    all_end,
    greedy,
    spec_of,
    started,
    streamed_tokens_are_of_the_weights_that_they_name,
    tokens_are_sampled,
    updates_are_exact_and_refused_ones_leave_the_old_weights,
)
from packages.servers.tests.vllm_server import SECRET, attached_spec, running
from rollweave.schema import serving as s
from rollweave.schema.errors import EngineLostError
from rollweave.schema.work import Routes
from rollweave.weights.checkpoint import read_shape
from rollweave_servers.control import RefusedError
from rollweave_servers.process import PLUGIN, inherited
from rollweave_servers.vllm import TOKEN, VllmServer
from rollweave_servers.vllm_control import VllmControl
from tests.support.engines import VLLM_START_S, needs_vllm, vllm_spec
from tests.support.processes import descendants
from tests.support.real_gateway import Turns, checkpoint, served

pytestmark = list(needs_vllm)


class ExpertWeights(Weights):
    """Checkpoints of Qwen3-MoE, with experts of a width that vLLM pads on a CPU. The
    embedded engine does not compute them: transformers does.
    """

    def write(self, path: Path, number: int) -> None:
        torch.manual_seed(number)
        config = Qwen3MoeConfig(
            vocab_size=128,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            max_position_embeddings=512,
            initializer_range=0.1,
            eos_token_id=127,
            dtype="float32",
        )
        Qwen3MoeForCausalLM(config).save_pretrained(path)

    async def continued(self, number: int, request: s.GenerateRequest) -> s.GenerateResult:
        model = Qwen3MoeForCausalLM.from_pretrained(self.checkpoint(number), dtype=torch.float32)
        tokens, logprobs = list(request.tokens), list[float]()
        while len(logprobs) < request.sampling.max_tokens and 127 not in tokens:
            with torch.no_grad():
                row = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(row.argmax()))
            logprobs.append(float(row.max()))
        return s.GenerateResult(
            id=request.id,
            tokens=tuple(tokens[len(request.tokens) :]),
            logprobs=tuple(logprobs),
            versions=(),
            finish=s.FinishReason.LENGTH,
        )


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


def shared_names(pids: list[int]) -> list[str]:
    """Return the shared memory of these processes that would be left if they were
    killed now.
    """
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [line for line in lines if " /dev/shm/" in line and not line.endswith("(deleted)")]


async def test_updates_are_exact_and_refused_ones_leave_the_old_weights(
    weights: Weights, tmp_path: Path
) -> None:
    """One server, because each takes tens of seconds to start."""
    async with started(weights, tmp_path, vllm_spec()) as (engine, _):
        await updates_are_exact_and_refused_ones_leave_the_old_weights(engine, weights)


async def test_a_server_that_already_runs_is_leased_updated_and_left(
    weights: Weights, tmp_path: Path
) -> None:
    """The first engine ends while the server is paused in the middle of an update."""
    port, kv_bytes = free_port(), str(16 << 20)
    options = {"model": weights.model, "port": port, "host": "127.0.0.1", "dtype": "float32"}
    options |= {"max-num-seqs": 16, "max-num-batched-tokens": 16384, "block-size": 32}
    options |= {"kv-cache-memory-bytes": kv_bytes, "distributed-executor-backend": "uni"}
    command = [os.environ[VARIABLE], str(PLUGIN / "rollweave_vllm_leases.py")]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command += ["--enforce-eager", "--no-enable-chunked-prefill", "--skip-tokenizer-init"]
    variables = {
        **inherited(),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        TOKEN: SECRET,
    }
    with running(command, variables, port, SECRET, START_S) as process:
        async with started(weights, tmp_path, attached_spec(port)) as (engine, pid):
            await updates_are_exact_and_refused_ones_leave_the_old_weights(engine, weights)
            await engine.suspend()
            os.kill(pid, signal.SIGKILL)
            await asyncio.wait([engine.lost])
        async with started(weights, tmp_path, attached_spec(port)) as (engine, _):
            await agrees(engine, weights, 0)
        assert process.poll() is None


async def test_streamed_tokens_are_of_the_weights_that_they_name(
    weights: Weights, tmp_path: Path
) -> None:
    async with started(weights, tmp_path, vllm_spec()) as (engine, _):
        await streamed_tokens_are_of_the_weights_that_they_name(engine, weights, until_the_end=True)


async def test_a_program_reads_text_while_vllm_samples_it(tmp_path: Path) -> None:
    """Through the gateway, with a tokenizer, which the server loads, too."""
    directory = tmp_path / "model"
    directory.mkdir()
    model = cast(Weights, SimpleNamespace(model=checkpoint(directory, head_dim=32)))
    async with started(model, tmp_path, vllm_spec()) as (engine, _):
        texts, arrived = list[str](), list[bool]()
        for stop in (None, ["no such text"]):
            turns = Turns(engine)
            async with (
                served(turns, directory, "s") as (server, url, access),
                AsyncOpenAI(base_url=url + access["s"].path, api_key=access["s"].token) as openai,
            ):
                chunks = await openai.chat.completions.create(
                    model="tiny",
                    messages=[{"role": "user", "content": "Go on."}],
                    temperature=0.0,
                    max_tokens=400,
                    stop=stop,
                    stream=True,
                )
                text = ""
                async for chunk in chunks:
                    text += chunk.choices[0].delta.content or ""
                    arrived.append(bool(text) and turns.answered == 0)
                (sequence,) = server.close("s").sequences
            (turn,) = sequence.turns
            assert turn.end - turn.start > 50
            texts.append(text)
    assert texts[0] == texts[1] != ""
    assert sum(arrived) > 4


async def test_adapters_are_added_to_the_first_weights(weights: Weights, tmp_path: Path) -> None:
    async with started(weights, tmp_path, vllm_spec(), SCALE) as (engine, _):
        await adapters_are_added_to_the_first_weights(engine, weights)


async def test_the_weights_of_experts_are_exact_before_and_after_updates(tmp_path: Path) -> None:
    weights = ExpertWeights(tmp_path)
    async with started(weights, tmp_path, vllm_spec()) as (engine, _):
        await agrees(engine, weights, 0)
        for number in (1, 2):
            await engine.load(weights.published(number))
            await agrees(engine, weights, number)
    weights.close()


def routed_by(path: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Return the experts that transformers' own routers choose: [T, layers, top_k]."""
    model = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        output = model(torch.tensor([list(tokens)]), output_router_logits=True)
    return torch.stack([each.topk(2).indices for each in output.router_logits], 1)


def same_experts(
    routes: Routes | None, path: Path, tokens: Sequence[int], start: int, end: int
) -> None:
    """Assert that the routes of `[start, end)` are those of transformers, in any
    order.
    """
    part = routes.between(start, end) if routes is not None else None
    assert part is not None
    assert (part.start, part.end, part.layers, part.top_k) == (start, end, 2, 2)
    there = torch.frombuffer(bytearray(part.data), dtype=torch.uint8).view(-1, 2, 2).long()
    here = routed_by(path, tokens)[start:end]
    assert torch.equal(there.sort(-1).values, here.sort(-1).values)


async def test_answers_have_the_experts_of_the_weights_that_sampled_their_tokens(
    tmp_path: Path,
) -> None:
    weights = ExpertWeights(tmp_path)
    async with started(weights, tmp_path, vllm_spec(), routes=True) as (engine, _):
        await engine.load(weights.published(1))
        await agrees(engine, weights, 1)
        path, prompt = weights.checkpoint(1), tuple(range(70))
        first = await engine.generate(greedy("first", prompt))
        same_experts(first.routes, path, prompt + first.tokens, 0, len(prompt + first.tokens) - 1)

        # a second turn, whose prompt is cached, with and without what is known of it
        context = (*prompt, *first.tokens, 5, 6)
        known = len(context) - 3
        for name, start in (("whole", 0), ("rest", known)):
            asked = msgspec.structs.replace(greedy(name, context), routes_from=start)
            second = await engine.generate(asked)
            assert second.cached_tokens >= 64
            assert second.routes is not None
            assert second.routes.start == start
            whole = context + second.tokens
            same_experts(second.routes, path, whole, start, len(whole) - 1)

        # a turn that is aborted, and one that continues after its tokens
        turn = engine.generate(greedy("aborted", prompt, count=400))
        await tokens_are_sampled(engine)
        engine.abort("aborted")
        part = await turn
        whole = prompt + part.tokens
        same_experts(part.routes, path, whole, 0, len(whole) - 1)
        kept = len(part.tokens[:20])
        assert kept
        partial = s.PartialOutput(
            tokens=part.tokens[:kept],
            logprobs=part.logprobs[:kept],
            versions=(s.VersionSpan(start=0, end=kept, version=1),),
        )
        rest = greedy("rest of it", prompt, count=30)
        result = await engine.generate(msgspec.structs.replace(rest, resumed=partial))
        assert result.tokens[:kept] == partial.tokens
        whole = prompt + result.tokens
        same_experts(result.routes, path, whole, 0, len(whole) - 1)

        # weights that change in the middle of a turn
        manifest = weights.published(2)
        await engine.stage(manifest)
        turn = engine.generate(greedy("both", prompt, count=400))
        await tokens_are_sampled(engine)
        await engine.suspend()
        await engine.load(manifest)
        engine.resume()
        both = await turn
        assert [span.version for span in both.versions] == [1, 2]
        # a token is sampled from the position before it
        change = len(prompt) + both.versions[1].start - 1
        whole = prompt + both.tokens
        same_experts(both.routes, path, whole[: change + 1], 0, change)
        assert both.routes is not None
        assert both.routes.end == len(whole) - 1
        same_experts(both.routes, weights.checkpoint(2), whole, change, len(whole) - 1)
    weights.close()


async def test_loss_of_the_server_names_the_signal_and_leaves_no_process(
    weights: Weights, tmp_path: Path
) -> None:
    async with started(weights, tmp_path, vllm_spec()) as (engine, pid):
        server, *others = descendants(pid)
        turn = engine.generate(greedy("r0", count=400))
        await engine.stats()
        assert not shared_names([server, *others])
        os.kill(server, signal.SIGKILL)
        with pytest.raises(EngineLostError, match="vLLM ended: signal SIGKILL"):
            await turn
        await all_end([pid, server, *others])


async def test_two_ranks_load_their_slices_and_a_lost_engine_leaves_no_process(
    weights: Weights, tmp_path: Path
) -> None:
    async with started(weights, tmp_path, vllm_spec(degree=2)) as (engine, pid):
        processes = [pid, *descendants(pid)]
        assert len(processes) > 4  # with the server, its engine core and two ranks
        await engine.load(weights.published(1))
        await agrees(engine, weights, 1)
        assert not shared_names(processes)
        os.kill(pid, signal.SIGKILL)  # not through the handle, which kills the whole group
        await asyncio.wait([engine.lost])
        await all_end(processes)


async def test_a_server_that_stops_during_an_update_is_killed_with_the_route(
    weights: Weights, tmp_path: Path
) -> None:
    async with started(weights, tmp_path, vllm_spec(control_s=3.0)) as (engine, pid):
        processes = descendants(pid)
        turn = engine.generate(greedy("r0", count=400))
        await engine.suspend()
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        with pytest.raises(EngineLostError, match="vLLM did not answer /start_weight_update"):
            await engine.load(weights.published(1))
        with pytest.raises(EngineLostError):
            await turn
        await all_end([pid, *processes])


async def test_ranks_refuse_before_any_of_them_swaps(weights: Weights, tmp_path: Path) -> None:
    """The routes, with updates that the engine itself would have refused."""
    vllm = vllm_spec()
    server = VllmServer(spec_of(weights, vllm), read_shape(weights.model), tmp_path)
    control = VllmControl(server.url, token=server.token, limit_s=60.0)
    try:
        await until(lambda: control.connect())
        good = weights.published(1)
        update: dict[str, object] = {
            "part": "check",
            "location": good.location,
            "nbytes": good.nbytes,
            "tensors": [(one.name, one.dtype, one.shape, one.offset) for one in good.tensors],
        }
        await control.pause()
        for wrong in ({"nbytes": 5}, {"location": "/nowhere"}, {"part": "swap"}, {"x": 1}):
            await control.start_update()
            with pytest.raises(RefusedError, match="/update_weights with status 500"):
                await control.update({**update, **wrong})
        await control.start_update()
        await control.update(update)
        await control.update({"part": "swap"})
        await control.finish_update("1")
        await control.resume()
        stranger = VllmControl(server.url, token="guessed", limit_s=60.0)
        with pytest.raises(RefusedError, match="status 401"):
            await stranger.pause()
        await stranger.close()
    finally:
        await control.close()
        server.kill()
        await server.ended()


async def until(connect: Callable[[], Awaitable[None]]) -> None:
    """Call until it succeeds: the server needs tens of seconds to start."""
    async with asyncio.timeout(VLLM_START_S):
        while True:
            try:
                return await connect()
            except Exception:
                await asyncio.sleep(0.2)
