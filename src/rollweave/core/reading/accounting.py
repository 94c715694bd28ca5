"""The account of a run: where every training trajectory that was started went."""

from rollweave.core.state import GroupStatus, State
from rollweave.schema.base import Struct
from rollweave.schema.work import Purpose


class Account(Struct, frozen=True, kw_only=True):
    """started = trained + dropped (by reason) + cancelled + buffered + in_flight.

    At the end of a run `in_flight` is 0.
    """

    started: int
    trained: int
    dropped: dict[str, int]
    cancelled: int
    buffered: int
    in_flight: int

    @property
    def balanced(self) -> bool:
        return (
            self.started
            == self.trained
            + sum(self.dropped.values())
            + self.cancelled
            + self.buffered
            + self.in_flight
        )


def account(state: State) -> Account:
    counters = state.counters
    buffered = in_flight = 0
    for trajectory in state.trajectories.values():
        group = state.groups[trajectory.group_id]
        if not trajectory.started or group.purpose is not Purpose.TRAIN:
            continue
        chosen = trajectory.id in group.chosen
        if chosen and group.status is GroupStatus.BUFFERED:
            buffered += 1
        elif not (chosen and group.status in (GroupStatus.TRAINED, GroupStatus.COVERED)):
            in_flight += 1
    return Account(
        started=counters.started,
        trained=counters.trained,
        dropped=dict(counters.dropped),
        cancelled=counters.cancelled,
        buffered=buffered,
        in_flight=in_flight,
    )
