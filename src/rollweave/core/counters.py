"""The counts of a run and the account of its time: parts of its state that reports and
metrics read.
"""

import msgspec


class SchedulingCounters(msgspec.Struct):
    """The actions of trajectory-level scheduling, and their cost."""

    predictions: int = 0  # requested
    predictions_late: int = 0  # came too late for the turn, or never
    awaited_s: float = 0.0  # seconds for which first turns waited for predictions
    preemptions: int = 0
    overdue: int = 0  # turns that ran because they were overtaken too often
    plans: int = 0
    migrations: int = 0
    migrations_dropped: int = 0  # because the tool was done before the transfer began
    migrations_failed: int = 0
    moved_tokens: int = 0
    exposed_s: float = 0.0  # seconds for which turns waited for a transfer
    queue_s: float = 0.0  # seconds for which turns waited, in the core or on their engine
    reallocations: int = 0
    released: int = 0  # engines freed by consolidation
    moved_engines: int = 0  # between prefill and decoding (mechanisms/ratio)
    moved_ranks: int = 0  # places, between engines and the trainer (mechanisms/division)
    moved_domains: int = 0  # changes of a domain's shares of pools (mechanisms/pools)
    repacked: int = 0  # trajectories moved by consolidation
    kv_reported: int = 0  # engines that consolidation judged by the KV that they report
    kv_estimated: int = 0  # engines that it judged by the contexts of their trajectories
    split_turns: int = 0  # whose prompts were given to prefill engines
    split_tokens: int = 0  # that these have computed
    split_failed: int = 0  # prompts that were not computed there, or whose KV did not come
    split_s: float = 0.0  # seconds until turns had the KV of such prompts


class WeightCounters(msgspec.Struct):
    """Transfers of new weights to relays and to serving engines (RollArt Table 4)."""

    updates: int = 0  # versions swapped in
    transfer_s: float = 0.0  # seconds in which engines received and verified versions
    stopped_s: float = 0.0  # seconds for which engines were suspended for them
    staged: int = 0  # updates whose transfer the engine's own steps hid
    fetch_s: float = 0.0  # seconds in which relays fetched versions, beside the engines' steps
    fetched_bytes: int = 0  # by relays from relays of other hosts


class Counters(msgspec.Struct):
    """Training trajectories by their end.

    `started` = trained + dropped + cancelled + buffered + in flight, always.
    """

    started: int = 0
    trained: int = 0
    cancelled: int = 0
    dropped: dict[str, int] = {}
    retried: dict[str, int] = {}
    # attempts launched, for any purpose: each is under way, or has ended with one stop
    # reason
    attempts: int = 0
    relaunched: int = 0  # attempts at a trajectory after its first
    continued: int = 0  # of these, attempts that continue one that was lost with its controller
    stop_reasons: dict[str, int] = {}
    eval_started: int = 0
    eval_scored: int = 0
    eval_dropped: int = 0
    submitted: int = 0  # rollouts submitted to a service: delivered by stop reason, or under way
    delivered: dict[str, int] = {}
    staleness: dict[int, int] = {}  # trained trajectories by steps from launch to training
    # trajectories rolled out by versions published from launch to end (Laminar §6)
    inherent: dict[int, int] = {}
    evicted: int = 0  # groups that had no place in the buffer
    engines_joined: int = 0  # registered during the run
    engines_left: int = 0  # withdrawn, and gone
    turns: int = 0
    turns_returned: int = 0  # by borrowed engines, to continue elsewhere
    cut_turns: dict[str, int] = {}  # number of turns that ended at max_turn_tokens, by task domain
    output_tokens: int = 0
    cached_tokens: int = 0
    context_tokens: int = 0
    watchdog: dict[str, int] = {}
    scheduling: SchedulingCounters = msgspec.field(default_factory=SchedulingCounters)
    weights: WeightCounters = msgspec.field(default_factory=WeightCounters)


class Idle(msgspec.Struct):
    """Seconds of the engines (summed) and of the trainer by what they did or waited
    for, since the run began.
    """

    engines: dict[str, float] = {}
    trainer: dict[str, float] = {}
    clock: float | None = None
