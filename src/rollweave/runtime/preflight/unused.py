"""Find settings that were changed but have no effect in this run, so that the user does
not wait for one.

A setting counts as changed if it differs from its default. `simulate` names the
settings that a simulation ignores.
"""

from collections.abc import Iterator

from rollweave.core.policy.scheduling import scheduling
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.sections import ModeName, Section

WINDOWED = (ModeName.PARTIAL, ModeName.BOUNDED)
"""Modes in which `rollout.alpha` bounds staleness."""


def without_effect(config: RunConfig, *, cores: int) -> list[str]:
    """Return a line for each changed setting without effect, such as `rollout.alpha has
    no effect in mode sync, got 2`.

    `cores` is the number of this machine's cores: an engine on the CPU has no use for a
    larger parallel degree.
    """
    lines: list[str] = []
    for name, section, fields, why in _idle(config):
        default = type(section).model_construct()
        for field in fields:
            value = getattr(section, field)
            if value != getattr(default, field):
                lines.append(f"{name}.{field} has no effect {why}, got {value}")
    if config.model.device == "cpu":
        lines += [
            f"engines.degree has no effect beyond the {cores} cores of this machine, got {degree}"
            for degree in sorted({group.degree for group in config.engines if group.degree > cores})
        ]
    return lines


def _idle(config: RunConfig) -> Iterator[tuple[str, Section, tuple[str, ...], str]]:
    """Yield the fields of each section that this run does not read, and why."""
    rollout, algorithm = config.rollout, config.algorithm
    if rollout.mode not in WINDOWED:
        yield "rollout", rollout, ("alpha",), f"in mode {rollout.mode.value}"
    if not scheduling(rollout, config.ablation).predicts:
        yield "rollout", rollout, ("predictor",), "where no priority or placement predicts lengths"
    if not algorithm.kl:
        yield "algorithm", algorithm, ("kl_direction",), "while algorithm.kl is 0"
    if algorithm.correction == "bypass":
        yield "algorithm", algorithm, ("is_cap",), "with algorithm.correction bypass"
    if not algorithm.advantage.startswith("gigpo"):
        yield "algorithm", algorithm, ("gamma",), f"with algorithm.advantage {algorithm.advantage}"
    if not config.warmup.steps:
        yield "warmup", config.warmup, ("batch", "observations"), "while warmup.steps is 0"
    if not config.weights.relays:
        yield "weights", config.weights, ("transport",), "while weights.relays is 0"
    if not config.eval.every:
        yield (
            "eval",
            config.eval,
            ("stop_at",),
            "while eval.every is 0, since periodic evaluations reach it",
        )
    if not config.eval.every and config.eval.final_episodes:
        yield (
            "eval",
            config.eval,
            ("episodes",),
            "while eval.every is 0 (the last evaluation has eval.final_episodes)",
        )
    if not config.faults.latency_s:
        yield "faults", config.faults, ("latency_sigma",), "while faults.latency_s is 0"
    for index, task in enumerate(config.tasks):
        if len(config.tasks) == 1:
            yield f"tasks.{index}", task, ("weight",), "with one task domain"
