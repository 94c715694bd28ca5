"""Batches for an outside trainer by asynchronous DAPO (ProRL §3.4), out of rollouts of
a service. `core/policy/dapo.py` decides.

Invariants: what `Dapo` has under way is asked for at the service, and nothing else;
what it gives up is cancelled there; closing leaves nothing of it running. Rollouts go
on between two batches, while the trainer trains. A cancelled `next` loses nothing.
"""

import asyncio
import secrets
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self

import msgspec

from rollweave.core.policy.dapo import Account, Dapo, DapoRule
from rollweave.core.policy.redundancy import Verdict
from rollweave.schema.base import Struct
from rollweave.schema.errors import RollweaveError
from rollweave.schema.service import RolloutRequest, RolloutStatus
from rollweave.schema.work import Trajectory
from rollweave.service.client import Addresses, NoServiceError, RolloutClient, ServiceError
from rollweave.service.loop import LoopThread

PATIENCE_S = 300.0
"""For which no service may answer, before a batch is given up: time to start one again."""

PAUSE_S = 1.0
"""Before services of which none answered are asked again."""


class DapoError(RollweaveError):
    """No batch will come any more; the message says why.

    What was under way is cancelled.
    """


class TasksOverError(DapoError):
    """There are no more tasks, and what they came to does not fill a batch."""


class DapoGroup(Struct, frozen=True, kw_only=True):
    """A group to train on: the trajectories that have a reward, whose rewards are not
    all equal, with their token sequences.

    `version` is that of the trainer's weights when it was begun.
    """

    request: RolloutRequest
    version: int
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> list[float]:
        return [
            trajectory.reward for trajectory in self.trajectories if trajectory.reward is not None
        ]


class DapoBatch(Struct, frozen=True, kw_only=True):
    """`rule.groups` groups to train on, from weights `version`; those begun first come
    first.
    """

    version: int
    groups: tuple[DapoGroup, ...]


class DapoBatches:
    """`async with DapoBatches(client, tasks, rule) as batches: batch = await
    batches.next(version=step)`.

    A task's `members` is the rule's group size; one without an id gets one. Belongs to
    the event loop of the client.
    """

    def __init__(
        self,
        client: RolloutClient,
        tasks: Iterable[RolloutRequest],
        rule: DapoRule,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._client, self._tasks, self._rule, self._patience_s = (
            client,
            iter(tasks),
            rule,
            patience_s,
        )
        self._dapo = Dapo(rule)
        self._name = f"dapo-{secrets.token_hex(6)}"
        self._rollouts: dict[int, asyncio.Task[None]] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._groups: dict[int, DapoGroup] = {}
        self._changed = asyncio.Event()
        self._tasks_over = self._asked = False
        self._error: BaseException | None = None
        self._last_failure = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def account(self) -> Account:
        """What became of all groups so far."""
        return self._dapo.account

    async def next(self, *, version: int) -> DapoBatch:
        """A full batch to train on, from weights `version`, which also serve from now
        on. One call at a time.

        Raises TasksOverError, DapoError where no batch can come, NoServiceError,
        ServiceError for a task that is refused for good, whatever the tasks' iterator
        raises, and ValueError for a version below an earlier one.
        """
        if self._asked:
            raise RuntimeError("one batch at a time: next is under way already")
        self._asked = True
        try:
            self._dapo.ask(version)
            while True:
                self._turn()
                if self._error is not None:
                    raise self._error
                numbers = self._dapo.take()
                if numbers is not None:
                    groups = tuple(self._groups.pop(number) for number in numbers)
                    self._turn()  # early termination, and on for the next one
                    return DapoBatch(version=version, groups=groups)
                if self._tasks_over and not self._dapo.under_way:
                    raise TasksOverError(
                        f"the tasks are over: {len(self._dapo.ready)} groups of "
                        f"{self._rule.groups} are informative"
                    )
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._asked = False

    async def close(self) -> None:
        """Cancel at the service what is under way, and wait until it is told."""
        self._fail(DapoError("the batches are closed"))
        while self._stopping:
            await asyncio.gather(*self._stopping, return_exceptions=True)

    # What the policy wants.

    def _turn(self) -> None:
        """Stop what is too old, begin what there is room for."""
        if self._error is not None:
            return
        self._stop(self._dapo.overdue())
        for number in self._groups.keys() - self._dapo.ready.keys():
            del self._groups[number]
        for _ in range(0 if self._tasks_over else self._dapo.room()):
            try:
                request = next(self._tasks)
                if not isinstance(request, RolloutRequest):
                    raise TypeError(f"tasks must be of RolloutRequest, got {request!r:.100}")
            except StopIteration:
                self._tasks_over = True
                return
            except Exception as error:
                self._fail(error)
                return
            number = self._dapo.begun()
            request = msgspec.structs.replace(
                request, members=self._rule.group_size, id=request.id or f"{self._name}/{number}"
            )
            self._rollouts[number] = asyncio.create_task(
                self._run(number, self._dapo.version, request)
            )

    def _stop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            rollout = self._rollouts.pop(number)
            rollout.cancel()
            self._stopping.add(rollout)
            rollout.add_done_callback(self._stopping.discard)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._stop([number for number in self._dapo.abandon() if number in self._rollouts])
        self._groups.clear()
        self._changed.set()

    # One group.

    async def _run(self, number: int, version: int, request: RolloutRequest) -> None:
        try:
            found = await self._rolled_out(request)
        except Exception as error:
            if self._rollouts.pop(number, None) is not None:
                self._fail(error)
            return
        if self._rollouts.pop(number, None) is None:
            return  # stopped, just when it was over
        scored = tuple(result for result in found if result.reward is not None)
        verdict = self._dapo.ended(
            number, [result.reward for result in scored if result.reward is not None]
        )
        if verdict is Verdict.COMPLETE:
            self._groups[number] = DapoGroup(request=request, version=version, trajectories=scored)
        hopeless = self._dapo.hopeless()
        if hopeless:
            self._fail(DapoError(f"{hopeless}; last failure: {self._last_failure or 'none'}"))
        self._turn()
        self._changed.set()

    async def _rolled_out(self, request: RolloutRequest) -> list[Trajectory]:
        """What came of the members; [] where it failed at the service.

        Raises what no other group would fare better with.
        """
        loop, gone_since = asyncio.get_running_loop(), None
        while True:
            try:
                return self._results(await self._client.rollout(request))
            except NoServiceError:
                gone_since = gone_since or loop.time()
                if loop.time() - gone_since >= self._patience_s:
                    raise
                await asyncio.sleep(PAUSE_S)
            except ServiceError as error:
                if error.status < 500 and error.status != 410:
                    raise
                self._last_failure = str(error)
                return []

    def _results(self, status: RolloutStatus) -> list[Trajectory]:
        results = [member.result for member in status.members if member.result is not None]
        for result in results:
            if result.reward is None:
                self._last_failure = f"{result.stop_reason}: {result.error}"
        return results


class DapoRollouts:
    """The same for programs without an event loop: `with DapoRollouts(addresses, tasks,
    rule) as batches: ...`.

    Rollouts go on in a thread of its own; there the tasks are drawn, too.
    """

    def __init__(
        self,
        addresses: Addresses,
        tasks: Iterable[RolloutRequest],
        rule: DapoRule,
        *,
        token: str | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._client = RolloutClient(addresses, token=token)
        self._tasks: Iterator[RolloutRequest] = iter(tasks)
        self._rule, self._patience_s = rule, patience_s
        self._loop = LoopThread("dapo")

    def __enter__(self) -> Self:
        self._loop.start()
        self._batches = self._loop.call(self._open())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._loop.call(self._close())
        finally:
            self._loop.stop()

    def next(self, *, version: int) -> DapoBatch:
        """As that of `DapoBatches`."""
        return self._loop.call(self._batches.next(version=version))

    def close(self) -> None:
        """Cancel what is under way.

        A `next` that another thread waits for raises DapoError.
        """
        self._loop.call(self._batches.close())

    @property
    def account(self) -> Account:
        """What became of all groups so far."""
        return self._batches.account

    async def _open(self) -> DapoBatches:
        await self._client.__aenter__()
        return DapoBatches(self._client, self._tasks, self._rule, patience_s=self._patience_s)

    async def _close(self) -> None:
        await self._batches.close()
        await self._client.__aexit__()
