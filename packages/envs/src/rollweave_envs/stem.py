r"""Science with tools: bash, IPython, `think` and `search`, then an answer in
`\boxed{}` (after ProRL Agent's STEM task, §4).

The search covers one of three sources: built-in invented worlds, the user's documents,
or the web with the user's key.

Invariants: training, validation and test have separate worlds, which depend on the
run's seed; a question belongs to exactly one split; the search runs outside the
sandbox, which has no network and no key.
"""

import asyncio
import functools
import random
import threading

from rollweave.envs.base import Options, Score, Split, new_task, payload_of, split_of
from rollweave.envs.handlers.answers import judged, within_tolerance
from rollweave.envs.handlers.base import Agent, Job
from rollweave.envs.handlers.tools import CallStyle
from rollweave.schema.base import mix
from rollweave.schema.errors import ConfigError, EnvError
from rollweave.schema.work import Task
from rollweave_envs.corpus import Bm25, documents
from rollweave_envs.invented import question as invented_question
from rollweave_envs.invented import world
from rollweave_envs.questions import (
    TOOL_S,
    QuestionHandler,
    check_own_questions,
    own_question,
)
from rollweave_envs.search import Search, search_tool, web_search

ABOUT = (
    "Answer the question. Facts are found with the tool search; compute with bash or ipython. "
    "The answer is a number, without its unit, or a name."
)
TOOLS = ("bash", "ipython", "think")

WORLDS = 16
"""Number of worlds of each split: 900 articles, so that the agent looks facts up rather
than memorizes them.
"""

TOLERANCE = 0.01
"""Default relative tolerance of a number, for intermediate rounding."""


class Stem(QuestionHandler):
    """Questions about invented worlds; or the user's own, records of the JSONL file
    `path`, with `corpus` or `web`.

    `corpus` is a folder of .txt and .md files, or a JSONL file of {"title", "text"}.
    `web` is {service = "tavily" or "serper", key_env = the environment variable with
    the key, url = another address with the same protocol}. `held_out`, `question` and
    `answer` are as in `math_tool`. The reward is 1 for a number within `tolerance` of
    the correct one (relative), or the correct words.
    """

    def __init__(
        self,
        *,
        corpus: str = "",
        web: Options | None = None,
        path: str = "",
        held_out: str = "",
        question: str = "question",
        answer: str = "answer",
        tolerance: float = TOLERANCE,
        calls: CallStyle = "native",
        tool_s: float = TOOL_S,
    ) -> None:
        names = {"question": question, "answer": answer}
        _check({"corpus": corpus, "web": web, "path": path, "held_out": held_out, **names})
        if not 0 <= tolerance < 1:
            raise ConfigError(f"options.tolerance must be from 0 to below 1, got {tolerance}")
        self._corpus, self._tolerance = corpus, tolerance
        self._search: Search | None = web_search(web) if web else None
        super().__init__(calls=calls, tool_s=tool_s)

    async def init(self, job: Job) -> None:
        if self._search is None:
            seed = None if self._corpus else payload_of(job.task).get("world")
            if not self._corpus and not isinstance(seed, int):
                raise EnvError(
                    "payload must have the seed of its world where there is no "
                    f"options.corpus, got {seed!r}"
                )
            self._search = await asyncio.to_thread(_index, self._corpus, seed)
        await super().init(job)

    async def run(self, agent: Agent) -> None:
        assert self._search is not None, "init comes first"
        tools = [search_tool(self._search)]
        await self.solve(agent, about=ABOUT, names=TOOLS, tools=tools)

    async def eval(self) -> Score:
        given, expected = self._answer, self._question.answer
        if given is None:
            return Score(reward=0.0, success=False)
        verdict = within_tolerance(given, expected, tolerance=self._tolerance)
        return (verdict or await judged(given, expected)).score

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Return a question of the split.

        Raises ConfigError for invalid options, and for a file without records of the
        split.
        """
        _check(options)
        if options.get("path"):
            own = own_question(options, index=index, seed=seed, split=split)
            return new_task(question=own.question, answer=own.answer)
        rng = random.Random(mix(seed, split, index))
        while True:
            place = mix(seed, split, "world", rng.randrange(WORLDS))
            drawn = invented_question(world(place), rng)
            if split_of(drawn.question) is split:
                return new_task(question=drawn.question, answer=drawn.answer, world=place)


def _check(options: Options) -> None:
    sources = {name: options.get(name) for name in ("corpus", "web", "path", "held_out")}
    if sources["corpus"] and sources["web"]:
        raise ConfigError(
            f"options must have corpus or web, not both, got {sources['corpus']!r} "
            f"and {sources['web']!r}"
        )
    if bool(sources["path"]) != bool(sources["corpus"] or sources["web"]):
        rule = (
            "options.path, with your questions, must come with options.corpus or options.web to "
            "search, and they with it"
        )
        raise ConfigError(
            f"{rule}, got { ({name: value for name, value in sources.items() if value}) }"
        )
    if sources["held_out"] and not sources["path"]:
        raise ConfigError(
            f"options.held_out must come with options.path, got {sources['held_out']!r} alone"
        )
    if sources["corpus"]:
        documents(sources["corpus"])
    if sources["web"]:
        web_search(sources["web"])
    check_own_questions(options)


def _index(corpus: str, seed: int | None) -> Bm25:
    """Return the index of a corpus or world. It is called on threads: none is built
    twice.
    """
    with _MAKING:
        return _build_corpus(corpus, seed)


_MAKING = threading.Lock()


@functools.lru_cache(64)
def _build_corpus(corpus: str, seed: int | None) -> Bm25:
    return Bm25(documents(corpus) if seed is None else world(seed).documents)
