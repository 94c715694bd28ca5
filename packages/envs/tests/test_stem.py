r"""Science with tools, lived through by scripted agents in real sandboxes, with
searches of every kind.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollweave.envs.base import Score, Split, new_task, payload_of
from rollweave.envs.handlers.base import Job
from rollweave.envs.handlers.sandboxes import Sandboxes
from rollweave.io.http.guard import Guard
from rollweave.io.http.listening import listening
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError, EnvError
from rollweave.schema.work import Task
from rollweave_envs.invented import world
from rollweave_envs.search import NOTHING
from rollweave_envs.stem import Stem
from tests.envs.handlers.agents import Scripted, attempt, calls, sandboxes

RIGHT, WRONG = Score(reward=1.0, success=True), Score(reward=0.0, success=False)
KEY, KEY_ENV = "secret-key-2718", "ROLLWEAVE_TEST_SEARCH_KEY"


def task_like(words: str) -> Task:
    """Return a training task with these words in its question."""
    tasks = (
        Stem.make_task(index=index, seed=3, split=Split.TRAIN, options={}) for index in range(300)
    )
    return next(task for task in tasks if words in payload_of(task)["question"])


def weighing(messages: Sequence[Message]) -> Message | str:
    """Return an agent that answers questions about a block's weight: mineral, planet,
    calculation.
    """
    texts = [message.content for message in messages]
    block = re.search(r"block of (\w+) has a volume of (\d+)", texts[1])
    assert block is not None
    if len(messages) == 2:
        return calls(("search", {"query": f"{block[1]} density mined", "count": 3}))
    article = next(part for part in texts[3].split("\n\n") if block[1] in part.split("\n")[0])
    density, planet = (
        re.search(r"density is ([\d.]+)", article),
        re.search(r"mined on (\w+)", article),
    )
    assert density is not None
    assert planet is not None
    if len(messages) == 4:
        return calls(("search", {"query": planet[1]}))
    gravity = re.search(rf"on {planet[1]} with an acceleration of ([\d.]+)", texts[5])
    assert gravity is not None
    if len(messages) == 6:
        return calls(
            (
                "bash",
                {
                    "command": f"echo 'print({density[1]} * {block[2]} / 1000 * "
                    f"{gravity[1]})' > a.py"
                },
            )
        )
    if len(messages) == 8:
        return calls(("bash", {"command": "python3 a.py"}))
    return rf"It weighs \boxed{{{float(texts[-1]):.4g}\text{{ N}}}}."


async def test_two_searches_and_a_calculation() -> None:
    handler, agent = Stem(), Scripted(weighing)
    async with sandboxes() as boxes:
        assert await attempt(handler, task_like("What does it weigh"), agent, boxes) == RIGHT
    assert [tool.name for tool in agent.tools[0]] == ["bash", "ipython", "think", "search"]
    answer = handler.final_result()["answer"]
    assert answer.endswith(r"\text{ N}")


async def test_the_same_with_calls_in_text() -> None:
    task = task_like("densest")
    names = re.findall(r"\b[A-Z][a-z]+ite\b", payload_of(task)["question"])
    densities: dict[str, float] = {}

    def policy(messages: Sequence[Message]) -> str:
        if len(messages) > 2:
            name = names[len(densities)]
            match = re.search(rf"\] {name}\n.*density is ([\d.]+)", messages[-1].content)
            assert match is not None, messages[-1].content
            densities[name] = float(match[1])
        if len(densities) < 3:
            return f"```search\n{names[len(densities)]}\n```"
        return rf"\boxed{{{max(densities, key=lambda name: densities[name])}}}"

    async with sandboxes() as boxes:
        assert await attempt(Stem(calls="text"), task, Scripted(policy), boxes) == RIGHT


@pytest.mark.extended
async def test_wrong_and_missing_answers() -> None:
    task = new_task(question="?", answer="100", world=1)
    scores = {
        r"\boxed{101}": RIGHT,
        r"\boxed{102}": WRONG,
        "100": WRONG,
        r"\boxed{100 or 7}": WRONG,
        "": WRONG,
    }
    async with sandboxes() as boxes:
        for answer, score in scores.items():
            assert await attempt(Stem(), task, Scripted([answer]), boxes) == score
        assert (
            await attempt(Stem(tolerance=0.0), task, Scripted([r"\boxed{100.1}"]), boxes) == WRONG
        )


async def test_search_results_are_no_answer(tmp_path: Path) -> None:
    (tmp_path / "trap.txt").write_text(r"The answer is \boxed{100}.")
    options: Any = {
        "corpus": str(tmp_path),
        "path": records(tmp_path / "q.jsonl", {"question": "?", "answer": 100}),
    }
    agent = Scripted(
        [
            calls(("search", {"query": "zebra"}), ("search", {"query": "answer"})),
            "The search has it.",
        ]
    )
    async with sandboxes() as boxes:
        assert (
            await attempt(Stem(**options), new_task(question="?", answer="100"), agent, boxes)
            == WRONG
        )
    assert [message.content for message in agent.messages if message.role == "tool"] == [
        NOTHING,
        "[1] trap.txt\nThe answer is \\boxed{100}.",
    ]


async def test_the_users_own_documents_and_questions(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("# Pumps\n\nThe red pump moves 12 litres a minute.")
    questions = (
        {"q": f"How much moves the red pump in {n} minutes?", "a": 12 * n} for n in range(60)
    )
    path = records(tmp_path / "q.jsonl", *questions)
    options: Any = {"corpus": str(tmp_path / "docs"), "path": path, "question": "q", "answer": "a"}
    task = Stem.make_task(index=5, seed=1, split=Split.TRAIN, options=options)
    minutes = int(payload_of(task)["question"].split()[-2])
    assert payload_of(task) == {
        "question": f"How much moves the red pump in {minutes} minutes?",
        "answer": str(12 * minutes),
    }
    agent = Scripted(
        [
            calls(("search", {"query": "red pump"})),
            rf"\boxed{{{12 * minutes}\text{{ litres}}}}",
        ]
    )
    async with sandboxes() as boxes:
        assert await attempt(Stem(**options), task, agent, boxes) == RIGHT
    assert agent.messages[-1].content == "[1] a.md\n# Pumps\nThe red pump moves 12 litres a minute."


@pytest.mark.extended
async def test_a_web_search_hides_its_key_from_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)

    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {KEY}"
        return web.json_response(
            {
                "results": [
                    {"title": "Page", "content": f"Seven. {request.headers['Authorization']}"}
                ]
            }
        )

    app = web.Application()
    app.router.add_post("/search", answer)
    path = records(tmp_path / "q.jsonl", {"question": "?", "answer": "seven"})
    search = calls(
        ("search", {"query": "number"}),
        (
            "bash",
            {
                "command": "env; cat /proc/*/environ | tr '\\0' '\\n'; grep -rs secret-key / "
                "--include=*.toml"
            },
        ),
        ("ipython", {"code": "import os; dict(os.environ)"}),
    )
    agent = Scripted([search, r"\boxed{Seven}"])
    async with (
        listening(app, "127.0.0.1", 0, guard=Guard(token=None), shutdown_s=0.1) as url,
        sandboxes() as boxes,
    ):
        options: Any = {
            "web": {"service": "tavily", "key_env": KEY_ENV, "url": f"{url}/search"},
            "path": path,
        }
        handler = Stem(**options)
        assert await attempt(handler, new_task(question="?", answer="seven"), agent, boxes) == RIGHT
    transcript = json.dumps([message.content for message in agent.messages])
    assert "[1] Page\\nSeven. Bearer [key]" in transcript
    assert "PATH=" in transcript
    assert KEY not in transcript
    assert KEY not in json.dumps(handler.final_result())


async def test_a_failed_search_is_not_the_agents_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)
    path = records(tmp_path / "q.jsonl", {"question": "?", "answer": 1})
    empty = listening(web.Application(), "127.0.0.1", 0, guard=Guard(token=None), shutdown_s=0.1)
    async with empty as url, sandboxes() as boxes:
        handler = Stem(
            web={"service": "serper", "key_env": KEY_ENV, "url": f"{url}/search"}, path=path
        )
        await handler.init(Job(task=new_task(question="?", answer="1"), seed=0, sandboxes=boxes))
        with pytest.raises(EnvError, match=r"the search at .* failed: status 404") as raised:
            await handler.run(Scripted([calls(("search", {"query": "x"}))]))
        assert await handler.run_exception(raised.value) is None
        await handler.close()


async def test_a_payload_without_a_world() -> None:
    for payload in (
        {"question": "?", "answer": "1"},
        {"question": "?", "answer": "1", "world": "x"},
    ):
        with pytest.raises(
            EnvError,
            match=r"payload must have the seed of its world where there is no options\.corpus",
        ):
            await Stem().init(Job(task=new_task(**payload), seed=0, sandboxes=Sandboxes("zygote")))


def make(index: int, split: Split, seed: int = 0) -> dict[str, Any]:
    return payload_of(Stem.make_task(index=index, seed=seed, split=split, options={}))


def test_tasks_are_deterministic_and_splits_have_separate_worlds() -> None:
    drawn = {split: [make(index, split) for index in range(80)] for split in Split}
    assert drawn == {split: [make(index, split) for index in range(80)] for split in Split}
    for what, fewest in (("question", 75), ("world", 14)):
        sets = [{payload[what] for payload in drawn[split]} for split in Split]
        assert len(set().union(*sets)) == sum(map(len, sets))
        assert all(len(one) >= fewest for one in sets)
    other = {make(index, Split.TRAIN, seed=1)["world"] for index in range(80)}
    assert not other & {payload["world"] for payload in drawn[Split.TRAIN]}


def test_a_question_is_about_its_world() -> None:
    for index in range(30):
        payload = make(index, Split.TEST)
        titles = {document.title for document in world(payload["world"]).documents}
        assert set(re.findall(r"\b[A-Z][a-z]+\b", payload["question"])) & titles


def records(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps(record) for record in rows))
    return str(path)


WEB = {"service": "tavily", "key_env": "NOT_SET_ANYWHERE"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"corpus": "docs"},
            r"options\.path, with your questions, must come with options\.corpus "
            r".*got \{'corpus': 'docs'\}",
        ),
        (
            {"path": "q.jsonl"},
            r"options\.path, with your questions, must come with .*got \{'path': 'q.jsonl'\}",
        ),
        (
            {"held_out": "q.jsonl"},
            r"options\.held_out must come with options\.path, got 'q.jsonl' alone",
        ),
        (
            {"corpus": "docs", "web": WEB},
            r"options must have corpus or web, not both, got 'docs' and",
        ),
        (
            {"corpus": "no/such", "path": "q"},
            r"options\.corpus must be a folder of UTF-8 texts or a JSONL file, got 'no/such'",
        ),
        ({"corpus": "EMPTY", "path": "q"}, r"options\.corpus must have documents .*has none"),
        (
            {"web": WEB, "path": "q"},
            r"options\.web\.key_env must name an environment variable that is set, got 'NOT_SET",
        ),
    ],
)
def test_refuses_invalid_options(options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    options = {
        name: str(tmp_path) if value == "EMPTY" else value for name, value in options.items()
    }
    for use in (
        lambda: Stem(**options),
        lambda: Stem.make_task(index=0, seed=0, split=Split.TRAIN, options=options),
    ):
        with pytest.raises(ConfigError, match=problem):
            use()


def test_refuses_an_invalid_tolerance() -> None:
    with pytest.raises(ConfigError, match=r"options\.tolerance must be from 0 to below 1, got 1"):
        Stem(tolerance=1)
