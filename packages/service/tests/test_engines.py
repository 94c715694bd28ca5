"""A service with registered engines: their loss and replacement."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from packages.service.tests.api import call, game, get, status_of, submit, wait_until
from packages.service.tests.rollout_service import Program, serving
from packages.service.tests.services import elsewhere, registered
from rollweave.schema.errors import ConfigError
from rollweave_service.client import NoServiceError, RolloutClient
from rollweave_service.engines import backend_factory, vocab_size
from rollweave_service.messages import EngineRequest, RolloutRequest


async def done(service: str, id: str) -> Any:
    while True:
        body = await get(service, f"/v1/rollouts/{id}?wait=10")
        if body["state"] == "done":
            return body


@pytest.mark.parametrize("dialect", ["rollweave", "completions", "prorl"])
async def test_a_registered_engine_serves_rollouts(tmp_path: Path, dialect: str) -> None:
    config = registered(tmp_path)
    async with elsewhere() as (_, address):
        with serving(config, make_backend=backend_factory(config), registered=True) as service:
            await submit(service, id="early", members=2)
            status, body, _ = await call(
                service, "POST", "/v1/engines", {"address": address, "dialect": dialect}
            )
            assert (status, body["address"]) == (202, address)
            for member in (await done(service.address, "early"))["members"]:
                (sequence,) = member["result"]["sequences"]
                kinds = {segment["kind"]: segment["version"] for segment in sequence["segments"]}
                assert kinds["output"] == 0
                assert min(sequence["logprobs"]) == -1.0
            answer = await get(service, "/v1/engines")
            assert [engine["status"] for engine in answer["engines"]] == ["serving"]


async def test_lengths_of_rollouts_and_costs_of_registered_engines_are_learned(
    tmp_path: Path,
) -> None:
    """A policy that needs both has them, for each engine by itself."""
    config = registered(tmp_path, rollout={"scheduling": "trajectory"})
    async with elsewhere() as (_, one), elsewhere() as (_, other):
        with serving(config, make_backend=backend_factory(config), registered=True) as service:
            for address in (one, other):
                body = {"address": address, "dialect": "completions"}
                await call(service, "POST", "/v1/engines", body)
            state = service.service.engines._world.state
            counted, number = state.counters.scheduling, 0
            while (
                counted.predictions == counted.predictions_late
                or len(state.mechanisms["costs"].measured) < 2
            ):
                rollout = game(id=f"r{number}", members=8)
                await call(service, "POST", "/v1/rollouts", rollout)
                await done(service.address, f"r{number}")
                number += 1
            assert state.mechanisms["costs"].measured.keys() == {"x0", "x1"}


async def test_turns_of_a_lost_engine_move_to_another(tmp_path: Path) -> None:
    config = registered(tmp_path)
    async with elsewhere() as (_, lasting), elsewhere() as (ending, address):
        with serving(config, make_backend=backend_factory(config), registered=True) as service:
            for place in (address, lasting):
                await call(
                    service, "POST", "/v1/engines", {"address": place, "dialect": "rollweave"}
                )
            await wait_until(
                service,
                "/v1/engines",
                lambda answer: [one["status"] for one in answer["engines"]] == ["serving"] * 2,
            )
            ending.kill()
            for number in range(4):
                await submit(service, id=f"r{number}")
            for number in range(4):
                assert (await done(service.address, f"r{number}"))["members"][0][
                    "stop_reason"
                ] == "finished"


async def addresses_at(service: str) -> set[str]:
    """Return the addresses of the engines that accept turns of a service."""
    answer = await get(service, "/v1/engines")
    return {
        one["address"]
        for one in answer["engines"]
        if one["status"] == "serving" and not one["draining"]
    }


async def wait_for_shares(services: list[str], sizes: list[int]) -> None:
    """Wait until each engine is registered with one service, and service i has
    `sizes[i]` engines.
    """
    async with asyncio.timeout(60.0):
        while True:
            answer = [await addresses_at(service) for service in services]
            if [len(own) for own in answer] == sizes and sum(sizes) == len(set.union(*answer)):
                return
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_engines_are_distributed_and_move_when_a_service_fails(tmp_path: Path) -> None:
    """One of two services with four engines is killed and restarted: all engines move
    to the other one, and two move back.
    """
    configs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        configs.append(registered(tmp_path / name))
    programs = [Program(config, registered=True) for config in configs]
    services = [program.address for program in programs]
    try:
        async with contextlib.AsyncExitStack() as stack:
            places = [(await stack.enter_async_context(elsewhere()))[1] for _ in range(4)]
            client = await stack.enter_async_context(RolloutClient(services))
            await client.register_engines(
                [EngineRequest(address=place, dialect="rollweave") for place in places]
            )
            await wait_for_shares(services, [2, 2])
            programs[0].kill()
            tasks = [
                asyncio.create_task(client.rollout(RolloutRequest(handler="game", index=i)))
                for i in range(8)
            ]
            await wait_for_shares(services[1:], [4])
            for status in await asyncio.gather(*tasks):
                assert status.members[0].stop_reason == "finished"
            port = int(services[0].rpartition(":")[2])
            programs[0] = Program(configs[0], port=port, registered=True)
            await wait_for_shares(services, [2, 2])
            await client.register_engines(
                [EngineRequest(address=place, dialect="rollweave") for place in places[:2]]
            )
            await wait_for_shares(services, [1, 1])
        gone = EngineRequest(address=places[0], dialect="rollweave")
        async with RolloutClient("http://127.0.0.1:1") as unreachable:
            with pytest.raises(NoServiceError):
                await unreachable.register_engines([gone])
    finally:
        for program in programs:
            program.kill()


async def test_refuses_invalid_registrations(tmp_path: Path) -> None:
    config = registered(tmp_path)
    with serving(config, make_backend=backend_factory(config), registered=True) as service:
        for body, reason in (
            ({"address": "http://x", "dialect": "latin"}, "dialect"),
            ({"address": "x", "dialect": "vllm"}, "http://"),
        ):
            status, answer, _ = await call(service, "POST", "/v1/engines", body)
            assert status == 400
            assert reason in json.dumps(answer)


def test_vocab_size_comes_from_the_models_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must define a vocab_size of at least 1, got None"):
        vocab_size(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 7}))
    assert vocab_size(tmp_path) == 7
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 9}}))
    assert vocab_size(tmp_path) == 9
    for size in (0, "9"):
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size}))
        with pytest.raises(ConfigError, match=f"of at least 1, got {size!r}$"):
            vocab_size(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1}))
    assert vocab_size(tmp_path) == 1


async def engines_of(service: str) -> list[Any]:
    answer = await get(service, "/v1/engines")
    engines: list[Any] = answer["engines"]
    return engines


async def serving_engines(service: str, count: int) -> list[Any]:
    """Wait until `count` engines serve; return all engines."""
    await wait_until(
        service,
        "/v1/engines",
        lambda answer: sum(one["status"] == "serving" for one in answer["engines"]) == count,
    )
    return await engines_of(service)


async def test_reports_an_engine_that_refuses_the_connection(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    config, address = registered(tmp_path), f"http://127.0.0.1:{unused_tcp_port}"
    with serving(config, make_backend=backend_factory(config), registered=True) as service:
        _, queued, _ = await submit(service, id="waits")
        assert queued["waits_for"] == "no engine serves: none is registered"
        await call(service, "POST", "/v1/engines", {"address": address, "dialect": "rollweave"})
        await wait_until(
            service, "/v1/engines", lambda answer: "tried 3 times" in answer["engines"][0]["reason"]
        )
        (engine,) = await engines_of(service.address)
        assert engine["status"] == "starting"
        assert engine["reason"].startswith("unreachable: connection refused, tried ")
        answer = await get(service, "/v1/rollouts/waits")
        assert answer["waits_for"].startswith(
            "no engine serves (x0: unreachable: connection refused, tried "
        )
        warnings = [
            warning.message for warning in service.observer.warnings if warning.component == "x0"
        ]
        assert warnings == [f"unreachable at {address}: connection refused; it will be tried again"]
        status, health, _ = await call(service, "GET", "/ready")
        assert (status, health["status"]) == (503, "no engine")
        assert "connection refused" in health["reason"]
        assert await status_of(service, "GET", "/health") == 200


async def test_waiting_rollouts_name_a_removed_engine(tmp_path: Path) -> None:
    config = registered(tmp_path)
    async with elsewhere() as (_, address):
        with serving(config, make_backend=backend_factory(config), registered=True) as service:
            await call(service, "POST", "/v1/engines", {"address": address, "dialect": "sglang"})
            await submit(service, id="waits")
            await wait_until(
                service,
                "/v1/rollouts/waits",
                lambda answer: "x0: removed after" in answer["waits_for"],
            )
            answer = await get(service, "/v1/rollouts/waits")
            assert "cannot be used in the dialect sglang" in answer["waits_for"]
            (engine,) = await engines_of(service.address)
            assert engine["status"] == "removed"
            assert "cannot be used in the dialect sglang" in engine["reason"]
            _, again, _ = await call(
                service, "POST", "/v1/engines", {"address": address, "dialect": "rollweave"}
            )
            await serving_engines(service.address, 1)
            assert [engine["id"] for engine in await engines_of(service.address)] == [again["id"]]
            assert (await done(service.address, "waits"))["members"][0]["stop_reason"] == "finished"


async def test_registering_an_address_with_other_settings_replaces_the_engine(
    tmp_path: Path,
) -> None:
    config = registered(tmp_path)
    async with elsewhere() as (_, address):
        with serving(config, make_backend=backend_factory(config), registered=True) as service:
            wrong = {"address": address, "dialect": "sglang"}
            _, first, _ = await call(service, "POST", "/v1/engines", wrong)
            _, again, _ = await call(service, "POST", "/v1/engines", wrong)
            assert again["id"] == first["id"]
            status, right, _ = await call(
                service,
                "POST",
                "/v1/engines",
                {"address": address, "dialect": "rollweave", "slots": 2},
            )
            assert status == 202
            assert right["id"] != first["id"]
            await serving_engines(service.address, 1)
            await wait_until(service, "/v1/engines", lambda answer: len(answer["engines"]) == 1)
            (engine,) = await engines_of(service.address)
            assert (engine["id"], engine["slots"], engine["reason"]) == (right["id"], 2, "")


async def test_refuses_to_withdraw_the_last_serving_engine(tmp_path: Path) -> None:
    config = registered(tmp_path)
    async with elsewhere() as (_, one), elsewhere() as (_, other):
        with serving(config, make_backend=backend_factory(config), registered=True) as service:
            for address in (one, other):
                await call(
                    service, "POST", "/v1/engines", {"address": address, "dialect": "rollweave"}
                )
            first, last = await serving_engines(service.address, 2)
            assert await status_of(service, "GET", "/ready") == 200
            both = (
                call(service, "DELETE", f"/v1/engines/{engine['id']}") for engine in (first, last)
            )
            (status, answer, _), (other_status, *_) = sorted(
                await asyncio.gather(*both), key=lambda each: -each[0]
            )
            assert (status, other_status, answer["error"]["type"]) == (409, 202, "conflict")
            assert "must not be the last one that serves" in answer["error"]["message"]
            await wait_until(service, "/v1/engines", lambda answer: len(answer["engines"]) == 1)
            (last,) = await engines_of(service.address)
            assert await status_of(service, "DELETE", f"/v1/engines/{last['id']}") == 409
            assert (
                await status_of(service, "DELETE", f"/v1/engines/{last['id']}?force=perhaps") == 400
            )
            assert (await get(service, "/health"))["status"] == "ok"
            assert await status_of(service, "DELETE", f"/v1/engines/{last['id']}?force=true") == 202
            await wait_until(service, "/health", lambda health: health["status"] == "no engine")
            assert (await get(service, "/health"))[
                "reason"
            ] == "no engine serves: none is registered"
