"""`rollweave advise`: which split of GPUs, engines and mode, by simulation."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from rollweave.cli.console import err, out
from rollweave.core.policy.ratio import (
    Candidate,
    EngineGroup,
    Prediction,
    fastest_first,
    limit,
)
from rollweave.runtime.preflight.checks import human_seconds
from rollweave.runtime.preflight.machine import cores
from rollweave.runtime.preflight.memory import rank_parts
from rollweave.schema.base import Struct
from rollweave.schema.config.loading import load, loads
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave.sim.advise import (
    FASTER,
    SEEDS,
    Advice,
    Pool,
    Question,
    cost_per_step,
    fresher,
)
from rollweave.sim.advise import advise as search
from rollweave.sim.families import FAMILIES
from rollweave.sim.hardware import gpu
from rollweave.sim.hosts import NO_POOL, gpu_of
from rollweave.sim.models import model
from rollweave.sim.trials import trials_in
from rollweave.sim.world import PROFILE, section, workloads_of
from rollweave.weights.checkpoint import ModelShape

LIMITS = {
    "trainer": "the trainer: it works {trainer:.0%} of the time",
    "engines": "the engines: they have turns {engines:.0%} of the time",
    "kv": "the KV caches: {kv:.0%} of them is in use, so turns wait for room",
    "environment": "the environments: engines wait for them {wait:.0%} of the time",
    "prompts": "the prompts: prefill engines have none {wait:.0%} of the time",
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
"""Configuration of a question without one: 128 trajectories a step, as many as RollArt
§3.1 has for software engineering, and room for the trajectories of three steps.
"""

QUIET_S = 10.0
"""Seconds without a line of progress, from which the next trial prints one."""

FEWER = 0.9
"""Share of the most tokens a step below which an answer is said to train on fewer."""

LONGEST_TURN = 16_384
"""Maximum tokens of a turn in such a question."""


class Asked(Struct, frozen=True, kw_only=True):
    """The options of the command. Those that are lists belong together, in order."""

    gpus: Sequence[int] = ()
    hardware: Sequence[str] = ()
    price: Sequence[float] = ()
    model: str | None = None
    workload: str | None = None


def advise(target: str | None, overrides: Sequence[str], asked: Asked, *, as_json: bool) -> None:
    """Answer the question, and print the answer. Raises ConfigError."""
    began = time.monotonic()
    base = base_of(target, overrides, asked)
    question = Question(
        base=base,
        pools=pools_of(base, asked),
        work=workloads_of(base),
        rank_bytes=rank_bytes,
    )
    with trials_in(cores(), question.work) as run:
        advice = search(question, run, SearchProgress(time.monotonic))
    show(question, advice)
    err.print(f"[dim]answered in {human_seconds(time.monotonic() - began)}[/]")
    if as_json:
        sys.stdout.write(json.dumps(figures(question, advice)) + "\n")


class SearchProgress:
    """Prints each round of a search, and between rounds from time to time the share
    that is done and about how long the rest takes.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = self._printed = clock()

    def __call__(self, share: float, text: str) -> None:
        now = self._clock()
        if not text and now - self._printed < QUIET_S:
            return
        self._printed = now
        parts = [text] if text else []
        if 0 < share < 1:
            left_s = (now - self._began) * (1 - share) / share
            parts.append(f"{share:.0%} done, about {human_seconds(left_s)} left")
        err.print(f"[dim]{'; '.join(parts)}[/]", soft_wrap=True)


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
    """Return the GPUs that are given, or those of the configuration. Raises
    ConfigError.
    """
    if not asked.gpus and not asked.hardware:
        return _priced(_configured(base), asked.price)
    kinds = asked.hardware or [section(base).gpu]
    if len(kinds) != len(asked.gpus):
        raise ConfigError(
            f"--gpus must be given once for each --hardware ({len(kinds)}), got {len(asked.gpus)}"
        )
    chips = [gpu(_no_profile(kind)).name for kind in kinds]
    if len(set(chips)) != len(chips):
        raise ConfigError(f"--hardware must be distinct, got {', '.join(chips)}")
    names = [NO_POOL] if len(chips) == 1 else chips
    pools = {
        name: Pool(gpu=chip, gpus=count)
        for name, chip, count in zip(names, chips, asked.gpus, strict=True)
    }
    return _priced(pools, asked.price)


def _configured(base: RunConfig) -> dict[str, Pool]:
    """Return the GPUs of the simulated run that the configuration describes."""
    sim, gpus = section(base), dict[str, int]()
    for number, group in enumerate(base.engines):
        name = group.pool if base.pools else NO_POOL
        if name is None:
            raise ConfigError(f"engines.{number}.pool must be given with [pools], got none")
        gpus[name] = gpus.get(name, 0) + group.count * group.degree
    trains = (base.trainer.pool or next(iter(gpus))) if base.pools else NO_POOL
    gpus[trains] = (
        max(gpus[trains], sim.trainer_gpus)
        if base.trainer.colocated
        else gpus.get(trains, 0) + sim.trainer_gpus
    )
    chips = {name: gpu(_no_profile(gpu_of(base, name)[0])).name for name in gpus}
    if len(gpus) == 1:
        ((name, count),) = gpus.items()
        return {NO_POOL: Pool(gpu=chips[name], gpus=count)}
    return {name: Pool(gpu=chips[name], gpus=count) for name, count in gpus.items()}


def _priced(pools: Mapping[str, Pool], prices: Sequence[float]) -> dict[str, Pool]:
    if prices and len(prices) != len(pools):
        raise ConfigError(
            f"--price must be given once for each kind of GPU ({len(pools)}), got {len(prices)}"
        )
    given: Sequence[float | None] = prices or [None] * len(pools)
    return {
        name: Pool(gpu=pool.gpu, gpus=pool.gpus, price=price)
        for (name, pool), price in zip(pools.items(), given, strict=True)
    }


def _no_profile(name: str) -> str:
    if name.endswith(PROFILE):
        raise ConfigError(
            f"--hardware must name a GPU, since a profile is of one engine only, got {name!r}"
        )
    return name


def rank_bytes(config: RunConfig) -> int:
    """Return the GPU memory that a rank of the trainer needs at least; of a mixture of
    experts 0, since only its training state is estimated, by the simulator.

    It is the estimate of `train --dry-run` for bfloat16, with activations that are
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
        eps=1e-6,
        tied=shape.tied,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=True,
        inv_freq=(),
        eos_token_ids=(),
    )
    return sum(part.nbytes for part in rank_parts(config, sizes, rank=0) if part.on_device)


# The answer.


def figures(question: Question, advice: Advice) -> dict[str, Any]:
    """Return the answer as numbers; seconds are simulated ones."""
    return {
        "gpus": {
            name or pool.gpu: {"gpu": pool.gpu, "gpus": pool.gpus, "price": pool.price}
            for name, pool in question.pools.items()
        },
        "best": [_row(question, advice, one) for one in advice.best],
        "saved_if_halved": advice.gains,
        "apart": [
            {"engines": _engines(one), "step_s": prediction.step_s}
            for one, prediction in advice.apart.items()
        ],
        "considered": advice.considered,
        "simulated": advice.simulated,
        "left_out": advice.left_out,
        "failed": sorted(set(advice.failed.values())),
        "config": lines(question, advice.best[0]),
    }


def _row(question: Question, advice: Advice, one: Candidate) -> dict[str, Any]:
    prediction = advice.predictions[one]
    return {
        "mode": one.pacing.mode.value,
        "alpha": one.pacing.alpha or None,
        "colocated": one.split.colocated,
        "trainer_gpus": one.split.trainer,
        "trainer_pool": one.split.pool or None,
        "engines": _engines(one),
        "step_s": prediction.step_s,
        "step_s_range": [prediction.fastest_s, prediction.slowest_s],
        "step_tokens": prediction.step_tokens,
        "tokens_per_s": prediction.tokens_per_s,
        "cost": cost_per_step(question, one, prediction.step_s),
        "staleness": {"mean": prediction.staleness, "max": prediction.stalest},
        "dropped": prediction.dropped,
        "kv_used": prediction.kv_used,
        "engines_time": prediction.engines,
        "trainer_time": prediction.trainer,
        "limit": limit(prediction),
    }


def _engines(one: Candidate) -> list[dict[str, Any]]:
    return [
        {
            "pool": group.pool or None,
            "count": group.count,
            "degree": group.degree,
            "phase": group.phase,
        }
        for group in one.split.engines
    ]


def show(question: Question, advice: Advice) -> None:
    """Print the table of the best, the explanation, and the settings of the first."""
    priced = all(pool.price is not None for pool in question.pools.values())
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    heads = (
        "",
        "mode",
        "engines\nx GPUs",
        "trains",
        "s/step",
        "tokens\n/step",
        "tokens/s",
        "thrown\naway",
        "staleness",
        "idle\nengines",
        "idle\ntrainer",
    )
    for head in (*heads, *(["cost"] if priced else []), "limited by"):
        table.add_column(head, no_wrap=head != "limited by", overflow="fold")
    for number, one in enumerate(advice.best, start=1):
        prediction = advice.predictions[one]
        cost = cost_per_step(question, one, prediction.step_s)
        table.add_row(
            str(number),
            mode_text(one),
            " + ".join(map(_engines_text, one.split.engines)),
            f"{one.split.trainer} {one.split.pool}".strip(),
            f"{prediction.step_s:,.0f}" if prediction.step_s >= 10 else f"{prediction.step_s:.2f}",
            f"{prediction.step_tokens:,.0f}",
            f"{prediction.tokens_per_s:,.0f}",
            f"{prediction.dropped:.0%}",
            f"{prediction.staleness:.2f} (max {prediction.stalest})",
            f"{1 - prediction.engines.get('busy', 0.0):.0%}",
            f"{1 - prediction.trainer.get('busy', 0.0):.0%}",
            *([f"{cost:.2f}"] if priced else []),
            limit_text(prediction),
        )
    out.print(table)
    out.print()
    for line in explanation(question, advice):
        out.print(escape(line), soft_wrap=True)
    out.print()
    out.print(escape("\n".join(lines(question, advice.best[0]))), soft_wrap=True)


def mode_text(one: Candidate) -> str:
    alpha = f" {one.pacing.alpha}" if one.pacing.alpha else ""
    return f"{one.pacing.mode.value}{alpha}" + (", in turn" if one.split.colocated else "")


def _engines_text(group: EngineGroup) -> str:
    phase = "" if group.phase == "both" else group.phase
    return " ".join(filter(None, (f"{group.count} x {group.degree}", group.pool, phase)))


def layout_text(one: Candidate) -> str:
    engines = " and ".join(
        f"{group.count} engine{'s' * (group.count > 1)} of {group.degree} "
        f"GPU{'s' * (group.degree > 1)}"
        + (f" ({group.pool})" if group.pool else "")
        + (f" for {group.phase}" if group.phase != "both" else "")
        for group in one.split.engines
    )
    if one.split.colocated:
        return f"{engines} and the trainer take turns on all GPUs"
    where = f" ({one.split.pool})" if one.split.pool else ""
    return f"{one.split.trainer} GPUs{where} train beside {engines}"


def limit_text(prediction: Prediction) -> str:
    cause = limit(prediction)
    return LIMITS[cause].format(
        trainer=prediction.trainer.get("busy", 0.0),
        engines=prediction.engines.get("busy", 0.0),
        kv=prediction.kv_used,
        wait=prediction.engines.get(cause, 0.0),
    )


def explanation(question: Question, advice: Advice) -> list[str]:
    """Return the answer in about ten lines."""
    best = advice.best[0]
    top, rollout = advice.predictions[best], question.base.rollout
    gpus = " and ".join(f"{pool.gpus} {pool.gpu}" for pool in question.pools.values())
    tasks = ", ".join(task.name for task in question.base.tasks)
    text = [
        f"Question: {gpus}, {section(question.base).model}, {tasks}, {rollout.groups_per_step} "
        f"groups of {rollout.group_size} trajectories a step.",
        f"Fastest: mode {mode_text(best)}; {layout_text(best)}. A step takes "
        f"{human_seconds(top.step_s)} ({_range(top)} with {SEEDS} seeds).",
        f"It is limited by {limit_text(top)}.",
        *_gains(advice),
        f"It trains on trajectories that are {top.staleness:.2f} steps old on average (at most "
        f"{top.stalest}); {top.dropped:.0%} of those started are not trained on.",
        *_fewer_tokens(advice),
        *_alternatives(advice),
        *_apart(advice),
        _certainty(advice),
        *(f"Left out: {line}." for line in advice.left_out),
        "Learning is not simulated: a step on older data may teach less, so modes must also be "
        "compared by staleness.",
    ]
    if any(one.split.colocated for one in advice.best):
        text.append("Moving the trainer's state for engines in turn takes no simulated time.")
    return text


def _range(prediction: Prediction) -> str:
    return f"{human_seconds(prediction.fastest_s)} to {human_seconds(prediction.slowest_s)}"


def _gains(advice: Advice) -> list[str]:
    order = sorted(advice.gains, key=lambda part: -advice.gains[part])
    text = ", ".join(f"{PARTS[part]} {max(0.0, advice.gains[part]):.0%}" for part in order)
    times = "twice" if FASTER == 0.5 else f"{1 / FASTER:g} times"
    return [f"If one part were {times} as fast, a step would be shorter by: {text}."]


def _fewer_tokens(advice: Advice) -> list[str]:
    """Say which of the best train on clearly fewer tokens a step than another one,
    since they throw trajectories away.
    """
    most = max(advice.predictions[one].step_tokens for one in advice.best)
    shares = {
        number: advice.predictions[one].step_tokens / most
        for number, one in enumerate(advice.best, start=1)
        if advice.predictions[one].step_tokens < FEWER * most
        and advice.predictions[one].dropped >= 1 - FEWER
    }
    if not shares:
        return []
    low, high = min(shares.values()), max(shares.values())
    share = f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
    several = len(shares) > 1
    return [
        f"A step of {numbers(list(shares))} trains {share} of the most tokens in the table: "
        f"trajectories that exceed {'their bounds' if several else 'its bound'} are thrown away, "
        "mostly long ones, and shorter ones take their places. Compare by tokens/s, too, which "
        "counts trained tokens."
    ]


def numbers(rows: Sequence[int]) -> str:
    """Return ascending numbers of rows in words, such as `numbers 2 to 4 and 6`."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and row == runs[-1][-1] + 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    parts = [
        part
        for run in runs
        for part in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))
    ]
    text = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    return f"number{'s' * (len(rows) > 1)} {text}"


def _alternatives(advice: Advice) -> list[str]:
    """Compare with the fastest of the best that train on fresher data, and with another
    split in the same mode.
    """
    best, known = advice.best[0], {**advice.others, **advice.predictions}
    top, text = known[best].step_s, []
    other = fresher(advice, best)
    while other is not None:
        text.append(
            f"With {known[other].staleness:.2f} steps of staleness (mode {mode_text(other)}; "
            f"{layout_text(other)}) a step takes {known[other].step_s / top:.2f} times as long."
        )
        other = fresher(advice, other)
    same = [one for one in fastest_first(known) if one.pacing == best.pacing and one != best]
    if same:
        text.append(
            f"The next split in the fastest mode ({layout_text(same[0])}) takes "
            f"{known[same[0]].step_s / top:.2f} times as long."
        )
    return text


def _apart(advice: Advice) -> list[str]:
    """Compare the fastest with its own engines divided between prefill and decode."""
    if not advice.apart or advice.whole is None:
        return []
    one = fastest_first(advice.apart)[0]
    prompts = sum(each.count for each in one.split.engines if each.phase == "prefill")
    engines = sum(each.count for each in one.split.engines)
    ratio = advice.apart[one].step_s / advice.others[advice.whole].step_s
    return [
        f"With prefill and decode apart, the best of {len(advice.apart)} ratios ({prompts} of "
        f"{engines} engines compute prompts for the others) takes {ratio:.2f} times as long."
    ]


def _certainty(advice: Advice) -> str:
    top = advice.predictions[advice.best[0]]
    near = [
        number
        for number, one in enumerate(advice.best[1:], start=2)
        if advice.predictions[one].fastest_s <= top.slowest_s
    ]
    sure = (
        f"by the spread of seeds, {numbers(near)} may be as fast as number 1"
        if near
        else "it is faster than the others by more than the spread of seeds"
    )
    return (
        f"How sure: {sure}. Of {advice.considered} candidates, {advice.simulated} were simulated; "
        "a closed form estimated the others to be slower."
    )


def lines(question: Question, one: Candidate) -> list[str]:
    """Return the settings of a candidate, as TOML."""
    split, pools = one.split, question.pools
    text = ["[rollout]", f'mode = "{one.pacing.mode.value}"']
    text += [f"alpha = {one.pacing.alpha}"] if one.pacing.alpha else []
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
    sim = section(question.base)
    text += ["", "[sim]  # for `rollweave simulate`", f'model = "{sim.model}"']
    text += [f'gpu = "{pools[split.pool].gpu}"'] if len(pools) == 1 else []
    return [*text, f"trainer_gpus = {split.trainer}"]
