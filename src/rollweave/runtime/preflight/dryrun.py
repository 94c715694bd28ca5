"""Check everything about a run that can be known before it costs anything.

All checks are made even if some fail, so that the user learns of every problem at once.
"""

import functools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from rollweave.engine.server_kinds import check_kinds, kind_of
from rollweave.io import hub
from rollweave.io.extras import how_to_install
from rollweave.io.machine import bound_socket, cores
from rollweave.record.rundir import RunDir
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.driver import EpisodeStopError
from rollweave.runtime.hosts import launchers, user_files
from rollweave.runtime.hosts.hosts import hosts_here
from rollweave.runtime.hosts.serverless import check_platform
from rollweave.runtime.metrics import missing_sinks
from rollweave.runtime.preflight import examiner
from rollweave.runtime.preflight.checks import (
    FORCED,
    Check,
    fail,
    must_pass,
    ok,
    passing,
    refused,
    refusing,
    warn,
)
from rollweave.runtime.preflight.environments import REPEATED, Declared, Domain, as_prepared
from rollweave.runtime.preflight.layout import COMPUTED, Layout
from rollweave.runtime.preflight.model import LEFT_OUT, examine_model, without_overlong
from rollweave.runtime.preflight.site import Site
from rollweave.runtime.processes import engine_spec
from rollweave.runtime.recover import lost, rebuild
from rollweave.runtime.supervisors.relays import check_transport
from rollweave.schema.base import EngineId, Struct
from rollweave.schema.config.conflicts import without_effect
from rollweave.schema.config.engines import EngineConfig
from rollweave.schema.config.rollout import RewardConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, CorruptJournalError, FieldError
from rollweave.schema.events import EngineSlot
from rollweave.schema.hosts import Resources
from rollweave.train.lengths import check_installed

UNUSED = "no effect"
"""Name of the checks for settings without effect."""

SHOWN = (COMPUTED, FORCED, UNUSED, LEFT_OUT, REPEATED)
"""Names of the checks that a real run shows as well."""

PACKAGES = (check_installed, check_transport)
"""Each raises FieldError if a setting needs a package that is not installed."""

REWARD_S = 30.0
"""Maximum seconds for the first reward of a URL or judge, which may have to start."""


class Examination(Struct, frozen=True, kw_only=True):
    """The results of all checks, and the processes of the run if they are known."""

    checks: list[Check]
    config: RunConfig
    """The configuration, without the prompts that are left out."""
    layout: Layout | None
    declared: Declared
    """The declarations of the task domains."""


def examine(
    config: RunConfig, *, resume: bool = False, fresh: bool = False, deep: bool = True
) -> list[Check]:
    """Run all checks, as `plan` does."""
    return plan(config, resume=resume, fresh=fresh, deep=deep).checks


def plan(
    config: RunConfig,
    *,
    resume: bool = False,
    fresh: bool = False,
    deep: bool = True,
    hosts: Mapping[str, Resources] | None = None,
) -> Examination:
    """Run all checks, and predict the processes of the run, on `hosts` if they are
    given, even if these have not joined.

    `deep` also resets an environment of each domain with a task, which may take time
    and acquire resources. Raises ConfigError if a distribution is not installed that
    the run needs.
    """
    check_kinds(config)
    check_platform(config)
    if config.cluster is not None and hosts is None:
        launchers.kind_of(config.cluster)
    rules, domains, domain_checks = _users_code(config, deep=deep)
    config = as_prepared(config, domains)
    config, dropped, measured = without_overlong(config, domains)
    if dropped:
        rules, domains, domain_checks = _users_code(config, deep=deep)
    # to tokenize a data set takes minutes
    domains = [
        replace(domain, prompts=()) if domain.name in measured else domain for domain in domains
    ]
    checks = [
        *_readable_directory(config, resume=resume, fresh=fresh, deep=deep),
        *_sinks(config),
        *rules,
    ]
    checks += [*dropped, *domain_checks]
    declared = Declared(
        words=tuple(dict.fromkeys(word for domain in domains for word in domain.words)),
        images=tuple(image for domain in domains for image in domain.images),
    )
    site = Site(described=hosts)
    model_checks, layout = examine_model(config, domains, site)
    checks += [
        *_ports(config, site),
        *_servers(config, site),
        *_restrictions(config, domains),
        *_packages(config),
        *_rewards(config, site),
        *_roles(config, site),
        *_tokens(config, site),
        *_relays(config),
        *_cluster(config, site, declared.images),
        *model_checks,
        *_target(config),
        *_conflicts(config),
    ]
    return Examination(checks=checks, config=config, layout=layout, declared=declared)


def _users_code(
    config: RunConfig, *, deep: bool
) -> tuple[Sequence[Check], list[Domain], list[Check]]:
    """Check the functions of `[buffer]` and `[[rewards]]`, and the task domains."""
    rules = examiner.examine_rules(config)
    examined = list(examiner.examine_domains(config, deep=deep))
    domains = [one.domain for one in examined if one.domain is not None]
    return rules, domains, [check for one in examined for check in one.checks]


def _conflicts(config: RunConfig) -> Iterator[Check]:
    """Refuse settings that exclude each other, also of a configuration that comes from
    no file, and name the settings without effect.
    """
    yield from map(refused, config.broken_rules())
    for text in without_effect(config).values():
        yield warn(UNUSED, text)
    if config.model.device != "cuda" and config.cluster is None:
        for degree in sorted({group.degree for group in config.engines if group.degree > cores()}):
            yield warn(
                UNUSED,
                f"engines.degree has no effect beyond the {cores()} cores of this machine, got "
                f"{degree}",
            )


def check_first(config: RunConfig, *, resume: bool, fresh: bool) -> None:
    """Raise ConfigError if the run cannot have its engines' kinds, the platform of its
    functions or its directory, before anything else, which takes longer, is checked.
    """
    check_kinds(config)
    check_platform(config)
    must_pass(_readable_directory(config, resume=resume, fresh=fresh, deep=False))


def _readable_directory(config: RunConfig, *, resume: bool, fresh: bool, deep: bool) -> list[Check]:
    try:
        return list(_run_directory(config, resume=resume, fresh=fresh, deep=deep))
    except (OSError, ValueError) as error:  # a name too long, a null byte, no permission
        return [
            fail(
                "run.dir",
                f"must be a readable directory, or not exist yet, got {config.run.dir!r:.200}: "
                f"{error}",
            )
        ]


def _run_directory(config: RunConfig, *, resume: bool, fresh: bool, deep: bool) -> Iterator[Check]:
    run = RunDir(Path(config.run.dir) / config.run.name)
    try:
        if not fresh:
            run.must_fit()
        if resume and run.config.exists():
            run.must_be_writable()
    except ConfigError as error:
        yield fail("run.dir", str(error))
        return
    if resume:
        yield from _resumed(config, run, deep=deep)
        return
    occupied = run.has_content()
    if occupied and not fresh:
        text = "continue it with --resume, delete it with --fresh, or choose another name"
        yield fail("run.name", f"{run.path} holds a run already; {text}")
        return
    parent = run.path
    while not parent.exists():
        parent = parent.parent
    try:  # create a directory, as the run will: /proc and the like refuse only that
        with tempfile.TemporaryDirectory(dir=parent, prefix=".rollweave-"):
            pass
    except OSError as error:
        got = f"{config.run.dir} ({parent}: {error.strerror or error})"
        yield fail("run.dir", f"must be a directory to write to, got {got}")
        return
    yield ok("run.name", f"{run.path}{' (the former run is deleted)' if occupied else ''}")


def _resumed(config: RunConfig, run: RunDir, *, deep: bool) -> Iterator[Check]:
    """Check that the run in this directory can continue with this configuration."""
    if not run.config.exists():
        yield fail("run.name", f"{run.path} must hold a run to resume, found no config.toml")
        return
    if strays := config.strays_from(run.configuration()) if run.journal.exists() else ():
        yield from (fail("--resume", line) for line in strays)
        return
    if not deep:  # the run itself checks the rest before it changes a file
        yield ok("run.name", f"resumes in {run.path}")
        return
    try:
        beginning = rebuild(config, run)
    except (ConfigError, CorruptJournalError) as error:
        for line in str(error).splitlines():
            yield fail("--resume", line.removeprefix("--resume: "))
        return
    where = f"resumes in {run.path} {lost(beginning).describe()}"
    yield ok("run.name", where if beginning.resumed else f"begins in {run.path}")
    yield from (ok("--resume", f"changed since: {line}") for line in beginning.changes)
    yield from (warn("--resume", doubt.message) for doubt in beginning.doubts)


def _sinks(config: RunConfig) -> Iterator[Check]:
    missing = missing_sinks(config.run.sinks)
    for name in config.run.sinks:
        if name in missing:
            yield fail("run.sinks", f"{name} must be installed ({how_to_install(name)}), got none")
        else:
            yield ok("run.sinks", name)


def _servers(config: RunConfig, site: Site) -> Iterator[Check]:
    """Check the interpreters that have the engines' servers; those of other hosts are
    checked there.
    """
    if config.sim is not None or config.cluster is not None or not site.is_here:
        return
    for number, group in enumerate(config.engines):
        field = f"engines.{number}"
        if group.address:
            attached = functools.partial(_attached, config, number, group)
            yield passing(f"{field}.address", attached, ConfigError, within=field)
        elif group.server is not None:
            version = functools.partial(_version, config, group)
            yield passing(f"{field}.python", version, ConfigError)


def _version(config: RunConfig, group: EngineConfig) -> str:
    """Describe the server of a group that the run starts. Raises ConfigError."""
    assert group.server is not None, "the caller checks it"
    kind, routes = kind_of(group.server), config.algorithm.routing_replay
    version = kind.version(group.python, routes=routes, moves_kv=group.phase != "both")
    return f"{kind.name} {version} in {group.python}"


def _attached(config: RunConfig, number: int, group: EngineConfig) -> str:
    """Describe the servers of a group that the run does not start. Raises
    ConfigError.
    """
    run = RunDir(Path(config.run.dir) / config.run.name)
    slot = EngineSlot(id=EngineId(""), degree=group.degree, group=number)
    assert group.server is not None, "the configuration has addresses of servers only"
    kind = kind_of(group.server)
    versions = kind.attached_versions(engine_spec(config, run, slot))
    found = zip(group.address, versions, strict=True)
    return ", ".join(f"{kind.name} {version} at {url}" for url, version in found)


def _restrictions(config: RunConfig, domains: Sequence[Domain]) -> Iterator[Check]:
    """Check that all engines can restrict turns to the words of an action grammar."""
    kinds = {kind_of(group.server) for group in config.engines if group.server is not None}
    names = sorted(kind.name for kind in kinds if not kind.restricts_tokens)
    for domain in domains if names else ():
        if domain.allowed:
            words = ", ".join(domain.allowed)
            yield fail(
                domain.name,
                f"must have no allowed_words with {names[0]}, which cannot restrict a turn to "
                f"certain tokens, got {words:.100}",
            )


def _packages(config: RunConfig) -> Iterator[Check]:
    """Check that the packages are installed that settings need."""
    for check in PACKAGES:
        try:
            check(config)
        except FieldError as error:
            yield refused(error)


def _rewards(config: RunConfig, site: Site) -> Iterator[Check]:
    """Ask each URL and judge for a reward."""
    asked = [(n, one) for n, one in enumerate(config.rewards) if one.url is not None]
    if not site.is_here or not asked:
        return
    # most runs need no HTTP client
    from rollweave.rollout.rewards import check_reward

    def value(reward: RewardConfig) -> str:
        domain = reward.tasks[0] if reward.tasks else config.tasks[0].name
        value = check_reward(reward, domain=domain, limit_s=REWARD_S)
        return f"{reward.name}: {reward.url} answers, with {value:g}"

    for number, reward in asked:
        where, answer = f"rewards.{number}", functools.partial(value, reward)
        yield passing(f"{where}.{reward.kind}", answer, ConfigError, EpisodeStopError, within=where)


def _roles(config: RunConfig, site: Site) -> Iterator[Check]:
    """Check the modules of roles, and the models of judges that the run starts. A
    class is imported when its worker starts, before the run begins.
    """
    if not site.is_here or config.sim is not None:
        return
    for name, role in config.roles.items():
        if role.cls and config.cluster is None and not user_files.is_there(role.cls):
            yield fail(f"roles.{name}.cls", f"must be importable, got {role.cls}: no such module")
    for number, reward in enumerate(config.rewards):
        if reward.embedded and reward.judge is not None:
            where = f"rewards.{number}.judge.model"
            found = functools.partial(_judge_model, reward.judge.model, where)
            yield passing(where, found, ConfigError)


def _judge_model(model: str, field: str) -> str:
    """Describe the model of a judge that the run starts. Raises ConfigError."""
    place = hub.folder(hub.fetched(model, weights=False, field=field))
    ChatCodec.from_directory(place)
    return f"{model}, whose engine starts when a reward needs it"


def _tokens(config: RunConfig, site: Site) -> Iterator[Check]:
    """Check that rollout workers on other hosts get the tokens of the services that
    they ask.
    """
    if config.cluster is None or not config.workers.maximum or not site.is_here:
        return
    variables = [reward.token_variable for reward in config.rewards if reward.url is not None]
    if config.teacher is not None:
        # most runs need no HTTP client
        from rollweave.rollout.teacher import TEACHER_TOKEN

        variables.append(TEACHER_TOKEN)
    for variable in variables:
        if os.environ.get(variable) and variable not in config.cluster.env:
            rule = f"name {variable}, which rollout workers on other hosts need"
            yield refused(FieldError("cluster.env", rule, list(config.cluster.env)))


@refusing
def _cluster(config: RunConfig, site: Site, images: Sequence[str]) -> Iterator[Check]:
    cluster, described = config.cluster, site.described
    if cluster is None:
        if config.loans is not None:
            rule = "be given in a live run with [loans], whose engines are lent by hosts"
            yield refused(FieldError("cluster", rule, "none"))
        return
    if described is None:
        user_files.variables(cluster.env)
        user_files.pack(user_files.of_run(config, images), cluster.files)
        if cluster.address is not None:
            try:
                bound_socket(cluster.host, cluster.port).close()
            except OSError as error:
                got = f"{cluster.address}: {error}"
                raise FieldError(
                    "cluster.address", "be a free address of this host", got
                ) from error
    elif cluster.hosts is not None and cluster.hosts > len(described):
        rule = f"be at most the number of hosts described ({len(described)})"
        raise FieldError("cluster.hosts", rule, cluster.hosts)
    where = f" at {cluster.address}" if cluster.address is not None else ""
    hosts = cluster.hosts or "all"
    yield ok("cluster", f"waits for {hosts} hosts of launcher {cluster.launcher}{where}")


def _relays(config: RunConfig) -> Iterator[Check]:
    weights = config.weights
    if weights.collective:
        yield ok("weights", "the trainer broadcasts them to all engines, without relays")
    if not weights.relays:
        return
    addresses = [host.address for host in hosts_here(weights.relays).by_number.values()]
    try:
        for address in addresses:
            bound_socket(address, 0).close()
    except OSError as error:
        text = f"must each have their own loopback address, {address} is not available: {error}"
        yield fail("weights.relays", text)
    else:
        where = f"{addresses[0]} to {addresses[-1]}"
        yield ok("relays", f"{weights.relays} processes on {where} over {weights.transport}")


def _target(config: RunConfig) -> Iterator[Check]:
    """Warn that no check can tell whether an environment will ever report success."""
    if config.eval.stop_at is not None:
        text = (
            f"{config.eval.stop_at:g} is compared with success, which environments report "
            "(Step.success, Score.success): if one never does, the run trains all of run.steps, "
            "and reports it"
        )
        yield warn("eval.stop_at", text)


def _ports(config: RunConfig, site: Site) -> Iterator[Check]:
    """Check that several ranks on this machine can connect."""
    if config.cluster is not None or not site.is_here or config.trainer.most_ranks == 1:
        return
    try:
        bound_socket("127.0.0.1", 0).close()
    except OSError as error:
        ranks = config.trainer.most_ranks
        text = f"must have a local port on which {ranks} ranks connect, got {error}"
        yield fail("trainer.ranks", text)
    else:
        yield ok("ports", "trainer ranks connect on a free local port; nothing else listens")
