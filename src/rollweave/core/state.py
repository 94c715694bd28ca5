"""The state of a run as plain data: it can be written to a snapshot and read back.

Tables are dicts and keep insertion order, so that every walk over them is
deterministic; ids come from counters. The trajectories' pools are maintained by
`core/attempts.move` and verified by `reading/checks`.
"""

import enum
from typing import Any

import msgspec

from rollweave.core.counters import Counters, Idle
from rollweave.core.policy.modes import origin
from rollweave.schema.base import EngineId, GroupId, TrajectoryId
from rollweave.schema.config.engines import EnginePhase
from rollweave.schema.hosts import HostSlot, RankSlot
from rollweave.schema.work import Decoding, Measures, Purpose, StopReason, Task, TaskContent


class Stage(enum.StrEnum):
    """The stage of a trajectory's current attempt."""

    QUEUED = "queued"  # waits for an INIT slot
    INIT = "init"
    RUN_QUEUED = "run_queued"  # its environment is ready, waits for a RUN slot
    RUN = "run"
    EVAL_QUEUED = "eval_queued"  # rolled out, environment freed, waits for an EVAL slot
    EVAL = "eval"
    CLOSING = "closing"  # cancelled; the world has not yet reported that it stopped
    OVER = "over"  # the attempt is over, and core/lifecycle has not settled what follows
    SCORED = "scored"
    ENDED = "ended"


ALIVE = (Stage.INIT, Stage.RUN_QUEUED, Stage.RUN, Stage.EVAL, Stage.CLOSING)
"""Stages in which the world holds something for the attempt."""


class Requested(msgspec.Struct, frozen=True, tag=True):
    """The turn was requested, and has no place yet."""


class Held(msgspec.Struct, frozen=True, tag=True):
    """The turn waits until the mechanism that holds it releases it."""


class Queued(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The turn waits for an engine."""

    engine: EngineId | None  # None: any
    given: int  # turns that this queue had given when the turn joined it
    tiebreak: float  # lower first among equal ranks: its arrival, or its trajectory's launch
    pool: str = ""  # pool whose engines it prefers, if it waits for any engine
    resident: bool = False  # the engine has the trajectory's KV, or should


class Suspected(msgspec.Struct, frozen=True, tag=True):
    """The turn was on an engine that was lost, and waits to run apart from other
    suspects (mechanisms/suspects).
    """


class OnEngine(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An engine has the turn and owes its answer."""

    engine: EngineId
    given: int  # turns that this engine had been given, with this one


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """The engine, and its epoch, that was lost while it had a turn."""

    engine: EngineId
    epoch: int


MOVING = EngineId("")
"""`Turn.prefill` while the KV of the prompt is on its way."""


class Turn(msgspec.Struct, kw_only=True):
    """A turn that the episode waits for, and its place."""

    number: int
    context_tokens: int
    streamed: bool = False  # a program reads its tokens while they are sampled
    since: float  # when it was requested, given to its engine, or taken from one
    place: Requested | Held | Queued | Suspected | OnEngine = Requested()
    arrival: int = 0  # number of its arrival in the queue, in this run
    rank: float = 0.0
    dispatch: int = 0
    failures: int = 0
    suspicion: Suspicion | None = None  # it may be the reason why an engine was lost
    # tokens sampled, as last reported by its engine: KV beside that of the context
    output_tokens: int = 0
    avoid: list[EngineId] = []
    # weights that sampled the tokens with which it was given back; -1 if it was not
    returned_with: int = -1
    # the engine that computes its prompt for the one that has it, or MOVING
    prefill: EngineId | None = None


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that was lost with its worker or its controller, and whose turns are
    recorded: its number, the version at its launch, and the newest version that the
    loss of the trainer left; None if no version was lost.
    """

    attempt: int
    initiated: int
    version: int | None


class Past(msgspec.Struct):
    """The past of a trajectory: attempts that were lost."""

    # number of controllers and workers lost while an attempt was under way
    worlds_lost: int = 0
    kept: Kept | None = None  # the attempt that the next one may continue
    continues: bool = False  # this attempt continues an earlier one
    life: str = ""  # the controller's life in which the last attempt was launched
    # earliest step to which the trainer was restored since the attempt began
    restored_to: int | None = None


class Trajectory(msgspec.Struct):
    id: TrajectoryId
    group_id: GroupId
    member: int
    stage: Stage = Stage.QUEUED
    attempt: int = 0
    worker: str = ""  # that has this attempt
    initiated: int = -1  # weight version at launch of this attempt; -1 before
    launched_at: float = 0.0
    since: float = 0.0  # when the stage, or the environment's part of it, began
    turn: Turn | None = None
    turns_requested: int = 0  # by this attempt
    tokens: int = 0
    engine: EngineId | None = None  # that ran the last turn
    pool: str = ""  # pool that this attempt was given; "" if it is that of its task domain
    prompt_tokens: int = 0
    context_tokens: int = 0  # when the last turn was requested, and what it has sampled
    output_tokens: int = 0  # sampled by this attempt
    closing: StopReason | None = None
    failure: str = ""  # the world's description of the last attempt's failure
    reward: float | None = None
    success: bool | None = None
    started: bool = False  # counted as started
    stop: StopReason | None = None  # the reason why it, or its RUN stage, is over
    past: Past = msgspec.field(default_factory=Past)

    @property
    def origin(self) -> int:
        """The version from which the attempt's staleness counts."""
        return origin(self.initiated, self.past.restored_to)

    @property
    def launched(self) -> bool:
        """True if this attempt has begun, and has not ended."""
        return self.stage in ALIVE or self.stage is Stage.EVAL_QUEUED

    @property
    def open_turn(self) -> Turn:
        """The turn, where a queue, an engine or a transfer shows that there is one."""
        assert self.turn is not None, f"{self.id} has no open turn"
        return self.turn


class GroupStatus(enum.StrEnum):
    DRAWING = "drawing"
    ACTIVE = "active"
    COMPARING = "comparing"  # its chosen members, by a pairwise judge
    BUFFERED = "buffered"
    TAKEN = "taken"  # in the training step that runs now
    TRAINED = "trained"  # kept until a checkpoint covers its step
    COVERED = "covered"  # by a checkpoint; kept until its last surplus member has stopped
    DROPPED = "dropped"  # kept until its last member has stopped


class Group(msgspec.Struct):
    id: GroupId
    name: str
    index: int
    purpose: Purpose
    since: float  # when its task, or the comparison of its members, was requested
    status: GroupStatus = GroupStatus.DRAWING
    task: Task | None = None
    members: list[TrajectoryId] = []
    chosen: list[TrajectoryId] = []  # scored members that go into the batch
    decoding: Decoding = Decoding()
    limit_s: float = 0.0  # maximum seconds of the comparison
    tokens_lost: bool = False  # of a chosen member: it can never be trained on again
    measures: Measures | None = None  # under the newest published weights


class EngineStatus(enum.StrEnum):
    STARTING = "starting"
    STALE = "stale"  # ready, without weights that it may serve
    SUSPENDING = "suspending"
    LOADING = "loading"
    SERVING = "serving"


class Seat(msgspec.Struct):
    """The place of an engine, and what it is for."""

    degree: int = 1
    group: int = 0  # index in the configuration's engines
    host: int = 0
    devices: tuple[int, ...] = ()
    pool: str = ""  # through which it found its place (core/policy/routing)
    phase: EnginePhase = "both"  # parts of turns that it computes (mechanisms/phases)


class Abilities(msgspec.Struct):
    """The abilities of an engine, which it reports when it is ready."""

    max_slots: int = 0
    kv_tokens: int = 0
    stages: bool = False  # it can receive weights while it serves
    moves_kv: bool = True  # to and from other engines
    preempts: bool = True  # a turn of higher rank takes the slot of one of its turns
    lent: bool = False  # it computes beside the model of a serving engine


class Loading(msgspec.Struct):
    """The weights that an engine loads, or has loaded last; -1 if there are none."""

    id: int = -1
    step: int | None = None  # of the checkpoint from which it loads them; None: from memory


class Staging(msgspec.Struct):
    """The weights that an engine receives while it serves; -1 if there are none."""

    id: int = -1  # that it receives now
    since: float = 0.0
    staged_id: int = -1  # that it has received, and not swapped in yet
    unstaged_id: int = -1  # that it could not receive, and loads while suspended


class Failures(msgspec.Struct):
    """The failures of an engine, and of its turns."""

    restarts: int = 0  # after failures for which it is to blame
    # epochs lost with suspects, of whom none is guilty yet → those without an answer
    doubted: dict[int, int] = {}
    excused: int = 0  # losses in a row for which a turn is to blame
    consecutive_timeouts: int = 0
    unanswered: dict[TrajectoryId, int] = {}  # turns that timed out since it last answered one
    load_failures: int = 0
    returns: int = 0  # times that it gave turns back since it last finished one
    moved: bool = False  # it replaces an engine whose failures made its host be given up
    # the suspect for which it is kept empty, or which it runs: it gets no other turns
    isolates: TrajectoryId | None = None


class Engine(msgspec.Struct):
    id: EngineId
    seat: Seat = msgspec.field(default_factory=Seat)
    abilities: Abilities = msgspec.field(default_factory=Abilities)
    joined: bool = False  # it joined during the run, and returns in every later world
    lender: str = ""  # the serving engine that it is borrowed from; "" if it is the run's own
    # the reasons why it gets no turns, although it has weights → until when
    barred: dict[str, float] = {}
    leaving: bool = False  # it was withdrawn: it launches nothing, and drains when it may
    draining: bool = False  # it takes no more turns, and is removed when its last one is done
    status: EngineStatus = EngineStatus.STARTING
    since: float = 0.0
    epoch: int = 0
    version: int = -1
    publication_id: int = -1
    loading: Loading = msgspec.field(default_factory=Loading)
    staging: Staging = msgspec.field(default_factory=Staging)
    # colocated placement: it gives its memory back for the trainer, or has given it
    released: bool = False
    active: dict[TrajectoryId, int] = {}  # trajectory → turn number
    turns_given: int = 0  # turns that it was given so far
    oversubscribed_at: float = 0.0  # when it last answered while it had more turns than slots
    failures: Failures = msgspec.field(default_factory=Failures)

    @property
    def samples(self) -> bool:
        """True if turns are sampled there: it is no prefill engine."""
        return self.seat.phase != "prefill"

    @property
    def open(self) -> bool:
        """True if the engine may get turns: nothing bars it, and it has no suspect."""
        return not self.barred and self.failures.isolates is None

    @property
    def departing(self) -> bool:
        """True if the engine will be removed: it may still finish work, but takes no
        more.
        """
        return self.leaving or self.draining


class WorkerStatus(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # gets no more attempts, and moves when its last one is over
    RETIRING = "retiring"  # gets no more attempts, and stops when its last one is over
    STOPPED = "stopped"  # has no process: there are enough without it
    UNPLACED = "unplaced"  # there is no host for it
    FAILED = "failed"  # given up after repeated failure


class Worker(msgspec.Struct):
    """A rollout worker."""

    id: str
    host: int
    status: WorkerStatus = WorkerStatus.STARTING
    epoch: int = 0
    since: float = 0.0
    restarts: int = 0  # restarts since an environment last started there
    displaced: bool = False  # the host on which it was is gone
    candidates: list[int] = []  # hosts that have joined since it was displaced
    attempts: dict[TrajectoryId, None] = {}  # attempts that it runs, or that it will score


class TrainerStatus(enum.StrEnum):
    STARTING = "starting"
    IDLE = "idle"
    MEASURING = "measuring"  # measures groups of the buffer
    TRAINING = "training"
    PUBLISHING = "publishing"
    SAVING = "saving"


class Trainer(msgspec.Struct):
    status: TrainerStatus = TrainerStatus.STARTING
    epoch: int = 0
    step: int = 0  # steps trained; the version of the weights that the trainer holds
    parts_done: int = 0  # mini-batches of the current step that are trained
    batch: list[GroupId] = []
    measuring: list[GroupId] = []  # they stay in the buffer, and may be evicted during it
    since: float = 0.0
    restarts: int = 0
    unplaced: str = ""  # why it starts again, as long as no host has room for it
    saving: int | None = None  # step of the checkpoint that is being copied or written
    save_requested_at: float = 0.0  # when the newest checkpoint was requested
    # seconds of the newest finished one, from the request until it was written or had
    # failed
    last_save_s: float = 0.0
    saving_publication_id: int = -1  # of the weights in this checkpoint; -1: unpublished
    exports: bool = False  # this checkpoint has an export
    # its current step must be saved as soon as the checkpoint before it is written
    save_pending: bool = False


class Evaluation(msgspec.Struct):
    """An evaluation under way.

    It holds back weight updates until its last episode is scored.
    """

    version: int
    final: bool
    to_draw: list[tuple[str, int]]  # (task domain, task index), next one last
    tasks: list[tuple[str, int]] = []  # all of them, in the same order
    publication_id: int = -1
    pending: dict[GroupId, None] = {}
    rewards: dict[str, list[float]] = {}
    successes: dict[str, int] = {}
    scored: dict[str, dict[TaskContent, None]] = {}  # the tasks with a reward, by task domain
    failed: dict[str, int] = {}
    last_failure: str = ""  # stop reason of the last failed episode, and its description
    started: bool = False  # engines serve `version`
    checkpointed: bool = False  # a checkpoint holds `version`


class Phase(enum.StrEnum):
    RUNNING = "running"
    SERVING = "serving"  # serves clients; there is no training
    DRAINING = "draining"  # training is over: cancel, wait for what was started
    SAVING = "saving"  # the final checkpoint
    EVALUATING = "evaluating"  # the final evaluation
    FINISHED = "finished"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A failed attempt: its stage, what it has in common with others that fail in the
    same way (`schema/text`), and its task.
    """

    stage: Stage
    kind: str
    task: TaskContent


class DomainStats(msgspec.Struct):
    """The stages in which the code of a task domain works, and its failures."""

    passed: dict[Stage, None] = {}  # the stages of its code that an attempt has passed
    # the last failure of each that failed in a stage that none has passed
    failed: dict[TrajectoryId, Failure] = {}


class Pools(msgspec.Struct):
    """The trajectories by the stage of their attempt, each in the order in which they
    entered it (owner: `core/attempts`).
    """

    queued: dict[TrajectoryId, None] = {}
    init: dict[TrajectoryId, None] = {}
    run_queued: dict[TrajectoryId, None] = {}
    run: dict[TrajectoryId, None] = {}
    eval_queued: dict[TrajectoryId, None] = {}
    eval: dict[TrajectoryId, None] = {}
    closing: dict[TrajectoryId, Stage] = {}  # → the stage in which it was cancelled


class Turns(msgspec.Struct):
    """The queued turns (owner: `core/turns`)."""

    queue: dict[TrajectoryId, int] = {}  # → its arrival number
    suspects: dict[TrajectoryId, None] = {}  # that wait for an engine, first to run first
    arrivals: int = 0
    given: int = 0  # turns given to all engines
    timer_at: float = 0.0  # when the timer fires next; 0 if it has fired


class Drawing(msgspec.Struct):
    """The groups that are drawn and rolled out, and how that goes (owner:
    `core/groups`).
    """

    active: dict[GroupId, None] = {}  # training groups being drawn or rolled out
    next_group: int = 0
    drawn: dict[str, int] = {}
    consecutive_failed: int = 0  # groups dropped in a row without one member scored
    consecutive_filtered: int = 0  # groups filtered in a row (dynamic sampling)
    # complete groups since the last step was trained, and filtered ones
    kept: int = 0
    filtered: int = 0
    spare: int = 0  # spare groups that were learned
    swept_for_version: int = 0  # the next_version for which expired groups were last dropped


class Membership(msgspec.Struct):
    """The engines that join and leave (owner: the mechanism `membership`)."""

    next_number: int = 0
    withdrawn: list[EngineId] = []  # configured engines that are gone for good, in later worlds too
    pending_degrees: list[int] = []  # degrees of engines that are planned, and not started yet


class Unplaced(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that has no place."""

    degree: int
    group: int
    joined: bool = False
    moved: bool = False
    returns: bool = False  # its host was lost, and may join again


class Hosts(msgspec.Struct):
    """The hosts, and the trainer's places on them (owner: `core/recovery`)."""

    up: dict[int, HostSlot] = {}  # by number
    ranks: list[RankSlot] = []
    # processes have shared a GPU from the beginning
    shares_gpus: bool = False
    # colocated placement: host → GPU → how many engines it may have
    engine_limits: dict[int, dict[int, int]] = {}
    unplaced: list[Unplaced] = []  # engines whose host is gone, until they start elsewhere
    # since when no engine that samples has a place
    engineless_since: float | None = None


class Publication(msgspec.Struct):
    """The published weights, and those that can still be loaded (owner:
    `core/weights`).
    """

    version: int = -1
    id: int = -1
    at: float = 0.0
    next_id: int = 0
    retained: dict[int, int] = {}  # weights that may be loaded from memory: id → version
    # weights in a checkpoint: id → its step, which is their version (mode decoupled)
    checkpointed: dict[int, int] = {}
    # steps to which the trainer was restored, by the id of the next weights
    restores: dict[int, int] = {}


class Checkpoints(msgspec.Struct):
    """The checkpoints, and what they do not cover yet (owner: `core/training`)."""

    newest: int | None = None  # newest step with a checkpoint
    previous: int | None = None  # the checkpoint before it, in case it is damaged
    lineage: dict[int, list[GroupId]] = {}  # step → groups trained since `previous`
    exported: int = -1  # newest step whose checkpoint has an export
    requested_at: float = 0.0  # when the newest checkpoint was requested
    newest_requested: int = -1  # greatest step for which a checkpoint was ever requested
    failed_at: int = -1
    error: str = ""


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """The best evaluation of a step with a checkpoint."""

    step: int
    success: dict[str, float]  # by task domain
    reward: dict[str, float]


class Evaluations(msgspec.Struct):
    """The evaluation under way, and what evaluations have found (owner:
    `core/evaluation`).
    """

    current: Evaluation | None = None
    # the one that was under way when the controller was lost, until it can continue
    suspended: Evaluation | None = None
    newest_version: int = -1  # newest version that was evaluated
    best: Best | None = None
    # task domains whose environment has reported whether an episode succeeded
    defines_success: dict[str, None] = {}
    # step whose evaluation reached eval.stop_at, which ends training
    target_step: int | None = None
    final_done: bool = False

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint by evaluation."""
        return self.best.step if self.best is not None else None


class Service(msgspec.Struct):
    """The condition of a service (owner: `core/serving`)."""

    closed: bool = False  # it accepts no more rollouts
    no_engine_since: float | None = None  # since when none of its engines takes turns


class State(msgspec.Struct):
    """The whole state: what concerns the run itself, the tables, and a part for each
    sub-machine that owns more than a table. `core/recovery` resets parts with the
    world.
    """

    run_id: str = ""  # from RunStarted
    life: str = ""  # from RunStarted or the last WorldLost
    phase: Phase = Phase.RUNNING
    error: str = ""
    last_failure: str = ""  # stop reason of the last failed attempt, and the world's description
    skip_final_eval: bool = False  # the user asked to stop
    serving: bool = False  # the world has no trainer
    groups: dict[GroupId, Group] = {}
    trajectories: dict[TrajectoryId, Trajectory] = {}
    engines: dict[EngineId, Engine] = {}
    workers: dict[str, Worker] = {}  # none if attempts run in the controller
    buffer: dict[GroupId, None] = {}
    domains: dict[str, DomainStats] = {}  # by task domain
    trainer: Trainer = msgspec.field(default_factory=Trainer)
    pools: Pools = msgspec.field(default_factory=Pools)
    turns: Turns = msgspec.field(default_factory=Turns)
    drawing: Drawing = msgspec.field(default_factory=Drawing)
    membership: Membership = msgspec.field(default_factory=Membership)
    hosts: Hosts = msgspec.field(default_factory=Hosts)
    publication: Publication = msgspec.field(default_factory=Publication)
    checkpoints: Checkpoints = msgspec.field(default_factory=Checkpoints)
    evaluations: Evaluations = msgspec.field(default_factory=Evaluations)
    service: Service = msgspec.field(default_factory=Service)
    mechanisms: dict[str, Any] = {}  # the part of each mechanism, by its name
    counters: Counters = msgspec.field(default_factory=Counters)
    idle: Idle = msgspec.field(default_factory=Idle)
