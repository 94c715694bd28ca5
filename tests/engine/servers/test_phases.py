"""The line about an update in the log of an engine is read as it was written."""

from pathlib import Path

import pytest

from benchmarks.vllm.phases import read_updates
from rollweave.engine.servers.reports import PHASES, UpdateTimes


def test_an_update_is_read_from_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = UpdateTimes()
    with pytest.raises(ValueError, match="refused"), times.measured("swap"):
        raise ValueError("refused")
    times.seconds["pause"] = 1.5
    times.report(7)
    log = tmp_path / "e0.log"
    log.write_text(f"INFO: started\n{capsys.readouterr().err}weights v8 were lost\n")
    (update,) = read_updates(log)
    assert tuple(update) == PHASES
    assert update["pause"] == 1.5
    assert 0 <= update["swap"] < 1
    assert update["bring"] == 0.0
