"""Check the configuration of a service before the service starts."""

import contextlib

from rollweave.engine.server_kinds import check_kinds
from rollweave.runtime.preflight.checks import Check, must_pass, warn
from rollweave.runtime.preflight.dryrun import UNUSED
from rollweave.runtime.preflight.environments import (
    Domain,
    as_prepared,
    drops_overlong,
    examine_domain,
)
from rollweave.runtime.preflight.model import check_context, check_prompts, without_overlong
from rollweave.schema.config.conflicts import without_effect
from rollweave.schema.config.root import RunConfig


def examine_service(
    config: RunConfig, *, registered: bool = False
) -> tuple[RunConfig, list[Check]]:
    """Check that the model has room for the longest sequences, unless only `registered`
    engines compute them, and drop overlong prompts of domains whose `overlong` is
    "drop". Return the configuration, and a warning for each of these domains, and for
    each setting without effect.

    Raises ConfigError, also for a domain of which no prompt would be left, for a model
    whose tokenizer cannot be read, and for engines of a kind that is not installed.
    """
    if not registered:
        check_kinds(config)
        must_pass(check_context(config))
    domains = list[Domain]()
    for index, task in enumerate(config.tasks):
        if drops_overlong(task):
            with contextlib.chdir("."):  # the user's code may change the directory
                domain, _ = examine_domain(config, index, deep=False)
            domains += [domain] if domain is not None else []
    config = as_prepared(config, domains)
    config, checks, measured = without_overlong(config, domains)
    must_pass(check_prompts(config, [one for one in domains if one.name not in measured]))
    unused = [warn(UNUSED, text) for text in without_effect(config).values()]
    return config, [*checks, *unused]
