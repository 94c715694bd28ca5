"""New weights in a server with SGLang's routes, and what goes wrong with them. SGLang
itself was never run: see `sglang_server.py`.
"""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from packages.servers.tests.server_engines import (
    SCALE,
    Weights,
    adapters_are_added_to_the_first_weights,
    agrees,
    all_end,
    greedy,
    started,
    streamed_tokens_are_of_the_weights_that_they_name,
    updates_are_exact_and_refused_ones_leave_the_old_weights,
)
from packages.servers.tests.sglang_package import sglang_spec
from rollweave.schema.errors import EngineLostError
from tests.support.processes import descendants


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


@pytest.mark.extended
async def test_updates_are_exact_and_refused_ones_leave_the_old_weights(
    weights: Weights, tmp_path: Path
) -> None:
    async with started(weights, tmp_path, sglang_spec(tmp_path)) as (engine, pid):
        await updates_are_exact_and_refused_ones_leave_the_old_weights(engine, weights)
        (server,) = descendants(pid)
        folder = Path(variables(server)["TMPDIR"])
        assert not [name for name in os.listdir(folder) if name.startswith("v")]
        assert "--api-key" not in command(server)
    assert folder.name not in os.listdir(folder.parent)


@pytest.mark.extended
@pytest.mark.parametrize("args", [(), pytest.param(("--stream-all",), marks=pytest.mark.slow)])
async def test_streamed_tokens_are_of_the_weights_that_they_name(
    weights: Weights, tmp_path: Path, args: tuple[str, ...]
) -> None:
    """SGLang names versions at the end: those behind new weights are not certain."""
    async with started(weights, tmp_path, sglang_spec(tmp_path, *args)) as (engine, _):
        await streamed_tokens_are_of_the_weights_that_they_name(
            engine, weights, until_the_end=False
        )


@pytest.mark.slow
async def test_adapters_are_added_to_the_first_weights(weights: Weights, tmp_path: Path) -> None:
    async with started(weights, tmp_path, sglang_spec(tmp_path), SCALE) as (engine, _):
        await adapters_are_added_to_the_first_weights(engine, weights)


def variables(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def command(pid: int) -> str:
    """Return the command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.slow
async def test_loss_of_the_server_names_the_signal_and_leaves_no_process(
    weights: Weights, tmp_path: Path
) -> None:
    async with started(weights, tmp_path, sglang_spec(tmp_path)) as (engine, pid):
        (server,) = descendants(pid)
        turn = engine.generate(greedy("r0", count=400))
        await engine.stats()
        os.kill(server, signal.SIGKILL)
        with pytest.raises(EngineLostError, match="SGLang ended: signal SIGKILL"):
            await turn
        await all_end([pid, server])


@pytest.mark.slow
async def test_a_lost_engine_leaves_no_server(weights: Weights, tmp_path: Path) -> None:
    async with started(weights, tmp_path, sglang_spec(tmp_path, degree=2)) as (engine, pid):
        processes = [pid, *descendants(pid)]
        await engine.load(weights.published(1))
        await agrees(engine, weights, 1)
        os.kill(pid, signal.SIGKILL)  # not through the handle, which kills the whole group
        await asyncio.wait([engine.lost])
        await all_end(processes)


@pytest.mark.slow
async def test_a_server_that_stops_during_an_update_is_killed_with_the_route(
    weights: Weights, tmp_path: Path
) -> None:
    server = sglang_spec(tmp_path, control_s=3.0)
    async with started(weights, tmp_path, server) as (engine, pid):
        processes = descendants(pid)
        turn = engine.generate(greedy("r0", count=400))
        await engine.suspend()
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        with pytest.raises(
            EngineLostError, match=r"SGLang did not answer /update_weights_from_disk within 3 s"
        ):
            await engine.load(weights.published(1))
        with pytest.raises(EngineLostError):
            await turn
        await all_end([pid, *processes])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("refused", "SGLang answered /update_weights_from_disk with status 400: .*Rolling back"),
        ("unlabeled", "SGLang's weights must be version '1', got 'default'"),
        ("split", "SGLang's ranks have weights of several versions"),
        ("small", "SGLang has room for 16 tokens of KV, engines.kv_tokens is 16384"),
    ],
)
async def test_a_server_in_an_unknown_state_ends(
    weights: Weights, tmp_path: Path, fault: str, reason: str
) -> None:
    server = sglang_spec(tmp_path, "--fault", fault, degree=2)
    with pytest.raises(EngineLostError, match=reason):
        async with started(weights, tmp_path, server) as (engine, _):
            await engine.load(weights.published(1))
