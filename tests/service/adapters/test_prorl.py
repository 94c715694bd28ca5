"""Replays of the requests that ProRL's clients send: NeMo-Gym's agent, and the setup
and batches of a NeMo-RL client.
"""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollweave.service.adapters.prorl import task_domain
from rollweave.service.engines import backend_factory
from tests.service.api import call, get, wait_until
from tests.support.rollout_service import Serving, service_config, serving
from tests.support.services import elsewhere, registered


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
            assert (answer["success"], answer["finish"], answer["critical_error"]) == (
                True,
                True,
                None,
            )
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
        assert await post(service, "/cancel", {"job_id": "one"}) == (
            200,
            {"status": "Job one canceled successfully"},
        )
        status, answer = await named
        assert (status, answer["success"], answer["finish"], answer["filter"]) == (
            200,
            False,
            False,
            False,
        )
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


async def test_a_failure_is_reported_and_filtered(tmp_path: Path) -> None:
    config = service_config(
        tmp_path,
        task={"env": "tests.service.broken:Broken", "tag": "game"},
        options={"stage": "reset"},
    )
    with serving(config) as service:
        await post(service, "/start")
        status, answer = await post(service, "/process", job(0))
        assert (status, answer["success"], answer["critical_error"], answer["filter"]) == (
            200,
            False,
            "init",
            True,
        )
        assert "broken on purpose" in answer["error"]


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
