"""`rollweave advise`: finds the best mode, engines and split of GPUs by simulation; for
a run, the best mode and number of engines, from the run's measurements.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict
from rich.markup import escape
from rich.table import Table

from rollweave.cli.console import err, out
from rollweave.io.machine import cores
from rollweave.record.rundir import RunDir
from rollweave.schema.base import Struct
from rollweave.schema.config.loading import load, loads
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.text import human_seconds
from rollweave.train.needs import rank_needs
from rollweave.weights.checkpoint import ModelShape
from rollweave_sim.advise import Advice, Pool, Splits, search
from rollweave_sim.candidates import Candidate, EngineGroup, Prediction, fastest_first, limit
from rollweave_sim.families import FAMILIES
from rollweave_sim.hardware import gpu, model
from rollweave_sim.hosts import NO_POOL, gpu_of
from rollweave_sim.rerun import Reruns
from rollweave_sim.trial import trials_in
from rollweave_sim.world import PROFILE, section, workloads_of

LIMITS = {
    "trainer": "the trainer: it works {trainer:.0%} of the time",
    "engines": "the engines: they have turns {engines:.0%} of the time",
    "kv": "the KV caches: {kv:.0%} of them is in use, so turns wait for room",
    "environment": "the environments: engines wait for them {wait:.0%} of the time",
    "stragglers": "the slowest trajectories: engines wait for others' turns {wait:.0%} of the time",
    "reward": "the rewards: engines wait for them {wait:.0%} of the time",
    "weights": "the weights: engines wait for them {wait:.0%} of the time",
    "window": "the bound: engines may not run further ahead {wait:.0%} of the time",
}
"""Sentences that say what limits a candidate."""

PARTS = {
    "engines": "engine steps",
    "trainer": "training steps",
    "environment": "environments and rewards",
    "weights": "transfers of weights",
}

TASKS = """
[run]
name = "advice"
[[tasks]]
env = {env}
max_turns = {turns}
max_tokens = {tokens}
max_turn_tokens = {turn_tokens}
step_s = 3600.0
[rollout]
groups_per_step = 16
group_size = 8
max_running = 384
[engines]
max_slots = 256
prefill_chunk_tokens = 2048
[eval]
final_episodes = 0
[watchdog]
turn_s = 3600.0
train_s = 3600.0
[sim]
model = "qwen3-8b"
"""
"""Configuration of a question without a configuration file: 128 trajectories a step, as
in RollArt §3.1 for software engineering, and room for the trajectories of three steps.
"""

LONGEST_TURN = 16_384
"""Maximum tokens of a turn in a question without a configuration file."""

FRESHER = 0.05
"""Minimum steps of staleness by which an alternative must be fresher to be named."""


class Asked(Struct, frozen=True, kw_only=True):
    """The options of the command. Options that are lists belong together, in order."""

    gpus: Sequence[int] = ()
    hardware: Sequence[str] = ()
    price: Sequence[float] = ()
    model: str | None = None
    workload: str | None = None


def advise(target: str | None, overrides: Sequence[str], *, as_json: bool, **options: Any) -> None:
    """Advise on the run whose directory `target` is, or else on a configuration, and
    print the answer. `options` are the fields of `Asked`. Raises ConfigError.
    """
    began, asked = time.monotonic(), Asked(**options)
    if target is not None and RunDir(Path(target)).journal.exists():
        if overrides or asked != Asked():
            raise ConfigError(
                "--json must be the only option beside RUN, which has its own settings"
            )
        answer = _advise_run(Path(target))
    else:
        answer = _advise_gpus(target, overrides, asked)
    err.print(f"[dim]answered in {human_seconds(time.monotonic() - began)}[/]")
    if as_json:
        sys.stdout.write(json.dumps(answer) + "\n")


def _progress(text: str) -> None:
    err.print(f"[dim]{escape(text)}[/]", soft_wrap=True)


def _found(candidate: Candidate, it: Prediction) -> None:
    """Say what is the best so far, which is not the answer yet."""
    what = f"so far {mode_text(candidate)}, {layout_text(candidate)}"
    _progress(f"  {what}: {human_seconds(it.step_s)} a step, {it.tokens_per_s:,.0f} tokens/s")


def _advise_gpus(target: str | None, overrides: Sequence[str], asked: Asked) -> dict[str, Any]:
    base = base_of(target, overrides, asked)
    table = Splits(base, pools_of(base, asked), workloads_of(base), rank_bytes=rank_bytes)
    with trials_in(cores(), table.work) as run:
        advice = search(table, run, _progress, _found)
    columns = dict(COLUMNS)
    if all(pool.price is not None for pool in table.pools.values()):
        last, limited = columns.popitem()
        columns["cost"] = lambda candidate, it: f"{table.cost_per_step(candidate, it.step_s):.2f}"
        columns[last] = limited
    rows = {str(number): candidate for number, candidate in enumerate(advice.best, start=1)}
    _print_table(rows, advice.predictions, columns)
    _print_text([*explanation(table, advice), "", *lines(table, advice.best[0])])
    return figures(table, advice)


def _advise_run(path: Path) -> dict[str, Any]:
    table = Reruns(path)
    with trials_in(cores(), table.work) as trials:
        advice = search(table, trials, _progress, _found)
    own = table.itself
    shown = advice.best if own in advice.best or own not in advice.known else [*advice.best, own]
    rows = {
        "this run" if candidate == own else str(number): candidate
        for number, candidate in enumerate(shown, start=1)
    }
    _print_table(rows, advice.known, COLUMNS)
    _print_text(_explanation_of_run(table, advice))
    return {
        "measured_step_s": table.step_s,
        "best": [
            {
                **_figures(candidate, advice.known[candidate]),
                "engines": candidate.split.engines[0].count,
                "this_run": candidate == own,
            }
            for candidate in shown
        ],
        "simulated": len(advice.known),
    }


# The question.


def base_of(target: str | None, overrides: Sequence[str], asked: Asked) -> RunConfig:
    """Return the configuration that the search starts from. Raises ConfigError."""
    sets = list(overrides)
    if asked.model is not None:
        sets.append(f"sim.model={_quoted(asked.model)}")
    if target is None:
        if asked.workload is None or asked.model is None or not asked.gpus:
            raise ConfigError(
                "CONFIG must be given, or else --gpus, --hardware, --model and --workload"
            )
        config = loads(_tasks(asked.workload), sets, name="advise")
    else:
        if asked.workload is not None:
            sets.append(f"tasks.0.env={_quoted(asked.workload)}")
        config = load(Path(target), sets)
    section(config)
    if config.allocation is not None:
        raise ConfigError(
            "allocation must be left out: advise compares fleets itself, got [allocation]"
        )
    return config


def _tasks(workload: str) -> str:
    """Return a configuration for a workload alone, as TOML."""
    family = FAMILIES.get(workload)
    tokens = family.max_context if family is not None else 32_768
    return TASKS.format(
        env=_quoted(workload),
        turns=family.turns[1] if family is not None else 64,
        tokens=tokens,
        turn_tokens=min(tokens, LONGEST_TURN),
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def pools_of(base: RunConfig, asked: Asked) -> dict[str, Pool]:
    """Return the GPUs of the options, else of the configuration. Raises ConfigError."""
    gpus = _asked(base, asked) if asked.gpus or asked.hardware else _configured(base)
    if asked.price and len(asked.price) != len(gpus):
        raise ConfigError(
            f"--price must be given once for each kind of GPU ({len(gpus)}), got {len(asked.price)}"
        )
    prices: Sequence[float | None] = asked.price or [None] * len(gpus)
    return {
        name: Pool(gpu=chip, gpus=count, price=price)
        for (name, (chip, count)), price in zip(gpus.items(), prices, strict=True)
    }


def _asked(base: RunConfig, asked: Asked) -> dict[str, tuple[str, int]]:
    """Return the kind and the number of the GPUs of the options, by pool."""
    kinds = asked.hardware or [section(base).gpu]
    if len(kinds) != len(asked.gpus):
        raise ConfigError(
            f"--gpus must be given once for each --hardware ({len(kinds)}), got {len(asked.gpus)}"
        )
    chips = list(map(_gpu_named, kinds))
    if len(set(chips)) != len(chips):
        raise ConfigError(f"--hardware must be distinct, got {', '.join(chips)}")
    names = [NO_POOL] if len(chips) == 1 else chips
    return dict(zip(names, zip(chips, asked.gpus, strict=True), strict=True))


def _configured(base: RunConfig) -> dict[str, tuple[str, int]]:
    """Return those of the simulated run that the configuration describes, by pool."""
    section(base)  # refuses a run without a section [sim]
    gpus = dict[str, int]()
    for number, group in enumerate(base.engines):
        name = group.pool if base.pools else NO_POOL
        if name is None:
            raise ConfigError(f"engines.{number}.pool must be given with [pools], got none")
        gpus[name] = gpus.get(name, 0) + group.count * group.degree
    trains = (base.trainer.pool or next(iter(gpus))) if base.pools else NO_POOL
    gpus[trains] = (
        max(gpus[trains], base.trainer.first_ranks)
        if base.trainer.colocated
        else gpus.get(trains, 0) + base.trainer.first_ranks
    )
    chips = {name: _gpu_named(gpu_of(base, name)[0]) for name in gpus}
    return {NO_POOL if len(gpus) == 1 else name: (chips[name], gpus[name]) for name in gpus}


def _gpu_named(name: str) -> str:
    """Return the name of a GPU as the simulator has it."""
    if name.endswith(PROFILE):
        raise ConfigError(
            f"--hardware must name a GPU, since a profile is of one engine only, got {name!r}"
        )
    return gpu(name).name


def rank_bytes(config: RunConfig) -> int:
    """Return the bytes of GPU memory that a rank of the trainer needs at least. Return
    0 for a mixture of experts, of which only the training state is estimated, by the
    simulator.

    The estimate is that of `train --dry-run` for bfloat16 with activations that are
    computed again.
    """
    shape = model(section(config).model)
    if shape.experts:
        return 0
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"device": "cuda", "dtype": "bfloat16"}),
            "trainer": config.trainer.model_copy(update={"save_memory": ("activations",)}),
        }
    )
    sizes = ModelShape(
        vocab=shape.vocab,
        hidden=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn=shape.ffn,
        context=config.max_tokens,
        tied=shape.tied,
        qk_norm=True,
    )
    return sum(need.nbytes for need in rank_needs(config, sizes, rank=0) if need.on_device)


# The answer.


def _print_text(text: Sequence[str]) -> None:
    out.print()
    for line in text:
        out.print(escape(line), soft_wrap=True)


Column = Callable[[Candidate, Prediction], str]

COLUMNS: dict[str, Column] = {
    "mode": lambda candidate, _: mode_text(candidate),
    "engines\nx GPUs": lambda candidate, _: " + ".join(map(_engines_text, candidate.split.engines)),
    "trains": lambda candidate, _: f"{candidate.split.trainer} {candidate.split.pool}".strip(),
    "s/step": lambda _, it: f"{it.step_s:,.0f}" if it.step_s >= 10 else f"{it.step_s:.2f}",
    "tokens\n/step": lambda _, it: f"{it.step_tokens:,.0f}",
    "tokens/s": lambda _, it: f"{it.tokens_per_s:,.0f}",
    "thrown\naway": lambda _, it: f"{it.dropped:.0%}",
    "staleness": lambda _, it: f"{it.staleness:.2f} (max {it.stalest})",
    "idle\nengines": lambda _, it: f"{1 - it.engines.get('busy', 0.0):.0%}",
    "idle\ntrainer": lambda _, it: f"{1 - it.trainer.get('busy', 0.0):.0%}",
    "limited by": lambda _, it: limit_text(it),
}
"""The columns of the table of the best candidates, by their heads."""


def _print_table(
    rows: Mapping[str, Candidate],
    predictions: Mapping[Candidate, Prediction],
    columns: Mapping[str, Column],
) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("", *columns):
        table.add_column(head, no_wrap=head != "limited by", overflow="fold")
    for name, candidate in rows.items():
        table.add_row(name, *(cell(candidate, predictions[candidate]) for cell in columns.values()))
    out.print(table)


def mode_text(candidate: Candidate) -> str:
    alpha = f" {candidate.pacing.alpha}" if candidate.pacing.alpha else ""
    return f"{candidate.pacing.mode.value}{alpha}" + (
        ", in turn" if candidate.split.colocated else ""
    )


def _engines_text(group: EngineGroup) -> str:
    phase = "" if group.phase == "both" else group.phase
    return " ".join(filter(None, (f"{group.count} x {group.degree}", group.pool, phase)))


def layout_text(candidate: Candidate) -> str:
    engines = " and ".join(
        f"{group.count} engine{'s' * (group.count > 1)} of {group.degree} "
        f"GPU{'s' * (group.degree > 1)}"
        + (f" ({group.pool})" if group.pool else "")
        + (f" for {group.phase}" if group.phase != "both" else "")
        for group in candidate.split.engines
    )
    if candidate.split.colocated:
        return f"{engines} and the trainer take turns on all GPUs"
    where = f" ({candidate.split.pool})" if candidate.split.pool else ""
    return f"{candidate.split.trainer} GPUs{where} train beside {engines}"


def limit_text(prediction: Prediction) -> str:
    cause = limit(prediction)
    return LIMITS[cause].format(
        trainer=prediction.trainer.get("busy", 0.0),
        engines=prediction.engines.get("busy", 0.0),
        kv=prediction.kv_used,
        wait=prediction.engines.get(cause, 0.0),
    )


def explanation(table: Splits, advice: Advice) -> list[str]:
    """Return the answer in about ten lines."""
    best, predictions = advice.best[0], advice.predictions
    top, rollout = predictions[best], table.base.rollout
    gpus = " and ".join(f"{pool.gpus} {pool.gpu}" for pool in table.pools.values())
    tasks = ", ".join(task.name for task in table.base.tasks)
    parts = sorted(advice.gains, key=lambda part: -advice.gains[part])
    gains = ", ".join(f"{PARTS[part]} {max(0.0, advice.gains[part]):.0%}" for part in parts)
    text = [
        f"Question: {gpus}, {section(table.base).model}, {tasks}, {rollout.groups_per_step} "
        f"groups of {rollout.group_size} trajectories a step.",
        f"Fastest: mode {mode_text(best)}; {layout_text(best)}. A step takes "
        f"{human_seconds(top.step_s)} ({human_seconds(top.fastest_s)} to "
        f"{human_seconds(top.slowest_s)} with {table.seeds} seeds).",
        f"It is limited by {limit_text(top)}.",
        f"If one part were twice as fast, a step would be shorter by: {gains}.",
        f"It trains on trajectories that are {top.staleness:.2f} steps old on average (at most "
        f"{top.stalest}); {top.dropped:.0%} of those started are not trained on.",
    ]
    age = top.staleness
    for candidate in advice.best[1:]:
        if predictions[candidate].staleness < age - FRESHER:
            age = predictions[candidate].staleness
            text.append(
                f"With {age:.2f} steps of staleness (mode {mode_text(candidate)}; "
                f"{layout_text(candidate)}) a step takes "
                f"{predictions[candidate].step_s / top.step_s:.2f} times as long."
            )
    near = [
        str(number)
        for number, candidate in enumerate(advice.best[1:], start=2)
        if predictions[candidate].fastest_s <= top.slowest_s
    ]
    text += [
        "How sure: "
        + (
            f"by the spread of seeds, number {' and number '.join(near)} may be as fast as "
            "number 1."
            if near
            else "it is faster than the others by more than the spread of seeds."
        )
        + f" Of {advice.considered} candidates, {advice.simulated} were simulated; a closed form "
        "estimated the others to be slower.",
        *(f"Left out: {line}." for line in table.left_out),
        "Learning is not simulated: a step on older data may teach less, and a mode that "
        "throws long trajectories away trains on fewer tokens. Compare modes by staleness and "
        "tokens/s, too.",
    ]
    if any(candidate.split.colocated for candidate in advice.best):
        text.append("Moving the trainer's state for engines in turn takes no simulated time.")
    return text


def _explanation_of_run(table: Reruns, advice: Advice) -> list[str]:
    best, own = fastest_first(advice.known)[0], advice.known.get(table.itself)
    text = [
        f"Fastest: mode {mode_text(best)} with {best.split.engines[0].count} engines, "
        f"{human_seconds(advice.known[best].step_s)} a step."
    ]
    if own is not None:
        measured = (
            f", {human_seconds(table.step_s)} were measured." if table.step_s is not None else "."
        )
        text.append(
            f"This run as it was: {human_seconds(own.step_s)} a step are predicted{measured}"
        )
    text += [
        f"Left out: mode {mode_text(candidate)} with "
        f"{candidate.split.engines[0].count} engines: {why}."
        for candidate, why in advice.failed.items()
    ]
    return [*text, "Learning is not simulated: compare modes by staleness, too."]


def _figures(candidate: Candidate, prediction: Prediction) -> dict[str, Any]:
    return {
        "mode": candidate.pacing.mode.value,
        "alpha": candidate.pacing.alpha or None,
        "step_s": prediction.step_s,
        "step_tokens": prediction.step_tokens,
        "tokens_per_s": prediction.tokens_per_s,
        "dropped": prediction.dropped,
        "staleness": prediction.staleness,
        "limit": limit(prediction),
    }


def figures(table: Splits, advice: Advice) -> dict[str, Any]:
    """Return the answer as numbers. Seconds are simulated seconds."""
    return {
        "gpus": {
            name or pool.gpu: {"gpu": pool.gpu, "gpus": pool.gpus, "price": pool.price}
            for name, pool in table.pools.items()
        },
        "best": [
            _row(table, candidate, advice.predictions[candidate]) for candidate in advice.best
        ],
        "saved_if_halved": advice.gains,
        "considered": advice.considered,
        "simulated": advice.simulated,
        "left_out": table.left_out,
        "failed": sorted(set(advice.failed.values())),
        "config": lines(table, advice.best[0]),
    }


def _row(table: Splits, candidate: Candidate, prediction: Prediction) -> dict[str, Any]:
    split = candidate.split
    return {
        **_figures(candidate, prediction),
        "colocated": split.colocated,
        "trainer_gpus": split.trainer,
        "trainer_pool": split.pool or None,
        "engines": [{**asdict(group), "pool": group.pool or None} for group in split.engines],
        "step_s_range": [prediction.fastest_s, prediction.slowest_s],
        "cost": table.cost_per_step(candidate, prediction.step_s),
        "staleness": {"mean": prediction.staleness, "max": prediction.stalest},
        "kv_used": prediction.kv_used,
        "engines_time": prediction.engines,
        "trainer_time": prediction.trainer,
    }


def lines(table: Splits, candidate: Candidate) -> list[str]:
    """Return the settings of a candidate, as TOML."""
    split, pools = candidate.split, table.pools
    text = ["[rollout]", f'mode = "{candidate.pacing.mode.value}"']
    text += [f"alpha = {candidate.pacing.alpha}"] if candidate.pacing.alpha else []
    for group in split.engines:
        text += ["", "[[engines]]"]
        text += [f"count = {group.count}", f"degree = {group.degree}"]
        text += [f'phase = "{group.phase}"'] if group.phase != "both" else []
        text += [f'pool = "{group.pool}"'] if group.pool else []
    text += ["", "[trainer]", f"ranks = {split.trainer}"]
    text += ["colocated = true"] if split.colocated else []
    text += [f'pool = "{split.pool}"'] if split.pool else []
    for name, pool in pools.items() if len(pools) > 1 else ():
        text += ["", f"[pools.{name}]", f'resource = "{pool.gpu.upper()}"']
    sim = section(table.base)
    text += ["", "[sim]  # for `rollweave simulate`", f'model = "{sim.model}"']
    text += [f'gpu = "{pools[split.pool].gpu}"'] if len(pools) == 1 else []
    return text
