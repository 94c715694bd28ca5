"""Compare the needs of a run with the permissions that operators gave on its hosts.

Invariants: a controller names one of a closed list of programs, and neither modules nor
options nor environment variables of processes; the agent enforces what its operator
allows, and the controller compares its configuration with that when the host joins.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rollweave.runtime.hosts import user_files
from rollweave.schema.config.engines import EngineConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import JoinHost, Program
from rollweave.schema.serving import SERVER_PYTHON

USER_CODE, VARIABLE = "--user-code", "--env"
"""Options of `rollweave host`."""

NAMES = {
    Program.ENGINE: "engines",
    Program.SERVER_ENGINE: "inference servers",
    Program.TRAINER: "ranks of the trainer",
    Program.RELAY: "relays",
    Program.WORKER: "rollout workers",
    Program.ROLE: "workers of roles",
}


@dataclass(frozen=True, kw_only=True)
class Hosted:
    """A program of a run, and the `pools` to whose hosts it is bound: any host if there
    are none. `setting` names the pool. `user_code` is the setting for which it runs the
    user's code; "" if it runs none.
    """

    program: Program
    setting: str
    pools: tuple[str, ...] = ()
    user_code: str = ""


def programs_of(config: RunConfig) -> tuple[Hosted, ...]:
    """Return the programs that a run may start on hosts. Every host has a relay."""
    return tuple(_programs_of(config))


def _programs_of(config: RunConfig) -> Iterator[Hosted]:
    several = len(config.engines) > 1
    for number, group in enumerate(config.engines):
        section = f"engines.{number}" if several else "engines"
        own = _own_of_server(group)
        yield Hosted(
            program=Program.ENGINE if group.server is None else Program.SERVER_ENGINE,
            setting=f"{section}.pool",
            pools=config.pools_of(group.pool),
            user_code=f"{section}.{own}" if own else "",
        )
    files = user_files.of_run(config)
    imports = bool(config.warmup.steps and (files.modules or files.paths))
    yield Hosted(
        program=Program.TRAINER,
        setting="trainer.pool",
        pools=config.pools_of(config.trainer.pool),
        user_code="warmup.steps" if imports else "",
    )
    if config.workers.count:
        yield Hosted(
            program=Program.WORKER,
            setting="workers.pool",
            pools=config.pools_of(config.workers.pool),
            user_code="workers.count",
        )


def _own_of_server(group: EngineConfig) -> str:
    """Return the setting by which a server runs what the user names; "" if there is
    none.
    """
    if group.server is None or group.address:
        return ""
    if group.args:
        return "args"
    return "python" if group.python != SERVER_PYTHON else ""


def refusal(
    joined: JoinHost, pools: Iterable[str], hosted: Iterable[Hosted], variables: Iterable[str]
) -> str:
    """Return the line with which a host that belongs to these pools is refused, since
    its operator does not allow what the run asks of it; "" if it may join.

    `variables` are those of `cluster.env`.
    """
    present = set(pools)
    for one in hosted:
        if one.pools and present.isdisjoint(one.pools):
            continue
        named = ", ".join(one.pools) or "none, which stands for all hosts"
        if joined.lends and one.program is not Program.ENGINE:
            return (
                f"host {joined.name} lends an engine, and runs no {NAMES[one.program]}: "
                f"{one.setting} must name a pool without this host, got {named}"
            )
        if one.user_code and not joined.user_code:
            return (
                f"host {joined.name} must run the user's code, since {one.user_code} is set and "
                f"{one.setting} ({named}) includes this host: start its agent with {USER_CODE}"
            )
    missing = [name for name in variables if name not in joined.variables]
    if missing and not joined.lends:
        return (
            f"host {joined.name} must pass on {', '.join(missing)} of cluster.env: start its agent "
            f"with {' '.join(f'{VARIABLE} {name}' for name in missing)}"
        )
    return ""


def options_for(hosted: Iterable[Hosted], variables: Iterable[str]) -> str:
    """Return the options of `rollweave host` that a run needs, each after a space."""
    own = f" {USER_CODE}" if any(one.user_code for one in hosted) else ""
    return own + "".join(f" {VARIABLE} {name}" for name in variables)
