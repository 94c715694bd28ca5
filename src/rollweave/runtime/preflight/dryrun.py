"""Check everything about a run that can be known before it costs anything.

All checks are made even if some fail, so that the user learns of every problem at once.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from rollweave.core.mechanisms.membership.members import first_engines
from rollweave.engine.servers.attached import check_servers
from rollweave.engine.servers.kinds import kind_of
from rollweave.envs.rules import named
from rollweave.io.extras import how_to_install
from rollweave.io.sockets import bound_socket
from rollweave.record.rundir import RunDir
from rollweave.rollout.budget import EpisodeStopError
from rollweave.runtime.hosts import user_files
from rollweave.runtime.hosts.hosts import hosts_here
from rollweave.runtime.hosts.launchers import check_launcher
from rollweave.runtime.hosts.serverless import check_platform
from rollweave.runtime.preflight import examiner
from rollweave.runtime.preflight.checks import FORCED, Check, fail, must_pass, ok, refused, warn
from rollweave.runtime.preflight.environments import (
    REPEATED,
    Declared,
    Domain,
    examine_domain,
    examine_rules,
)
from rollweave.runtime.preflight.layout import COMPUTED, Layout
from rollweave.runtime.preflight.machine import cores
from rollweave.runtime.preflight.model import (
    LEFT_OUT,
    examine_model,
    without_overlong,
)
from rollweave.runtime.processes import server_spec
from rollweave.runtime.recover import lost, rebuild
from rollweave.runtime.sinks import missing_sinks
from rollweave.runtime.supervisors.relays import missing_extra
from rollweave.schema.base import EngineId, Struct
from rollweave.schema.config.engines import EngineConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, CorruptJournalError, FieldError
from rollweave.schema.hosts import Resources
from rollweave.schema.serving import EngineSpec
from rollweave.train.lengths import check_installed

UNUSED = "no effect"
"""Name of the checks for settings without effect."""

SHOWN = (COMPUTED, FORCED, UNUSED, LEFT_OUT, REPEATED)
"""Names of the checks that a real run shows as well."""

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
    trains: bool = True,
    hosts: Mapping[str, Resources] | None = None,
) -> Examination:
    """Run all checks, and predict the processes of the run, on `hosts` if they are
    given, even if these have not joined.

    `deep` also resets an environment of each domain with a task, which may take time
    and acquire resources. `trains` is false for an evaluation.
    """
    rules, domains, domain_checks = _users_code(config, deep=deep)
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
    model_checks, layout = examine_model(config, domains, hosts)
    checks += [
        *_cpu(config, hosts),
        *_servers(config, elsewhere=hosts is not None),
        *_restrictions(config, domains),
        *_rewards(config, elsewhere=hosts is not None),
        *_relays(config),
        *_cluster(config, hosts, declared.images),
        *_predictor(config),
        *model_checks,
        *_target(config),
        *_conflicts(config),
    ]
    return Examination(checks=checks, config=config, layout=layout, declared=declared)


def _users_code(
    config: RunConfig, *, deep: bool
) -> tuple[Sequence[Check], list[Domain], list[Check]]:
    """Check the functions of `[buffer]` and `[[rewards]]`, and the task domains: in
    another process if the run has rollout workers, whose controller runs no
    environment.
    """
    rules: Sequence[Check] = ()
    if config.workers.count:
        functions = named(config) or any(one.function is not None for one in config.rewards)
        rules = examiner.examine_rules(config) if functions else ()
        examined = [(one.domain, one.checks) for one in examiner.examine_domains(config, deep=deep)]
    else:
        with contextlib.chdir("."):  # the user's code may change the directory
            rules = tuple(examine_rules(config))
        examined = []
        for index in range(len(config.tasks)):
            with contextlib.chdir("."):
                domain, checks = examine_domain(config, index, deep=deep)
            examined.append((domain, tuple(checks)))
    domains = [domain for domain, _ in examined if domain is not None]
    return rules, domains, [check for _, checks in examined for check in checks]


def _conflicts(config: RunConfig) -> Iterator[Check]:
    """Refuse settings that exclude each other, also of a configuration that comes from
    no file.
    """
    yield from map(refused, config.broken_rules())
    if config.model.device != "cuda" and config.cluster is None:
        for degree in sorted({group.degree for group in config.engines if group.degree > cores()}):
            yield warn(
                UNUSED,
                f"engines.degree has no effect beyond the {cores()} cores of this machine, got "
                f"{degree}",
            )


def check_directory(config: RunConfig, *, resume: bool, fresh: bool) -> None:
    """Raise ConfigError if the run cannot have its directory, before anything else,
    which takes longer, is checked.
    """
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
    path = Path(config.run.dir) / config.run.name
    run = RunDir(path)
    try:
        run.must_fit()
    except ConfigError as error:
        if not fresh:
            yield fail("run.dir", str(error))
            return
    if resume:
        if not run.config.exists():
            yield fail("run.name", f"{path} must hold a run to resume, found no config.toml")
            return
        try:
            run.must_be_writable()
        except ConfigError as error:
            yield fail("run.dir", str(error))
            return
        if strays := config.strays_from(run.configuration()) if run.journal.exists() else ():
            yield from (fail("--resume", line) for line in strays)
            return
        if not deep:  # the run itself checks the rest before it changes a file
            yield ok("run.name", f"resumes in {path}")
            return
        try:
            beginning = rebuild(config, run)
        except (ConfigError, CorruptJournalError) as error:
            yield from (
                fail("--resume", line.removeprefix("--resume: "))
                for line in str(error).splitlines()
            )
            return
        yield ok(
            "run.name",
            f"resumes in {path} {lost(beginning).describe()}"
            if beginning.resumed
            else f"begins in {path}",
        )
        yield from (ok("--resume", f"changed since: {line}") for line in beginning.changes)
        yield from (warn("--resume", doubt.message) for doubt in beginning.doubts)
        return
    occupied = run.has_content()
    if occupied and not fresh:
        yield fail(
            "run.name",
            f"{path} holds a run already; continue it with --resume, delete it with "
            "--fresh, or choose another name",
        )
        return
    parent = path
    while not parent.exists():
        parent = parent.parent
    try:  # create a directory, as the run will: /proc and the like refuse only that
        with tempfile.TemporaryDirectory(dir=parent, prefix=".rollweave-"):
            pass
    except OSError as error:
        yield fail(
            "run.dir",
            f"must be a directory to write to, got {config.run.dir} ({parent}: "
            f"{error.strerror or error})",
        )
        return
    yield ok("run.name", f"{path}{' (the former run is deleted)' if occupied else ''}")


def _sinks(config: RunConfig) -> Iterator[Check]:
    missing = missing_sinks(config.run.sinks)
    for name in config.run.sinks:
        if name in missing:
            yield fail("run.sinks", f"{name} must be installed ({how_to_install(name)}), got none")
        else:
            yield ok("run.sinks", name)


def _servers(config: RunConfig, *, elsewhere: bool) -> Iterator[Check]:
    """Check the interpreters that have the engines' servers; those of other hosts are
    checked there.
    """
    if config.sim is not None or config.cluster is not None or elsewhere:
        return
    for number, group in enumerate(config.engines):
        if group.address:
            yield _attached(config, number, group)
        elif group.server is not None:
            kind = kind_of(group.server)
            field = f"engines.{number}.python"
            try:
                version = kind.version(
                    group.python,
                    routes=config.algorithm.routing_replay,
                    moves_kv=group.phase != "both",
                )
                yield ok(field, f"{kind.name} {version} in {group.python}")
            except ConfigError as error:
                yield fail(field, str(error))


def _attached(config: RunConfig, number: int, group: EngineConfig) -> Check:
    """Check the servers of a group that the run does not start."""
    field = f"engines.{number}"
    directory = Path(config.run.dir) / config.run.name
    try:
        server = server_spec(config, group, degree=group.degree, directory=directory)
    except FieldError as error:
        return refused(error, field)
    assert config.model.path is not None, "its server has a checkpoint"
    assert group.server is not None, "the configuration has addresses of servers only"
    kind = kind_of(group.server)
    spec = EngineSpec(
        id=EngineId(""),
        model=str(Path(config.model.path).absolute()),
        dtype=config.model.dtype,
        max_slots=group.max_slots,
        kv_tokens=group.kv_tokens,
        deterministic=group.deterministic,
        prefix_cache="prefix_cache" not in config.ablation.without,
        server=server,
    )
    try:
        servers = check_servers(kind, spec)
    except ConfigError as error:
        return fail(f"{field}.address", str(error))
    detail = ", ".join(
        f"{kind.name} {about.version} at {url}"
        for url, about in zip(group.address, servers, strict=True)
    )
    return ok(f"{field}.address", detail)


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


def _rewards(config: RunConfig, *, elsewhere: bool) -> Iterator[Check]:
    """Check that functions can be deployed, and ask each URL and judge for a reward. A
    run that is planned for other hosts asks none.
    """
    try:
        check_platform(config)
    except FieldError as error:
        yield refused(error)
    asked = [(n, one) for n, one in enumerate(config.rewards) if one.function is None]
    if elsewhere or not asked:
        return
    # most runs need no HTTP client
    from rollweave.rollout.reward_check import check_reward

    for number, reward in asked:
        where = f"rewards.{number}"
        domain = reward.tasks[0] if reward.tasks else config.tasks[0].name
        try:
            value = check_reward(reward, domain=domain, limit_s=REWARD_S)
        except FieldError as error:
            yield refused(error, where)
        except EpisodeStopError as error:
            yield fail(f"{where}.{reward.kind}", str(error))
        else:
            url = reward.url if reward.judge is None else reward.judge.url
            yield ok(f"{where}.{reward.kind}", f"{reward.name}: {url} answers, with {value:g}")


def _predictor(config: RunConfig) -> Iterator[Check]:
    try:
        check_installed(config)
    except FieldError as error:
        yield refused(error)


def _cluster(
    config: RunConfig, hosts: Mapping[str, Resources] | None, images: Sequence[str]
) -> Iterator[Check]:
    cluster = config.cluster
    if cluster is None:
        return
    where = f" at {cluster.address}" if cluster.address is not None else ""
    text = f"waits for {cluster.hosts or 'all'} hosts of launcher {cluster.launcher}{where}"
    if hosts is not None:
        if cluster.hosts is not None and cluster.hosts > len(hosts):
            yield fail(
                "cluster.hosts",
                f"must be at most the number of hosts described ({len(hosts)}), got "
                f"{cluster.hosts}",
            )
        else:
            yield ok("cluster", text)
        return
    try:
        check_launcher(cluster)
        user_files.variables(cluster.env)
        user_files.pack(user_files.of_run(config, images), cluster.files)
        if cluster.address is not None:
            bound_socket(cluster.host, cluster.port).close()
    except FieldError as error:
        yield refused(error)
    except OSError as error:
        yield fail(
            "cluster.address",
            f"must be a free address of this host, got {cluster.address}: {error}",
        )
    else:
        yield ok("cluster", text)


def _relays(config: RunConfig) -> Iterator[Check]:
    weights = config.weights
    if not weights.relays:
        return
    if (extra := missing_extra(weights)) is not None:
        yield fail(
            "weights.transport", f"{extra} must be installed ({how_to_install(extra)}), got none"
        )
    addresses = [host.address for host in hosts_here(weights.relays).by_number.values()]
    try:
        for address in addresses:
            bound_socket(address, 0).close()
    except OSError as error:
        yield fail(
            "weights.relays",
            f"must each have their own loopback address, {address} is not available: {error}",
        )
    else:
        first, last = addresses[0], addresses[-1]
        yield ok(
            "relays", f"{weights.relays} processes on {first} to {last} over {weights.transport}"
        )


def _target(config: RunConfig) -> Iterator[Check]:
    """Warn that no check can tell whether an environment will ever report success."""
    if config.eval.stop_at is not None:
        text = (
            f"{config.eval.stop_at:g} is compared with success, which environments report "
            "(Step.success, Score.success): if one never does, the run trains all of run.steps, "
            "and reports it"
        )
        yield warn("eval.stop_at", text)


def _cpu(config: RunConfig, hosts: Mapping[str, Resources] | None) -> Iterator[Check]:
    if config.cluster is not None or hosts is not None:
        return
    trainer, degrees = config.trainer, [slot.degree for slot in first_engines(config)]
    threads = sum(degrees) + trainer.ranks
    engines = " + ".join(
        f"{degrees.count(degree)} engines × {degree}" for degree in dict.fromkeys(degrees)
    )
    text = f"{engines} + {trainer.ranks} trainers on {cores()} cores"
    yield (
        ok("cores", text) if threads <= cores() else warn("cores", f"{text}: they will share cores")
    )
    if trainer.ranks > 1:
        try:
            bound_socket("127.0.0.1", 0).close()
        except OSError as error:
            yield fail(
                "trainer.ranks",
                f"must have a local port on which {trainer.ranks} ranks connect, got {error}",
            )
        else:
            yield ok("ports", "trainer ranks connect on a free local port; nothing else listens")
