"""Asynchronous DAPO: against a reference that keeps a list of all groups there ever
were and looks through it each time.
"""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.service.tests.adapters.accounts import balances
from rollweave.core.policy.redundancy import GroupDecision
from rollweave_service.adapters.dapo_policy import Dapo, DapoRule
from tests.support.properties import examples


@dataclass
class Record:
    version: int
    state: str = "under way"
    ended_at: int = -1


class Reference:
    """The same decisions, from the whole history."""

    def __init__(self, rule: DapoRule) -> None:
        self.rule, self.groups, self.clock = rule, list[Record](), 0
        self.version, self.following = -1, 0

    def of(self, state: str) -> list[int]:
        return [number for number, group in enumerate(self.groups) if group.state == state]

    def too_old(self, number: int) -> bool:
        return self.following - self.groups[number].version > self.rule.staleness

    def room(self) -> int:
        """One at a time, while the batch that it would be in, were all before it in
        batches, is not too far ahead.
        """
        if self.version < 0:
            return 0
        room, under_way, ready = (
            0,
            len(self.of("under way")),
            len(self.of("under way")) + len(self.of("ready")),
        )
        spare = max(0, self.rule.under_way - self.rule.groups)
        batches = max(0, self.version + self.rule.staleness - self.following + 1)
        while under_way + room < self.rule.under_way and ready + room < (
            batches * self.rule.groups + spare if batches else 0
        ):
            room += 1
        return room

    def sweep(self) -> list[int]:
        stopped = [number for number in self.of("under way") if self.too_old(number)]
        for number in stopped:
            self.groups[number].state = "cancelled"
        for number in self.of("ready"):
            if self.too_old(number):
                self.groups[number].state = "stale"
        return stopped

    def end(self, number: int, rewards: list[float]) -> None:
        self.clock += 1
        group = self.groups[number]
        group.ended_at = self.clock
        few = len(rewards) < self.rule.min_members
        group.state = "failed" if few else "filtered" if len(set(rewards)) == 1 else "ready"

    def take(self) -> list[int] | None:
        fresh = [number for number in self.of("ready") if not self.too_old(number)]
        fresh.sort(key=lambda number: (self.groups[number].version, self.groups[number].ended_at))
        if len(fresh) < self.rule.groups:
            return None
        for number in fresh[: self.rule.groups]:
            self.groups[number].state = "used"
        self.following = self.version + 1
        return fresh[: self.rule.groups]


rules = st.builds(
    DapoRule,
    groups=st.integers(1, 4),
    group_size=st.integers(2, 3),
    under_way=st.integers(1, 9),
    staleness=st.integers(0, 3),
)


@settings(max_examples=examples(400))
@given(rule=rules, data=st.data())
def test_every_decision_is_the_references_and_no_group_is_lost_or_used_twice(
    rule: DapoRule, data: st.DataObject
) -> None:
    dapo, slow = Dapo(rule), Reference(rule)
    used: set[int] = set()
    for _ in range(data.draw(st.integers(1, 60))):
        choice = data.draw(st.sampled_from(["ask", "end", "end", "end", "begin", "begin", "take"]))
        if choice == "ask":
            version = max(slow.version, 0) + data.draw(st.integers(0, 2))
            dapo.request_batch(version)
            slow.version = slow.following = version
        elif choice == "end" and (under_way := slow.of("under way")):
            number = data.draw(st.sampled_from(under_way))
            rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0]), max_size=rule.group_size))
            dapo.end_group(number, rewards)
            slow.end(number, rewards)
        elif choice == "begin":
            for _ in range(min(dapo.room(), data.draw(st.integers(1, 9)))):
                assert dapo.start_group() == len(slow.groups)
                slow.groups.append(Record(slow.version))
        elif choice == "take":
            batch = dapo.take()
            assert batch == slow.take()
            if batch is not None:
                assert len(batch) == rule.groups
                assert all(
                    slow.version - slow.groups[number].version <= rule.staleness for number in batch
                )
                assert not used & set(batch)
                used |= set(batch)
        assert dapo.overdue() == slow.sweep()
        assert dapo.room() == slow.room()
        assert list(dapo.under_way) == slow.of("under way")
        assert sorted(dapo.ready) == slow.of("ready")
        assert len(dapo.under_way) <= rule.under_way
        account = dapo.account
        assert balances(account)
        counted = (
            account.started,
            account.used,
            account.filtered,
            account.failed,
            account.stale,
            account.cancelled,
        )
        assert counted == (
            len(slow.groups),
            *(len(slow.of(s)) for s in ("used", "filtered", "failed", "stale", "cancelled")),
        )
    assert set(dapo.abandon()) == set(slow.of("under way"))
    assert (dapo.account.carried, balances(dapo.account)) == (0, True)


@settings(max_examples=examples(200))
@given(rule=rules, informative=st.lists(st.booleans(), min_size=1, max_size=20), data=st.data())
def test_an_asker_always_gets_its_batch(
    rule: DapoRule, informative: list[bool], data: st.DataObject
) -> None:
    """Whatever the order in which groups end, there is room until the batch is full, if
    one group in a while is informative.
    """
    dapo, outcomes = Dapo(rule), [*informative, True]
    for version in range(4):
        dapo.request_batch(version)
        for _ in range(1000):
            dapo.overdue()
            if dapo.take() is not None:
                break
            for _ in range(dapo.room()):
                dapo.start_group()
            group = data.draw(st.sampled_from(list(dapo.under_way)))
            dapo.end_group(group, [0.0, float(outcomes[group % len(outcomes)])])
        else:
            raise AssertionError("no batch")


def one_batch(rule: DapoRule) -> Dapo:
    """A state in which a batch has just been taken: as many groups as allowed have
    started, the first `groups` ended.
    """
    dapo = Dapo(rule)
    dapo.request_batch(0)
    for _ in range(dapo.room()):
        dapo.start_group()
    for group in range(rule.groups):
        assert dapo.end_group(group, [0.0, 1.0]) is GroupDecision.COMPLETE
    assert dapo.take() == list(range(rule.groups))
    return dapo


def test_on_policy_a_full_batch_cancels_groups_in_flight() -> None:
    dapo = one_batch(DapoRule(groups=2, group_size=2, under_way=5, staleness=0))
    assert (dapo.overdue(), dapo.room()) == ([2, 3, 4], 0)
    assert dapo.end_group(2, [0.0, 1.0]) is GroupDecision.INCOMPLETE  # it was too late
    assert (dapo.account.cancelled, dapo.account.failed, dapo.account.carried) == (3, 0, 0)
    dapo.request_batch(1)
    assert dapo.room() == 5


def test_within_the_bound_groups_continue_and_are_replenished_during_training() -> None:
    dapo = one_batch(DapoRule(groups=2, group_size=2, under_way=5, staleness=1))
    assert (dapo.overdue(), list(dapo.under_way), dapo.room()) == ([], [2, 3, 4], 2)
    dapo.end_group(2, [1.0, 1.0])
    assert (dapo.account.filtered, dapo.room()) == (1, 3)
    dapo.end_group(3, [0.0, 1.0])
    dapo.end_group(4, [0.0, 1.0])
    dapo.request_batch(1)
    assert dapo.take() == [3, 4]  # at once


def test_reports_groups_that_only_fail() -> None:
    dapo = Dapo(DapoRule(groups=1, group_size=2, under_way=1, staleness=1))
    dapo.request_batch(0)
    for _ in range(4):
        assert not dapo.hopeless()
        dapo.end_group(dapo.start_group(), [])
    assert "failed without one reward" in dapo.hopeless()
    dapo.end_group(dapo.start_group(), [1.0])
    assert not dapo.hopeless()
    for _ in range(100):
        assert not dapo.hopeless()
        dapo.end_group(dapo.start_group(), [1.0, 1.0])
    assert "nothing is left to learn from" in dapo.hopeless()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groups": 0}, "groups must be at least 1, got 0"),
        ({"group_size": 1}, "group_size must be at least 2, got 1"),
        ({"under_way": 0}, "under_way must be at least 1, got 0"),
        ({"min_members": 1}, "min_members must be at least 2, got 1"),
        ({"min_members": 9}, r"min_members must be at most group_size \(4\), got 9"),
        ({"staleness": -1}, "staleness must be at least 0, got -1"),
    ],
)
def test_refuses_an_invalid_rule(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DapoRule(**{"groups": 2, "group_size": 4, "under_way": 4, "staleness": 1, **fields})


def test_the_least_rule_is_accepted() -> None:
    least = {"groups": 1, "group_size": 2, "under_way": 1, "staleness": 0, "min_members": 2}
    rule = DapoRule(**least)
    assert {name: getattr(rule, name) for name in least} == least


def test_versions_do_not_go_back() -> None:
    dapo = Dapo(DapoRule(groups=1, group_size=2, under_way=1, staleness=1))
    with pytest.raises(ValueError, match="version must not go back below 0, got -1"):
        dapo.request_batch(-1)
    dapo.request_batch(3)
    with pytest.raises(ValueError, match="version must not go back below 3, got 2"):
        dapo.request_batch(2)
