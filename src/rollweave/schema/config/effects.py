"""The settings that have no effect beside others. A file that changes one is refused,
so that its user does not wait for the effect.

Invariant: only what was written counts, and only where it differs from the default, so
that a configuration that was dumped loads as itself.
"""

from collections.abc import Callable, Iterator

from pydantic import BaseModel

from rollweave.schema.config.ablation import PARTITIONS, POLICIES
from rollweave.schema.config.algorithm import OF_TURNS, TaskAlgorithmConfig
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.tasks import TaskConfig

WINDOWED = (ModeName.PARTIAL, ModeName.BOUNDED)
"""Modes in which `rollout.alpha` bounds staleness."""

ABORTING = (ModeName.SYNC, ModeName.ONE_STEP, ModeName.BOUNDED)
"""Modes in which groups may be spare: those that no step has a place for are ended."""

Rule = Callable[[RunConfig], str | None]
"""Returns why a setting has no effect; None if it has one."""


def _predicts(config: RunConfig) -> bool:
    priority, placement, _ = POLICIES[config.rollout.scheduling]
    return (config.ablation.priority or priority) == "longest_first" or (
        config.ablation.placement or placement
    ) in PARTITIONS


def _discounts(task: TaskConfig, config: RunConfig) -> bool:
    return config.algorithm_of(task.name).advantage in OF_TURNS


def _unless(has_effect: Callable[[RunConfig], object], why: str) -> Rule:
    return lambda config: None if has_effect(config) else why.format(config=config)


_has_images = _unless(
    lambda config: config.sandbox.backend not in ("zygote", "plain"),
    "with sandbox.backend {config.sandbox.backend}, which has the host's image only",
)

_has_critic = _unless(
    lambda config: config.has_critic,
    "with algorithm.advantage {config.algorithm.advantage}, which takes no critic",
)

IN_MODE = "in mode {config.rollout.mode.value}"

RULES: dict[str, Rule] = {
    "algorithm.gamma": _unless(
        lambda config: any(_discounts(task, config) for task in config.tasks),
        "with algorithm.advantage {config.algorithm.advantage}",
    ),
    "algorithm.kl_direction": _unless(
        lambda config: config.algorithm.kl, "while algorithm.kl is 0"
    ),
    "algorithm.reward_weight": _unless(
        lambda config: any(config.distills(task.name) for task in config.tasks),
        "with algorithm.advantage {config.algorithm.advantage}",
    ),
    "critic.gae_lambda": _has_critic,
    "critic.lr": _has_critic,
    "eval.episodes": _unless(
        lambda config: config.eval.every or not config.eval.final_episodes,
        "while eval.every is 0 (the last evaluation has eval.final_episodes)",
    ),
    "eval.stop_at": _unless(
        lambda config: config.eval.every,
        "while eval.every is 0, since periodic evaluations reach it",
    ),
    "eval.temperature": _unless(
        lambda config: config.eval.every or config.eval.final_episodes,
        "without evaluations (eval.every and eval.final_episodes are 0)",
    ),
    "rollout.alpha": _unless(lambda config: config.rollout.mode in WINDOWED, IN_MODE),
    "rollout.group_size": _unless(
        lambda config: len(config.own_group_sizes()) < len(config.tasks),
        "where each task domain has its own",
    ),
    "rollout.predictor": _unless(_predicts, "where no policy predicts lengths"),
    "rollout.spare_groups": _unless(lambda config: config.rollout.mode in ABORTING, IN_MODE),
    "sandbox.cache_dir": _has_images,
    "sandbox.cache_gb": _has_images,
    "sandbox.mirror": _has_images,
    "warmup.batch": _unless(lambda config: config.warmup.steps, "while warmup.steps is 0"),
    "workers.idle_s": _unless(
        lambda config: config.workers.elastic,
        "while the number of workers does not change (workers.minimum)",
    ),
    "workers.pool": _unless(lambda config: config.workers.count, "while workers.count is 0"),
    "weights.transport": _unless(
        lambda config: config.weights.relays or config.cluster is not None,
        "while weights.relays is 0",
    ),
}
"""Setting → when it has no effect."""


def without_effect(config: RunConfig) -> list[str]:
    """Return a line for each changed setting without effect, such as `rollout.alpha has
    no effect in mode sync, got 2`.
    """
    return [f"{key} has no effect {why}, got {value}" for key, why, value in _idle(config)]


def _idle(config: RunConfig) -> Iterator[tuple[str, str, object]]:
    """Yield each changed setting without effect, why it has none, and its value."""
    for key, rule in RULES.items():
        name, field = key.split(".")
        section = getattr(config, name)
        if is_changed(section, field) and (why := rule(config)) is not None:
            yield key, why, getattr(section, field)
    if len(config.tasks) == 1 and is_changed(config.tasks[0], "weight"):
        yield "tasks.0.weight", "with one task domain", config.tasks[0].weight
    for number, task in enumerate(config.tasks):
        if is_changed(task, "env_weight") and not config.rewards_of(task.name):
            yield f"tasks.{number}.env_weight", "without [[rewards]] for it", task.env_weight
    yield from _idle_algorithms(config)
    relayed = config.weights.relays or config.cluster is not None
    if "deltas" in config.ablation.without and not relayed:
        yield "ablation.without", "for deltas while weights.relays is 0", "deltas"
    if "staging" in config.ablation.without and config.trainer.colocated:
        yield "ablation.without", "for staging with trainer.colocated", "staging"
    if "cuda_graphs" in config.ablation.without:
        if config.model.device == "cpu":
            yield "ablation.without", "for cuda_graphs on model.device cpu", "cuda_graphs"
        elif all(group.server is not None or group.deterministic for group in config.engines):
            why = "for cuda_graphs where all engines are servers or deterministic"
            yield "ablation.without", why, "cuda_graphs"
    for number, group in enumerate(config.engines):
        if group.server is not None and is_changed(group, "prefill_chunk_tokens"):
            argument = {"vllm": "--max-num-batched-tokens", "sglang": "--chunked-prefill-size"}
            why = f"with kind {group.kind}, whose args has {argument[group.server]}"
            yield f"engines.{number}.prefill_chunk_tokens", why, group.prefill_chunk_tokens
    for name, pool in config.pools.items():
        if is_changed(pool, "site") and config.cluster is None:
            yield f"pools.{name}.site", "without [cluster]", pool.site
    if "optimizer" in config.trainer.save_memory and config.model.device == "cpu":
        yield "trainer.save_memory", "for optimizer on model.device cpu", "optimizer"
    cluster = config.cluster
    if cluster is not None and cluster.launcher != "ray" and is_changed(cluster, "ray"):
        yield "cluster.ray", f"with launcher {cluster.launcher}", cluster.ray
    if "latency_sigma" in config.faults and not config.faults.get("latency_s"):
        yield "faults.latency_sigma", "without faults.latency_s", config.faults["latency_sigma"]


def _idle_algorithms(config: RunConfig) -> Iterator[tuple[str, str, object]]:
    """Yield what [algorithm] has that no task domain takes, and what domains have that
    their estimator ignores.
    """
    algorithm = config.algorithm
    for field in TaskAlgorithmConfig.model_fields:
        taken = any(task.algorithm.inherits(field, algorithm) for task in config.tasks)
        if is_changed(algorithm, field) and not taken:
            where = "where each task domain has its own"
            yield f"algorithm.{field}", where, getattr(algorithm, field)
    for number, task in enumerate(config.tasks):
        if task.algorithm.gamma is not None and not _discounts(task, config):
            advantage = config.algorithm_of(task.name).advantage
            where = f"tasks.{number}.algorithm.gamma"
            yield where, f"with advantage {advantage}", task.algorithm.gamma
        if task.algorithm.reward_weight is not None and not config.distills(task.name):
            advantage = config.algorithm_of(task.name).advantage
            where = f"tasks.{number}.algorithm.reward_weight"
            yield where, f"with advantage {advantage}", task.algorithm.reward_weight


def is_changed(section: BaseModel, field: str) -> bool:
    """True if `field` was written, and differs from its default."""
    default = type(section).model_fields[field].get_default(call_default_factory=True)
    return field in section.model_fields_set and getattr(section, field) != default
