"""Sessions of agent programs: the recording, against a slow reference that keeps every
call and compares all pairs.
"""

import itertools
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.rollout.gateway.branches import Call, CallState
from rollweave.rollout.gateway.recorder import SessionRecorder
from rollweave.schema.chat import Message, ToolCall
from rollweave.schema.serving import FinishReason, GenerateResult, VersionSpan
from rollweave.schema.work import Origin, Routes, SegmentKind, SequenceCause, TokenSequence
from tests.support.chats import bpe, codec
from tests.support.properties import examples

OF = codec("tools")
END = OF.stop_token_ids[0]
P, A, B = SegmentKind.PROMPT, SegmentKind.OUTPUT, SegmentKind.OBSERVATION


def user(text: str) -> Message:
    return Message(role="user", content=text)


def result(tokens: list[int], *, mark: float = 1.0, cut: int = 0) -> GenerateResult:
    """Return a result; `mark` makes recognizable log-probs; with `cut` the weights
    change at that token.
    """
    cut = min(cut, len(tokens) - 1)
    spans = [VersionSpan(start=0, end=cut, version=3)] if cut else []
    return GenerateResult(
        id="x",
        tokens=tuple(tokens),
        logprobs=tuple(-mark - place / 1024 for place in range(len(tokens))),
        versions=(*spans, VersionSpan(start=cut, end=len(tokens), version=4)),
        finish=FinishReason.STOP,
    )


def encode(text: str) -> list[int]:
    return list(bpe().encode(text, add_special_tokens=False).ids)


def speak(recorder: SessionRecorder, call: Call, text: str, **options: float) -> Message:
    """Answer with text, and deliver."""
    message = Message(role="assistant", content=text)
    recorder.answer(call, result([*encode(text), END], **options), message)  # type: ignore[arg-type]
    recorder.deliver(call)
    return message


# The random program: what it may do, and a reference that knows only which calls it has
# the answers of.


@dataclass
class Program:
    """An agent program, its recorder, and all calls in the order in which it received
    their answers.
    """

    recorder: SessionRecorder = field(default_factory=lambda: SessionRecorder(OF))
    histories: list[tuple[Message, ...]] = field(default_factory=lambda: [(user("go"),)])
    waiting: list[tuple[Call, tuple[Message, ...], str]] = field(default_factory=list)
    lost: list[tuple[Call, tuple[Message, ...], str]] = field(default_factory=list)
    got: list[Call] = field(default_factory=list)
    prompts: dict[Call, tuple[int, ...]] = field(default_factory=dict)
    exchanged: list[tuple[tuple[Message, ...], Call]] = field(default_factory=list)
    keys: "itertools.count[int]" = field(default_factory=itertools.count)

    def ask(self, history: tuple[Message, ...]) -> None:
        key = f"k{next(self.keys)}"
        call = self.recorder.begin(key, history)
        self.prompts[call] = call.prompt
        assert self.is_a_prompt_of(call.prompt, history)
        self.waiting.append((call, history, key))

    def answer(self, at: int, ids: list[int], text: str, outcome: str) -> None:
        call, history, key = self.waiting.pop(at % len(self.waiting))
        if outcome == "dropped":
            self.recorder.drop(call)
            return
        words = Message(role="assistant", content=text)
        self.recorder.answer(call, result(ids, mark=1.0 + call.number, cut=len(ids) // 2), words)
        self.exchanged.append(((*history, words), call))
        if outcome == "lost":
            self.recorder.lose(call)
            self.lost.append((call, (*history, words), key))
        else:
            self.take(call, (*history, words))

    def repeat(self, at: int) -> None:
        call, history, key = self.lost.pop(at % len(self.lost))
        again = self.recorder.begin(key, history[:-1])
        assert again is call or call.state is CallState.DELIVERED
        if again is call:
            self.take(call, history)
        else:  # it had shown that it knows the answer already: this is another sample
            self.recorder.drop(again)

    def is_a_prompt_of(self, prompt: tuple[int, ...], history: tuple[Message, ...]) -> bool:
        """Return whether these tokens may represent the conversation: they continue all
        of the call where it ends, the longest one; and after it, or from the start, the
        agent's messages are tokens that were sampled in some call.
        """
        ended = [
            (len(past), call) for past, call in self.exchanged if same(past, history[: len(past)])
        ]
        longest = max((length for length, _ in ended), default=0)
        if not longest:
            return self.pieces(prompt, (), history)
        return any(
            prompt[: len(conversation)] == conversation
            and self.pieces(prompt, call.message_tokens, history[longest:], at=len(conversation))
            for length, call in ended
            for conversation in [self.prompts[call] + call.message_tokens]
            if length == longest
        )

    def pieces(
        self,
        prompt: tuple[int, ...],
        words: tuple[int, ...],
        rest: tuple[Message, ...],
        at: int = 0,
    ) -> bool:
        """Return whether the prompt continues from `at` with `rest`, after the agent's
        message `words` (none: at the start).
        """
        places = [
            place
            for place, m in enumerate(rest)
            if m.role == "assistant" and any(same(t[-1:], (m,)) for t, _ in self.exchanged)
        ]
        places = [place for place in places if words or place]
        gap = rest[: places[0]] if places else rest
        between = OF.extend(words, gap) if words else OF.start(gap)
        if prompt[at : at + len(between)] != between:
            return False
        at += len(between)
        if not places:
            return at == len(prompt)
        message = rest[places[0]]
        return any(
            prompt[at : at + len(call.message_tokens)] == call.message_tokens
            and self.pieces(
                prompt, call.message_tokens, rest[places[0] + 1 :], at + len(call.message_tokens)
            )
            for past, call in self.exchanged
            if same(past[-1:], (message,))
        )

    def take(self, call: Call, history: tuple[Message, ...]) -> None:
        self.recorder.deliver(call)
        self.got.append(call)
        self.histories.append(history)


def same(left: tuple[Message, ...], right: tuple[Message, ...]) -> bool:
    def plain(message: Message) -> tuple[str, str]:
        return (
            message.role,
            message.content.strip() if message.role == "assistant" else message.content,
        )

    return [plain(message) for message in left] == [plain(message) for message in right]


def reference(program: Program) -> list[list[tuple[int, bool, float, int]]]:
    """Return (token, output?, log-prob, version) of each position of each sequence,
    from calls in the order of their delivery.
    """
    sequences: list[list[tuple[int, bool, float, int]]] = []
    for call in program.got:
        prompt = program.prompts[call]
        best: list[tuple[int, bool, float, int]] | None = None
        for sequence in sequences:
            tokens = [place[0] for place in sequence]
            if list(prompt[: len(tokens)]) == tokens and (best is None or len(tokens) > len(best)):
                best = sequence
        if best is None:
            best = []
            sequences.append(best)
        best += [(token, False, 0.0, -1) for token in prompt[len(best) :]]
        for span in call.result.versions:
            for place in range(span.start, span.end):
                best.append(
                    (call.result.tokens[place], True, call.result.logprobs[place], span.version)
                )
    return sequences


def flat(sequence: TokenSequence) -> list[tuple[int, bool, float, int]]:
    version = {
        place: segment.version
        for segment in sequence.segments
        for place in range(segment.start, segment.end)
    }
    mask = sequence.output_mask()
    return [
        (token, mask[i], sequence.logprobs[i], version[i])
        for i, token in enumerate(sequence.tokens)
    ]


edits = st.sampled_from(["go on", "edit", "drop the first", "alone", "as is"])
texts = st.sampled_from(["", "a", "b", " b ", "yes\n", "🙂"])
steps = st.one_of(
    st.tuples(
        st.just("ask"),
        st.integers(0, 20),
        texts,
        st.sampled_from(["go on", "edit", "drop the first", "alone", "as is"]),
    ),
    st.tuples(
        st.just("answer"),
        st.integers(0, 20),
        st.lists(st.integers(0, 3) | st.just(END), min_size=1, max_size=4),
        st.tuples(texts, st.sampled_from(["taken", "taken", "taken", "lost", "dropped"])),
    ),
    st.tuples(st.just("repeat"), st.integers(0, 20), st.none(), st.none()),
)


@settings(max_examples=examples(250))
@given(st.lists(steps, max_size=30))
def test_every_delivered_token_is_an_output_exactly_once(does: list[tuple]) -> None:  # type: ignore[type-arg]
    program = Program()
    before: tuple[TokenSequence, ...] = ()
    for kind, at, what, how in does:
        if kind == "ask":
            history = program.histories[at % len(program.histories)]
            if how == "edit":
                history = tuple(user("edited") if m.role == "user" else m for m in history)
            elif how == "drop the first":
                history = (user("sum"), *history[2:])
            elif how == "alone":
                history = ()
            program.ask(history if how == "as is" else (*history, user(what)))
        elif kind == "answer" and program.waiting:
            program.answer(at, what, *how)
        elif kind == "repeat" and program.lost:
            program.repeat(at)
        # What a program sends back, it has: also where the answer had seemed lost.
        delivered = [call for call, _, _ in program.lost if call.state is CallState.DELIVERED]
        program.got += [call for call in delivered if call not in program.got]
        program.lost = [entry for entry in program.lost if entry[0] not in delivered]
        after = program.recorder.sequences()
        for old, new in zip(before, after, strict=False):
            assert new.tokens[: len(old.tokens)] == old.tokens
            assert new.output_mask()[: len(old.tokens)] == old.output_mask()
            assert new.logprobs[: len(old.tokens)] == old.logprobs
        before = after
    sampled = sorted(
        entry
        for call in program.got
        if call.result
        for entry in zip(call.result.tokens, call.result.logprobs, strict=True)
    )
    outputs = sorted(
        (token, logprob) for each in before for token, output, logprob, _ in flat(each) if output
    )
    assert outputs == sampled
    assert [flat(sequence) for sequence in before] == reference(program)
    assert sum(len(sequence.turns) for sequence in before) == len(program.got)


@settings(max_examples=examples(80))
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 390), min_size=1, max_size=6), st.booleans(), texts),
        min_size=1,
        max_size=5,
    )
)
def test_a_program_that_only_appends_has_one_sequence(
    turns: list[tuple[list[int], bool, str]],
) -> None:
    recorder = SessionRecorder(OF)
    history = [user("go")]
    for number, (ids, ended, answer) in enumerate(turns):
        call = recorder.begin(number, history)
        before = recorder.sequences()
        assert not before or call.prompt[: len(before[0].tokens)] == before[0].tokens
        sampled = [*ids, *([END] if ended else [])]
        message = Message(role="assistant", content=OF.text(sampled))
        recorder.answer(call, result(sampled), message)
        recorder.deliver(call)
        history += [message, user(answer)]
    (sequence,) = recorder.sequences()
    assert [segment.kind for segment in sequence.segments] == [P, A, *[B, A] * (len(turns) - 1)]
    assert [list(sequence.tokens[turn.start : turn.end]) for turn in sequence.turns] == [
        [*ids, *([END] if ended else [])] for ids, ended, _ in turns
    ]


def test_prompts_contain_sampled_tokens_not_retokenized_text() -> None:
    recorder = SessionRecorder(OF)
    # by its letters: the tokenizer has a token for the word
    odd = [encode(letter)[0] for letter in "user"]
    assert encode("user") != odd
    assert OF.decode(odd) == "user"
    call = recorder.begin("1", [user("say")])
    recorder.answer(call, result([*odd, END]), Message(role="assistant", content="user"))
    # White space around it is not an edit, nor is an answer that never was marked as
    # delivered a foreign one.
    before = call.prompt
    after = recorder.begin(
        "2", [user("say"), Message(role="assistant", content=" user\n"), user("more")]
    )
    assert after.prompt[: len(before) + 5] == (*before, *odd, END)
    assert call.state is CallState.DELIVERED
    # A context that was rewritten around it keeps the tokens, and counts them in the
    # other sequence only.
    moved = recorder.begin(
        "3", [user("other"), Message(role="assistant", content="user"), user("more")]
    )
    start = len(OF.start([user("other")]))
    assert moved.prompt[start : start + 5] == (*odd, END)
    for each in (after, moved):
        speak(recorder, each, "a")
    first, second = recorder.sequences()
    assert [segment.kind for segment in first.segments] == [P, A, B, A]
    assert [segment.kind for segment in second.segments] == [P, A]


def test_equal_samples_of_one_prompt_are_two_calls_that_continue() -> None:
    recorder = SessionRecorder(OF)
    calls = [recorder.begin(key, [user("q")]) for key in ("1", "2")]
    exchanged = [speak(recorder, call, "a") for call in calls]
    for key, message in zip("34", exchanged, strict=True):
        speak(recorder, recorder.begin(key, [user("q"), message, user("same")]), "b")
    one, other = recorder.sequences()
    assert one == msgspec.structs.replace(other, origin=one.origin)
    assert len(one.turns) == 2


def test_a_repeated_request_counts_once() -> None:
    recorder = SessionRecorder(OF)
    call = recorder.begin("1", [user("q")])
    assert recorder.begin("1", [user("q")], repeated=True) is call  # still under way
    other = recorder.begin("1", [user("q")])  # not exchanged to be a repetition: another sample
    assert other is not call
    recorder.drop(other)
    message = Message(role="assistant", content="a")
    recorder.answer(call, result([*encode("a"), END]), message)
    recorder.lose(call)
    assert recorder.sequences() == ()
    assert recorder.undelivered_tokens == 2
    again = recorder.begin("1", [user("q")])  # the answer was lost: this is for it
    assert again is call
    recorder.deliver(again)
    recorder.deliver(again)
    # it arrived, as far as could be seen
    assert recorder.begin("1", [user("q")], repeated=True) is call
    recorder.deliver(call)
    (sequence,) = recorder.sequences()
    assert len(sequence.turns) == 1
    assert recorder.undelivered_tokens == 0
    assert recorder.calls == 2


def test_a_dropped_request_leaves_no_trace() -> None:
    recorder = SessionRecorder(OF)
    recorder.drop(recorder.begin("1", [user("q")]))
    again = recorder.begin("1", [user("q")], repeated=True)
    assert again.state is CallState.PENDING
    speak(recorder, again, "a")
    assert len(recorder.sequences()) == 1


def test_calls_are_the_same_whatever_their_ids_and_spacing() -> None:
    recorder = SessionRecorder(OF)
    call = recorder.begin("1", [user("q")], ("{}",))
    expected = ToolCall(id="c1", name="add", arguments='{"a": 1}')
    tokens = [*encode('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'), END]
    recorder.answer(
        call, result(tokens), Message(role="assistant", content="", tool_calls=(expected,))
    )
    recorder.deliver(call)
    echoed = ToolCall(id="other", name="add", arguments='{"a":1}')
    history = [
        user("q"),
        Message(role="assistant", content="", tool_calls=(echoed,)),
        Message(role="tool", content="2"),
    ]
    after = recorder.begin("2", history, ("{}",))
    speak(recorder, after, "done")
    (sequence,) = recorder.sequences()
    assert [segment.kind for segment in sequence.segments] == [P, A, B, A]
    assert list(sequence.tokens[sequence.turns[0].start : sequence.turns[0].end]) == tokens
    changed = [
        *history[:1],
        Message(role="assistant", content="", tool_calls=(expected, expected)),
        history[2],
    ]
    assert (
        recorder.begin("3", history, ("{}",)).prompt == sequence.tokens[: sequence.turns[1].start]
    )
    assert (
        recorder.begin("4", changed, ("{}",)).prompt != sequence.tokens[: sequence.turns[1].start]
    )


def test_different_tools_make_a_different_context() -> None:
    recorder = SessionRecorder(OF)
    exchanged = speak(recorder, recorder.begin("1", [user("q")], ('{"a": 1}',)), "a")
    speak(recorder, recorder.begin("2", [user("q"), exchanged, user("r")], ('{"b": 1}',)), "b")
    assert len(recorder.sequences()) == 2


@pytest.mark.parametrize(
    "broken",
    [
        GenerateResult(id="x", tokens=(), logprobs=(), versions=(), finish=FinishReason.STOP),
        GenerateResult(
            id="x", tokens=(1, 2), logprobs=(-1.0,), versions=(), finish=FinishReason.STOP
        ),
        GenerateResult(
            id="x",
            tokens=(1,),
            logprobs=(-1.0,),
            versions=(VersionSpan(start=0, end=1, version=-1),),
            finish=FinishReason.STOP,
        ),
        GenerateResult(
            id="x",
            tokens=(1,),
            logprobs=(-1.0,),
            versions=(VersionSpan(start=0, end=2, version=0),),
            finish=FinishReason.STOP,
        ),
    ],
)
def test_refuses_an_invalid_result(broken: GenerateResult) -> None:
    recorder = SessionRecorder(OF)
    call = recorder.begin("1", [user("q")])
    with pytest.raises(ValueError, match="must"):
        recorder.answer(call, broken, Message(role="assistant", content="a"))
    assert call.state is CallState.PENDING


def test_a_conversation_that_ends_with_the_agent_continues_with_a_turn() -> None:
    recorder = SessionRecorder(OF)
    call = recorder.begin("1", [user("q")])
    prompt = call.prompt
    exchanged = speak(recorder, call, "a")
    again = recorder.begin("2", [user("q"), exchanged])
    assert again.prompt == (*prompt, *encode("a<|im_end|>\n<|im_start|>assistant\n"))
    twice = speak(recorder, again, "b")
    speak(recorder, recorder.begin("3", [user("q"), exchanged, twice, user("r")]), "c")
    (sequence,) = recorder.sequences()
    assert len(sequence.turns) == 3


def test_routes_are_those_of_the_call_that_sampled_a_token() -> None:
    """A later call of the same branch also returns those of tokens before its own."""
    recorder = SessionRecorder(OF)
    exchanged: list[Message] = []
    ends: list[int] = []
    for number in range(3):
        call = recorder.begin(f"k{number}", [user("q"), *exchanged])
        answer = result([*encode("a"), END])
        end = len(call.prompt) + len(answer.tokens) - 1
        routes = Routes(start=0, end=end, layers=1, top_k=1, data=bytes([number]) * end)
        message = Message(role="assistant", content="a")
        recorder.answer(call, msgspec.structs.replace(answer, routes=routes), message)
        recorder.deliver(call)
        exchanged += [message, user(f"m{number}")]
        ends.append(end)
    (sequence,) = recorder.sequences()
    expected = [(0, ends[0]), (ends[0], ends[1]), (ends[1], ends[2])]
    assert [(part.start, part.end) for part in sequence.routes] == expected
    assert [set(part.data) for part in sequence.routes] == [{0}, {1}, {2}]
    assert ends[2] == len(sequence.tokens) - 1


# Why a sequence began.

FIRST, NEW, BRANCH = (
    SequenceCause.FIRST,
    SequenceCause.NEW_CONVERSATION,
    SequenceCause.BRANCH,
)
EDITED, SHORTENED = SequenceCause.HISTORY_EDITED, SequenceCause.HISTORY_SHORTENED


def system(text: str) -> Message:
    return Message(role="system", content=text)


def agent(text: str) -> Message:
    return Message(role="assistant", content=text)


TALK = [system("s"), user("go"), agent("one"), user("and"), agent("two"), user("so")]
DEPARTURES: dict[str, tuple[list[Message], SequenceCause, int]] = {
    "another task": ([system("s"), user("else")], NEW, -1),
    "another system message": ([system("other"), user("go")], NEW, -1),
    "the last turn again": (TALK, BRANCH, -1),
    "an earlier turn again": (TALK[:2], BRANCH, -1),
    "another message after an earlier turn": ([*TALK[:3], user("but")], BRANCH, 3),
    "an edited answer": ([*TALK[:2], agent("1"), *TALK[3:]], EDITED, 2),
    "an edited answer at the end": ([*TALK[:4], agent("2"), user("so")], EDITED, 4),
    "an edited message of the user": ([*TALK[:3], user("then"), *TALK[4:]], EDITED, 3),
    "a system message with the time": ([system("12:00"), *TALK[1:]], EDITED, 0),
    "a summary": ([*TALK[:2], user("I did one and two"), user("so")], SHORTENED, 2),
    "a dropped turn": ([*TALK[:2], *TALK[4:]], SHORTENED, 2),
    "a dropped beginning": (TALK[2:], SHORTENED, 0),
}


@pytest.mark.parametrize("name", DEPARTURES)
def test_a_sequence_tells_why_it_began(name: str) -> None:
    history, cause, message = DEPARTURES[name]
    recorder = SessionRecorder(OF)
    for number, length in enumerate((2, 4, 6)):
        call = recorder.begin(f"k{number}", TALK[:length])
        speak(recorder, call, ("one", "two", "three")[number])
    speak(recorder, recorder.begin("departs", history), "well")
    first, second = recorder.sequences()
    assert first.origin == Origin(cause=FIRST)
    of = -1 if cause is NEW else 0
    role = history[message].role if message >= 0 else ""
    assert second.origin == Origin(cause=cause, of=of, message=message, role=role)


def test_other_tools_or_template_arguments_are_told() -> None:
    recorder = SessionRecorder(codec("tools"))
    speak(recorder, recorder.begin("a", TALK[:2]), "one")
    speak(recorder, recorder.begin("b", TALK[:4], ['{"name": "add"}']), "two")
    switched = SessionRecorder(codec("switched"))
    speak(switched, switched.begin("a", TALK[:2]), "one")
    arguments = '{"enable_thinking": false}'
    speak(switched, switched.begin("b", TALK[:2], arguments=arguments), "two")
    for record, cause, own in (
        (recorder, SequenceCause.TOOLS_CHANGED, ""),
        (switched, SequenceCause.TEMPLATE_CHANGED, arguments),
    ):
        told = record.sequences()[1].origin
        assert told == Origin(cause=cause, of=0, arguments=own)
        assert str(told).endswith(own)


def test_a_departure_is_from_the_sequence_that_is_most_like_it() -> None:
    recorder = SessionRecorder(OF)
    talks = [[system("s"), user(text)] for text in ("a", "b", "c")]
    for number, talk in enumerate(talks):
        speak(recorder, recorder.begin(number, talk), "one")
    for number, talk in enumerate(talks):
        speak(recorder, recorder.begin((number, "again"), talk), "two")
    causes = [sequence.origin for sequence in recorder.sequences()]
    assert causes[1:3] == [Origin(cause=NEW)] * 2
    assert causes[3:] == [Origin(cause=BRANCH, of=number) for number in range(3)]


def test_completions_tell_why_they_began() -> None:
    recorder = SessionRecorder(OF)
    for number, prompt in enumerate(("once", "twice", "once x", "once x")):
        call = recorder.begin(number, (), prompt=prompt)
        recorder.answer(call, result(encode(" x")), Message(role="assistant", content=" x"))
        recorder.deliver(call)
    causes = [sequence.origin.cause for sequence in recorder.sequences() if sequence.origin]
    assert causes == [FIRST, NEW, BRANCH]


def test_an_origin_is_read_as_a_sentence() -> None:
    told = Origin(cause=EDITED, of=0, message=3, role="tool")
    assert str(told) == "history edited, departs from sequence 1 at message 4 (tool)"
    assert str(Origin(cause=FIRST)) == "first"
    given = Origin(cause=SequenceCause.TEMPLATE_CHANGED, of=0, arguments='{"a": 1}')
    assert str(given).endswith('departs from sequence 1, with template arguments {"a": 1}')
