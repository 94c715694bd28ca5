"""`rollweave advise RUN`: which mode and how many engines, from what a run measured."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from rollweave.cli.advise import Asked, advise, limit_text, mode_text
from rollweave.cli.console import err, out
from rollweave.core.policy.ratio import Candidate, Prediction, fastest_first, limit, listed
from rollweave.record.rundir import RunDir
from rollweave.runtime.hosts.resources import devices as gpus
from rollweave.runtime.preflight.checks import human_seconds
from rollweave.runtime.preflight.machine import cores
from rollweave.schema.errors import ConfigError, RollweaveError
from rollweave.sim.advise import LISTED
from rollweave.sim.rerun import (
    Recording,
    candidates,
    itself,
    predict,
    read_recording,
    recorded_shares,
)


def answer(target: str | None, overrides: Sequence[str], asked: Asked, *, as_json: bool) -> None:
    """Advise on the run whose directory `target` is, or else on a configuration. Raises
    ConfigError.
    """
    if target is None or not RunDir(Path(target)).journal.exists():
        advise(target, overrides, asked, as_json=as_json)
        return
    if overrides or asked != Asked():
        raise ConfigError("--json must be the only option beside RUN, which has its own settings")
    advise_run(Path(target), as_json=as_json)


def advise_run(path: Path, *, as_json: bool) -> None:
    """Predict the steps of the recorded run in other modes and with other numbers of
    engines, and print the best. Raises ConfigError.
    """
    began = time.monotonic()
    run = RunDir(path)
    run.must_fit()
    device = run.configuration().model.device
    on_gpus = device == "cuda" or (device == "auto" and gpus())
    recording = read_recording(path, cores=None if on_gpus else cores())
    predictions: dict[Candidate, Prediction] = {}
    failed: dict[Candidate, str] = {}
    try:
        before = None if recording.cores is None else recorded_shares(recording)
    except RollweaveError as error:
        raise ConfigError(f"{path}: the run itself cannot be simulated: {error}") from error
    for one in candidates(recording):
        try:
            predictions[one] = predict(recording, one, before)
        except RollweaveError as error:
            failed[one] = str(error)
        err.print(f"[dim]{len(predictions) + len(failed)} simulated[/]", soft_wrap=True)
    if not predictions:
        raise ConfigError(f"no candidate can be simulated: {next(iter(failed.values()))}")
    own = itself(recording)
    best = listed(predictions, LISTED)
    shown = best if own in best or own not in predictions else [*best, own]
    out.print(_table(predictions, shown, own))
    out.print()
    for line in _explanation(recording, predictions, failed):
        out.print(escape(line), soft_wrap=True)
    err.print(f"[dim]answered in {human_seconds(time.monotonic() - began)}[/]")
    if as_json:
        sys.stdout.write(json.dumps(_figures(recording, predictions, shown)) + "\n")


def _table(
    predictions: dict[Candidate, Prediction], shown: list[Candidate], own: Candidate
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in (
        "",
        "mode",
        "engines",
        "s/step",
        "tokens\n/step",
        "tokens/s",
        "thrown\naway",
        "staleness",
        "limited by",
    ):
        table.add_column(head, no_wrap=head != "limited by", overflow="fold")
    for number, one in enumerate(shown, start=1):
        figures = predictions[one]
        table.add_row(
            "this run" if one == own else str(number),
            mode_text(one),
            str(one.split.engines[0].count),
            f"{figures.step_s:,.2f}",
            f"{figures.step_tokens:,.0f}",
            f"{figures.tokens_per_s:,.0f}",
            f"{figures.dropped:.0%}",
            f"{figures.staleness:.2f} (max {figures.stalest})",
            limit_text(figures),
        )
    return table


def _explanation(
    recording: Recording,
    predictions: dict[Candidate, Prediction],
    failed: dict[Candidate, str],
) -> list[str]:
    best, own = fastest_first(predictions)[0], predictions.get(itself(recording))
    text = [
        f"Fastest: mode {mode_text(best)} with {best.split.engines[0].count} engines, "
        f"{human_seconds(predictions[best].step_s)} a step."
    ]
    if own is not None:
        text.append(
            f"This run as it was: {human_seconds(own.step_s)} a step are predicted"
            + (
                f", {human_seconds(recording.step_s)} were measured."
                if recording.step_s is not None
                else "."
            )
        )
    if recording.cores is not None:
        text.append(
            f"Engines, trainer and controller share {recording.cores} cores of this machine."
        )
    text += [
        f"Left out: mode {mode_text(one)} with {one.split.engines[0].count} engines: {why}."
        for one, why in failed.items()
    ]
    return [*text, "Learning is not simulated: compare modes by staleness, too."]


def _figures(
    recording: Recording, predictions: dict[Candidate, Prediction], shown: list[Candidate]
) -> dict[str, Any]:
    return {
        "measured_step_s": recording.step_s,
        "cores": recording.cores,
        "best": [
            {
                "mode": one.pacing.mode.value,
                "alpha": one.pacing.alpha or None,
                "engines": one.split.engines[0].count,
                "this_run": one == itself(recording),
                "step_s": predictions[one].step_s,
                "step_tokens": predictions[one].step_tokens,
                "tokens_per_s": predictions[one].tokens_per_s,
                "dropped": predictions[one].dropped,
                "staleness": predictions[one].staleness,
                "limit": limit(predictions[one]),
            }
            for one in shown
        ],
        "simulated": len(predictions),
    }
