"""The domains of a run: draws, environments, words, transcripts; and the errors of an
environment that breaks a rule.
"""

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest

from rollweave.envs.base import Observation, Split, split_of
from rollweave.envs.games import Nim
from rollweave.envs.tasks import InlineEnv, TaskSource, images_of, rule
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.conversation import tokenize_transcript
from rollweave.rollout.chat.template import ChatTemplate
from rollweave.sandbox.base import HOST
from rollweave.schema.config.training import FINAL_TASKS_FROM
from rollweave.schema.errors import ConfigError, EnvError
from rollweave.schema.work import Purpose, SegmentKind
from rollweave.train.scratch import CHAT_TEMPLATE, TURN_END, build_tokenizer

from .worlds import HERE, draw, source

GAMES = ({"env": "frozenlake"}, {"env": "calculator"}, {"env": "nim", "tag": "game"})


def codec(of: TaskSource) -> ChatCodec:
    template = ChatTemplate(CHAT_TEMPLATE, special={"eos_token": TURN_END}, name="scratch")
    return ChatCodec(build_tokenizer(of.words()), template)


def test_a_domain_is_called_by_its_tag(tmp_path: Path) -> None:
    of = source(tmp_path, *GAMES)
    task = draw(of, "game", 3)
    assert (task.env, task.tag, task.id) == ("nim", "game", "game-train-3")
    for call in (
        lambda: draw(of, "nim"),
        lambda: of.provider("nim"),
        lambda: of.allowed_words("nim"),
    ):
        with pytest.raises(
            ConfigError, match="must be one of frozenlake, calculator, game, got 'nim'"
        ):
            call()


def test_evaluations_have_separate_tasks(tmp_path: Path) -> None:
    of = source(tmp_path, *GAMES)
    ids = [
        draw(of, "game", index, Purpose.EVAL).id
        for index in (0, 7, FINAL_TASKS_FROM, FINAL_TASKS_FROM + 7)
    ]
    assert ids == ["game-validation-0", "game-validation-7", "game-test-0", "game-test-7"]


def test_without_make_task_a_task_is_its_seed(tmp_path: Path) -> None:
    of = source(tmp_path, {"env": f"{HERE}Echo"})
    tasks = [draw(of, f"{HERE}Echo", index, purpose) for purpose in Purpose for index in range(50)]
    assert len({task.seed for task in tasks}) == 100
    assert {task.payload for task in tasks} == {"{}"}


def test_an_invalid_make_task(tmp_path: Path) -> None:
    of = source(tmp_path, {"env": f"{HERE}BadTask", "tag": "bad"})
    with pytest.raises(EnvError, match="bad: make_task must return a Task, got str"):
        draw(of, "bad", 0)
    with pytest.raises(EnvError, match="bad: make_task raised SystemExit: 4"):
        draw(of, "bad", 2)
    with pytest.raises(EnvError, match="bad: make_task raised LookupError: no more tasks"):
        draw(of, "bad", 1)


def test_refuses_an_invalid_configuration_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean nim"):
        source(tmp_path, {"env": "nimm"})
    with pytest.raises(ConfigError, match="must suit Nim"):
        source(tmp_path, {"env": "nim", "options": {"pile": 3}})


async def test_inline_environments(tmp_path: Path) -> None:
    of = source(tmp_path, {"env": f"{HERE}Echo", "tag": "echo", "options": {"greeting": "hi"}})
    task = draw(of, "echo")
    env = await of.provider("echo").open(task)
    assert isinstance(env, InlineEnv)
    assert await env.reset(task) == Observation.of(f"hi {task.seed}")
    env.kill()
    await env.close()
    await of.close()


def test_splits_have_their_shares() -> None:
    counts = Counter(split_of(f"thing {number}") for number in range(4000))
    assert abs(counts[Split.VALIDATION] / 4000 - 1 / 8) < 0.02
    assert abs(counts[Split.TEST] / 4000 - 1 / 8) < 0.02


def test_every_word_of_a_transcript_is_one_token(tmp_path: Path) -> None:
    of = source(tmp_path, *GAMES)
    chat = codec(of)
    for messages in itertools.islice(of.transcripts(seed=1), 60):
        pieces = [chat.decode([token]) for token in tokenize_transcript(chat, messages).tokens]
        single = [piece for piece in pieces if len(piece) == 1]
        assert set(single) <= {"\n"}, pieces


def test_transcripts_come_from_all_domains_and_teach_the_ends_of_turns(tmp_path: Path) -> None:
    of = source(tmp_path, *GAMES)
    chat = codec(of)
    transcripts = list(itertools.islice(of.transcripts(seed=1), 300))
    assert transcripts == list(itertools.islice(of.transcripts(seed=1), 300))
    assert transcripts[:20] != list(itertools.islice(of.transcripts(seed=2), 20))
    sequences = [tokenize_transcript(chat, messages) for messages in transcripts]
    texts = [chat.decode(sequence.tokens) for sequence in sequences]
    shares = [sum(mark in text for text in texts) / 300 for mark in (" at=", "=?", " pile=")]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.01)
    for sequence in sequences:
        for segment in sequence.segments:
            if segment.kind is SegmentKind.OUTPUT:
                assert sequence.tokens[segment.end - 1] == chat.stop_token_ids[0]


def test_a_domain_without_transcripts_cannot_warm_up(tmp_path: Path) -> None:
    of = source(tmp_path, {"env": "nim"}, {"env": f"{HERE}Echo", "tag": "echo"})
    with pytest.raises(ConfigError, match=r"must have transcript\(\).*:Echo has none"):
        next(of.transcripts(seed=0))


def test_words_are_those_of_all_domains_once(tmp_path: Path) -> None:
    of = source(tmp_path, *GAMES, {"env": "nim", "tag": "again"})
    words = of.words()
    assert len(words) == len(set(words))
    assert {"<take-1>", " at=a1", " =?"} <= set(words)


def test_drawing_does_not_touch_the_global_generator(tmp_path: Path) -> None:
    of = source(tmp_path, *GAMES)
    state = random.getstate()
    for task in GAMES:
        draw(of, str(task.get("tag", task["env"])), 5)
    assert random.getstate() == state


class Odd:
    found: ClassVar[object] = ()
    reset = step = lambda self, _: None

    @classmethod
    def words(cls, options: object) -> object:
        return cls.found


class Clerk:
    init = run = eval = lambda self, _: None


class Images(Clerk):
    @classmethod
    def images(cls, options: dict[str, str]) -> list[str]:
        return [HOST, "a:1", options.get("more", HOST)]


@pytest.mark.parametrize("found", ["text", ["a", ""], [3]])
def test_words_are_a_list_of_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: object
) -> None:
    of = source(tmp_path, {"env": "nim"}, {"env": f"{__name__}:Odd", "tag": "odd"})
    assert of.words() == tuple(Nim.words({}))
    monkeypatch.setattr(Odd, "found", found)
    wrong = found if isinstance(found, str) else found[-1]  # type: ignore[index]
    rule = f"must return a list of non-empty strings, got {wrong!r}$"
    with pytest.raises(ConfigError, match=f"words of environment '.*:Odd' {rule}"):
        of.words()


def test_images_that_are_known_before_the_run() -> None:
    for env, options, images in (
        ("frozenlake", {"image": "a:1"}, ()),
        ("program", {"image": "a:1"}, ("a:1",)),
        ("program", {}, ()),
        (f"{__name__}:Images", {"more": "b:1"}, ("a:1", "b:1")),
        (f"{__name__}:Clerk", {"image": "a.tar"}, ("a.tar",)),
        (f"{__name__}:Clerk", {"image": 3}, ()),
    ):
        assert images_of(env, options) == images


def measured_by_name(experiences: object, version: int) -> tuple[str, ...]:
    return ()


measured_by_name.measures = ("entropy",)  # type: ignore[attr-defined]


def test_a_rule_is_a_function_of_experiences_and_version() -> None:
    assert rule(f"{__name__}:draw") is draw
    for name, problem in (
        ("test_inline_environments", "must be a function, got a coroutine function"),
        ("GAMES", "must be a function, got tuple"),
        ("codec", "must take the experiences and the version: too many positional"),
        ("measured_by_name", r"must have measures True or False, got \('entropy',\)"),
    ):
        with pytest.raises(ConfigError, match=f"^function '{__name__}:{name}' {problem}"):
            rule(f"{__name__}:{name}")
