"""The settings that a simulation ignores, so that it can report them: it computes only
time.
"""

from collections.abc import Iterator
from typing import Any

from rollweave.schema.config.conflicts import without_effect
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.sections import SIMULATED_MODEL
from rollweave.schema.config.values import Section

ALL = ()
"""Stands for all fields of a section."""

IGNORED: dict[str, tuple[str, ...]] = {
    "run": ("sinks",),
    "rollout": ("temperature", "top_p"),
    "trainer": (
        "tensor_parallel",
        "lr",
        "final_lr",
        "warmup_steps",
        "weight_decay",
        "max_grad_norm",
        "epochs",
        "micro_tokens",
        "save_memory",
    ),
    "algorithm": ALL,
    "critic": ALL,
    "warmup": ALL,
    "workers": ("count", "pool"),
    "weights": ("transport",),
    "eval": ("temperature", "stop_at"),
    "sandbox": ALL,
    "serve": ALL,
}
"""Section → ignored fields. The core, which is the real one, or the cost models honor
all others.
"""

IGNORED_TASK = ("options", "isolation", "time_s", "algorithm", "env_weight")
IGNORED_ENGINE = ("deterministic",)


def ignored(config: RunConfig) -> list[str]:
    """Return the names of changed settings that a simulation of `config` ignores."""
    names = [] if config.model.path == SIMULATED_MODEL else ["model"]
    for name, fields in IGNORED.items():
        section = getattr(config, name)
        names += [
            f"{name}.{field}"
            for field in _changed(section, fields or tuple(type(section).model_fields))
        ]
    names += ["ablation.without"] if "cuda_graphs" in config.ablation.without else []
    if config.workers.elastic:  # otherwise they start beside the engines
        names = [name for name in names if not name.startswith("workers.")]
    names += ["lora"] if config.lora is not None else []
    names += ["rewards"] if config.rewards else []
    for index, task in enumerate(config.tasks):
        names += [f"tasks.{index}.{field}" for field in _changed(task, IGNORED_TASK)]
    for index, group in enumerate(config.engines):
        where = f"engines.{index}" if len(config.engines) > 1 else "engines"
        names += [f"{where}.{field}" for field in _changed(group, IGNORED_ENGINE)]
    return list(dict.fromkeys([*names, *without_effect(config)]))


def _changed(section: Section, fields: tuple[str, ...]) -> Iterator[str]:
    for field in fields:
        default: Any = type(section).model_fields[field].get_default(call_default_factory=True)
        if getattr(section, field) != default:
            yield field
