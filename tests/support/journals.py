"""The journal of a run that is over, checked."""

import itertools
from pathlib import Path

from rollweave.record.journal import Replay
from rollweave.record.rundir import RunDir
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig
from tests.support.referee import Referee


def checked_journal(config: RunConfig) -> tuple[Referee, list[e.Event], list[c.Command]]:
    """Return the journal, checked against the contract between the core and its
    worlds.
    """
    run = RunDir(Path(config.run.dir) / config.run.name)
    replay, referee = Replay(run.journal, config), Referee()
    history = list(replay)
    referee.watch(history)
    assert replay.differing == 0
    assert referee.owed() == []
    return (
        referee,
        [event for _, event, _ in history],
        list(itertools.chain.from_iterable(commands for _, _, commands in history)),
    )
