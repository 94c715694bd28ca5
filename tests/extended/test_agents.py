"""Agent programs of the package indexes, as they are installed: in the recording
gateway, against the APIs of `rollweave engine`, and in a sandbox.

They are installed once, in the folder that ROLLWEAVE_AGENTS names, or in
~/.cache/rollweave/agents.
"""

import asyncio

import pytest

from benchmarks.agents.installed import PROGRAMS, Installed, default_folder, install
from benchmarks.agents.real import WAYS, run

pytestmark = [pytest.mark.extended, pytest.mark.timeout(2400)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
async def test_a_program_runs_as_it_is_installed(program: Installed, way: str) -> None:
    folder = default_folder()
    if why := await asyncio.to_thread(install, program, folder):
        pytest.skip(why)
    outcome = await run(program, way, folder)
    if outcome.why_not:
        pytest.skip(outcome.why_not)
    assert (outcome.failed, outcome.refused, outcome.silent, outcome.split) == ("", [], [], [])
    assert outcome.turns > 1
    if way != "engine":
        expected = {"first", "new conversation"} | (
            {"history edited"} if program.rewrites else set()
        )
        assert {text.split(",")[0] for text in outcome.sequences} <= expected
