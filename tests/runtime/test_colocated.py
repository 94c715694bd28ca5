"""The trainer and the engines take turns on the same devices, as real processes that
give their memory back to each other.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollweave.core.core import Core
from rollweave.core.state import EngineStatus
from rollweave.engine.clients.client import EngineClient, in_process
from rollweave.io.child import Child, Spawn, spawn
from rollweave.runtime.launch import train
from rollweave.runtime.roles.group import WorkerPlace
from rollweave.runtime.supervisors.trainer_link import ProcessTrainer, TrainerSpec
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import Programs
from rollweave.schema.training import Publish, Published, Trained, TrainOn
from tests.support.host_agents import Agents, agents, secret
from tests.support.real_runs import Life, Lineage, check_totals, lake, living, longer, run_dir
from tests.support.tiny_models import request, spec
from tests.support.trainers import make_batch, make_config, make_model

__all__ = ["agents", "secret"]  # fixtures

MIB = 1 << 20
ENGINE = "rollweave.runtime.entrypoints.engine"
TRAINER = "rollweave.runtime.entrypoints.trainer"
PROMPT = [(5 * at + 3) % 100 for at in range(60)]


def resident(pid: int) -> int:
    """Return the bytes of a process that are in memory and no file's."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the process is gone")


@pytest.mark.extended
async def test_trainer_and_engine_give_their_memory_back(tmp_path: Path) -> None:
    """The engine begins without any, takes it with the weights, and samples the same
    tokens after it has had none for a while.
    """
    path = make_model(tmp_path / "m", hidden=512, layers=4)
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    children: list[Child] = []

    def recorded(module: str) -> Spawn:
        def start(**settings: Any) -> Child:
            children.append(spawn(module=module, env={"OMP_NUM_THREADS": "1"}, **settings))
            return children[-1]

        return start

    config = make_config(trainer={"colocated": True})
    trainer = ProcessTrainer(
        TrainerSpec(config=config.model_dump_json(), model=str(path)),
        places=[WorkerPlace(spawn=recorded(TRAINER))],
        logs=tmp_path / "logs",
        start_s=60.0,
    )
    of = spec(str(path), kv_tokens=1 << 14, released=True)
    there = asyncio.get_running_loop().create_future()
    there.set_result(None)
    engine = EngineClient(
        "e",
        in_process(of, spawn=recorded(ENGINE), log=tmp_path / "e.log", model_ready=there),
        start_s=60.0,
        reply_s=60.0,
    )
    try:
        await trainer.ready()
        assert (await engine.ready()).stages is False
        of_trainer, of_engine = (process.pid for process in children)
        without = resident(of_engine)

        async def publish(number: int, *, release: bool) -> Published:
            reply = await trainer.ask(
                Publish(version=number, publication_id=number, keep=(0, 1), release=release)
            )
            assert isinstance(reply, Published), reply
            return reply

        manifest = (await publish(0, release=True)).manifest
        reply = await trainer.ask(TrainOn(batch=make_batch(0, groups=16, size=8)))
        assert isinstance(reply, Trained), reply
        before = (await publish(1, release=False)).manifest
        full = resident(of_trainer)
        await publish(2, release=True)
        assert full - resident(of_trainer) > 20 * MIB, "what the step has used"

        sampled = []
        for source in (manifest, before, manifest):
            await engine.load(source)
            engine.resume()
            results = await asyncio.gather(
                *(engine.generate(request(f"r{n}", PROMPT[n:], max_tokens=20)) for n in range(8))
            )
            sampled.append([result.tokens for result in results])
            used = resident(of_engine)
            assert used - without > weights
            late = asyncio.ensure_future(engine.generate(request("late", PROMPT, max_tokens=400)))
            await engine.suspend(release=True)
            assert used - resident(of_engine) > weights
            assert resident(of_engine) - without < weights / 4
            late.cancel()
        assert sampled[0] == sampled[2] != sampled[1]
    finally:
        await engine.close()
        await trainer.close()


def colocated(directory: Path, **sections: Any) -> RunConfig:
    rollout = {"mode": "sync", **sections.pop("rollout", {})}
    trainer = {"colocated": True, **sections.pop("trainer", {})}
    return lake(directory, rollout=rollout, trainer=trainer, **sections)


def weights_after(config: RunConfig, step: int) -> dict[str, torch.Tensor]:
    return load_file(run_dir(config) / f"checkpoints/step-{step:06d}/model.safetensors")


@pytest.mark.slow
def test_a_colocated_run_trains_the_weights_of_one_that_is_not(tmp_path: Path) -> None:
    """One trajectory at a time, so that both have their batches in the same order."""
    weights = []
    for name, placed in (("turns", True), ("apart", False)):
        config = colocated(
            tmp_path / name,
            rollout={"max_running": 1},
            trainer={"colocated": placed, "lr": 1e-2},
            engines={"count": 1, "deterministic": True, "max_slots": 8, "kv_tokens": 4096},
            eval={"every": 0, "final_episodes": 0},
            warmup={"steps": 20},
        )
        summary = train(config, inproc=True)
        assert (summary.error, summary.steps, summary.idle["engines"].get("training", 0) > 0) == (
            "",
            2,
            placed,
        )
        weights.append(weights_after(config, 2))
    turns, apart, before = *weights, weights_after(config, 1)
    assert turns.keys() == apart.keys() == before.keys()
    assert all(torch.equal(turns[name], apart[name]) for name in turns)
    assert not all(torch.equal(before[name], apart[name]) for name in turns)


def releases(core: Core) -> bool:
    engines = core.state.engines.values()
    return bool(engines) and all(
        engine.released and engine.status is EngineStatus.STALE for engine in engines
    )


def without_memory(core: Core) -> bool:
    engines = core.state.engines.values()
    return bool(engines) and all(
        engine.released and engine.status is EngineStatus.STALE for engine in engines
    )


def steps_after(life: Life, step: int) -> int:
    """Wait until the run has trained one more step, and return their number."""
    core = life.until(lambda core: core.state.trainer.step > step, f"a step after {step}")
    return core.state.trainer.step


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_colocated_run_survives_the_loss_of_each_process(tmp_path: Path) -> None:
    """An engine that has no memory, the trainer, and the controller."""
    evaluations = {"every": 3, "episodes": 2, "final_episodes": 8}
    config = colocated(tmp_path, run={"steps": 100_000}, engines={"count": 2}, eval=evaluations)
    lineage = Lineage()
    with living(config) as life:
        core = life.until(without_memory, "engines without memory")
        engine, *_ = life.children(ENGINE)
        os.kill(engine, signal.SIGKILL)
        step = steps_after(life, core.state.trainer.step + 1)
        os.kill(life.child(TRAINER), signal.SIGKILL)
        life.until(lambda core: core.state.trainer.epoch == 1, "another trainer")
        step = steps_after(life, step)
        life.kill()
    lineage.take(config)
    more = longer(config, step + 3)
    with living(more, resume=True) as life:
        check_totals(more, life.finish())
    lineage.take(more)
    lineage.check(step + 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engines_and_ranks_of_two_hosts_take_turns_and_one_host_is_lost(
    tmp_path: Path, agents: Agents
) -> None:
    """A rank and an engine on each host; all continue on the one that is left."""
    config = colocated(
        tmp_path,
        run={"steps": 100_000},
        engines={"count": 2, "pool": "both"},
        trainer={"ranks": 2, "pool": "both"},
        pools={"both": {"resource": "both"}},
        cluster={"address": f"127.0.0.1:{agents.port}", "hosts": 2},
        eval={"every": 3, "episodes": 2, "final_episodes": 8},
    )
    lineage = Lineage()
    agents.start("a", "b", resource="both=1", programs=Programs())
    with living(config) as life:
        core = life.until(lambda core: core.state.trainer.step > 1, "two steps")
        hosts = core.state.hosts
        assert {rank.host for rank in hosts.ranks} == {0, 1}
        assert {engine.seat.host for engine in core.state.engines.values()} == {0, 1}
        life.until(without_memory, "engines without memory")
        agents.signal(hosts.up[hosts.ranks[0].host].name, signal.SIGKILL)
        core = life.until(lambda core: core.state.trainer.epoch == 1, "another trainer")
        step = steps_after(life, core.state.trainer.step + 1)
        life.kill()
    lineage.take(config)
    assert config.cluster is not None
    more = longer(config, step + 3, cluster=config.cluster.model_copy(update={"hosts": 1}))
    with living(more, resume=True) as life:
        check_totals(more, life.finish())
    lineage.take(more)
    lineage.check(step + 3)
    assert sorted(agents.statuses().values()) == [-signal.SIGKILL, 0]
