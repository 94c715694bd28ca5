"""The hosts of one run. They are gathered before the world starts; later changes are
reported to it.

Without a cluster this machine is the only host, and nothing listens. With one, agents
join the controller; its own machine is a host only if an agent runs there.

Invariants: a controller names one of a closed list of programs, and neither modules nor
options nor environment variables of processes; the agent enforces what its operator
allows, and the controller compares its configuration with that when the host joins.
"""

import asyncio
import contextlib
import functools
import hashlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from rollweave.core.policy.binding import pools_of, slots_of
from rollweave.core.policy.waiting import Wait
from rollweave.io.disk import replace_file
from rollweave.io.reading import whole
from rollweave.record.rundir import RunDir
from rollweave.runtime.hosts import user_files
from rollweave.runtime.hosts.hosts import LOOPBACK, Host, Hosts, hosts_here
from rollweave.runtime.hosts.launchers import Launcher, kind_of
from rollweave.runtime.hosts.listener import HostListener
from rollweave.runtime.hosts.remote import LEASE_S, RemoteHost
from rollweave.runtime.hosts.user_files import UserFiles, pack, variables
from rollweave.runtime.tasks import Tasks, name_long_waits
from rollweave.schema.config.engines import ClusterConfig, EngineConfig, PoolConfig, RoleConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.events import Event, HostJoined, HostLost, Lender, LendersReported
from rollweave.schema.hosts import (
    JOIN_S,
    HostAccepted,
    HostSlot,
    JoinHost,
    Program,
    Programs,
    Resources,
)
from rollweave.schema.serving import SERVER_PYTHON

SECRET_VARIABLE = "ROLLWEAVE_HOST_SECRET"
"""Environment variable with the secret of the run, which controller and agents may read
in place of its file.
"""

SECRET_FILE_BYTES = 1 << 16
"""Maximum size of the file with the secret."""

SECRET_BYTES = 32
"""Number of random bytes in a generated secret."""

REPORT_S = 10.0
"""Seconds between two reports of the engines that hosts lend, if nothing changes."""

UNHEARD_S = 30.0
"""Seconds without a report of a host about the engine that it lends, as if the engine
hangs, after which the engine is left out of the run's reports: its lease then ends.
"""

CHANGE_S = 0.2
"""Minimum seconds between two reports of these engines."""

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
    if config.workers.maximum:
        yield Hosted(
            program=Program.WORKER,
            setting="workers.pool",
            pools=config.pools_of(config.workers.pool),
            user_code="workers.count",
        )
    judges = [reward.name for reward in config.rewards if reward.embedded]
    for name in dict.fromkeys([*config.roles, *judges]):
        role = config.roles.get(name, RoleConfig())
        yield Hosted(
            program=Program.ROLE,
            setting=f"roles.{name}.pool",
            pools=config.pools_of(role.pool),
            user_code=f"roles.{name}.cls" if role.cls else "",
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


@dataclass(frozen=True, kw_only=True)
class _Member:
    number: int
    remote: RemoteHost


class GatheredHosts:
    """The hosts of a run, or of a role of the user's program.

    `on_status` receives lines for the user.
    """

    def __init__(
        self,
        cluster: ClusterConfig | None,
        pools: Mapping[str, PoolConfig],
        run: RunDir,
        tasks: Tasks,
        *,
        relays: int = 0,
        user: UserFiles | None = None,
        hosted: Iterable[Hosted] = (),
        programs: Programs | None = None,
        loans: str = "",
        on_status: Callable[[str], None],
    ) -> None:
        """Without a cluster, this machine stands for `relays` hosts. Each host of a
        cluster that runs the user's code gets the files of `user`. `hosted` are the
        programs that the hosts must run, and `programs` the modules of those on this
        machine. `loans` is the name of the run if it borrows engines ([loans]): hosts
        that lend are then reported to it, and run nothing else for it.
        """
        self._loans = loans if cluster is not None else ""
        self._lenders_changed = asyncio.Event()
        self._cluster, self._pools, self._run = cluster, pools, run
        self._user, self._hosted = user or UserFiles(), tuple(hosted)
        self._programs = programs or Programs()
        self._tasks, self._on_status = tasks, on_status
        self._numbers = itertools.count()
        self._members: dict[str, _Member] = {}
        self._changed = asyncio.Event()
        self._post: Callable[[Event], None] | None = None
        self._listener: HostListener | None = None
        self._launcher: Launcher | None = None
        self._where = ""
        """Address and port on which the controller listens."""
        self.address = str(LOOPBACK)
        """The address at which all hosts reach the controller."""
        self._reserved: dict[str, set[int]] = {}
        """The GPUs of roles, by the name of their host."""
        self._pending: list[str] = []
        """Reports of the launcher about agents that have not started yet."""
        self._refusal = self._wrong_secret = ""
        """Reasons why the last host was refused, and the last one with a wrong secret.
        """
        self._wanted, self._until = 0, 0.0
        """Number of hosts that `gather` waits for, and until when."""
        self.hosts: Hosts = hosts_here(relays, self._programs)
        self.slots: tuple[HostSlot, ...] = ()
        """The hosts with which the world starts; empty for this machine alone."""

    async def gather(self) -> None:
        """Start the launcher, if there is one, and wait until `cluster.hosts` hosts
        have joined.

        Raises `ConfigError` if they do not join in time or cannot join, or if the
        address is not free.
        """
        cluster = self._cluster
        if cluster is None:
            return
        self.hosts = Hosts()
        if (kind := kind_of(cluster)) is not None:
            self._launcher = kind(
                cluster,
                self._run.logs,
                self._programs,
                labels=[pool.resource for pool in self._pools.values()],
                on_status=self._on_pending,
                fail=self._on_refused,
            )
        reach = None if self._launcher is None else await self._launcher.open()
        host = cluster.host or (reach.address if reach is not None else "")
        wanted = cluster.hosts or (reach.hosts if reach is not None else 1)
        secret = self._secret()
        self._listener = self._listen(cluster, host, secret)
        self._where, self.address = f"{host}:{self._listener.port}", host
        if self._launcher is None:
            given = SECRET_VARIABLE in os.environ
            option = "" if given else f" --secret-file {self._run.host_secret}"
            option += options_for(self._hosted, cluster.env)
            self._on_status(
                f"waiting for {wanted} hosts: rollweave host --join {self._where}{option}"
            )
        else:
            self._launcher.start((host, self._listener.port), secret)
            self._on_status(f"waiting for {wanted} hosts")
        self._wanted, self._until = wanted, time.monotonic() + JOIN_S
        naming = self._tasks.spawn(self._name_long_wait(wanted), "name the wait for hosts")
        try:
            async with asyncio.timeout(JOIN_S):
                await self._until_joined(wanted)
        except TimeoutError:
            refused = [
                f"refused: {error}" for error in (self._refusal, self._wrong_secret) if error
            ]
            raise ConfigError(
                f"cluster.hosts: {wanted} hosts must join within {JOIN_S:g} s, "
                f"got {'; '.join([self._present(), *self._pending, *refused])}"
            ) from None
        finally:
            naming.cancel()
        self._number_from_zero()
        self.slots = tuple(self._slot(member) for member in self._members.values())

    async def _until_joined(self, wanted: int) -> None:
        """Wait until `wanted` hosts have joined. Raises `ConfigError` if one that a
        launcher has started cannot join.
        """
        while len(self.present()) < wanted:
            if self._refusal and self._launcher is not None:
                raise ConfigError(self._refusal)
            self._changed.clear()
            await self._changed.wait()

    def _number_from_zero(self) -> None:
        """Number the hosts anew. Some may have left, but a world begins with the hosts
        0, 1, …, and a relay on each.
        """
        by_number = self.hosts.by_number
        members = [
            _Member(number=number, remote=member.remote)
            for number, member in enumerate(self._members.values())
        ]
        self.hosts.by_number = {
            member.number: by_number[self._members[member.remote.name].number] for member in members
        }
        self._members = {member.remote.name: member for member in members}
        self._numbers = itertools.count(len(members))

    async def _name_long_wait(self, hosts: int) -> None:
        """Report from time to time which hosts have joined."""
        began = time.monotonic()

        def waits() -> list[Wait]:
            joined = len(self.present())
            what = f"{joined} of {hosts} joined {self._where} so far: {self._present()}"
            return [Wait(component="hosts", what=what, since=began)]

        await name_long_waits(
            waits, clock=time.monotonic, report=lambda _, line: self._on_status(line)
        )

    def _present(self) -> str:
        """Name the hosts that have joined, and those that are about to."""
        lending = {name for name, one in self._members.items() if self._only_lends(one.remote)}
        named = (f"{name} (lends)" if name in lending else name for name in self._members)
        names = ", ".join(named) or "none"
        entering = ", ".join(self._listener.entering) if self._listener is not None else ""
        return f"{names}; entering the run: {entering}" if entering else names

    def report_to(self, post: Callable[[Event], None]) -> None:
        """Post an event for every host that joins or is lost from now on, and at once
        for those that have joined or were lost since `gather`.
        """
        self._post = post
        numbers = {member.number for member in self._members.values()}
        for slot in self.slots:
            if slot.number not in numbers:
                post(HostLost(host=slot.number, error="its connection ended"))
        known = {slot.number for slot in self.slots}
        for member in self._members.values():
            if self.slots and member.number not in known:
                post(HostJoined(host=self._slot(member)))
        if self._loans:
            self._tasks.spawn(self._report_lenders(post), "report the engines that hosts lend")

    async def _report_lenders(self, post: Callable[[Event], None]) -> None:
        """Report the engines that hosts lend from time to time, and when one of them
        changes.
        """
        while True:
            self._lenders_changed.clear()
            if lenders := tuple(self._lenders()):
                post(LendersReported(lenders=lenders))
            await asyncio.sleep(CHANGE_S)  # a host that changes its mind all the time
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S - CHANGE_S):
                    await self._lenders_changed.wait()

    def _lenders(self) -> Iterator[Lender]:
        """Yield the engines that hosts lend and have reported in the last
        `UNHEARD_S`.
        """
        for name, member in self._members.items():
            remote = member.remote
            state = remote.lender(within_s=UNHEARD_S)
            if state is not None and self._only_lends(remote):
                yield Lender(
                    name=name,
                    host=member.number,
                    kv_use=state.kv_use,
                    lent_to=self._loans if remote.has_engine else "",
                    takes=state.takes,
                    recalled=state.recalled,
                )

    def _only_lends(self, remote: RemoteHost) -> bool:
        """True if the run has nothing on this host but an engine that it borrows."""
        return bool(self._loans) and remote.lends

    def present(self) -> dict[str, Resources]:
        """Return the resources of each host that has joined and does more than lend, by
        its name.
        """
        return {
            name: member.remote.resources
            for name, member in self._members.items()
            if not self._only_lends(member.remote)
        }

    def joined(self) -> tuple[HostSlot, ...]:
        """Return the hosts that have joined, without the GPUs of roles."""
        return tuple(self._slot(member) for member in self._members.values())

    def reserve(self, host: str, devices: Iterable[int]) -> None:
        """Keep GPUs of a host from all other processes, also if the host joins anew."""
        self._reserved.setdefault(host, set()).update(devices)

    async def close(self) -> None:
        """Release all hosts."""
        if self._listener is not None:
            await self._listener.close()
        if self._launcher is not None:
            await self._launcher.close()

    def _slot(self, member: _Member) -> HostSlot:
        remote = member.remote
        if self._only_lends(remote):
            return HostSlot(
                number=member.number,
                name=remote.name,
                machine=remote.name,
                cpus=remote.resources.cpus,
                lends=True,
            )
        slot = slot_of(self._pools, member.number, remote.name, remote.resources)
        taken = self._reserved.get(remote.name, ())
        devices = tuple(one for one in slot.devices if one not in taken)
        return msgspec.structs.replace(slot, devices=devices)

    def _listen(self, cluster: ClusterConfig, host: str, secret: bytes) -> HostListener:
        run, mark = self._run, secrets.token_hex(SECRET_BYTES)
        archive = pack(self._user, cluster.files)
        replace_file(run.host_mark, mark.encode())
        listener = HostListener(
            secret=secret,
            accepted=HostAccepted(
                lease_s=LEASE_S,
                mark_path=str(run.host_mark),
                mark=mark,
                env=variables(cluster.env),
                archive_bytes=len(archive),
                digest=hashlib.sha256(archive).digest(),
                modules=self._user.modules,
                loans=bool(self._loans),
            ),
            archive=archive,
            tasks=self._tasks,
            on_joined=self._on_joined,
            on_lost=self._on_lost,
            on_refused=self._on_refused,
            on_wrong_secret=self._on_wrong_secret,
            on_cut=self._on_status,
            refusal=functools.partial(self._refused, cluster.env),
        )
        try:
            listener.listen(host, cluster.port)
        except OSError as error:
            raise ConfigError(
                "cluster.address must be a free address of this host, got "
                f"{cluster.address or host}: {error}"
            ) from None
        return listener

    def _refused(self, names: Iterable[str], joined: JoinHost) -> str:
        """Return why the run does not take a host whose operator allows too little."""
        if self._loans and joined.lends:
            return ""
        return refusal(joined, pools_of(self._pools, joined.resources), self._hosted, names)

    def _secret(self) -> bytes:
        """Return the secret in the environment, or else that of the run, which is
        created if it does not exist.
        """
        if text := os.environ.get(SECRET_VARIABLE, "").strip():
            return text.encode()
        file = self._run.host_secret
        if not file.exists():
            replace_file(file, f"{secrets.token_hex(SECRET_BYTES)}\n".encode(), mode=0o600)
        return whole(file, SECRET_FILE_BYTES).strip()

    def _on_joined(self, remote: RemoteHost) -> None:
        member = self._members[remote.name] = _Member(number=next(self._numbers), remote=remote)
        self.hosts.by_number[member.number] = Host(
            name=remote.name, address=remote.address, starting=remote.starting
        )
        remote.on_lender = self._lenders_changed.set
        self._lenders_changed.set()  # its first report may have come
        self._changed.set()
        if self._post is not None:
            self._post(HostJoined(host=self._slot(member)))
        else:
            self._on_status(f"host {remote.name} has joined")

    def _on_pending(self, line: str) -> None:
        """Report why an agent is not started yet."""
        self._pending.append(line)
        self._on_status(line)

    def _on_refused(self, error: str) -> None:
        """Report why a host cannot join."""
        if self._post is None and self._launcher is not None:
            self._refusal = error
            self._changed.set()
        elif self._post is None:
            self._refusal = error
            self._on_status(f"{error}{self._further_wait()}")
        else:
            self._on_status(error)

    def _on_wrong_secret(self, error: str) -> None:
        """Report a host with a wrong secret, which must not end the run."""
        self._wrong_secret = error
        self._on_status(f"{error}{self._further_wait()}")

    def _further_wait(self) -> str:
        """Describe how long the run still waits for a host in place of a refused one,
        which the user may start at any time; "" if it does not wait.
        """
        missing, left_s = self._wanted - len(self.present()), self._until - time.monotonic()
        if self._post is not None or missing < 1 or left_s <= 0:
            return ""
        return f"; the run waits up to {left_s:.0f} s for {missing} more of {self._wanted} hosts"

    def _on_lost(self, remote: RemoteHost, reason: str) -> None:
        member = self._members.pop(remote.name)
        del self.hosts.by_number[member.number]
        if self._post is not None:
            self._post(HostLost(host=member.number, error=reason))
        else:
            self._on_status(f"host {remote.name} is lost: {reason}")


def slot_of(
    pools: Mapping[str, PoolConfig], number: int, name: str, resources: Resources
) -> HostSlot:
    """Return the host of this number and name, with its devices and pools."""
    return HostSlot(
        number=number,
        name=name,
        machine=name,
        cpus=resources.cpus,
        devices=tuple(device.index for device in resources.devices),
        pools=pools_of(pools, resources),
        slots=slots_of(pools, resources),
    )
