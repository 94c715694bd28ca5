"""Run the agent programs of `clients.py`, and say what came of each."""

from collections.abc import Awaitable
from typing import Any, Final

from benchmarks.agents.clients import Adder, Program, Sum
from benchmarks.agents.features import Cell, Outcome
from benchmarks.agents.scripted import CALL, CALLS, Scripted, scripted
from rollweave.schema.work import SequenceCause

ANSWER: Final = "It is 5."
LONGEST: Final = 300
"""Maximum number of characters of an error that is shown."""


async def try_program(program: Program) -> dict[str, Cell]:
    """Return what came of each feature that the program has."""
    cells = {
        "tools": await _episode(program, streamed=False),
        "tools, streamed": await _episode(program, streamed=True),
    }
    if not program.says:
        cells["parallel calls"] = await _episode(program, streamed=False, says=CALLS)
    if program.form is not None:
        async with scripted('{"sum": 5}') as gateway:
            cells["JSON schema"] = await _asked(
                program.form(gateway), lambda answer: _is_constrained(gateway, answer)
            )
    if program.two is not None:
        async with scripted(ANSWER) as gateway:
            cells["n of 2"] = await _asked(program.two(gateway), lambda _: False)
    return cells


async def _episode(program: Program, *, streamed: bool, says: str = CALL) -> Cell:
    """Let the program add with its tool. It works if the tool was called, the program
    has the answer, and the recording is what it must be.
    """
    tool = Adder()
    async with scripted(*(program.says or (says, ANSWER))) as gateway:
        try:
            answer = await program.run(gateway, tool, streamed)
        except Exception as error:
            return _refusal(error)
        wrong = _wrong(gateway, rewrites=streamed in program.rewrites)
    if answer != ANSWER:
        wrong = f"the program has the answer {answer!r:.80}"
    if sorted(tool.added) != ([(2, 3), (4, 3)] if says == CALLS else [(2, 3)]):
        wrong = f"the tool was called with {tool.added}"
    return Cell(outcome=Outcome.FAILED if wrong else Outcome.WORKS, detail=wrong)


def _wrong(gateway: Scripted, *, rewrites: bool) -> str:
    """Return what is wrong with the recording, or ""."""
    sequences = gateway.sequences()
    script = gateway.script
    if sum(len(sequence.turns) for sequence in sequences) != len(script.prompts):
        return f"{len(script.prompts)} turns are recorded as {sequences}"
    starts = [sequence.tokens[: turn.start] for sequence in sequences for turn in sequence.turns]
    if sorted(starts) != sorted(script.prompts):
        return "a turn does not follow the prompt from which it was sampled"
    causes = [sequence.origin.cause for sequence in sequences if sequence.origin is not None]
    if not rewrites:
        return "" if causes == [SequenceCause.FIRST] else f"its sequences are {causes}"
    edited = (SequenceCause.HISTORY_EDITED, SequenceCause.HISTORY_SHORTENED)
    return "" if all(cause in edited for cause in causes[1:]) and len(causes) > 1 else f"{causes}"


def _is_constrained(gateway: Scripted, answer: Any) -> bool:
    constraint = gateway.script.samplings[-1].constraint
    return isinstance(answer, Sum) and answer.sum == 5 and constraint is not None


async def _asked(asking: Awaitable[Any], honored: Any) -> Cell:
    try:
        answer = await asking
    except Exception as error:
        return _refusal(error)
    return Cell(outcome=Outcome.WORKS if honored(answer) else Outcome.IGNORED)


def _refusal(error: BaseException) -> Cell:
    """Return the cell of a program that raised: it was refused if the error has the
    form of a refusal.
    """
    text = f"{type(error).__name__}: {error}"
    named = ", got " in text or "must be" in text
    return Cell(outcome=Outcome.REFUSED if named else Outcome.FAILED, detail=text[:LONGEST])
