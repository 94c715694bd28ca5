"""A service whose environment shows images, with an engine that stands in for vLLM's
API: what it gets, what the result says, and what a restart keeps.
"""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollweave.envs.base import Observation, Step
from rollweave.schema.config.root import RunConfig
from rollweave.schema.media import Image
from rollweave.schema.work import Task
from rollweave.service.backends import backend_factory
from tests.service.api import call, game, wait_until
from tests.support.fake_runs import until_turns_done
from tests.support.rollout_service import Program, serving
from tests.support.services import elsewhere, registered
from tests.support.vision_models import picture, write_tokenizer

RED, GREEN = Image.of(picture(255)), Image.of(picture(0, 255))
ANSWER = [72, 73]


class Pictures:
    """Shows an image before each of two turns; with `many`, too many for the engine.
    Its steps wait for the file `gate`, if that is given.
    """

    shows_images = True

    def __init__(self, *, many: bool = False, gate: str = "") -> None:
        self._many, self._gate, self._steps = many, Path(gate), 0

    def reset(self, task: Task) -> Observation:
        return Observation.of("look", images=(RED,))

    def step(self, action: str) -> Step:
        while not self._gate.exists():
            time.sleep(0.01)
        self._steps += 1
        images = (GREEN,) * 16 if self._many else (GREEN,)
        return Step.of("more", images=images, reward=1.0, done=self._steps == 2)


class StandIn:
    """`/inference/v1/generate` as of vLLM 0.32, which checks that there is a
    placeholder for each image.
    """

    def __init__(self, placeholder: int) -> None:
        self.placeholder = placeholder
        self.images: list[list[bytes]] = []

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        images = [
            base64.b64decode(part["url"].partition(",")[2])
            for part in body.get("content_parts", [])
        ]
        if body["token_ids"].count(self.placeholder) != len(images):
            return web.json_response({"error": {"message": "placeholders"}}, status=400)
        if len(images) > 10:
            text = "The decoder prompt (length 900) is longer than the maximum model length of 512."
            return web.json_response({"error": {"message": text}}, status=400)
        self.images.append(images)
        tokens = ANSWER[: body["sampling_params"]["max_tokens"]]
        content = [{"token_id": token, "logprob": -1e-4} for token in tokens]
        choice = {"token_ids": tokens, "finish_reason": "length", "logprobs": {"content": content}}
        usage = {"prompt_tokens": len(body["token_ids"]) + 30 * len(images)}
        return web.json_response({"choices": [choice], "usage": usage})

    async def healthy(self, request: web.Request) -> web.Response:
        del request
        return web.Response()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[tuple[StandIn, str]]:
    placeholder = write_tokenizer(tmp_path / "other").token_to_id("<image>")
    stands_in = StandIn(placeholder)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/inference/v1/generate", stands_in.generate)
    app.router.add_get("/health", stands_in.healthy)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield stands_in, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def pictured(tmp_path: Path, *, isolation: str = "inline", **options: Any) -> RunConfig:
    config = registered(tmp_path)
    model = Path(config.model.path or "")
    write_tokenizer(model)
    (model / "config.json").write_text(json.dumps({"vocab_size": 260}))
    task = config.tasks[0].model_copy(
        update={
            "env": f"{__name__}:Pictures",
            "options": options,
            "isolation": isolation,
            "tag": "game",
            "max_tokens": 2000,
            "max_turn_tokens": 2,
        }
    )
    return config.model_copy(update={"tasks": (task,)})


async def played(service: str, address: str, id: str) -> Any:
    await call(service, "POST", "/v1/engines", {"address": address, "dialect": "vllm"})
    await call(service, "POST", "/v1/rollouts", {"handler": "game", "index": 1, "id": id})
    return await ended(service, id)


async def ended(service: str, id: str) -> Any:
    while True:
        _, body, _ = await call(service, "GET", f"/v1/rollouts/{id}?wait=10")
        if body["state"] == "done":
            return body["members"][0]["result"]


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_images_reach_the_engine_the_result_and_whoever_asks(
    tmp_path: Path, engine: tuple[StandIn, str], isolation: str
) -> None:
    stands_in, address = engine
    config = pictured(tmp_path, isolation=isolation)
    with serving(config, make_backend=backend_factory(config)) as service:
        result = await played(service.address, address, "seen")
        assert (result["stop_reason"], result["reward"]) == ("finished", 2.0), result["error"]
    assert stands_in.images[-2:] == [[RED.data], [RED.data, GREEN.data]]
    (sequence,) = result["sequences"]
    assert [each["image"] for each in sequence["images"]] == [
        {"digest": image.digest, "media_type": "image/png"} for image in (RED, GREEN)
    ]
    places = [each["at"] for each in sequence["images"]]
    assert [sequence["tokens"][at] for at in places] == [stands_in.placeholder] * 2
    with serving(config, make_backend=backend_factory(config)) as service:  # started again
        for image in (RED, GREEN):
            status, data, headers = await call(service.address, "GET", f"/v1/images/{image.digest}")
            assert (status, data, headers["Content-Type"]) == (200, image.data, "image/png")
            assert headers["X-Content-Type-Options"] == "nosniff"
        for digest in ("0" * 64, "x"):
            status, body, _ = await call(service.address, "GET", f"/v1/images/{digest}")
            assert (status, body["error"]["type"]) == (404, "unknown")


async def test_a_prompt_that_only_the_engine_finds_too_long_is_scored(
    tmp_path: Path, engine: tuple[StandIn, str]
) -> None:
    _, address = engine
    config = pictured(tmp_path, many=True)
    with serving(config, make_backend=backend_factory(config)) as service:
        result = await played(service.address, address, "long")
    assert (result["stop_reason"], result["blame"], result["reward"]) == (
        "max_tokens",
        "agent",
        1.0,
    )


async def test_an_engine_that_takes_no_images_says_so(
    tmp_path: Path, engine: tuple[StandIn, str]
) -> None:
    """The turn is refused before it is sent, and goes to an engine that takes them."""
    stands_in, address = engine
    config = pictured(tmp_path)
    async with elsewhere() as (_, other):
        with serving(config, make_backend=backend_factory(config)) as service:
            body = {"address": other, "dialect": "completions"}
            await call(service.address, "POST", "/v1/engines", body)
            await wait_until(
                service.address,
                "/v1/engines",
                lambda answer: answer["engines"][0]["status"] == "serving",
            )
            await call(
                service.address, "POST", "/v1/rollouts", {"handler": "game", "index": 1, "id": "a"}
            )
            result = await ended(service.address, "a")
            assert result["stop_reason"] == "engine_failure"
            assert "takes no images, got 1" in result["error"]
            body = {"address": address, "dialect": "vllm"}
            await call(service.address, "POST", "/v1/engines", body)
            await wait_until(
                service.address,
                "/v1/engines",
                lambda answer: [one["status"] for one in answer["engines"]] == ["serving"] * 2,
            )
            result = await played(service.address, address, "b")
            assert result["stop_reason"] == "finished"
    assert stands_in.images[-1] == [RED.data, GREEN.data]


async def test_a_killed_service_ends_its_rollouts_with_the_same_images(
    tmp_path: Path, engine: tuple[StandIn, str]
) -> None:
    stands_in, address = engine
    gate = tmp_path / "gate"
    config = pictured(tmp_path, gate=str(gate))
    program = Program(config)
    try:
        body = {"address": address, "dialect": "vllm"}
        await call(program.address, "POST", "/v1/engines", body)
        await call(program.address, "POST", "/v1/rollouts", game(id="x"))
        await asyncio.to_thread(until_turns_done, config, 1)
    finally:
        await asyncio.to_thread(program.kill)
    gate.touch()
    with serving(config, make_backend=backend_factory(config)) as service:
        result = await ended(service.address, "x")
        for image in (RED, GREEN):
            path = f"/v1/images/{image.digest}"
            assert (await call(service.address, "GET", path))[:2] == (200, image.data)
    assert result["stop_reason"] == "finished", result["error"]
    assert stands_in.images[-1] == [RED.data, GREEN.data]
    digests = [each["image"]["digest"] for each in result["sequences"][0]["images"]]
    assert digests == [RED.digest, GREEN.digest]
