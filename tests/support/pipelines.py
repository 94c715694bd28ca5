"""Fakes for the pipeline's tests: a scripted environment, an engine with one answer,
and a pipeline around them.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from rollweave.engine.clients.base import OnTokens
from rollweave.envs.base import Episode, Observation, Score, Step
from rollweave.io.wire import decoder_of, encode
from rollweave.record.store import TrajectoryStore
from rollweave.record.turn_log import TurnLog
from rollweave.rollout.chat.codec import AgentConfig, ChatCodec
from rollweave.rollout.chat.template import ChatTemplate
from rollweave.rollout.driver import MakeEpisode
from rollweave.rollout.env_episode import EnvEpisode
from rollweave.rollout.pipeline import Pipeline, WorkerPort
from rollweave.rollout.rewards import DomainRewards
from rollweave.rollout.teacher import Teach
from rollweave.rollout.worker import RolloutWorker
from rollweave.schema import serving as s
from rollweave.schema.base import EngineId, GroupId, TaskId, TrajectoryId
from rollweave.schema.commands import (
    Continuation,
    Predict,
    StartEval,
    StartInit,
    StartRun,
    StartTurn,
)
from rollweave.schema.errors import EngineError, EngineLostError, KvError
from rollweave.schema.events import EnvReady, Event, RewardReady, TrajectoryEnded, TurnRequested
from rollweave.schema.rollouts import (
    AttemptReport,
    RolloutCommand,
    RolloutWorkerCommand,
    WorkerReport,
)
from rollweave.schema.training import LengthContext
from rollweave.schema.weights import WeightManifest
from rollweave.schema.work import Limits, Purpose, Task

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRAJECTORY = TrajectoryId("g0.0")
ENGINE = EngineId("e0")


def codec() -> ChatCodec:
    """Return a codec with one token per character, and two special tokens."""
    special = ["<|im_start|>", "<|im_end|>"]
    characters = [chr(code) for code in range(32, 127)] + ["\n", "⁂"]
    vocabulary = {token: index for index, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return ChatCodec(tokenizer, ChatTemplate(TEMPLATE, special={}, name="test"))


CODEC = codec()


def reply_tokens(text: str, *, end: bool = True) -> tuple[int, ...]:
    """Return the tokens that an engine samples for `text`."""
    tokens = CODEC.encode_literal(text)
    return (*tokens, 1) if end else tokens


@dataclass
class Script:
    """The environment's behavior: each entry is an answer, an exception to raise, or
    None to hang.
    """

    reset: Any = field(default_factory=lambda: Observation.of("go", state_key="a"))
    steps: list[Any] = field(
        default_factory=lambda: [
            Step.of("on", reward=0.5, state_key="b"),
            Step(reward=1.0, done=True, success=True),
        ]
    )
    score: Any = field(default_factory=lambda: Score(reward=1.5, success=True))
    open: Any = "open"
    close: Any = "closed"


class ScriptedEnv:
    """An `OpenedEnv` that records whether it is still open."""

    def __init__(self, script: Script, log: list[str]) -> None:
        self._script, self._log = script, log
        self._steps = iter(script.steps)
        self.is_open = True

    async def reset(self, task: Task) -> Observation:
        self._log.append("reset")
        return await _play(self._script.reset)  # type: ignore[no-any-return]

    async def step(self, action: str, *, finish_reason: str) -> Step:
        self._log.append(f"step {action}" if finish_reason == "stop" else f"step {action} (cut)")
        return await _play(next(self._steps))  # type: ignore[no-any-return]

    async def close(self) -> None:
        self._log.append("close")
        await _play(self._script.close)
        self.is_open = False

    def kill(self) -> None:
        self._log.append("kill")
        self.is_open = False


class ScriptedEnvProvider:
    """The environments of one task domain."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.log: list[str] = []
        self.scored: list[Episode] = []
        self.envs: list[ScriptedEnv] = []

    async def open(self, task: Task) -> ScriptedEnv:
        self.log.append("open")
        await _play(self.script.open)
        self.envs.append(ScriptedEnv(self.script, self.log))
        return self.envs[-1]

    async def score(self, episode: Episode) -> Score:
        assert not any(env.is_open for env in self.envs), (
            "the environment is freed before the reward"
        )
        self.scored.append(episode)
        self.log.append(f"score {sum(episode.rewards)} after {list(episode.actions())}")
        return await _play(self.script.score)  # type: ignore[no-any-return]


async def _play(entry: Any) -> Any:
    await asyncio.sleep(0)
    if entry is None:
        await asyncio.Event().wait()
    if isinstance(entry, BaseException):
        raise entry
    return entry


class OneWordEngine:
    """An engine of all protocols that answers every request with `answer`: a result, an
    exception to raise, or None to hang.
    """

    def __init__(self) -> None:
        self.answer: Any = "hi"
        self.requests: list[s.GenerateRequest] = []
        self.ranks: list[tuple[str, float]] = []
        self.live = 0
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def lost(self) -> asyncio.Future[str]:
        return self._lost

    def generate(
        self,
        request: s.GenerateRequest,
        on_tokens: OnTokens | None = None,
        *,
        report_s: float = s.STREAM_S,
    ) -> asyncio.Future[s.GenerateResult]:
        self.requests.append(request)
        return asyncio.ensure_future(self._generate(request))

    async def _generate(self, request: s.GenerateRequest) -> s.GenerateResult:
        self.live += 1
        try:
            answer = await _play(self.answer)
        finally:
            self.live -= 1
        return engine_result(answer, request.id) if isinstance(answer, str) else answer  # type: ignore[no-any-return]

    async def ready(self) -> s.Ready:
        return s.Ready(version=-1, kv_total_tokens=1000, max_slots=8, max_context=1000)

    def abort(self, request_id: str) -> None:
        return

    def rerank(self, request_id: str, rank: float) -> None:
        self.ranks.append((request_id, rank))

    async def export_kv(self, tokens: Sequence[int], over: s.KvTransport) -> s.KvManifest:
        raise KvError("has none")

    async def import_kv(self, tokens: Sequence[int], manifest: s.KvManifest) -> int:
        raise KvError("has no room")

    def release_kv(self, export_id: str, *, abandoned: bool = False) -> None:
        return

    async def suspend(self, *, release: bool = False) -> s.Suspended:
        return s.Suspended(in_flight=self.live)

    def resume(self) -> None:
        return

    async def stage(self, weights: WeightManifest) -> None:
        return

    async def load(self, weights: WeightManifest | s.LoadCheckpoint) -> None:
        return

    async def stats(self) -> s.EngineStats:
        raise EngineError("has none")

    async def beat(self) -> s.Beating:
        return s.Beating()

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        if not self._lost.done():
            self._lost.set_result("killed")


def engine_result(
    text: str, id: str = "r", *, finish: s.FinishReason = s.FinishReason.STOP, version: int = 3
) -> s.GenerateResult:
    """Return an engine's answer."""
    tokens = reply_tokens(text, end=finish is s.FinishReason.STOP)
    spans = (s.VersionSpan(start=0, end=len(tokens), version=version),)
    return s.GenerateResult(
        id=id,
        tokens=tokens,
        logprobs=(-0.5,) * len(tokens),
        versions=spans,
        finish=finish,
        cached_tokens=2,
    )


LOST = EngineLostError("gone")


class Wire:
    """Carries messages between pipeline and worker as frames would: encoded, in order,
    and later.
    """

    def __init__(self, harness: "Harness") -> None:
        self._harness = harness

    def send(self, command: RolloutCommand) -> None:
        self._carry(
            command, RolloutWorkerCommand, lambda message: self._harness.worker.send(message)
        )

    def report(self, report: AttemptReport) -> None:
        self._carry(report, WorkerReport, lambda message: self._harness.pipeline.on_report(message))

    def _carry(self, message: Any, kind: Any, receive: Callable[[Any], None]) -> None:
        decoded = decoder_of(kind)(encode(message))
        assert decoded == message
        asyncio.get_running_loop().call_soon(receive, decoded)


class Harness:
    """A pipeline over a scripted environment and engine, its events, and its tasks."""

    wired = False
    """True if the worker is reached by frames, as one in another process is."""

    def __init__(
        self,
        store: TrajectoryStore,
        script: Script | None = None,
        *,
        make: MakeEpisode | None = None,
        keep_partial_turns: bool = False,
        log: TurnLog | None = None,
        teach: Teach | None = None,
        rewards: DomainRewards | None = None,
        **limits: Any,
    ) -> None:
        """Create the pipeline; `make` replaces the scripted episode by another driver,
        `teach` asks the teacher, and `rewards` are those beside the environment's.
        """
        self.store = store
        self.provider = ScriptedEnvProvider(script or Script())
        self.engine = OneWordEngine()
        self.engine_missing = False
        self.events: list[Event] = []
        self.on_post: Callable[[Event], None] = lambda event: None
        self.tasks: set[asyncio.Task[None]] = set()
        self.limits = Limits(
            **{"max_turns": 4, "max_tokens": 400, "time_s": 30.0, "step_s": 10.0, **limits}
        )
        self._posted = asyncio.Event()
        clock, wire = asyncio.get_running_loop().time, Wire(self)
        self.pipeline = Pipeline(
            worker=lambda _: self.port,
            engine=lambda _: None if self.engine_missing else self.engine,
            store=store,
            post=self._post,
            clock=clock,
            spans=NoSpans(),
            waiting_limit=2,
            keep_partial_turns=keep_partial_turns,
            log=log,
        )
        self.worker = RolloutWorker(
            make_episode=make or self._episode,
            report=wire.report if self.wired else self.pipeline.on_report,
            spawn=self._spawn,
            clock=clock,
            waiting_limit=2,
            teacher=lambda _: teach,
            rewards_of=lambda _: rewards,
        )
        self.port: WorkerPort = wire if self.wired else self.worker

    def init(
        self,
        attempt: int = 0,
        purpose: Purpose = Purpose.TRAIN,
        id: TrajectoryId = TRAJECTORY,
        continues: Continuation | None = None,
    ) -> StartInit:
        command = StartInit(
            trajectory_id=id,
            attempt=attempt,
            group_id=GroupId("g0"),
            member=0,
            task=Task(id=TaskId("t"), env="scripted", seed=1, tag="scripted", limits=self.limits),
            purpose=purpose,
            initiated_version=3,
            continues=continues,
        )
        self.pipeline.start_init(command)
        return command

    def run(self, attempt: int = 0) -> None:
        self.pipeline.start_run(StartRun(trajectory_id=TRAJECTORY, attempt=attempt))

    def turn(self, turn: int, dispatch: int = 0, attempt: int = 0, *, resume: bool = False) -> None:
        self.pipeline.start_turn(
            StartTurn(
                trajectory_id=TRAJECTORY,
                attempt=attempt,
                turn=turn,
                engine_id=ENGINE,
                rank=0.0,
                dispatch=dispatch,
                resume=resume,
            )
        )

    def eval(self, attempt: int = 0) -> None:
        self.pipeline.start_eval(StartEval(trajectory_id=TRAJECTORY, attempt=attempt))

    @property
    def active_attempts(self) -> int:
        """The attempts under way, for the controller or for the worker."""
        return max(
            len(part._attempts) + len(part._evaluations) for part in (self.pipeline, self.worker)
        )

    async def until(self, kind: type[Event], after: int = 0) -> Event:
        """Wait for the first event of this kind, from position `after` on."""
        async with asyncio.timeout(10):
            while True:
                for event in self.events[after:]:
                    if isinstance(event, kind):
                        return event
                self._posted.clear()
                await self._posted.wait()

    async def play(self) -> TrajectoryEnded:
        """Grant all requests of the episode until it ends."""
        self.init()
        handled = 0
        async with asyncio.timeout(10):
            while True:
                while handled == len(self.events):
                    self._posted.clear()
                    await self._posted.wait()
                event = self.events[handled]
                handled += 1
                if isinstance(event, EnvReady):
                    self.run()
                elif isinstance(event, TurnRequested):
                    self.turn(event.turn)
                elif isinstance(event, TrajectoryEnded):
                    return event

    def contexts(self) -> list[LengthContext]:
        """Return a list that gets the context of a prediction before each turn."""
        known = LengthContext(
            domain="d",
            prompt_tokens=1,
            turn=0,
            output_tokens=0,
            last_output_tokens=0,
            observation_tokens=0,
            tool_s=0.0,
            siblings=0,
            sibling_mean=0.0,
            sibling_longest=0,
        )
        seen: list[LengthContext] = []

        def look(event: Event) -> None:
            if isinstance(event, TurnRequested):
                names = {"trajectory_id": event.trajectory_id, "attempt": event.attempt}
                asked = Predict(**names, turn=event.turn, context=known)
                seen.append(self.pipeline.length_context(asked))

        self.on_post = look
        return seen

    async def asked(self, attempt: int = 0, **options: Any) -> None:
        """Begin an attempt, and wait until it requests its first turn."""
        self.init(attempt, **options)
        await self.until(EnvReady)
        self.run(attempt)
        await self.until(TurnRequested)

    async def scored(self, kind: type[Event] = RewardReady) -> Any:
        """Play, and wait for the reward, or for its failure."""
        await self.play()
        self.eval()
        return await self.until(kind)

    async def idle(self) -> None:
        """Wait until no task is left."""
        async with asyncio.timeout(10):
            while self.tasks:
                await asyncio.wait(set(self.tasks))

    def _episode(self, command: StartInit) -> EnvEpisode:
        sampling = s.Sampling(stop_token_ids=CODEC.stop_token_ids)
        return EnvEpisode(
            command,
            provider=self.provider,
            agent=AgentConfig(codec=CODEC, sampling=sampling),
            seed=7,
            clock=asyncio.get_running_loop().time,
        )

    def _post(self, event: Event) -> None:
        self.events.append(event)
        self.on_post(event)
        self._posted.set()

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


class NoSpans:
    """`Spans` without effect."""

    def episode_span(self, lane: str, name: str, start: float, end: float) -> None:
        return

    def episode_over(self, lane: str) -> None:
        return
