"""Recorded turns are used for their own contexts, and only if their weights survive."""

import msgspec
import pytest

from rollweave.record.turn_log import TurnAnswer, TurnRecord, TurnTokens, context_digest
from rollweave.rollout.turn_parts import PartialTurn, RecordedTurns
from rollweave.schema import serving as s
from rollweave.schema.base import TrajectoryId

ID, MOST = TrajectoryId("g0.0"), s.Sampling(max_tokens=100)


def context(turn: int) -> tuple[int, ...]:
    return tuple(range(10 * turn + 5))


def spans(versions: str, start: int = 0) -> tuple[s.VersionSpan, ...]:
    """One span for each run of equal digits: "334" are two tokens of 3 and one of 4."""
    spans, begin = list[s.VersionSpan](), 0
    for end in range(1, len(versions) + 1):
        if end == len(versions) or versions[end] != versions[begin]:
            version = int(versions[begin])
            spans.append(s.VersionSpan(start=start + begin, end=start + end, version=version))
            begin = end
    return tuple(spans)


def answer(turn: int, versions: str = "333") -> TurnAnswer:
    count = len(versions)
    result = s.GenerateResult(
        id="r",
        tokens=tuple(range(count)),
        logprobs=(-0.5,) * count,
        versions=spans(versions),
        finish=s.FinishReason.STOP,
        generate_s=float(count),
    )
    digest = context_digest(context(turn), MOST)
    return TurnAnswer(trajectory_id=ID, attempt=0, turn=turn, context=digest, result=result)


def tokens(turn: int, versions: str = "33", *, start: int = 0) -> TurnTokens:
    end = start + len(versions)
    delta = s.TokenDelta(
        id="r",
        start=start,
        tokens=tuple(range(start, end)),
        logprobs=(-0.5,) * len(versions),
        versions=spans(versions, start),
        generate_s=float(end),
    )
    digest = context_digest(context(turn), MOST)
    return TurnTokens(trajectory_id=ID, attempt=0, turn=turn, context=digest, delta=delta)


def known(records: list[TurnRecord], version: int = 9) -> list[tuple[int, bool]]:
    """Return the number of tokens of each turn that is used, and whether it is an
    answer.
    """
    recorded, taken = RecordedTurns(records, version=version), list[tuple[int, bool]]()
    while (turn := recorded.take(len(taken), context(len(taken)), MOST)) is not None:
        taken.append((len(turn), turn.answer is not None))
    return taken


def test_turns_are_assembled_from_their_records() -> None:
    assert known([]) == []
    assert known([tokens(0), tokens(0, start=2)]) == [(4, False)]
    assert known([tokens(0), answer(0), tokens(1)]) == [(3, True), (2, False)]
    assert known([tokens(0), tokens(0, start=2), tokens(0, "3")]) == [(1, False)], "started over"
    assert known([tokens(0), tokens(0, start=3)]) == [], "there is a gap"
    assert known([tokens(0, start=2)]) == [], "the beginning is missing"
    assert known([answer(1)]) == [], "an earlier turn is missing"
    assert known([tokens(0), answer(1)]) == [(2, False)], "nothing follows an unfinished turn"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        *((9, [(3, True), (4, True), (2, False)]), (5, [(3, True), (4, True), (2, False)])),
        *((4, [(3, True), (3, False)]), (3, [(3, True), (1, False)]), (2, [])),
    ],
)
def test_tokens_of_lost_versions_are_cut_off(
    version: int, expected: list[tuple[int, bool]]
) -> None:
    assert known([answer(0), answer(1, "3445"), tokens(2, "55")], version) == expected


def test_a_cut_turn_keeps_tokens_log_probs_and_versions_together() -> None:
    recorded = RecordedTurns([answer(0, "3345")], version=4)
    turn = recorded.take(0, context(0), MOST)
    assert turn.partial.tokens == (0, 1, 2)
    assert turn.partial.versions == spans("334")
    assert turn.partial.generate_s == 3.0


def test_another_context_ends_the_use_of_records() -> None:
    recorded = RecordedTurns([answer(0), answer(1)], version=9)
    assert recorded.take(0, (9, 9), MOST) is None
    assert recorded.take(1, context(1), MOST) is None


def test_a_turn_that_is_longer_than_allowed_is_not_used() -> None:
    assert (
        RecordedTurns([answer(0)], version=9).take(0, context(0), s.Sampling(max_tokens=2)) is None
    )
    assert (
        RecordedTurns([answer(0)], version=9).take(0, context(0), s.Sampling(max_tokens=3))
        is not None
    )


def test_records_of_another_attempt_have_what_is_left() -> None:
    recorded = RecordedTurns([answer(0), answer(1, "3345")], version=4)
    again = list(recorded.records(ID, 7))
    assert {record.attempt for record in again} == {7}
    assert known(again) == known([answer(0), answer(1, "3345")], 4) == [(3, True), (3, False)]


def test_a_turn_that_was_sampled_in_another_way_is_not_used() -> None:
    """The run was resumed with another temperature."""
    recorded = RecordedTurns([answer(0)], version=9)
    assert recorded.take(0, context(0), s.Sampling(temperature=0.6, max_tokens=100)) is None


@pytest.mark.parametrize(("most", "answered"), [(3, True), (4, False)])
def test_an_answer_that_a_lower_limit_cut_goes_on(most: int, *, answered: bool) -> None:
    whole = answer(0, "334")
    cut = msgspec.structs.replace(whole.result, finish=s.FinishReason.LENGTH)
    recorded = RecordedTurns([msgspec.structs.replace(whole, result=cut)], version=9)
    turn = recorded.take(0, context(0), s.Sampling(max_tokens=most))
    assert (turn.answer == cut, turn.partial is None) == (answered, answered)
    if turn.partial is not None:
        assert turn.partial.tokens == cut.tokens
        assert turn.partial.versions == cut.versions


def test_a_long_turn_is_assembled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are not copied again for each record."""
    built = list[int]()

    def partial(self: PartialTurn) -> s.PartialOutput | None:
        built.append(len(self))
        return whole(self)

    whole = PartialTurn.partial.fget
    assert whole is not None
    monkeypatch.setattr(PartialTurn, "partial", property(partial))
    RecordedTurns([tokens(0, start=start) for start in range(0, 40, 2)], version=9)
    assert built == [40]
