"""A service whose engines are elsewhere: registered by address, lost and replaced, with tokens or with text alone."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollweave.backends.client import EngineClient
from rollweave.backends.inproc import in_thread
from rollweave.backends.server import EngineServer
from rollweave.schema.base import EngineId
from rollweave.schema.config import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.service import EngineRequest, RolloutRequest
from rollweave.schema.serving import EngineSpec
from rollweave.service.client import NoServiceError, RolloutClient
from rollweave.service.engines import connector, vocabulary
from tests.backends.echo_engine import EchoLoop
from tests.service.serving import Program, service_config, serving
from tests.service.test_service import ask, game, until


def registered(directory: Path) -> RunConfig:
    """A service without engines of its own; the echo engine's tokens are below 128."""
    config = service_config(directory, serve={"engines": "registered"})
    (Path(config.model.path or "") / "config.json").write_text(json.dumps({"vocab_size": 128}))
    return config


class Words:
    def encode(self, text: str) -> list[int]:
        return [5] * len(text)

    def decode(self, tokens: Any) -> str:
        return "a" * len(tokens)


@contextlib.asynccontextmanager
async def elsewhere() -> AsyncIterator[tuple[EngineClient, str]]:
    """An echo engine behind HTTP, and its address."""
    present: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    present.set_result(None)
    spec = EngineSpec(id=EngineId("e0"), model="echo", max_slots=4)
    engine = EngineClient("echo", in_thread(spec, EchoLoop, model_ready=present), start_s=20.0, reply_s=20.0)
    app = EngineServer(engine, model="echo", text=Words()).application()
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await engine.ready()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield engine, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        await engine.close()


async def done(service: str, id: str) -> Any:
    while True:
        _, body, _ = await ask(service, "GET", f"/v1/rollouts/{id}?wait=10")
        if body["state"] == "done":
            return body


@pytest.mark.parametrize("dialect", ["rollweave", "completions", "prorl"])
async def test_an_engine_elsewhere_serves_rollouts(tmp_path: Path, dialect: str) -> None:
    config = registered(tmp_path)
    async with elsewhere() as (_, address):
        with serving(config, connect=connector(config)) as service:
            await ask(service.address, "POST", "/v1/rollouts", game(id="early", members=2))
            status, body, _ = await ask(service.address, "POST", "/v1/engines", {"address": address, "dialect": dialect})
            assert (status, body["address"]) == (202, address)
            for member in (await done(service.address, "early"))["members"]:
                (sequence,) = member["result"]["sequences"]
                kinds = {segment["kind"]: segment["version"] for segment in sequence["segments"]}
                assert kinds["output"] == 0
                assert min(sequence["logprobs"]) == -1.0
            _, found, _ = await ask(service.address, "GET", "/v1/engines")
            assert [engine["status"] for engine in found["engines"]] == ["serving"]


async def test_text_alone_leaves_no_output_that_could_be_trained_on(tmp_path: Path) -> None:
    config = registered(tmp_path)
    async with elsewhere() as (_, address):
        with serving(config, connect=connector(config)) as service:
            body = {"address": address, "dialect": "completions", "text_only": True}
            assert (await ask(service.address, "POST", "/v1/engines", body))[0] == 202
            await ask(service.address, "POST", "/v1/rollouts", game(id="text"))
            (member,) = (await done(service.address, "text"))["members"]
            assert member["stop_reason"] == "finished"
            (sequence,) = member["result"]["sequences"]
            assert {segment["kind"] for segment in sequence["segments"]} == {"prompt", "observation"}
            assert sequence["turns"]


async def test_when_an_engine_is_gone_another_takes_its_turns(tmp_path: Path) -> None:
    config = registered(tmp_path)
    async with elsewhere() as (_, lasting), elsewhere() as (ending, address):
        with serving(config, connect=connector(config)) as service:
            for place in (address, lasting):
                await ask(service.address, "POST", "/v1/engines", {"address": place, "dialect": "rollweave"})
            await until(
                service.address, "/v1/engines", lambda found: [one["status"] for one in found["engines"]] == ["serving"] * 2
            )
            ending.kill()
            for number in range(4):
                await ask(service.address, "POST", "/v1/rollouts", game(id=f"r{number}"))
            for number in range(4):
                assert (await done(service.address, f"r{number}"))["members"][0]["stop_reason"] == "finished"


async def addresses_at(service: str) -> set[str]:
    """Of the engines that take turns there."""
    _, found, _ = await ask(service, "GET", "/v1/engines")
    return {one["address"] for one in found["engines"] if one["status"] == "serving" and not one["draining"]}


async def shares(services: list[str], sizes: list[int]) -> None:
    """Engines come to be dealt so, each to one service."""
    while True:
        found = [await addresses_at(service) for service in services]
        if [len(own) for own in found] == sizes and sum(sizes) == len(set.union(*found)):
            return
        await asyncio.sleep(0.05)


async def test_engines_are_dealt_to_services_and_move_with_them(tmp_path: Path) -> None:
    """Four engines and two services, one of which is killed and started again: all go to the other one and come back."""
    configs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        configs.append(registered(tmp_path / name))
    programs = [Program(config) for config in configs]
    services = [program.address for program in programs]
    try:
        async with contextlib.AsyncExitStack() as stack:
            places = [(await stack.enter_async_context(elsewhere()))[1] for _ in range(4)]
            client = await stack.enter_async_context(RolloutClient(services))
            await client.register_engines([EngineRequest(address=place, dialect="rollweave") for place in places])
            await shares(services, [2, 2])
            programs[0].kill()
            tasks = [asyncio.create_task(client.rollout(RolloutRequest(handler="game", index=i))) for i in range(8)]
            await shares(services[1:], [4])
            for status in await asyncio.gather(*tasks):
                assert status.members[0].stop_reason == "finished"
            port = int(services[0].rpartition(":")[2])
            again = configs[0].model_copy(update={"serve": configs[0].serve.model_copy(update={"port": port})})
            programs[0] = Program(again)
            await shares(services, [2, 2])
            await client.register_engines([EngineRequest(address=place, dialect="rollweave") for place in places[:2]])
            await shares(services, [1, 1])
        async with RolloutClient("http://127.0.0.1:1") as nobody:
            with pytest.raises(NoServiceError):
                await nobody.register_engines([EngineRequest(address=places[0], dialect="rollweave")])
    finally:
        for program in programs:
            program.kill()


async def test_what_cannot_be_registered_is_refused(tmp_path: Path) -> None:
    config = registered(tmp_path)
    with serving(config, connect=connector(config)) as service:
        for body, reason in (
            ({"address": "http://x", "dialect": "latin"}, "dialect"),
            ({"address": "x", "dialect": "vllm"}, "http://"),
            ({"address": "http://x", "dialect": "vllm", "text_only": True}, "text_only must be off"),
        ):
            status, found, _ = await ask(service.address, "POST", "/v1/engines", body)
            assert status == 400
            assert reason in json.dumps(found)


def test_the_vocabulary_is_that_of_the_models_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must tell a vocab_size of at least 1, got None"):
        vocabulary(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 7}))
    assert vocabulary(tmp_path) == 7
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 9}}))
    assert vocabulary(tmp_path) == 9
