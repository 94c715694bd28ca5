"""Rewards beside the environment's: each is a number, or a failure that is blamed and
keeps what it would be computed from.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollweave.envs.threads import EnvThreads
from rollweave.record.store import TrajectoryReader, TrajectoryStore
from rollweave.rollout.driver import EpisodeStopError
from rollweave.rollout.reward_sources import (
    Finished,
    reward_function,
    source_of,
)
from rollweave.rollout.rewards import DomainRewards, Rewards, check_reward
from rollweave.schema.base import TaskId, TrajectoryId
from rollweave.schema.chat import Message, ToolCall
from rollweave.schema.commands import CancelTrajectory
from rollweave.schema.config.rollout import RewardConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.events import AttemptDelayed, RewardFailed, TrajectoryEnded
from rollweave.schema.work import Blame, StopReason, Task
from tests.rollout import reward_functions
from tests.support.judge_server import FakeServer, graded
from tests.support.pipelines import TRAJECTORY, Harness

pytestmark = pytest.mark.usefixtures("quick")

FUNCTIONS = "tests.rollout.reward_functions"


def finished(**changes: Any) -> Finished:
    payload = json.dumps({"answer": "4"})
    values: dict[str, Any] = {
        "trajectory_id": TRAJECTORY,
        "attempt": 1,
        "task": Task(id=TaskId("t"), env="scripted", seed=1, tag="scripted", payload=payload),
        "conversation": (
            Message(role="user", content="2 + 2?"),
            Message(role="assistant", content="4", tool_calls=(ToolCall(id="a", name="add"),)),
        ),
        "reward": 0.5,
        "success": True,
        "stop_reason": StopReason.FINISHED,
    }
    return Finished(**(values | changes))


def reward_config(**settings: Any) -> RewardConfig:
    return RewardConfig.model_validate({"name": "extra", **settings})


async def asked(attempt: Finished | None = None, **settings: Any) -> float:
    """Return the reward of one source."""
    threads = EnvThreads()
    source = source_of(
        reward_config(**settings),
        run_id="run",
        threads=threads,
        clock=asyncio.get_running_loop().time,
    )
    try:
        return await source.reward(attempt or finished())
    finally:
        await source.close()
        threads.close()


async def failure(attempt: Finished | None = None, **settings: Any) -> tuple[StopReason, str]:
    with pytest.raises(EpisodeStopError) as raised:
        await asked(attempt, **settings)
    return raised.value.reason, str(raised.value)


def judge(server: FakeServer, **settings: Any) -> dict[str, Any]:
    """Return the settings of a reward by a judge, which has these settings."""
    return {
        "url": f"{server.url}/v1",
        "judge": {"model": "m", "rubric": "Be strict.", **settings},
    }


async def test_the_secret_url_of_a_service_of_the_run_is_not_shown() -> None:
    source = source_of(
        reward_config(judge={"model": "m", "rubric": "r"}, timeout_s=0.05),
        run_id="run",
        threads=EnvThreads(),
        clock=asyncio.get_running_loop().time,
        deployed="http://127.0.0.1:9/secret/extra",
    )
    asking = asyncio.create_task(source.reward(finished()))
    await asyncio.sleep(0)
    wait = source.wait()
    assert wait is not None
    assert wait.service == "reward extra"
    with pytest.raises(EpisodeStopError, match=r"^reward extra gave no reward within") as raised:
        await asking
    assert "secret" not in str(raised.value) + wait.what
    await source.close()


# The user's function.


async def test_a_function_gets_the_conversation_the_task_and_the_reward() -> None:
    assert await asked(function=f"{FUNCTIONS}:length") == 2.5
    assert await asked(function=f"{FUNCTIONS}:slowly") == 3.0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("broken", "raised KeyError: 'no such word'"), ("text", "must return a finite number")),
        *(("infinite", "must return a finite number"), ("missing", "has no missing")),
    ],
)
async def test_a_function_that_gives_no_number_is_a_failure(name: str, text: str) -> None:
    reason, error = await failure(function=f"{FUNCTIONS}:{name}")
    assert (reason, text in error) == (StopReason.REWARD_ERROR, True), error


async def test_a_function_that_hangs_blocks_nothing_and_ends_at_its_deadline() -> None:
    reward_functions.release.clear()
    try:
        reason, error = await failure(function=f"{FUNCTIONS}:hanging", timeout_s=0.05)
    finally:
        reward_functions.release.set()
    assert reason == StopReason.REWARD_HANG
    assert error == f"function {FUNCTIONS}:hanging did not return within 0.05 s"


@pytest.mark.parametrize(
    ("name", "text"),
    [("of_nothing", "must take the conversation"), ("number", "must be a function, got int")],
)
def test_what_is_no_reward_function_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        reward_function(f"{FUNCTIONS}:{name}")


# A URL.


async def test_a_url_gets_the_attempt_with_key_and_token(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWEAVE_REWARD_EXTRA_TOKEN", "secret")
    assert await asked(url=f"{server.url}/score") == 2.0
    (body,) = server.requests
    key = f"run/{TRAJECTORY}/1/extra"
    assert (body["name"], body["key"], body["env_reward"]) == ("extra", key, 0.5)
    assert body["task"]["payload"] == {"answer": "4"}
    assert body["conversation"][1] == {
        "role": "assistant",
        "content": "4",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        ],
    }
    (headers,) = server.headers
    assert (headers["Idempotency-Key"], headers["Authorization"]) == (key, "Bearer secret")


async def test_a_url_that_is_busy_or_restarts_is_asked_again_with_the_same_key(
    server: FakeServer,
) -> None:
    server.answer = lambda number: (
        web.Response(status=503, headers={"Retry-After": "0"}) if number == 1 else {"reward": -1.5}
    )
    server.gate.clear()
    asking = asyncio.ensure_future(asked(url=f"{server.url}/score"))
    await server.arrived.wait()
    await server.stop()  # in the middle of the first request
    server.gate.set()
    server.requests.clear()
    await server.start()
    assert await asking == -1.5
    assert {body["key"] for body in server.requests} == {f"run/{TRAJECTORY}/1/extra"}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (web.Response, "its answer must be {\"reward\": NUMBER}, got ''"),
        (lambda: web.Response(text="<html>hello"), 'must be {"reward": NUMBER}, got \'<html>'),
        (lambda: web.Response(text='{"reward": NaN}'), "must be"),
        *((lambda: {"reward": "good"}, "must be"), (lambda: {"reward": True}, "must be")),
        *((lambda: {"reward": None}, "must be"), (lambda: {"score": 1}, "must be")),
        *((lambda: [1], "must be"), (lambda: {"reward": 1e13}, "must be at most 1e+12")),
        (lambda: web.Response(status=401, text="no"), "status 401: no"),
        (lambda: web.Response(status=302, headers={"Location": "/"}), "status 302"),
    ],
)
async def test_a_url_that_gives_no_number_is_a_failure_of_the_infrastructure(
    server: FakeServer, answer: Callable[[], Any], text: str
) -> None:
    server.answer = lambda _: answer()
    reason, error = await failure(url=f"{server.url}/score")
    assert (reason, text in error) == (StopReason.REWARD_UNAVAILABLE, True), error
    assert "\n" not in error


async def test_a_request_has_a_maximum_size(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollweave.rollout.reward_sources.PAYLOAD_BYTES", 1000)
    assert await asked(url=f"{server.url}/score") == 2.0
    long = finished(conversation=(Message(role="user", content="x" * 1000),))
    reason, error = await failure(long, url=f"{server.url}/score")
    assert reason is StopReason.REWARD_UNAVAILABLE
    assert "must have at most 1000 bytes" in error
    assert len(server.requests) == 1


async def test_a_url_that_is_not_there_is_given_up_at_the_deadline() -> None:
    reason, error = await failure(url="http://127.0.0.1:9/score", timeout_s=0.2)
    assert reason is StopReason.REWARD_UNAVAILABLE
    assert error.startswith(
        "reward extra http://127.0.0.1:9/score gave no reward within 0.2 s: ClientConnector"
    )


# A judge.


@pytest.mark.parametrize(
    ("text", "grade"),
    [
        ("Score: 0.7", 0.7),
        ("It is right.\n\n**Score: 0.25**\n", 0.25),
        ("Score: 1\nBut then it errs.\nscore: 0", 0.0),
    ],
)
async def test_the_last_line_of_a_judge_is_its_grade(
    server: FakeServer, text: str, grade: float
) -> None:
    server.answer = lambda _: graded(text)
    settings = judge(server, reference="answer", request={"max_tokens": 9})
    assert await asked(**settings) == grade
    (body,) = server.requests
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 9, 0)
    system, user = body["messages"]
    assert system["content"].startswith("Be strict.\n")
    assert "a number from 0 to 1" in " ".join(system["content"].split())
    shown = json.loads(user["content"])
    assert shown["reference_answer"] == "4"
    assert [message["content"] for message in shown["conversation"]] == ["2 + 2?", "4"]


@pytest.mark.parametrize(
    "text",
    [
        *("1", "Score: high", "Score: 1 of 1", "Score: 2", "Score: -1", "Score: nan"),
        *("Score: 1\nDone.", ""),
        *("Score: １", "Score: ٣", "Score: 1_0", "Score: 1.５"),
    ],
)
async def test_a_judge_that_answers_out_of_format_is_asked_again_and_then_a_failure(
    server: FakeServer, text: str
) -> None:
    server.answer = lambda number: graded(text if number < 3 else "Score: 1")
    assert await asked(**judge(server)) == 1.0
    server.answer = lambda _: graded(text)
    reason, error = await failure(**judge(server))
    assert reason is StopReason.REWARD_UNAVAILABLE
    assert "must end with a line Score: NUMBER, with a number from 0 to 1, got" in error
    assert len(server.requests) == 6


async def test_a_task_without_the_reference_answer_is_a_failure(server: FakeServer) -> None:
    reason, error = await failure(**judge(server, reference="solution"))
    assert reason is StopReason.REWARD_ERROR
    assert "must have the key 'solution' (judge.reference)" in error


async def test_a_rubric_may_be_in_a_file(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "rubric.md"
    with pytest.raises(ConfigError, match=r"judge\.rubric must be a readable file"):
        await asked(**judge(server, rubric=str(file)))
    file.write_text("Only the moves count.\n")
    server.answer = lambda _: graded("Score: 1")
    assert await asked(**judge(server, rubric=str(file))) == 1.0
    assert server.requests[0]["messages"][0]["content"].startswith("Only the moves count.")


# The dry run.


async def test_a_dry_run_asks_for_a_reward(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = reward_config(url=f"{server.url}/score")
    assert await asyncio.to_thread(check_reward, config, domain="d", limit_s=5.0) == 2.0
    assert server.requests[0]["key"].startswith("dry-run-")
    with monkeypatch.context() as patch:
        patch.setenv(config.token_variable, "schlüssel")
        with pytest.raises(ConfigError, match="ROLLWEAVE_REWARD_EXTRA_TOKEN must be set in the"):
            await asyncio.to_thread(check_reward, config, domain="d", limit_s=5.0)
    server.answer = lambda _: web.Response(status=401, text="who?")
    missing = r"status 401: who\? \(ROLLWEAVE_REWARD_EXTRA_TOKEN must hold its token, got none\)"
    with pytest.raises(EpisodeStopError, match=missing):
        await asyncio.to_thread(check_reward, config, domain="d", limit_s=5.0)
    server.answer = lambda _: web.Response(text="<html>")
    with pytest.raises(EpisodeStopError, match=r"must be \{\"reward\": NUMBER\}, got '<html>'"):
        await asyncio.to_thread(check_reward, config, domain="d", limit_s=5.0)


# All rewards of an attempt.


def run_config(*rewards: dict[str, Any], **more: Any) -> RunConfig:
    task = {"env": "frozenlake", "tag": "scripted", "max_tokens": 400, **more.pop("task", {})}
    return RunConfig.model_validate(
        {
            "run": {"name": "r"},
            "model": {"scratch": {}},
            "tasks": [task],
            "rewards": list(rewards),
            **more,
        }
    )


Domain = Callable[[RunConfig], DomainRewards]


@pytest.fixture
async def domain_rewards() -> AsyncIterator[Domain]:
    """Return what makes the rewards of the domain, which are closed in the end."""
    async with contextlib.AsyncExitStack() as stack:

        def make(config: RunConfig) -> DomainRewards:
            threads, clock = EnvThreads(), asyncio.get_running_loop().time
            rewards = Rewards(config, "run", threads=threads, clock=clock)
            stack.push_async_callback(rewards.close)
            stack.callback(threads.close)
            domain = rewards.of("scripted")
            assert domain is not None
            return domain

        yield make


async def test_the_reward_is_the_weighted_sum_of_all(domain_rewards: Domain) -> None:
    config = run_config(
        {"name": "a", "weight": 0.5, "function": f"{FUNCTIONS}:length"},
        {"name": "b", "weight": -1, "function": f"{FUNCTIONS}:slowly", "tasks": "scripted"},
        task={"env_weight": 2.0},
    )
    spans: list[str] = []
    computed = await domain_rewards(config).compute(
        finished(), record=lambda name, start, end: spans.append(name)
    )
    assert computed.components == {"env": 0.5, "a": 2.5, "b": 3.0}
    assert computed.reward == 2 * 0.5 + 0.5 * 2.5 - 3
    assert sorted(spans) == ["reward a", "reward b"]


async def test_what_failed_is_named_and_the_others_are_kept(domain_rewards: Domain) -> None:
    config = run_config(
        {"name": "a", "function": f"{FUNCTIONS}:length"},
        {"name": "b", "function": f"{FUNCTIONS}:broken"},
        {"name": "c", "url": "http://127.0.0.1:9", "timeout_s": 0.05},
    )
    outcome = await domain_rewards(config).compute(finished())
    assert outcome.reward is None
    assert (outcome.reason, outcome.missing) == (StopReason.REWARD_UNAVAILABLE, ("b", "c"))
    assert outcome.components == {"env": 0.5, "a": 2.5}
    assert "broken raised KeyError" in outcome.error
    assert "gave no reward within 0.05 s" in outcome.error


async def test_a_sum_that_is_too_large_is_a_failure(domain_rewards: Domain) -> None:
    config = run_config({"name": "a", "weight": 1e12, "function": f"{FUNCTIONS}:length"})
    outcome = await domain_rewards(config).compute(finished())
    assert (outcome.reward, outcome.reason) == (None, StopReason.REWARD_ERROR)
    assert outcome.error == "the weighted sum of rewards must be at most 1e+12, got 2.5e+12"


async def test_rewards_of_an_attempt_are_computed_at_once(
    server: FakeServer, domain_rewards: Domain
) -> None:
    url = f"{server.url}/score"
    config = run_config({"name": "a", "url": url}, {"name": "b", "url": url})
    server.gate.clear()
    computing = asyncio.ensure_future(domain_rewards(config).compute(finished()))
    async with asyncio.timeout(10):
        while len(server.requests) < 2:
            server.arrived.clear()
            await server.arrived.wait()
    server.gate.set()
    assert (await computing).reward == 4.5


# In the pipeline.


@pytest.mark.usefixtures("wired")
async def test_an_attempt_is_stored_with_the_components_of_its_reward(
    store: TrajectoryStore, server: FakeServer, domain_rewards: Domain
) -> None:
    config = run_config(
        {"name": "a", "function": f"{FUNCTIONS}:length"},
        {"name": "b", "url": f"{server.url}/score"},
    )
    harness = Harness(store, rewards=domain_rewards(config))
    ready = await harness.scored()
    assert (ready.reward, ready.success) == (1.5 + (4 + 1.5) + 2, True)
    (trajectory,) = store.get([TRAJECTORY])
    assert trajectory.rewards == {"env": 1.5, "a": 5.5, "b": 2.0}
    assert trajectory.reward == ready.reward
    assert [message["role"] for message in server.requests[0]["conversation"]] == [
        "user",
        "assistant",
    ] * 2
    # the wait is no failure of the environment, whatever its limits
    assert any(isinstance(event, AttemptDelayed) for event in harness.events)
    await harness.idle()


@pytest.mark.usefixtures("wired")
async def test_a_reward_that_fails_keeps_what_it_is_computed_from(
    store: TrajectoryStore, server: FakeServer, domain_rewards: Domain
) -> None:
    server.answer = lambda _: web.Response(status=400, text="no")
    config = run_config({"name": "b", "url": f"{server.url}/score"})
    harness = Harness(store, rewards=domain_rewards(config))
    event = await harness.scored(RewardFailed)
    assert event.stop_reason is StopReason.REWARD_UNAVAILABLE
    reader = TrajectoryReader(store._directory)
    (entry,) = reader.entries
    trajectory = reader.load(entry)
    assert (trajectory.reward, trajectory.blame) == (None, Blame.INFRASTRUCTURE)
    unscored = entry.score.unscored
    assert (unscored.missing, unscored.reward, unscored.success) == (("b",), 1.5, True)
    assert unscored.stop_reason is StopReason.FINISHED
    assert [message.content for message in unscored.conversation] == ["go", "hi", "on", "hi"]
    await harness.idle()


async def test_a_reward_that_fails_before_the_comparison_leaves_both_missing(
    store: TrajectoryStore, server: FakeServer, domain_rewards: Domain
) -> None:
    server.answer = lambda _: web.Response(status=400, text="no")
    duel = judge(server, rubric="x", pairwise=True)
    config = run_config({"name": "b", "url": f"{server.url}/score"}, {"name": "duel", **duel})
    domain = domain_rewards(config)
    harness = Harness(store, rewards=domain)
    await harness.scored(RewardFailed)
    (entry,) = TrajectoryReader(store._directory).entries
    assert entry.score.unscored.missing == ("b", "duel")
    server.answer = lambda _: {"reward": 2}
    server.requests.clear()
    outcome = await domain.compute(finished(), compared=True)
    assert (outcome.reward, outcome.missing) == (None, ("duel",))
    assert outcome.error == "reward duel: the attempt was never compared with its group"
    assert server.requests == []
    assert (await domain.compute(finished())).reward == 2.5, "an evaluation compares nothing"
    await harness.idle()


async def test_an_attempt_that_waits_for_a_reward_is_cancelled(
    store: TrajectoryStore, server: FakeServer, domain_rewards: Domain
) -> None:
    server.gate.clear()
    config = run_config({"name": "b", "url": f"{server.url}/score"})
    harness = Harness(store, rewards=domain_rewards(config))
    await harness.play()
    harness.eval()
    await server.arrived.wait()
    after = len(harness.events)
    command = CancelTrajectory(
        trajectory_id=TrajectoryId(TRAJECTORY), attempt=0, reason=StopReason.STALE
    )
    harness.pipeline.cancel(command)
    ended = await harness.until(TrajectoryEnded, after)
    assert ended.stop_reason is StopReason.STALE
    await harness.idle()
    assert harness.active_attempts == 0
    server.gate.set()
