"""Plug-ins of ProRL Agent, driven by a run's pipeline over the real gateway."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollweave.envs.base import Split
from rollweave.envs.handlers.sandboxes import Sandboxes
from rollweave.record.store import TrajectoryStore
from rollweave.rollout.chat.codec import AgentConfig
from rollweave.rollout.gateway.server import GatewayListener
from rollweave.rollout.handler_episode import HandlerEpisode
from rollweave.schema import serving as s
from rollweave.schema.commands import CancelTrajectory, StartInit
from rollweave.schema.errors import ConfigError
from rollweave.schema.events import RewardFailed, TrajectoryEnded
from rollweave.schema.work import StopReason
from rollweave_envs import prorl
from rollweave_envs.prorl import ProRL
from tests.support.pipelines import CODEC, TRAJECTORY, Harness

PLUGINS = f"{__package__}.prorl_plugins"

Play = Callable[..., Harness]


@pytest.fixture
def instances(tmp_path: Path) -> str:
    path = tmp_path / "instances.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}?", "answer": "hi"}) + "\n" for n in "ab"))
    return str(path)


@pytest.fixture
async def plays(tmp_path: Path, instances: str) -> AsyncIterator[Play]:
    """Return what makes the pipeline of a plug-in."""
    listener = GatewayListener(CODEC, model="test")
    prorl._plugin.cache_clear()
    with TrajectoryStore(tmp_path / "trajectories") as store:

        def of(name: str, *, limits: dict[str, Any] | None = None, **options: Any) -> Harness:
            options = {"handler": f"{PLUGINS}:{name}", "instances": instances, **options}
            drawn = ProRL.make_task(index=0, seed=1, split=Split.TRAIN, options=options)

            def make(command: StartInit) -> HandlerEpisode:
                task = msgspec.structs.replace(command.task, payload=drawn.payload)
                return HandlerEpisode(
                    msgspec.structs.replace(command, task=task),
                    make=lambda: ProRL(**options),
                    agent=AgentConfig(
                        codec=CODEC, sampling=s.Sampling(stop_token_ids=CODEC.stop_token_ids)
                    ),
                    seed=7,
                    clock=asyncio.get_running_loop().time,
                    sandboxes=Sandboxes("plain"),
                    listener=listener,
                )

            return Harness(store, make=make, **(limits or {}))

        yield of
    await listener.close()


def plugin(name: str) -> Any:
    return prorl._plugin(f"{PLUGINS}:{name}")


@pytest.mark.parametrize(
    ("options", "answer", "reward"),
    [
        ({}, "hi", (1.0, True)),
        ({}, "ho", (0.0, False)),
        ({"reward": f"{PLUGINS}:Reward"}, "hi", (2.0, True)),
        ({"reward": f"{PLUGINS}:Reward"}, "ho", (0.25, False)),
    ],
)
async def test_an_attempt_is_recorded_and_scored(
    plays: Play, options: dict[str, str], answer: str, reward: tuple[float, bool]
) -> None:
    """Its first stage knows the address at which its agent answers later."""
    stage = plays("Asking", **options)
    stage.engine.answer = answer
    ready = await stage.scored()
    assert (ready.reward, ready.success) == reward
    (trajectory,) = stage.store.get([TRAJECTORY])
    (sequence,) = trajectory.sequences
    assert len(sequence.turns) == 1
    assert json.loads(trajectory.result) == {
        "success": True,
        "answer": answer,
        "resolved": reward[1],
    }
    (runtime,) = plugin("Asking").runtimes
    assert runtime.closed == 1
    assert all(name.startswith("prorl ") for name in plugin("Asking").threads)


async def test_an_agent_without_turns_is_evaluated(plays: Play) -> None:
    ready = await (stage := plays("Insistent", limits={"max_turns": 2})).scored()
    assert (ready.reward, ready.success) == (0.0, False)
    (trajectory,) = stage.store.get([TRAJECTORY])
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert plugin("Insistent").runtimes[0].closed == 1


async def test_a_callback_may_give_the_reward_of_a_failure(plays: Play) -> None:
    ready = await (stage := plays("Blaming")).scored()
    assert ready.reward == 0.0
    (trajectory,) = stage.store.get([TRAJECTORY])
    assert json.loads(trajectory.result)["reason"] == "the patch does not apply"


async def test_a_callback_learns_of_a_time_limit(
    plays: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollweave.rollout.worker.CLOSE_S", 0.1)
    monkeypatch.setattr("rollweave.rollout.handler_episode.CANCEL_S", 1.0)
    stage, slow = plays("Blocking", limits={"step_s": 1.0}), plugin("Blocking")
    monkeypatch.setattr(slow, "run_exception", lambda _, e: {"resolved": False, "error": str(e)})
    try:
        assert (await stage.scored()).reward == 0.0
    finally:
        slow.unblocked.set()
    (trajectory,) = stage.store.get([TRAJECTORY])
    assert "1 s" in json.loads(trajectory.result)["reason"]


async def test_a_failure_to_initialize_has_no_reward(plays: Play) -> None:
    stage = plays("Unprepared")
    stage.init()
    ended = await stage.until(TrajectoryEnded)
    assert isinstance(ended, TrajectoryEnded)
    assert ended.stop_reason is StopReason.ENV_ERROR
    assert "OSError: no image" in ended.error
    assert plugin("Unprepared").failures == ["no image"]


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ({"report": {"score": 1}}, "must return a number as reward, or resolved, got ['score']"),
        ({"critical_error": "eval", "error": "lost"}, "has the critical_error 'eval': lost"),
        (None, "must return a dict, got NoneType"),
    ],
)
async def test_a_result_without_a_reward_is_a_failure(
    plays: Play, monkeypatch: pytest.MonkeyPatch, returned: Any, text: str
) -> None:
    async def evaluated(*_: object, **__: object) -> Any:
        return returned

    stage = plays("Asking")
    monkeypatch.setattr(plugin("Asking"), "eval", evaluated)
    monkeypatch.setattr(plugin("Asking"), "final_result", lambda _: {})
    failed = await stage.scored(RewardFailed)
    assert text in failed.error


async def test_a_stage_that_blocks_delays_nobody_and_loses_its_runtime(
    plays: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollweave.rollout.worker.CLOSE_S", 0.1)
    monkeypatch.setattr("rollweave.rollout.handler_episode.CANCEL_S", 0.1)
    stage = plays("Blocking")
    await stage.asked()
    stage.turn(0)
    blocking = plugin("Blocking")
    try:
        await asyncio.to_thread(blocking.blocked.wait, 10)
        stage.pipeline.cancel(
            CancelTrajectory(trajectory_id=TRAJECTORY, attempt=0, reason=StopReason.CANCELLED)
        )
        await stage.idle()
        assert await asyncio.to_thread(blocking.runtimes[0].gone.wait, 10)
    finally:
        blocking.unblocked.set()


async def test_a_runtime_that_is_ready_after_the_end_is_closed(
    plays: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollweave.rollout.worker.CLOSE_S", 0.1)
    monkeypatch.setattr("rollweave.rollout.handler_episode.CANCEL_S", 0.1)
    stage, slow = plays("Slow"), plugin("Slow")
    stage.init()
    try:
        assert await asyncio.to_thread(slow.blocked.wait, 10)
        stage.pipeline.cancel(
            CancelTrajectory(trajectory_id=TRAJECTORY, attempt=0, reason=StopReason.CANCELLED)
        )
        await stage.idle()
        assert slow.runtimes == []
    finally:
        slow.unblocked.set()
    await asyncio.to_thread(slow.thread.join, 10)
    assert await asyncio.to_thread(slow.runtimes[0].gone.wait, 10)


async def test_the_runtime_of_an_incomplete_init_is_closed(plays: Play) -> None:
    (stage := plays("Careless")).init()
    try:
        ended = await stage.until(TrajectoryEnded)
    finally:
        plugin("Careless").unblocked.set()
    assert isinstance(ended, TrajectoryEnded)
    assert "not enough values" in ended.error
    assert plugin("Careless").runtimes[0].closed == 1


async def test_a_result_that_is_no_json_leaves_the_reward(
    plays: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = plays("Asking")
    monkeypatch.setattr(plugin("Asking"), "final_result", lambda _: {("a", 1): 2})
    assert (await stage.scored()).reward == 1.0
    (trajectory,) = stage.store.get([TRAJECTORY])
    assert "must be JSON: TypeError" in json.loads(trajectory.result)["error"]


def test_openhands_own_classes_are_used_where_a_plugin_imports_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Theirs: ...

    monkeypatch.setitem(prorl.sys.modules, "openhands.nvidia.registry", Theirs)  # type: ignore[arg-type]
    monkeypatch.setattr(Theirs, "JobDetails", Theirs, raising=False)
    assert prorl._theirs("openhands.nvidia.registry", "JobDetails", prorl.JobDetails) is Theirs
    assert prorl._theirs("openhands.other", "LLMConfig", prorl.JobDetails) is prorl.JobDetails


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"handler": "nowhere:Plugin"}, "options.handler: cannot import nowhere"),
        (
            {"handler": f"{PLUGINS}:Unfinished"},
            "has no run, eval, init_exception, run_exception, eval_exception, final_result",
        ),
        ({"handler": f"{PLUGINS}:ask"}, "must be an AgentHandler of ProRL Agent"),
        ({"reward": f"{PLUGINS}:Nothing"}, "prorl_plugins has no Nothing"),
        ({"agent_config": "deep"}, "options.agent_config must be a table, got str"),
        (
            {"llm_config": {"base_url": "http://elsewhere"}},
            "options.llm_config must leave base_url and api_key to the run, got base_url",
        ),
    ],
)
def test_wrong_options_are_named(instances: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ProRL(**{"handler": f"{PLUGINS}:Asking", "instances": instances, **options})
    assert text in str(raised.value)


def test_a_missing_file_of_instances_is_named() -> None:
    with pytest.raises(ConfigError, match=r"options\.instances must be a JSONL file, got none"):
        ProRL.make_task(index=0, seed=0, split=Split.TRAIN, options={})
