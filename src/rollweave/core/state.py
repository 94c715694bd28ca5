"""All that the core remembers, as plain data: it can be written to a snapshot and read
back.

Tables are dicts and keep insertion order, so that every walk over them is
deterministic; ids come from counters. Indices beside the tables (`in_init`, `in_run`,
…) are kept by `core/attempts.move` alone and verified by `core/checks`.
"""

import enum

import msgspec

from rollweave.core.policy.work import Rate
from rollweave.schema.base import EngineId, GroupId, TrajectoryId
from rollweave.schema.events import StepTime
from rollweave.schema.work import Decoding, Purpose, StopReason, Task


class Stage(enum.StrEnum):
    """Where a trajectory's current attempt stands."""

    QUEUED = "queued"  # waits for an INIT slot
    INIT = "init"
    RUN = "run"
    EVAL_QUEUED = "eval_queued"  # rolled out, environment freed, waits for an EVAL slot
    EVAL = "eval"
    CLOSING = "closing"  # cancelled, the world has not yet said that it stopped
    OVER = "over"  # the attempt is over, and core/lifecycle has not settled what follows
    SCORED = "scored"
    ENDED = "ended"


ALIVE = (Stage.INIT, Stage.RUN, Stage.EVAL, Stage.CLOSING)
"""Stages in which the world holds something for the attempt."""


class Turn(msgspec.Struct):
    """A turn that the episode waits for.

    `engine` is None while it is queued, or while its trajectory's KV moves.
    """

    number: int
    context_tokens: int
    since: float
    arrival: int = 0  # how-manieth to be queued in this run
    rank: float = 0.0
    tiebreak: float = (
        0.0  # among equal ranks the lower first: its arrival, or its trajectory's launch
    )
    queue: EngineId | None = None  # the engine that it waits for; None: any
    given_at_enqueue: int = (
        0  # turns given before it was queued, by its lane; once it is given, by its engine
    )
    dispatch: int = 0
    failures: int = 0
    output_tokens: int = 0  # of its tokens, as its engine told last: KV beside that of the context
    engine: EngineId | None = None
    avoid: list[EngineId] = []


class Trajectory(msgspec.Struct):
    id: TrajectoryId
    group_id: GroupId
    member: int
    stage: Stage = Stage.QUEUED
    attempt: int = 0
    worlds_lost: int = 0  # number of worlds that were lost while an attempt was under way
    initiated: int = -1  # weight version at launch of this attempt; -1 before
    weights_id: int = -1  # of that version, where it keeps to it (mode decoupled)
    launched_at: float = 0.0
    since: float = 0.0  # when the stage, or the environment's part of it, began
    turn: Turn | None = None
    turns_requested: int = 0  # turns that this attempt has asked for
    turns: int = 0
    tokens: int = 0
    engine: EngineId | None = None  # of the last turn
    assigned_engine: EngineId | None = None  # for which its turns wait (core/policy/scheduling)
    kv_resident: bool = False  # its KV is at home, or ought to be
    kv_demand: int = 0  # tokens of KV that it needs through its next turn
    prompt_tokens: int = 0
    context_tokens: int = 0  # as the last turn was asked for
    output_tokens: int = 0  # sampled by this attempt
    last_output_tokens: int = 0
    tool_s: float = 0.0  # in which its environment stepped
    estimate: int = 0  # tokens that it will probably yet sample
    kv_token_steps: int = 0  # the context of each of these tokens, summed
    length_bucket: int | None = None  # of its length, sampled and estimated (core/policy/priority)
    prediction_requested_for: int = -1  # turn before which a prediction was last asked for
    predicted_at_turn: int = -1  # turn before which the last prediction was that came
    migration: int | None = None  # its number, from the wish to MigrationDone
    closing: StopReason | None = None
    failure: str = ""  # the world's description of the last attempt's failure
    reward: float | None = None
    success: bool | None = None
    started: bool = False  # counted as started
    launched: bool = False  # this attempt has begun, and its end is not yet counted
    stop: StopReason | None = None  # why it, or its RUN stage, is over


class GroupStatus(enum.StrEnum):
    DRAWING = "drawing"
    ACTIVE = "active"
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
    since: float  # when its task was asked for
    status: GroupStatus = GroupStatus.DRAWING
    task: Task | None = None
    members: list[TrajectoryId] = []
    chosen: list[TrajectoryId] = []  # scored members that go into the batch
    decoding: Decoding = Decoding()
    tokens_lost: bool = (
        False  # tokens of a chosen member are gone: it can never be trained on again
    )
    ratio: float | None = None  # of the policy that was measured to the one that sampled it
    ratio_weights_id: int = -1  # weights under which it was measured


class EngineStatus(enum.StrEnum):
    STARTING = "starting"
    STALE = "stale"  # ready, no weights yet
    SUSPENDING = "suspending"
    LOADING = "loading"
    SERVING = "serving"


class MeasuredDegree(msgspec.Struct):
    """What engines of one degree measured of themselves.

    Kept when the last of them is gone.
    """

    profile: tuple[StepTime, ...]
    slots: int
    rate: Rate


class Engine(msgspec.Struct):
    id: EngineId
    degree: int = 1
    group: int = 0  # of the configuration's engines
    joined: bool = False  # it came while the run went on, and comes back in every later life of it
    leaving: bool = False  # it was withdrawn: it begins nothing, and drains when it may
    draining: bool = False  # it takes no turn any more, and is removed when its last one is done
    turns_given: int = 0  # turns so far
    oversubscribed_at: float = 0.0  # when it last answered with more turns than slots
    # what follows from its measured steps, its slots and KV; None before it has joined
    rate: Rate | None = None
    status: EngineStatus = EngineStatus.STARTING
    epoch: int = 0
    version: int = -1
    weights_id: int = -1
    loading_id: int = -1
    loading_step: int | None = None  # of the checkpoint that it loads them from; None: from memory
    max_slots: int = 0
    kv_tokens: int = 0
    since: float = 0.0
    active: dict[TrajectoryId, int] = {}  # trajectory → turn number
    restarts: int = 0
    consecutive_timeouts: int = 0
    load_failures: int = 0
    launched: int = 0  # trajectories that it has begun under its weights (mode decoupled)
    # tokens of KV that its trajectories held at the last look (core/consolidation)
    peak_kv: int | None = None

    @property
    def departing(self) -> bool:
        """It is on its way out: whatever it still works on, nobody counts on it for
        more.
        """
        return self.leaving or self.draining


class RelayStatus(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    FETCHING = "fetching"


class Relay(msgspec.Struct):
    """The relay of a machine.

    It takes one version at a time, and names its sources by their ids; None is the
    trainer.
    """

    id: str
    machine: int
    status: RelayStatus = RelayStatus.STARTING
    epoch: int = 0
    since: float = 0.0
    versions: list[int] = []  # weights ids, ascending
    fetching: int = -1
    source: str | None = None
    base: int | None = None
    fetches: int = 0  # so far, of any weights
    # sources that did not serve since it last took weights or looked anew
    refused_sources: list[str | None] = []
    # sources from which nothing came, of these weights: it has gone elsewhere, once for
    # each
    stalled_sources: list[str] = []
    force_full: bool = False  # a change did not fit: the next try is of the whole
    starved_since: float | None = None  # it has been refused weights that another one has
    failed_source: str | None = None  # the last source that was said to have them and did not serve
    # why it is to be restarted at once: others cannot use what it is said to hold
    restart_reason: str = ""
    restarts: int = 0
    suspected_since: float | None = None  # it is suspected: not heard since about then

    @property
    def suspected(self) -> bool:
        return self.suspected_since is not None


class Migration(msgspec.Struct):
    """The KV of a trajectory is to move.

    `since` is None while it waits for its transfer epoch.
    """

    number: int
    trajectory_id: TrajectoryId
    attempt: int
    source: EngineId
    target: EngineId
    since: float | None = None
    # the trajectory leaves for good, with its open turn, so that the source can take
    # new weights
    vacates: bool = False


class Share(msgspec.Struct):
    """Of the partition: this engine has the next `size` trajectories by predicted
    length.
    """

    engine_id: EngineId
    size: int


class Partition(msgspec.Struct):
    """Which engine has which ranks, longest first, as planned for `planned`
    trajectories. Without shares: to be planned.
    """

    shares: list[Share] = []
    planned: int = 0
    predictions: int = 0  # that have come since


class TrainerStatus(enum.StrEnum):
    STARTING = "starting"
    IDLE = "idle"
    MEASURING = "measuring"  # ratios of groups in the buffer
    TRAINING = "training"
    PUBLISHING = "publishing"
    SAVING = "saving"


class Trainer(msgspec.Struct):
    status: TrainerStatus = TrainerStatus.STARTING
    epoch: int = 0
    step: int = 0  # steps trained; the version of the weights that the trainer holds
    parts_done: int = 0  # mini-batches of the current step that are trained
    batch: list[GroupId] = []
    measuring: list[GroupId] = []  # they stay in the buffer, and may go meanwhile
    since: float = 0.0
    restarts: int = 0
    saving: int | None = None  # step of the checkpoint that is being taken or written
    save_requested_at: float = 0.0  # when the newest one was asked for
    # seconds that the newest finished one took, from the request until it was written
    # or had failed
    last_save_s: float = 0.0
    saving_weights_id: int = -1  # id of the published weights that this checkpoint holds; -1: none
    exports: bool = False  # this checkpoint has an export
    # its current step must be saved, as soon as the checkpoint before it is written
    save_pending: bool = False


class Evaluation(msgspec.Struct):
    """An evaluation under way.

    It holds back weight updates until its last episode is scored.
    """

    version: int
    final: bool
    to_draw: list[tuple[str, int]]  # (task domain, task index), next one last
    weights_id: int = -1
    pending: dict[GroupId, None] = {}
    rewards: dict[str, list[float]] = {}
    successes: dict[str, int] = {}
    failed: dict[str, int] = {}
    started: bool = False  # engines serve `version`
    checkpointed: bool = False  # a checkpoint holds `version`


class Phase(enum.StrEnum):
    RUNNING = "running"
    SERVING = "serving"  # what others ask for; there is no training
    DRAINING = "draining"  # training is over: cancel, wait for what was started
    SAVING = "saving"  # the final checkpoint
    EVALUATING = "evaluating"  # the final evaluation
    FINISHED = "finished"


class SchedulingCounters(msgspec.Struct):
    """What scheduling by trajectory did and cost."""

    predictions: int = 0  # that were asked for
    predictions_late: int = 0  # came after the turn that they were asked before, or never
    preemptions: int = 0
    overdue: int = 0  # turns that ran because they were overtaken too often
    plans: int = 0
    migrations: int = 0
    migrations_dropped: int = 0  # the tool was done before the transfer began
    migrations_failed: int = 0
    moved_tokens: int = 0
    exposed_s: float = 0.0  # in which turns waited for a transfer
    queue_s: float = 0.0  # in which turns waited, in the core or on their engine
    reallocations: int = 0
    released: int = 0  # engines that repack has freed
    repacked: int = 0  # trajectories that it has moved


class Counters(msgspec.Struct):
    """Training trajectories by their end.

    `started` = trained + dropped + cancelled + buffered + in flight, always.
    """

    started: int = 0
    trained: int = 0
    cancelled: int = 0
    dropped: dict[str, int] = {}
    retried: dict[str, int] = {}
    # number launched, for any purpose: each is under way, or has ended with one stop
    # reason
    attempts: int = 0
    relaunched: int = 0  # those of them that were later attempts at a trajectory
    stop_reasons: dict[str, int] = {}
    eval_started: int = 0
    eval_scored: int = 0
    eval_dropped: int = 0
    submitted: int = 0  # that others asked for: delivered by stop reason, or under way
    delivered: dict[str, int] = {}
    staleness: dict[int, int] = {}  # of what was trained: steps from its launch to its training
    # of what was rolled out: versions published from its launch to its end (Laminar §6)
    inherent: dict[int, int] = {}
    evicted: int = 0  # groups that had no place in the buffer
    engines_joined: int = 0  # that were asked for while the run went on
    engines_left: int = 0  # that were withdrawn, and are gone
    turns: int = 0
    cut_turns: dict[str, int] = {}  # number of turns that ended at max_turn_tokens, by task domain
    output_tokens: int = 0
    cached_tokens: int = 0
    context_tokens: int = 0
    watchdog: dict[str, int] = {}
    scheduling: SchedulingCounters = msgspec.field(default_factory=SchedulingCounters)


class Idle(msgspec.Struct):
    """Seconds by what engines (summed) and the trainer did or waited for, from the
    run's first moment on.
    """

    engines: dict[str, float] = {}
    trainer: dict[str, float] = {}
    clock: float | None = None


class State(msgspec.Struct):
    run_id: str = ""  # as RunStarted gave it
    phase: Phase = Phase.RUNNING
    error: str = ""
    skip_final_eval: bool = False  # the user asked to stop
    serving: bool = False  # the world has no trainer
    closed: bool = False  # a service takes nothing more
    no_engine_since: float | None = None  # no engine of a service takes turns since then
    final_evaluated: bool = False
    groups: dict[GroupId, Group] = {}
    trajectories: dict[TrajectoryId, Trajectory] = {}
    engines: dict[EngineId, Engine] = {}
    relays: dict[str, Relay] = {}
    chain: list[str] = []  # relays that are up, the master first
    # that the world began with: engine number k is on machine k modulo their number; 0:
    # no relays
    machines: int = 0
    trainer: Trainer = msgspec.field(default_factory=Trainer)
    init_queue: dict[TrajectoryId, None] = {}
    in_init: dict[TrajectoryId, None] = {}
    in_run: dict[TrajectoryId, None] = {}
    turn_queue: dict[TrajectoryId, int] = {}  # → number of its arrival
    arrivals: int = 0
    turns_given: int = 0  # turns that any engine was given
    measured: dict[int, MeasuredDegree] = {}  # by degree
    partition: Partition = msgspec.field(default_factory=Partition)
    migrations: dict[int, Migration] = {}
    next_migration: int = 0
    migration_token_s: float = 0.0  # seconds that a token's KV took on the way, on average
    # mean predicted length by task domain, for as long as none has finished
    first_lengths: dict[str, float] = {}
    # sampled tokens of the newest finished trajectories, by task domain
    lengths: dict[str, list[int]] = {}
    length_sums: dict[str, int] = {}  # of these
    context_growth: dict[
        str, float
    ] = {}  # tokens of context for each sampled one, by task domain, of late
    prompt_tokens: dict[str, float] = {}  # mean, by task domain
    turn_tokens: dict[str, float] = {}  # mean sampled tokens of a turn, by task domain
    turn_s: dict[str, float] = {}  # mean seconds of a turn on its engine, by task domain
    tool_s: dict[str, float] = {}  # mean seconds of an environment's step, by task domain
    next_engine: int = 0
    pending_degrees: list[int] = []  # degrees of the engines that the plan has and the fleet lacks
    withdrawn: list[EngineId] = []  # of the configured engines: gone for good, in later lives too
    planned_at: int = 0  # step of the last allocation
    eval_queue: dict[TrajectoryId, None] = {}
    in_eval: dict[TrajectoryId, None] = {}
    closing: dict[TrajectoryId, None] = {}
    active_groups: dict[GroupId, None] = {}  # training groups being drawn or rolled out
    buffer: dict[GroupId, None] = {}
    lineage: dict[int, list[GroupId]] = {}  # step → groups trained since checkpoint `fallback`
    consecutive_failed_groups: int = 0  # groups dropped in a row without one member scored
    last_failure: str = ""  # of an attempt: stop reason and the world's words
    consecutive_filtered_groups: int = 0  # groups filtered in a row (dynamic sampling)
    swept_for_version: int = 0  # the next_version for which doomed groups were last swept out
    unassigned: dict[TrajectoryId, None] = {}  # their weights are on no engine (mode decoupled)
    retained_versions: dict[int, int] = {}  # weights that may be loaded: id → version
    # weights that a checkpoint holds: id → its step, and their version (mode decoupled)
    checkpointed_versions: dict[int, int] = {}
    consolidated_at: float = 0.0
    published_version: int = -1
    published_id: int = -1
    published_at: float = 0.0
    # takes of the published weights from another relay, by form: whole, changes
    broadcast: dict[str, int] = {}
    # seconds from a publication until all relays had it, by form
    broadcast_s: dict[str, float] = {}
    next_weights_id: int = 0
    next_group: int = 0
    drawn: dict[str, int] = {}
    checkpoint: int | None = None  # newest step that a checkpoint covers
    previous_checkpoint: int | None = None  # the checkpoint before it, in case it is damaged
    exported: int = -1  # newest step whose checkpoint has an export
    checkpoint_requested_at: float = 0.0  # when the newest checkpoint's weights were taken
    newest_save_requested: int = -1  # greatest step for which a checkpoint was ever requested
    checkpoint_failed_at: int = -1
    checkpoint_error: str = ""
    best_step: int | None = None
    best_success: dict[str, float] = {}  # of the best evaluation, by task domain
    best_reward: dict[str, float] = {}
    # task domains whose environment has reported whether an episode succeeded
    defines_success: dict[str, None] = {}
    evaluated_version: int = -1
    evaluation: Evaluation | None = None
    # step whose evaluation reached eval.stop_at, which ends training
    target_step: int | None = None
    counters: Counters = msgspec.field(default_factory=Counters)
    idle: Idle = msgspec.field(default_factory=Idle)
