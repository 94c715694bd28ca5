"""Batches for an external trainer by asynchronous DAPO (ProRL §3.4), made of a
service's rollouts. `dapo_policy` makes the decisions.

Invariants: exactly the groups that `Dapo` counts as under way run at the service; those
that it abandons are cancelled there; closing cancels all of them. Rollouts continue
between two batches, while the trainer trains. Cancelling `next` loses nothing.
"""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from typing import Self

import msgspec

from rollweave.core.policy.redundancy import GroupDecision
from rollweave.schema.base import Struct
from rollweave.schema.errors import RollweaveError
from rollweave.schema.work import Trajectory
from rollweave_service.adapters.dapo_policy import Account, Dapo, DapoRule
from rollweave_service.client import Addresses, NoServiceError, RolloutClient, ServiceError
from rollweave_service.loop_context import LoopContext
from rollweave_service.messages import RolloutRequest, RolloutStatus

PATIENCE_S = 300.0
"""Maximum seconds without an answer from any service before a batch fails: long enough
to restart one.
"""

PAUSE_S = 1.0
"""Seconds before a retry when no service answers."""


class DapoError(RollweaveError):
    """No further batch is possible; the message says why.

    The rollouts under way are cancelled.
    """


class TasksOverError(DapoError):
    """The tasks are exhausted, and the groups that are left do not fill a batch."""


class DapoGroup(Struct, frozen=True, kw_only=True):
    """A group to train on: its trajectories that have a reward, with their token
    sequences. The rewards are not all equal.

    `version` is that of the trainer's weights when the group started.
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
    """`rule.groups` groups on which to train weights `version`: those of the oldest
    weights first, and among these as they were completed.
    """

    version: int
    groups: tuple[DapoGroup, ...]


class DapoBatches:
    """`async with DapoBatches(client, tasks, rule) as batches: batch = await
    batches.next(version=step)`.

    The rule's group size replaces `members` of each task; a task without an id gets
    one. All calls belong to the event loop of the client.
    """

    def __init__(
        self,
        client: RolloutClient,
        tasks: Iterable[RolloutRequest],
        rule: DapoRule,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._client, self._tasks = client, iter(tasks)
        self._rule, self._patience_s = rule, patience_s
        self._dapo = Dapo(rule)
        self._name = f"dapo-{secrets.token_hex(6)}"
        self._rollouts: dict[int, asyncio.Task[None]] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._groups: dict[int, DapoGroup] = {}
        self._changed = asyncio.Event()
        self._tasks_over = self._waiting = False
        self._error: BaseException | None = None
        self._last_failure = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def account(self) -> Account:
        """The counts of all groups so far, by outcome."""
        return self._dapo.account

    async def next(self, *, version: int) -> DapoBatch:
        """Return a full batch on which to train weights `version`, with which the
        engines serve from now on. Only one call may be pending.

        Raises TasksOverError, DapoError if no batch is possible, NoServiceError,
        ServiceError for a task that is refused for good, any error of the tasks'
        iterator, and ValueError for a version below an earlier one.
        """
        if self._waiting:
            raise RuntimeError("only one call of next may be pending")
        self._waiting = True
        try:
            self._dapo.request_batch(version)
            while True:
                self._advance()
                if self._error is not None:
                    raise self._error
                numbers = self._dapo.take()
                if numbers is not None:
                    groups = tuple(self._groups.pop(number) for number in numbers)
                    self._advance()  # stop superfluous groups, and begin those of the next batch
                    return DapoBatch(version=version, groups=groups)
                if self._tasks_over and not self._dapo.under_way:
                    raise TasksOverError(
                        f"no tasks are left: only {len(self._dapo.ready)} of the "
                        f"{self._rule.groups} groups of a batch are informative"
                    )
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._waiting = False

    async def close(self) -> None:
        """Cancel all rollouts that are under way, and wait until the service knows."""
        self._fail(DapoError("the batches are closed"))
        while self._stopping:
            await asyncio.gather(*self._stopping, return_exceptions=True)

    # Decisions of the policy.

    def _advance(self) -> None:
        """Stop groups that are too old, and begin as many new ones as the rule
        allows.
        """
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
            number = self._dapo.start_group()
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
            results = await self._roll_out(request)
        except Exception as error:
            if self._rollouts.pop(number, None) is not None:
                self._fail(error)
            return
        if self._rollouts.pop(number, None) is None:
            return  # it was stopped at the moment at which it was done
        scored = tuple(result for result in results if result.reward is not None)
        decision = self._dapo.end_group(
            number, [result.reward for result in scored if result.reward is not None]
        )
        if decision is GroupDecision.COMPLETE:
            self._groups[number] = DapoGroup(request=request, version=version, trajectories=scored)
        hopeless = self._dapo.hopeless()
        if hopeless:
            self._fail(DapoError(f"{hopeless}; last failure: {self._last_failure or 'none'}"))
        self._advance()
        self._changed.set()

    async def _roll_out(self, request: RolloutRequest) -> list[Trajectory]:
        """Return the members' trajectories, or [] if the rollout failed at the service.

        Raises errors that would meet every other group as well.
        """
        loop, unavailable_since = asyncio.get_running_loop(), None
        while True:
            try:
                return self._results(await self._client.rollout(request))
            except NoServiceError:
                unavailable_since = unavailable_since or loop.time()
                if loop.time() - unavailable_since >= self._patience_s:
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


class DapoRollouts(LoopContext):
    """`DapoBatches` for programs without an event loop: `with DapoRollouts(addresses,
    tasks, rule) as batches: ...`.

    Rollouts continue in a background thread, which also iterates over `tasks`.
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
        super().__init__("dapo")
        self._client = RolloutClient(addresses, token=token)
        self._tasks, self._rule, self._patience_s = iter(tasks), rule, patience_s

    def next(self, *, version: int) -> DapoBatch:
        """Return a full batch, as `DapoBatches.next`."""
        return self._loop.call(self._batches.next(version=version))

    def close(self) -> None:
        """Cancel all rollouts that are under way.

        A pending `next` of another thread raises DapoError.
        """
        self._loop.call(self._batches.close())

    @property
    def account(self) -> Account:
        """The counts of all groups so far, by outcome."""
        return self._batches.account

    async def _open(self) -> None:
        await self._stack.enter_async_context(self._client)
        batches = DapoBatches(self._client, self._tasks, self._rule, patience_s=self._patience_s)
        self._batches = await self._stack.enter_async_context(batches)
