"""Replays of the requests that ProRL's clients send: NeMo-Gym's agent, and the setup
and batches of a NeMo-RL client.
"""

import asyncio
import json
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import aiohttp
import msgspec
import pytest

from packages.service.tests.api import call, get, wait_until
from packages.service.tests.results import done, result
from packages.service.tests.rollout_service import Serving, service_config, serving
from packages.service.tests.services import elsewhere, registered
from rollweave.schema.address import Hosts
from rollweave.schema.errors import ConfigError, DiskError
from rollweave.schema.work import (
    SegmentKind,
    StopReason,
    Timing,
)
from rollweave_service.adapters import prorl
from rollweave_service.adapters.prorl import (
    Address,
    Process,
    ProRL,
    UnknownJobError,
    _request,
    task_domain,
)
from rollweave_service.base import FullError, GoneError, UnknownError
from rollweave_service.engines import backend_factory
from rollweave_service.messages import MemberStatus, RolloutRequest
from tests.support.sequences import sequence


async def post(service: Serving, path: str, body: Any = None) -> tuple[int, Any]:
    status, answer, _ = await call(service, "POST", path, body if body is not None else {})
    return status, answer


def job(number: int, **fields: Any) -> dict[str, Any]:
    params = {
        "temperature": 0.7,
        "top_p": 1.0,
        "max_iterations": 8,
        "max_output_tokens": 4,
        "token_level_generation": True,
    }
    instance = {
        "data_source": "game",
        "instance_id": f"i{number}",
        "trajectory_id": f"t{number}",
        "problem": "say anything",
    }
    return {
        "instance": {**instance, **fields.pop("instance", {})},
        "sampling_params": params,
        **fields,
    }


async def test_runs_the_requests_of_a_client(tmp_path: Path) -> None:
    with serving(service_config(tmp_path)) as service:
        assert (await post(service, "/process", job(0)))[0] == 503
        assert (await post(service, "/clear_llm_server"))[1] == {
            "status": "Cleared all LLM server addresses"
        }
        assert await post(service, "/start") == (200, {"status": "Server started successfully"})
        status, answer = await post(service, "/start")
        assert (status, set(answer)) == (400, {"detail"})  # which its clients take for good
        await wait_until(
            service, "/v1/engines", lambda answer: answer["engines"][0]["status"] == "serving"
        )
        answers = await asyncio.gather(
            *(post(service, "/process", job(number, job_id="again")) for number in range(6))
        )
        for number, (status, answer) in enumerate(answers):
            assert status == 200
            assert (answer["instance_id"], answer["trajectory_id"]) == (f"i{number}", f"t{number}")
            expected = (True, True, None)
            assert (answer["success"], answer["finish"], answer["critical_error"]) == expected
            assert answer["timing"]["counted_elapsed"] >= answer["timing"]["run_time"] > 0
            spoken = [message for message in answer["messages"] if message["role"] == "assistant"]
            assert len(spoken) == 2
            for message in spoken:
                assert len(message["token_ids"]) == len(message["logprobs"]) > 0
            first, second = spoken
            assert second["input_ids"][: len(first["input_ids"])] == first["input_ids"]
            assert (
                second["input_ids"][len(first["input_ids"]) :][: len(first["token_ids"])]
                == first["token_ids"]
            )
        status_reply = await get(service, "/status")
        assert (status_reply["total"], status_reply["active_run"]) == (0, 0)
        assert await post(service, "/stop") == (200, {"status": "Server stopped successfully"})
        assert (await post(service, "/process", job(0)))[0] == 503


async def test_cancels_jobs_by_id_by_disconnecting_and_by_stopping(tmp_path: Path) -> None:
    config = service_config(tmp_path, options={"wait": str(tmp_path / "gate")})
    with serving(config) as service:
        await post(service, "/start")
        named = asyncio.create_task(post(service, "/process", job(0, job_id="one")))
        await wait_until(service, "/health", lambda health: health["run"] == 1)
        wanted = (200, {"status": "Job one canceled successfully"})
        assert await post(service, "/cancel", {"job_id": "one"}) == wanted
        status, answer = await named
        expected = (200, False, False, False)
        assert (status, answer["success"], answer["finish"], answer["filter"]) == expected
        assert (await post(service, "/cancel", {"job_id": "one"}))[0] == 404
        leaving = asyncio.create_task(post(service, "/process", job(1)))
        await wait_until(service, "/health", lambda health: health["run"] == 1)
        leaving.cancel()
        await wait_until(service, "/health", lambda health: health["run"] + health["closing"] == 0)
        waiting = [
            asyncio.create_task(post(service, "/process", job(number))) for number in range(3)
        ]
        await wait_until(service, "/health", lambda health: health["run"] == 3)
        await post(service, "/stop")
        assert [(await task)[1]["success"] for task in waiting] == [False] * 3


async def test_refuses_invalid_requests_in_prorls_form(tmp_path: Path) -> None:
    with serving(service_config(tmp_path)) as service:
        await post(service, "/start")
        for body in (
            job(0, instance={"data_source": "none"}),
            {"instance": 1},
            {},
            job(0) | {"sampling_params": {"temperature": -1}},
            job(0) | {"sampling_params": {"max_iterations": "many"}},
            job(0) | {"sampling_params": {"min_p": 0.1}},
            job(0) | {"sampling_params": {"reasoning_effort": "high"}},
            job(0) | {"sampling_params": {"surprise": 1}},
            job(0, instance={"data_source": 5}),
        ):
            status, answer = await post(service, "/process", body)
            assert (status, set(answer)) == (400, {"detail"}), body
        assert (await post(service, "/add_llm_server", {"address": 5}))[0] == 400
        assert (await post(service, "/add_llm_server", {}))[0] == 400
        request_arguments = {"data": b"\xff{", "headers": {"Content-Type": "application/json"}}
        async with (
            aiohttp.ClientSession() as session,
            session.post(service.address + "/process", **request_arguments) as answer,
        ):
            assert answer.status == 400


NEMO_RL: dict[str, Any] = {
    "model": "hosted_vllm/Qwen/Qwen3-8B",
    "api_key": "dummy_key",
    "modify_params": False,
    "log_completions": False,
    "native_tool_calling": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_iterations": 35,
    "max_output_tokens": 4096,
    "token_level_generation": True,
    "custom_tokenizer": "Qwen/Qwen3-8B",
    "max_model_len": 32768,
    "ensure_thinking_end_properly": False,
    "strict_loop_detector": True,
    "is_reasoning_task": False,
    "enable_thinking": True,
}
"""The sampling parameters that its client sends with each job."""


@pytest.mark.parametrize("source", [{}, {"data_source": "swebench"}, {"data_source": "game"}])
async def test_prorls_client_runs_unchanged(tmp_path: Path, source: dict[str, str]) -> None:
    """Its instances have no `data_source` or that of their data set, and its addresses
    end in /v1.
    """
    config = registered(tmp_path)
    async with elsewhere() as (_, address):
        with serving(config, make_backend=backend_factory(config), registered=True) as service:
            assert (await post(service, "/add_llm_server", {"address": f"{address}/v1"}))[0] == 200
            assert (await post(service, "/start"))[0] == 200
            body = {
                "instance": {"instance_id": "i", "trajectory_id": 0, **source},
                "sampling_params": NEMO_RL,
            }
            status, answer = await post(service, "/process", body)
            assert (status, answer["instance_id"], answer["critical_error"]) == (200, "i", None), (
                answer["error"]
            )
            engines = await get(service, "/v1/engines")
            assert [engine["address"] for engine in engines["engines"]] == [address]


def test_maps_prorls_handler_names_to_task_domains() -> None:
    tasks = {"bugs": "swe", "sums": "math_tool", "own": "my:Agent"}
    answer = [
        task_domain(name, tasks)
        for name in ("swebench", "swe-gym", "math", "own", "deepcoder-v2", "gui")
    ]
    assert answer == ["bugs", "bugs", "sums", "own", "deepcoder-v2", "gui"]
    assert task_domain("deepcoder-v2", {"snippets": "code"}) == "snippets"
    assert task_domain("swebench", {"own": "my:Agent"}) == "own"
    assert task_domain("swebench", {"own": "my:Agent", "other": "my:Agent"}) == "swebench"
    assert task_domain("none", {"own": "my:Agent"}) == "none"


# Results.


class Letters:
    """Decodes token 100 to an a, and what the agent says to capitals."""

    def decode(self, tokens: tuple[int, ...]) -> str:
        return "".join(chr(token - 3) for token in tokens)

    def text(self, tokens: tuple[int, ...]) -> str:
        return self.decode(tokens).upper()


OUTPUT, READ = SegmentKind.OUTPUT, SegmentKind.OBSERVATION
TURNS = sequence([(SegmentKind.PROMPT, 2), (READ, 1), (OUTPUT, 1), (OUTPUT, 2), (READ, 1)])


def ended(reason: StopReason, **fields: Any) -> MemberStatus:
    timing = Timing(init_s=1.0, run_s=2.0, eval_s=4.0, queue_s=8.0)
    return done(result(reason, **{"sequences": (TURNS,), "timing": timing, **fields}))


def result_of(member: MemberStatus, **params: Any) -> dict[str, Any]:
    api = ProRL(cast(Any, None), codec=cast(Any, Letters()), hosts=cast(Any, None))
    return api._result(Process(instance={"instance_id": 7}, sampling_params=params), member)


def test_a_result_has_the_form_that_clients_read() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    member = ended(
        StopReason.FINISHED,
        reward=0.5,
        result='{"git_patch": "+x"}',
        tools=(json.dumps(tool),),
    )
    said: dict[str, Any] = {"role": "assistant", "content": "DEF", "tool_calls": []}
    sampled: dict[str, Any] = {"token_ids": (103, 104, 105), "input_ids": (100, 101, 102)}
    sampled["logprobs"] = (-4.0, -5.0, -5.0)
    user = [{"role": "user", "content": text} for text in ("ab", "c", "g")]
    expected = {
        "instance_id": 7,
        "trajectory_id": "r1.0",
        "git_patch": "+x",
        "success": True,
        "error": None,
        "finish": True,
        "messages": [*user[:2], said | sampled, user[2]],
        "tools": [tool],
        "end_properly": True,
        "resolved": True,
        "reward": 0.5,
        "critical_error": None,
        "filter": False,
        "timing": {
            "init_time": 1.0,
            "run_time": 2.0,
            "eval_time": 4.0,
            "others_time": 8.0,
            "counted_elapsed": 7.0,
            "timeout_triggered": False,
        },
    }
    assert result_of(member) == expected
    plain = result_of(member, token_level_generation=False)["messages"]
    assert [message for message in plain if message["role"] == "assistant"] == [said]
    assert plain == [*user[:2], said, user[2]]


ALL_WELL = "success finish end_properly resolved"


@pytest.mark.parametrize(
    ("reason", "fields", "flags", "error", "stage"),
    [
        (StopReason.FINISHED, {"reward": 0.0}, "success finish end_properly", None, None),
        (StopReason.FINISHED, {"reward": 0.0, "success": True}, ALL_WELL, None, None),
        (StopReason.FINISHED, {"reward": 1.0, "success": False}, ALL_WELL[:-9], None, None),
        (StopReason.MAX_TURNS, {"reward": 1.0}, "success end_properly resolved", None, None),
        (StopReason.MAX_TURNS, {}, "success", "max_turns", None),
        (StopReason.CANCELLED, {}, "", "cancelled", None),
        (StopReason.ENV_ERROR, {"error": "lost"}, "", "lost", "run"),
        (StopReason.ENV_ERROR, {"sequences": ()}, "", "env_error", "init"),
        (StopReason.REWARD_ERROR, {"sequences": ()}, "", "reward_error", "eval"),
        (StopReason.TIME_BUDGET, {}, "", "time_budget", "timeout"),
    ],
)
def test_a_result_says_how_far_a_job_came(
    reason: StopReason, fields: dict[str, Any], flags: str, error: str | None, stage: str | None
) -> None:
    answer = result_of(ended(reason, **fields))
    assert [name for name in ALL_WELL.split() if answer[name]] == flags.split()
    assert (answer["error"], answer["critical_error"]) == (error, stage)
    assert answer["filter"] == (stage is not None)
    assert answer["timing"]["timeout_triggered"] == (reason == StopReason.TIME_BUDGET)


def test_a_job_that_never_began_has_an_empty_result() -> None:
    for reason, stage in ((None, None), (StopReason.ENV_ERROR, "init"), ("worker_lost", "init")):
        answer = result_of(done(None, reason))
        assert (answer["success"], answer["critical_error"]) == (False, stage)
        assert (answer["error"], answer["messages"]) == (reason or "cancelled", [])
        assert set(answer["timing"].values()) == {0.0}
    assert result_of(ended(StopReason.FINISHED, reward=1.0, result="[1]"))["git_patch"] == ""


@pytest.mark.parametrize(
    ("instance", "params", "expected"),
    [
        ({"index": 3}, {"top_k": -1}, {"index": 3, "sampling": {"top_k": 0}}),
        ({"index": 3}, {"top_k": 5}, {"index": 3, "sampling": {"top_k": 5}}),
        (
            {"index": 3, "instance_id": "i", "trajectory_id": "t"},
            {"temperature": 0.5, "top_p": None},
            {"index": 3, "sampling": {"temperature": 0.5}},
        ),
        ({"index": 3, "problem": "p"}, {}, {"payload": {"index": 3, "problem": "p"}}),
        ({"instance_id": "i"}, {}, {"payload": {"instance_id": "i"}}),
        (
            {"problem": "p"},
            {"max_iterations": 2, "max_model_len": 30, "max_output_tokens": None, "timeout": 9},
            {
                "payload": {"problem": "p"},
                "limits": {"max_turns": 2, "max_tokens": 30, "time_s": 9},
            },
        ),
    ],
)
def test_a_job_is_a_rollout_of_an_index_or_of_its_own_data(
    instance: dict[str, Any], params: dict[str, Any], expected: dict[str, Any]
) -> None:
    body = Process(instance={"data_source": "game", **instance}, sampling_params=params)
    wanted = msgspec.convert({"id": "p", "handler": "game", **expected}, RolloutRequest)
    assert _request(body, "p", {"game": "game", "other": "x"}) == wanted


@pytest.mark.parametrize(
    ("address", "url", "dialect"),
    [
        ("host:1", "http://host:1", "prorl"),
        ("https://host:1/", "https://host:1", "prorl"),
        ("http://host:1/v1/", "http://host:1", "completions"),
    ],
)
async def test_a_servers_address_tells_its_dialect(address: str, url: str, dialect: str) -> None:
    service = Mock()
    api = ProRL(service, codec=Mock(), hosts=Hosts(frozenset({"host"}), ()))
    answer = await api.add(Address(address=address, token="secret"))
    assert answer.status == f"Added LLM server address: {url}"
    (engine,) = service.engines.register.call_args.args
    assert (engine.address, engine.dialect, engine.token) == (url, dialect, "secret")


async def test_counts_jobs_by_stage_and_withdraws_registered_engines_only() -> None:
    service = Mock()
    service.health.return_value = Mock(
        queued=1, init=2, run_queued=4, run=8, eval=16, eval_queued=32
    )
    engines = [Mock(id="e0", address=""), Mock(id="x1", address="http://host:1")]
    service.engines.statuses.return_value = engines
    api = ProRL(service, codec=Mock(), hosts=Mock())
    expected = {"status": "stopped", "init_queue": 1, "run_queue": 4, "eval_queue": 32}
    expected |= {"active_init": 2, "active_run": 8, "active_eval": 16, "total": 63}
    assert await api.status() == expected
    await api.start()
    assert (await api.status())["status"] == "running"
    await api.clear()
    service.engines.withdraw.assert_called_once_with("x1", drain=False, force=True)


def test_refusals_have_the_statuses_that_clients_read() -> None:
    errors = [UnknownJobError(""), UnknownError(""), GoneError(""), FullError(""), DiskError(0, "")]
    answers = [prorl._refused(error) for error in (*errors, ConfigError("no"))]
    assert [answer.status for answer in answers] == [404, 400, 503, 503, 507, 400]
    assert answers[-1].body == b'{"detail":"no"}'
