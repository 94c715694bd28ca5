"""Images of an environment from its observation to the engine and to the record, with a
worker here and in another process; and what a crash in between leaves.
"""

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollweave.envs.base import Observation, Score, Step
from rollweave.envs.handlers.base import Agent, Job, Tool
from rollweave.envs.handlers.sandboxes import Sandboxes
from rollweave.envs.handlers.tools import converse
from rollweave.record.images import (
    UNUSED_S,
    ImageError,
    ImageStore,
    find_image,
    images_of,
    read_image,
    with_images,
)
from rollweave.record.store import TrajectoryReader, TrajectoryStore
from rollweave.record.turn_log import TurnAnswer, TurnLog, context_digest
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.driver import AgentConfig, Driver
from rollweave.rollout.env_episode import EnvEpisode
from rollweave.rollout.gateway.server import GatewayListener
from rollweave.rollout.handler_episode import HandlerEpisode
from rollweave.rollout.recorded import RecordedTurns
from rollweave.schema.chat import Message
from rollweave.schema.commands import StartInit
from rollweave.schema.events import TrajectoryEnded, TurnDone, TurnWithdrawn
from rollweave.schema.media import Image, PlacedImage, keys_of
from rollweave.schema.serving import FinishReason, GenerateResult, Sampling, VersionSpan
from rollweave.schema.work import StopReason
from tests.support.pipelines import TRAJECTORY, Harness, Script
from tests.support.vision_models import picture, write_tokenizer

RED, GREEN, BLUE = (Image.of(picture(*color)) for color in ((255,), (0, 255), (0, 0, 255)))
ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TrajectoryStore]:
    with TrajectoryStore(tmp_path / "trajectories") as opened:
        yield opened


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    directory = tmp_path_factory.mktemp("vision")
    write_tokenizer(directory)
    return ChatCodec.from_directory(directory)


def script(*steps: Step) -> Script:
    return Script(reset=Observation.of("go", images=(RED,)), steps=list(steps))


STEPS = (Step.of("on", images=(GREEN, RED)), Step(reward=1.0, done=True, success=True))


class SeeingHarness(Harness):
    """A pipeline whose agent has a chat template with images."""

    def __init__(
        self,
        store: TrajectoryStore,
        of: ChatCodec,
        script: Script,
        *,
        no_images: str = "",
        log: TurnLog | None = None,
        **limits: int,
    ) -> None:
        def make(command: StartInit) -> Driver:
            return EnvEpisode(
                command,
                provider=self.provider,
                agent=AgentConfig(
                    codec=of,
                    sampling=Sampling(stop_token_ids=of.stop_token_ids),
                    no_images=no_images,
                ),
                seed=7,
                clock=asyncio.get_running_loop().time,
            )

        super().__init__(store, script, make=make, log=log, **limits)
        self.engine.answer = answer(of)


def answer(of: ChatCodec, text: str = "hi", **changes: object) -> GenerateResult:
    tokens = of.encode_turn(text)
    result = GenerateResult(
        id="r",
        tokens=tokens,
        logprobs=(-0.5,) * len(tokens),
        versions=(VersionSpan(start=0, end=len(tokens), version=3),),
        finish=FinishReason.STOP,
    )
    return msgspec.structs.replace(result, **changes)


@pytest.mark.usefixtures("wired")
async def test_images_reach_the_engine_and_the_record(
    store: TrajectoryStore, vision: ChatCodec
) -> None:
    harness = SeeingHarness(store, vision, script(*STEPS))
    ended = await harness.play()
    assert ended.stop_reason is StopReason.FINISHED
    assert [request.images for request in harness.engine.requests] == [(RED,), (RED, GREEN, RED)]
    for request in harness.engine.requests:
        assert request.tokens.count(vision.image_token or -1) == len(request.images)
    (trajectory,) = store.get([TRAJECTORY])
    (sequence,) = trajectory.sequences
    assert [placed.image for placed in sequence.images] == [
        image.reference() for image in (RED, GREEN, RED)
    ]
    assert all(sequence.tokens[placed.at] == vision.image_token for placed in sequence.images)
    directory = store.images.directory
    assert sorted(path.name for path in directory.iterdir()) == sorted([RED.name, GREEN.name])
    assert read_image(directory, sequence.images[1].image) == GREEN


@pytest.mark.usefixtures("wired")
async def test_an_image_that_no_turn_has_seen_is_recorded(
    store: TrajectoryStore, vision: ChatCodec
) -> None:
    steps = (Step.of("last", images=(BLUE,)),)
    harness = SeeingHarness(store, vision, script(*steps), max_turns=1)
    assert (await harness.play()).stop_reason is StopReason.MAX_TURNS
    assert find_image(store.images.directory, BLUE.digest) == BLUE


async def test_an_agent_that_cannot_see_ends_with_one_line(
    store: TrajectoryStore, vision: ChatCodec
) -> None:
    harness = SeeingHarness(store, vision, script(*STEPS), no_images="the trainer computes text")
    ended = await harness.play()
    assert (ended.stop_reason, ended.error) == (
        StopReason.ENV_ERROR,
        "first messages: the trainer computes text",
    )


@pytest.mark.usefixtures("wired")
@pytest.mark.parametrize("turns", [0, 1])
async def test_a_prompt_that_exceeds_the_engines_context_ends_the_trajectory(
    store: TrajectoryStore, vision: ChatCodec, turns: int
) -> None:
    harness = SeeingHarness(store, vision, script(*STEPS))
    full = answer(
        vision, tokens=(), logprobs=(), versions=(), finish=FinishReason.CONTEXT, error="full"
    )
    harness.engine.answer = [answer(vision), full][1 - turns]

    def on_post(event: object) -> None:
        if len(harness.engine.requests) == turns:
            harness.engine.answer = full

    harness.on_post = on_post
    ended = await harness.play()
    reason = StopReason.MAX_TOKENS if turns else StopReason.ENV_ERROR
    assert (ended.stop_reason, ended.turns) == (reason, turns)
    assert len(harness.engine.requests) == turns + 1, "it is no failure of the engine"
    assert any(isinstance(event, TurnWithdrawn) for event in harness.events)


async def test_the_engines_count_bounds_the_next_turn(
    store: TrajectoryStore, vision: ChatCodec
) -> None:
    harness = SeeingHarness(store, vision, script(*STEPS), max_tokens=150, max_turn_tokens=149)
    harness.engine.answer = answer(vision, prompt_tokens=100)
    ended = await harness.play()
    assert ended.stop_reason is StopReason.FINISHED
    first, second = harness.engine.requests
    expanded = 100 - len(first.tokens)
    assert second.sampling.max_tokens == 150 - len(second.tokens) - expanded


async def test_a_sampled_placeholder_ends_the_trajectory(
    store: TrajectoryStore, vision: ChatCodec
) -> None:
    assert vision.image_token is not None
    harness = SeeingHarness(store, vision, script(*STEPS))
    harness.engine.answer = answer(
        vision,
        tokens=(vision.image_token,),
        logprobs=(-1.0,),
        versions=(VersionSpan(start=0, end=1, version=3),),
    )
    ended = await harness.play()
    assert (ended.stop_reason, ended.turns) == (StopReason.MAX_TOKENS, 1)


class Watches:
    """A handler whose tool answers with an image, and whose agent is told so."""

    async def init(self, job: Job) -> None:
        return

    async def run(self, agent: Agent) -> None:
        first = Message(role="user", content="look", images=(RED,))
        await converse(agent, [first], [SEE], calls="text")

    async def eval(self) -> Score:
        return Score(reward=1.0)


async def _see(arguments: dict[str, Any]) -> list[str | Image]:
    return ["before", GREEN, "after"]


SEE = Tool(name="see", description="see", parameters={"type": "object"}, call=_see)


@pytest.mark.usefixtures("wired")
@pytest.mark.parametrize("refused", ["", "the trainer computes text only"])
async def test_a_handler_and_its_tools_show_images(
    store: TrajectoryStore, vision: ChatCodec, refused: str
) -> None:
    listener = GatewayListener(vision, model="test")

    def make(command: StartInit) -> Driver:
        return HandlerEpisode(
            command,
            make=Watches,
            agent=AgentConfig(
                codec=vision,
                sampling=Sampling(stop_token_ids=vision.stop_token_ids),
                no_images=refused,
            ),
            seed=7,
            clock=asyncio.get_running_loop().time,
            sandboxes=Sandboxes("plain"),
            listener=listener,
        )

    harness = Harness(store, make=make)
    harness.engine.answer = answer(vision, "```see\n```")

    def on_post(event: object) -> None:
        if isinstance(event, TurnDone):
            harness.engine.answer = answer(vision)

    harness.on_post = on_post
    ended = await harness.play()
    await listener.close()
    if refused:
        assert ended.stop_reason is StopReason.ENV_ERROR
        assert f"messages must have no images, got 1: {refused}" in ended.error
        return
    assert ended.stop_reason is StopReason.FINISHED
    assert [request.images for request in harness.engine.requests] == [(RED,), (RED, GREEN)]
    (sequence,) = store.get([TRAJECTORY])[0].sequences
    assert "before<image>after" in vision.decode(sequence.tokens)
    for placed in sequence.images:
        assert read_image(store.images.directory, placed.image).data


def test_a_recorded_turn_is_used_for_the_same_images_only() -> None:
    tokens, sampling = (5, 9, 7), Sampling()
    keys = keys_of([PlacedImage(at=1, image=RED)])
    record = TurnAnswer(
        trajectory_id=TRAJECTORY,
        attempt=0,
        turn=0,
        context=context_digest(tokens, sampling, keys),
        result=GenerateResult(
            id="r",
            tokens=(1,),
            logprobs=(-1.0,),
            versions=(VersionSpan(start=0, end=1, version=0),),
            finish=FinishReason.STOP,
        ),
    )
    other = keys_of([PlacedImage(at=1, image=GREEN)])
    for given, used in ((keys, True), (other, False), ((), False)):
        turns = RecordedTurns([record], version=None)
        assert (turns.take(0, tokens, sampling, given) is not None) is used


# Files.


def test_an_image_is_written_once_and_damage_is_one_line(tmp_path: Path) -> None:
    images = ImageStore(tmp_path / "images")
    images.add(RED)
    file = tmp_path / "images" / RED.name
    stamp = file.stat().st_ino
    ImageStore(tmp_path / "images").add(RED)
    assert file.stat().st_ino == stamp
    images.sync()
    file.write_bytes(RED.data[:-1])
    with pytest.raises(ImageError, match="is damaged") as raised:
        find_image(tmp_path / "images", RED.digest)
    assert "\n" not in str(raised.value)
    ImageStore(tmp_path / "images").add(RED)  # whoever has it again repairs it
    assert find_image(tmp_path / "images", RED.digest) == RED
    for digest in (GREEN.digest, "../../etc/passwd", ""):
        with pytest.raises(ImageError):
            find_image(tmp_path / "images", digest)


def test_recorded_messages_get_their_images_back(tmp_path: Path) -> None:
    images = ImageStore(tmp_path / "images")
    images.add(RED)
    shown = Message(role="user", content="ab", images=(RED, RED), image_places=(0, 1))
    said = Message(role="assistant", content="x")
    recorded = (shown.without_data(), said)
    assert recorded[0].images[0].data == b""
    assert with_images(images.directory, recorded) == (shown, said)
    gone = Message(role="user", content="", images=(GREEN,)).without_data()
    with pytest.raises(ImageError, match="cannot be read"):
        with_images(images.directory, [gone])


KILLED = """
    import os, signal
    from pathlib import Path
    from rollweave.io import disk
    from rollweave.record.store import TrajectoryStore
    from rollweave.schema.media import Image
    from tests.support.vision_models import picture

    store = TrajectoryStore(Path("trajectories"))
    replace = Path.replace
    def killed(self, target):
        if KILL_BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(self, target)
        os.kill(os.getpid(), signal.SIGKILL)
    Path.replace = killed
    store.images.add(Image.of(picture(255)))
"""


@pytest.mark.parametrize("before", [True, False])
def test_a_process_killed_between_image_and_record_leaves_a_usable_store(
    tmp_path: Path, before: bool
) -> None:
    code = textwrap.dedent(KILLED).replace("KILL_BEFORE", str(before))
    killed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    assert killed.returncode == -9
    with TrajectoryStore(tmp_path / "trajectories") as store:
        directory = images_of(tmp_path / "trajectories").directory
        assert (directory / RED.name).exists() is not before
        store.images.add(RED)
        assert find_image(directory, RED.digest) == RED
    assert TrajectoryReader(tmp_path / "trajectories").entries == []


@pytest.mark.usefixtures("wired")
async def test_a_missing_image_leaves_the_record_readable(
    store: TrajectoryStore, vision: ChatCodec
) -> None:
    harness = SeeingHarness(store, vision, script(*STEPS))
    assert isinstance(await harness.play(), TrajectoryEnded)
    (store.images.directory / RED.name).unlink()
    reader = TrajectoryReader(store.images.directory.parent)
    (sequence,) = reader.load(reader.entries[0]).sequences
    assert len(sequence.images) == 3
    with pytest.raises(ImageError, match="cannot be read"):
        read_image(store.images.directory, sequence.images[0].image)


def test_an_image_that_is_shown_again_is_kept_for_its_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1.8e9]
    monkeypatch.setattr("rollweave.record.images.time.time", lambda: clock[0])
    images = ImageStore(tmp_path / "images")
    images.add(RED)
    file = images.directory / RED.name
    os.utime(file, (clock[0], clock[0]))
    clock[0] += UNUSED_S + 5
    images.add(RED)
    images.remove_unused(())
    assert file.exists()
    os.utime(file, (clock[0], clock[0]))
    clock[0] += UNUSED_S + 5
    images.remove_unused(())
    assert not file.exists()
    images.add(RED)
    assert file.exists()


async def test_images_that_no_record_needs_are_deleted_with_the_last_segment(
    tmp_path: Path, vision: ChatCodec
) -> None:

    with TrajectoryStore(tmp_path / "t", segment_bytes=1) as store:
        harness = SeeingHarness(store, vision, script(*STEPS))
        for image in (RED, GREEN, BLUE):
            store.images.add(image)
        await harness.play()
        assert store.segment == 0
    with TrajectoryStore(tmp_path / "t", segment_bytes=1) as store:
        harness = SeeingHarness(store, vision, Script(reset=Observation.of("x", images=(GREEN,))))
        await harness.play()
        assert store.segment == 1
        for file in store.images.directory.iterdir():
            stamp = file.stat().st_mtime - UNUSED_S - 5
            os.utime(file, (stamp, stamp))
        store.discard(kept=[])
        assert [file.name for file in store.images.directory.iterdir()] == [GREEN.name]
