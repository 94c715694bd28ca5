"""Check what can be known about a service before it starts."""

import contextlib

from rollweave.envs.registry import resolve
from rollweave.runtime.preflight.checks import Check, must_pass
from rollweave.runtime.preflight.environments import Domain, examine_domain
from rollweave.runtime.preflight.model import check_context, check_prompts, without_overlong
from rollweave.schema.base import copied
from rollweave.schema.config.root import RunConfig


def examine_service(config: RunConfig) -> tuple[RunConfig, list[Check]]:
    """Check that the model has room for the longest sequences, unless only registered
    engines compute them. Leave out overlong prompts, as `leave_out_overlong` does.
    """
    if config.serve.engines == "local":
        must_pass(check_context(config))
    return leave_out_overlong(config)


def leave_out_overlong(config: RunConfig) -> tuple[RunConfig, list[Check]]:
    """Drop overlong prompts of domains whose `overlong` is "drop". Return the
    configuration, and a warning for each of them. Make no other check.

    Raises ConfigError for a domain of which no prompt would be left, and for a model
    whose tokenizer cannot be read.
    """
    domains = list[Domain]()
    for index, task in enumerate(config.tasks):
        drops = getattr(resolve(task.env), "drops_overlong", None)
        if drops is not None and drops(copied(task.options)):
            with contextlib.chdir("."):  # the user's code may change the directory
                domain, _ = examine_domain(config, index, deep=False)
            domains += [domain] if domain is not None else []
    config, checks, measured = without_overlong(config, domains)
    must_pass(check_prompts(config, [one for one in domains if one.name not in measured]))
    return config, checks
