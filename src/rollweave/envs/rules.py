"""Functions of the user's that a configuration names to decide what is trained on (`policy/experience.Rule`)."""

from rollweave.envs.registry import load
from rollweave.policy.experience import Rule
from rollweave.schema.config import RunConfig
from rollweave.schema.errors import ConfigError


def rules_of(config: RunConfig) -> dict[str, Rule]:
    """By `package.module:function`. Raises ConfigError for what cannot be imported or called."""
    found: dict[str, Rule] = {}
    for knob, name in (("buffer.sample", config.buffer.sample), ("buffer.evict", config.buffer.evict)):
        if ":" not in name:
            continue
        found[name] = load(name, what=knob)
        if not callable(found[name]):
            raise ConfigError(f"{knob} must be a function, got {type(found[name]).__name__} at {name}")
    return found
