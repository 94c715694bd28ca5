"""A turn resumed after the loss of an engine equals the uninterrupted turn, and its
progress reports are its beginning.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from rollweave.schema import serving as s
from tests.support.properties import examples
from tests.support.tiny_models import VOCAB, Outcome, Seconds, build, drive, request, save, spec

torch.set_num_threads(1)

PROMPTS = [[5, 9, 2, 77], list(range(1, 40)), [(7 * i) % 90 for i in range(23)]]
MAX_TOKENS = 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with a tokenizer: token 4 is "a", 5 is "b", and so on."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(
        models.WordLevel({chr(93 + token): token for token in range(VOCAB)}, unk_token="]")
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(kind))
    return save(build("qwen3"), directory)


@pytest.fixture(scope="module")
def uninterrupted(path: str) -> list[s.GenerateResult]:
    """Run each prompt's uninterrupted turn."""
    requests = [request(str(i), p, seed=i, max_tokens=MAX_TOKENS) for i, p in enumerate(PROMPTS)]
    results = drive(spec(path, deterministic=True), requests).results
    return [results[str(i)] for i in range(len(PROMPTS))]


def cut(result: s.GenerateResult, count: int, **changes: Any) -> s.PartialOutput:
    """Return the first `count` tokens."""
    spans = (s.VersionSpan(start=0, end=count, version=result.versions[0].version),)
    parts: dict[str, Any] = {
        "tokens": result.tokens[:count],
        "logprobs": result.logprobs[:count],
        "versions": spans,
    }
    return s.PartialOutput(**(parts | changes))


def resuming(original: s.GenerateRequest, partial: s.PartialOutput) -> s.GenerateRequest:
    return msgspec.structs.replace(original, resumed=partial)


def pieces(outcome: Outcome) -> list[s.TokenDelta]:
    return [piece for progress in outcome.of(s.Progress) for piece in progress.pieces]


def test_resumed_turn_is_bit_identical_wherever_it_was_cut(
    path: str, uninterrupted: list[s.GenerateResult]
) -> None:
    requests = [
        resuming(
            request(f"{i}.{count}", p, seed=i, max_tokens=MAX_TOKENS), cut(uninterrupted[i], count)
        )
        for i, p in enumerate(PROMPTS)
        for count in range(1, MAX_TOKENS + 1)
    ]
    outcome = drive(spec(path, deterministic=True), requests)
    for i, _ in enumerate(PROMPTS):
        for count in range(1, MAX_TOKENS + 1):
            result = outcome.results[f"{i}.{count}"]
            expected = (uninterrupted[i].tokens, uninterrupted[i].logprobs)
            assert (result.tokens, result.logprobs) == expected
            assert result.versions == uninterrupted[i].versions
            assert result.finish == s.FinishReason.LENGTH
            assert result.resumed_tokens == count
            # of the prompt, whatever it found of the resumed part
            assert result.cached_tokens <= len(PROMPTS[i])
    sampled = sum(MAX_TOKENS - count for count in range(1, MAX_TOKENS + 1)) * len(PROMPTS)
    assert outcome.stats[-1].output_tokens == sampled  # what is resumed is not counted again


@settings(max_examples=examples(12))
@given(st.lists(st.integers(1, 6), max_size=6), st.integers(0, len(PROMPTS) - 1))
def test_chain_of_lost_engines_loses_only_unreported_tokens(
    path: str, uninterrupted: list[s.GenerateResult], cuts: list[int], i: int
) -> None:
    """Each engine lives for a number of steps, one second each, and reports each one;
    then the next engine resumes the turn.
    """
    resumed_request = request("x", PROMPTS[i], seed=i, max_tokens=MAX_TOKENS)
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    for life in [*cuts, MAX_TOKENS]:
        if tokens:
            resumed_request = resuming(
                resumed_request,
                cut(uninterrupted[i], len(tokens), tokens=tokens, logprobs=logprobs),
            )
        at: dict[int, Sequence[s.EngineCommand]] = {
            0: [s.Add(request=resumed_request, report_s=s.PROGRESS_S)],
            life: [s.Abort(id="x")],
        }
        outcome = drive(spec(path, deterministic=True), [], at=at, clock=Seconds())
        for piece in pieces(outcome):
            assert piece.start == len(tokens)
            tokens, logprobs = tokens + piece.tokens, logprobs + piece.logprobs
        result = outcome.results["x"]
        if result.finish is not s.FinishReason.ABORTED:
            assert result.tokens == uninterrupted[i].tokens
            assert result.logprobs == uninterrupted[i].logprobs
            assert result.versions == uninterrupted[i].versions
            return
        assert tokens == uninterrupted[i].tokens[: len(tokens)]
        assert logprobs == uninterrupted[i].logprobs[: len(logprobs)]
    raise AssertionError("the last engine lives for long enough")


def test_spans_continue_and_a_new_version_starts_a_span(
    path: str, uninterrupted: list[s.GenerateResult]
) -> None:
    results = {}
    for version in (-1, 4):
        partial = cut(uninterrupted[0], 5)
        engine = spec(path, deterministic=True, version=version)
        results[version] = (
            drive(engine, [resuming(request("x", PROMPTS[0], max_tokens=9), partial)])
            .results["x"]
            .versions
        )
    assert results[-1] == (s.VersionSpan(start=0, end=9, version=-1),)
    expected = (s.VersionSpan(start=0, end=5, version=-1), s.VersionSpan(start=5, end=9, version=4))
    assert results[4] == expected


def test_resumed_tokens_that_end_the_turn_sample_nothing(
    path: str, uninterrupted: list[s.GenerateResult]
) -> None:
    tokens = uninterrupted[0].tokens
    stop = tokens[6]
    first = tokens.index(stop) + 1
    requests = [
        resuming(request("length", PROMPTS[0], max_tokens=4), cut(uninterrupted[0], 4)),
        resuming(
            request("stop", PROMPTS[0], max_tokens=MAX_TOKENS, stop_token_ids=(stop,)),
            cut(uninterrupted[0], first, generate_s=2.5),
        ),
        resuming(
            request("over", PROMPTS[0], max_tokens=MAX_TOKENS, stop_token_ids=(stop,)),
            cut(uninterrupted[0], first + 1),
        ),
        resuming(request("long", PROMPTS[0], max_tokens=3), cut(uninterrupted[0], 4)),
        resuming(
            request("foreign", PROMPTS[0], max_tokens=9),
            cut(uninterrupted[0], 2, tokens=(1, VOCAB)),
        ),
        resuming(
            request("nan", PROMPTS[0], max_tokens=9),
            cut(uninterrupted[0], 2, logprobs=(-1.0, float("nan"))),
        ),
        resuming(request("room", [1] * 510, max_tokens=9), cut(uninterrupted[0], 3)),
    ]
    outcome = drive(spec(path), requests)
    assert outcome.stats[-1].steps == 0
    length, stopped = outcome.results["length"], outcome.results["stop"]
    expected = (s.FinishReason.LENGTH, tokens[:4], uninterrupted[0].logprobs[:4])
    assert (length.finish, length.tokens, length.logprobs) == expected
    assert stopped.finish == s.FinishReason.STOP
    assert stopped.tokens == tokens[:first]
    assert stopped.generate_s == 2.5
    for name, words in {
        "over": "must end where the turn stops",
        "long": "not be more than the 3 of the whole turn",
        "foreign": "resumed.tokens must be in [0, 97)",
        "nan": "resumed.logprobs must be finite",
        "room": "not be more than the 2 of the whole turn",
    }.items():
        assert outcome.results[name].finish is s.FinishReason.ERROR
        assert words in outcome.results[name].error


def test_stop_string_across_the_boundary(path: str) -> None:
    """Only "a" and "b" are allowed; the turn stops at "ab", wherever it is cut."""
    sampling: dict[str, Any] = {"allowed": (4, 5), "stop": ("ab",), "max_tokens": 30, "seed": 3}
    free = drive(spec(path, deterministic=True), [request("x", PROMPTS[0], **sampling)]).results[
        "x"
    ]
    assert free.finish is s.FinishReason.STOP
    assert free.tokens[-2:] == (4, 5)
    requests = [
        resuming(request(str(count), PROMPTS[0], **sampling), cut(free, count))
        for count in range(1, len(free.tokens) + 1)
    ]
    for result in drive(spec(path, deterministic=True), requests).results.values():
        assert (result.tokens, result.finish) == (free.tokens, s.FinishReason.STOP)


def test_live_id_is_refused_even_for_an_ended_turn(
    path: str, uninterrupted: list[s.GenerateResult]
) -> None:
    ended = s.Add(
        request=resuming(request("x", PROMPTS[0], max_tokens=4), cut(uninterrupted[0], 4))
    )
    outcome = drive(spec(path), [request("x", PROMPTS[0], max_tokens=9)], at={3: [ended]})
    expected = [s.FinishReason.ERROR, s.FinishReason.LENGTH]
    assert [result.finish for result in outcome.answers] == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": (), "logprobs": (), "versions": ()},
        {"logprobs": (-1.0,)},
        {"versions": ()},
        {"versions": (s.VersionSpan(start=0, end=1, version=0),)},
        {
            "versions": (
                s.VersionSpan(start=0, end=1, version=0),
                s.VersionSpan(start=2, end=3, version=0),
            )
        },
        {"generate_s": float("nan")},
    ],
)
def test_inconsistent_partial_output_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        s.PartialOutput(
            **(
                {
                    "tokens": (1, 2),
                    "logprobs": (-1.0, -1.0),
                    "versions": (s.VersionSpan(start=0, end=2, version=0),),
                }
                | changes
            )
        )
    sent = json.dumps({"tokens": [1], "logprobs": [], "versions": []}).encode()
    with pytest.raises(msgspec.ValidationError, match="log-prob"):
        msgspec.json.decode(sent, type=s.PartialOutput)


def test_budget_includes_the_resumed_part(path: str, uninterrupted: list[s.GenerateResult]) -> None:
    """Five of 8 seconds are used up. With one step per second, the last one starts in
    the eighth.
    """
    resumed_request = resuming(
        request("x", PROMPTS[0], max_tokens=MAX_TOKENS), cut(uninterrupted[0], 4, generate_s=5.0)
    )
    result = drive(
        spec(path), [msgspec.structs.replace(resumed_request, budget_s=8.0)], clock=Seconds()
    ).results["x"]
    expected = (s.FinishReason.TIME, 4 + 4, 8.0, 0.0)
    assert (result.finish, len(result.tokens), result.generate_s, result.queue_s) == expected


# Progress.


def grown(reported: Sequence[s.TokenDelta]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Concatenate the deltas of one request, each of which continues the one before."""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    for piece in reported:
        assert piece.start == len(tokens)
        expected = [piece.start, *(span.end for span in piece.versions[:-1])]
        assert [span.start for span in piece.versions] == expected
        assert piece.versions[-1].end == piece.start + len(piece.tokens)
        tokens, logprobs = tokens + piece.tokens, logprobs + piece.logprobs
    return tokens, logprobs


def test_deltas_are_the_beginning_of_the_result_and_none_follows_it(path: str) -> None:
    adds: list[s.EngineCommand] = [
        s.Add(
            request=request(str(i), p, seed=i, max_tokens=4 + 5 * i),
            report_s=s.PROGRESS_S if i != 2 else None,
        )
        for i, p in enumerate(PROMPTS * 2)
    ]
    outcome = drive(
        spec(path, max_slots=3), [], at={0: adds, 4: [s.Abort(id="3")]}, clock=Seconds()
    )
    reported = {
        str(i): [piece for piece in pieces(outcome) if piece.id == str(i)] for i in range(6)
    }
    assert not reported["2"]  # it was not streamed
    for i in (0, 1, 3, 4, 5):
        result, (tokens, logprobs) = outcome.results[str(i)], grown(reported[str(i)])
        assert (tokens, logprobs) == (result.tokens[: len(tokens)], result.logprobs[: len(tokens)])
        # a second passes with each step: all but the last are reported
        assert len(result.tokens) - len(tokens) <= 1
        generate = [piece.generate_s for piece in reported[str(i)]]
        assert generate == sorted(generate)
    for at, reply in enumerate(outcome.replies):
        if isinstance(reply, s.Generated):
            later = [r for r in outcome.replies[at:] if isinstance(r, s.Progress)]
            assert all(
                piece.id != reply.result.id for progress in later for piece in progress.pieces
            )


class Fifths(Seconds):
    """A step takes a fifth of a second."""

    def step(self, *_: object) -> None:
        self.now += 0.2


def test_one_message_reports_all_requests_at_the_interval(path: str) -> None:
    """Every third step is reported, which is after half a second."""
    adds: list[s.EngineCommand] = [
        s.Add(request=request(str(i), p, seed=i, max_tokens=13), report_s=s.PROGRESS_S)
        for i, p in enumerate(PROMPTS)
    ]
    outcome = drive(spec(path), [], at={0: adds}, clock=Fifths())
    sizes = [
        [len(piece.tokens) for piece in progress.pieces] for progress in outcome.of(s.Progress)
    ]
    assert sizes == [[4, 4, 4], [3, 3, 3], [3, 3, 3]]


def test_the_most_impatient_request_sets_the_interval_while_it_lives(path: str) -> None:
    """Every step is reported until the turn that a client reads has ended, and every
    third one from then on.
    """
    adds: list[s.EngineCommand] = [
        s.Add(request=request("slow", PROMPTS[0], max_tokens=13), report_s=s.PROGRESS_S),
        s.Add(request=request("read", PROMPTS[1], max_tokens=5), report_s=s.STREAM_S),
    ]
    outcome = drive(spec(path), [], at={0: adds}, clock=Fifths())
    read, slow = (
        [len(piece.tokens) for piece in pieces(outcome) if piece.id == id]
        for id in ("read", "slow")
    )
    assert read == [2, 1, 1], "the last token comes with the result"
    assert slow == [2, 1, 1, 3, 3]


def test_suspension_reports_all_tokens(path: str) -> None:
    """Time stands still, so nothing is reported by the interval."""
    add = s.Add(request=request("x", PROMPTS[0], max_tokens=12), report_s=s.PROGRESS_S)
    at: dict[int, Sequence[s.EngineCommand]] = {0: [add], 5: [s.Suspend()], 7: [s.Resume()]}

    class Still(Seconds):
        def step(self, *_: object) -> None:
            return

    outcome = drive(spec(path), [], at=at, clock=Still())
    (piece,) = pieces(outcome)
    assert piece.tokens == outcome.results["x"].tokens[: len(piece.tokens)]
    assert 0 < len(piece.tokens) < 12
    kinds = [
        type(reply)
        for reply in outcome.replies
        if isinstance(reply, s.Progress | s.Suspended | s.Generated)
    ]
    assert kinds == [s.Progress, s.Suspended, s.Generated]


def test_resumed_tokens_are_not_reported_again(
    path: str, uninterrupted: list[s.GenerateResult]
) -> None:
    resumed_request = resuming(
        request("x", PROMPTS[0], max_tokens=MAX_TOKENS), cut(uninterrupted[0], 7)
    )
    outcome = drive(
        spec(path),
        [],
        at={0: [s.Add(request=resumed_request, report_s=s.PROGRESS_S)]},
        clock=Seconds(),
    )
    reported = pieces(outcome)
    assert reported[0].start == 7
    assert sum(len(piece.tokens) for piece in reported) >= MAX_TOKENS - 7 - 1
