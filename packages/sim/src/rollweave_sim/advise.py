"""Search for the best use of GPUs in the simulated world: the split between engines and
trainer, the engines' degree, the mode and its bound.

The search is over a table of candidates (`sim/candidates`), in rounds: those that a
closed form screens are simulated briefly, the fastest of them longer, and the best with
several seeds. A table says what its candidates are; here is the table of the splits of
given GPUs, and `sim/rerun` has that of a recorded run. Equal tables have equal answers,
however long a simulation takes.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import structs

from rollweave.schema.base import Struct
from rollweave.schema.config.engines import EngineConfig, PoolConfig
from rollweave.schema.config.loading import validated
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import EvalConfig, WeightsConfig
from rollweave.schema.errors import ConfigError
from rollweave_sim.candidates import (
    DEGREES,
    Candidate,
    Pacing,
    Prediction,
    candidates,
    divided,
    fastest_first,
    listed,
    screened,
    splits,
    survivors,
)
from rollweave_sim.cost import EngineCost, TrainerCost
from rollweave_sim.hardware import gpu, link, model
from rollweave_sim.training import passes_of
from rollweave_sim.trial import PARTS, Length, Result, Trial, together
from rollweave_sim.workload import Plan, Workload
from rollweave_sim.world import ONLY_SERVE, costs_of, section

FINALISTS = 5
"""Candidates of the second round, beside the best of each pacing."""

LISTED = 5
"""Number of answers."""

BUDGET = 8_000
"""Trajectories that the first round simulates: about 60 batches of 128."""

MOST, FEWEST = 64, 12
"""Maximum and minimum number of candidates in the first round."""

ALPHAS = (1, 2)
"""Bounds that are compared, beside the one of the configuration."""

SAMPLED_GROUPS = 16
"""Groups whose plans give the rough estimates."""

Run = Callable[[Sequence[Trial]], Iterable[Result]]
"""Runs the trials of a round."""


class Table(Protocol):
    """The candidates of a search. `rounds` are the lengths of their trials in each
    round, `seeds` those of the last one, and `parts` those whose gain is asked for.
    """

    everything: Sequence[Candidate]
    rounds: Sequence[Length]
    seeds: int
    parts: Sequence[str]

    def screened(self) -> list[Candidate]:
        """Return the candidates of the first round."""

    def trial(self, one: Candidate, length: Length, *, seed: int = 0, faster: str = "") -> Trial:
        """Return a trial of a candidate. Raises ConfigError if it cannot be one."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The answer: `predictions` of the `best` candidates, in their order.

    `known` has the predictions of the round before, which are less certain, and
    `failed` why a candidate has none. `gains` are the shares of a step of the best
    candidate that are saved if a part takes half its time.
    """

    best: list[Candidate]
    predictions: dict[Candidate, Prediction]
    known: dict[Candidate, Prediction]
    gains: dict[str, float]
    considered: int
    simulated: int
    failed: dict[Candidate, str] = field(default_factory=dict)


def search(
    table: Table,
    run: Run,
    progress: Callable[[str], None],
    found: Callable[[Candidate, Prediction], None] = lambda *_: None,
) -> Advice:
    """Search the table. `progress` is called with what each round simulates, and
    `found` with each candidate that is the fastest of its round so far. Raises
    ConfigError if no candidate can be simulated.
    """
    failed: dict[Candidate, str] = {}

    def simulate(chosen: Sequence[Candidate], length: Length) -> dict[Candidate, Prediction]:
        trials: dict[Candidate, Trial] = {}
        for one in chosen:
            try:
                trials[one] = table.trial(one, length)
            except ConfigError as error:
                failed[one] = str(error)
        predictions: dict[Candidate, Prediction] = {}
        for one, result in zip(trials, run(list(trials.values())), strict=True):
            if isinstance(result, str):
                failed[one] = result
                continue
            predictions[one] = result
            if fastest_first(predictions)[0] == one:
                found(one, result)
        return predictions

    first = chosen = table.screened()
    known: dict[Candidate, Prediction] = {}
    for number, length in enumerate(table.rounds):
        if number:
            best = fastest_first(known)[0]
            apart = [structs.replace(best, split=split) for split in divided(best.split)]
            chosen = [*survivors(known, FINALISTS), *apart]
        progress(f"{len(chosen)} of {len(table.everything)} candidates, {length.steps} steps")
        known = simulate(chosen, length)
        if not known:
            raise ConfigError(f"no candidate can be simulated: {next(iter(failed.values()))}")
    finalists, last = listed(known, LISTED), table.rounds[-1]
    progress(f"{len(finalists)} of them with {table.seeds} seeds")
    others = [(one, seed) for one in finalists for seed in range(1, table.seeds)]
    results = run([table.trial(one, last, seed=seed) for one, seed in others])
    seeds = {one: [known[one]] for one in finalists}
    for (one, _), result in zip(others, results, strict=True):
        if isinstance(result, Prediction):
            seeds[one].append(result)
    predictions = {one: together(each) for one, each in seeds.items()}
    best = fastest_first(predictions)[0]
    faster = [table.trial(best, last, faster=part) for part in table.parts]
    return Advice(
        best=fastest_first(predictions),
        predictions=predictions,
        known=known,
        gains={
            part: 1 - result.step_s / known[best].step_s
            for part, result in zip(table.parts, run(faster), strict=True)
            if isinstance(result, Prediction)
        },
        considered=len(table.everything),
        simulated=len(first),
        failed=failed,
    )


def pacings_of(base: RunConfig) -> list[Pacing]:
    """Return the modes to compare, with their bounds."""
    modes = [ModeName.SYNC, ModeName.ONE_STEP, ModeName.DECOUPLED]
    if base.trainer.minibatches > 1:  # with one mini-batch it is one_step
        modes.append(ModeName.STREAM)
    alphas = sorted({*ALPHAS, base.rollout.alpha or 1})
    bounded = [Pacing(mode=ModeName.BOUNDED, alpha=alpha) for alpha in alphas]
    partial = Pacing(mode=ModeName.PARTIAL, alpha=base.rollout.alpha or 1)
    return [*(Pacing(mode=mode) for mode in modes), partial, *bounded]


# The splits of given GPUs.


class Pool(Struct, frozen=True, kw_only=True):
    """Equal GPUs. `price` is that of one GPU for an hour, in any currency; None if
    unknown.
    """

    gpu: str
    gpus: int
    price: float | None = None


class Splits:
    """The table of the splits of `pools` (by name) between engines and a trainer.

    `base` has a [sim] section, and all settings that the search leaves unchanged.
    `rank_bytes` estimates the memory of a trainer's rank, from a configuration.
    `left_out` says what was not considered, and why. Raises ConfigError where nothing
    fits.
    """

    rounds: Sequence[Length] = (Length(warm=0, steps=2), Length(warm=1, steps=3))
    seeds = 3
    parts: Sequence[str] = tuple(PARTS)

    def __init__(
        self,
        base: RunConfig,
        pools: Mapping[str, Pool],
        work: Mapping[str, Workload],
        *,
        rank_bytes: Callable[[RunConfig], int],
    ) -> None:
        self.base, self.pools, self.work, self._rank_bytes = base, pools, work, rank_bytes
        self.left_out: list[str] = []
        self.everything: Sequence[Candidate] = self._considered()
        self._plans = _sample(base, work)

    def screened(self) -> list[Candidate]:
        rollout = self.base.rollout
        batch = rollout.groups_per_step * rollout.group_size
        most = min(MOST, max(FEWEST, BUDGET // (batch * self.rounds[0].batches(1))))
        return screened({one: self.estimate(one) for one in self.everything}, most)

    def trial(self, one: Candidate, length: Length, *, seed: int = 0, faster: str = "") -> Trial:
        config = self.arranged(one)
        run = config.run.model_copy(update={"seed": config.run.seed + seed})
        config = config.model_copy(update={"run": run})
        return Trial(config=config, length=length, faster=faster)

    def cost_per_step(self, one: Candidate, step_s: float) -> float | None:
        """Return the price of a step; None where that of a used pool is not known."""
        hourly = 0.0
        for name, pool in self.pools.items():
            used = one.split.gpus_of(name)
            if used and pool.price is None:
                return None
            hourly += used * (pool.price or 0.0)
        return hourly * step_s / 3600

    def _considered(self) -> list[Candidate]:
        """Return the candidates whose memory suffices."""
        shape, longest = model(section(self.base).model), self.base.max_tokens
        degrees: dict[str, list[int]] = {}
        least: dict[str, int] = {}
        for name, pool in self.pools.items():
            where = f" on {pool.gpu}"
            for degree in DEGREES:
                try:
                    room = EngineCost(gpu=gpu(pool.gpu), model=shape, tp=degree).kv_tokens
                    rule = (
                        ""
                        if room >= longest
                        else (
                            f"their KV cache has room for {room:,} tokens, a trajectory has up to "
                            f"{longest:,}"
                        )
                    )
                except ConfigError as error:
                    rule = _rule(error)
                if rule:
                    self.left_out.append(f"engines of degree {degree}{where}: {rule}")
                else:
                    degrees.setdefault(name, []).append(degree)
            fewest, rule = (
                (0, "these GPUs only generate") if pool.gpu in ONLY_SERVE else self._least(pool)
            )
            if rule:
                self.left_out.append(f"training{where}: {rule}")
            if fewest:
                least[name] = fewest
        gpus = {name: pool.gpus for name, pool in self.pools.items()}
        choices = splits(gpus, degrees, least)
        if (server := self.base.engines[0].server) is not None:
            choices = [one for one in choices if not one.colocated]
            self.left_out.append(
                f"engines and trainer in turn: engines.kind {server} keeps its memory"
            )
        runnable = candidates(choices, pacings_of(self.base))
        if not runnable:
            given = " and ".join(f"{pool.gpus} {pool.gpu}" for pool in self.pools.values())
            raise ConfigError(
                "gpus must suffice for engines and a trainer, got "
                + "; ".join([given, *self.left_out])
            )
        return runnable

    def _least(self, pool: Pool) -> tuple[int, str]:
        """Return the minimum number of GPUs of a pool that train, 0 if none do, and why
        fewer do not.
        """
        sim, chip, reason = section(self.base), gpu(pool.gpu), ""
        for count in range(1, pool.gpus + 1):
            try:
                TrainerCost(
                    gpu=chip,
                    model=model(sim.model),
                    gpus=count,
                    link=link(sim.link),
                    passes=passes_of(self.base),
                )
            except ConfigError as error:
                reason = _rule(error)
                continue
            trainer = self.base.trainer.model_copy(
                update={"ranks": count, "tensor_parallel": 1, "colocated": False}
            )
            needed = self._rank_bytes(self.base.model_copy(update={"trainer": trainer}))
            if needed <= chip.hbm_bytes:
                return count, reason
            reason = (
                f"{count} GPUs need {needed / 2**30:.0f} GiB each for a batch's longest "
                f"trajectory, and have {chip.hbm_bytes / 2**30:.0f}"
            )
        return 0, reason

    def arranged(self, one: Candidate) -> RunConfig:
        """Return the configuration of a candidate, whose task domains use any engine.
        Raises ConfigError where `base` does not allow it.
        """
        base, pools, split = self.base, self.pools, one.split
        alone, kv_tokens = len(pools) == 1, EngineConfig.model_fields["kv_tokens"].default
        rollout = {"mode": one.pacing.mode, "alpha": one.pacing.alpha or None}
        trainer = {
            "colocated": split.colocated,
            "pool": None if alone else split.pool,
            "ranks": split.trainer,
            "tensor_parallel": 1,
        }
        engine = {
            "address": (),
            "kv_tokens": kv_tokens if base.max_tokens <= kv_tokens else 1 << 30,
        }
        update = {
            "rollout": base.rollout.model_copy(update={**rollout, "affinity": "declared"}),
            "trainer": base.trainer.model_copy(update=trainer),
            "engines": tuple(
                base.engines[0].model_copy(
                    update={
                        **engine,
                        "count": group.count,
                        "degree": group.degree,
                        "phase": group.phase,
                        "pool": None if alone else group.pool,
                    }
                )
                for group in split.engines
            ),
            "pools": {}
            if alone
            else {name: PoolConfig(resource=pool.gpu) for name, pool in pools.items()},
            "sim": section(base).model_copy(update={"gpu": pools[split.pool].gpu}),
            "tasks": tuple(task.model_copy(update={"pool": None}) for task in base.tasks),
            "cluster": None,
            "allocation": None,
            "weights": WeightsConfig(),
            "eval": EvalConfig(final_episodes=0),
        }
        made = base.model_copy(update=update)
        return validated(RunConfig, made.model_dump(), "the candidate")

    def estimate(self, one: Candidate) -> float:
        """Return the seconds of a step if nothing ever waited: a rough lower bound that
        only orders candidates of one mode.
        """
        config, plans = self.arranged(one), self._plans
        engines, trainer = costs_of(config)
        rollout = config.rollout
        batch = rollout.groups_per_step * rollout.group_size
        totals = [_tokens(plan) for plan in plans]
        outputs, prompts, context = map(statistics.fmean, zip(*totals, strict=True))
        context = max(1.0, context)
        rate, slowest_token_s = 0.0, 0.0  # trajectories a second of all engines
        for group in config.engines:
            cost = engines[(group.pool or "", group.degree)]
            running = rollout.places.run / sum(each.count for each in config.engines)
            at_once = max(1, round(min(running, group.most_slots, cost.kv_tokens / context)))
            step_s = cost.decode_s(decode=at_once, decode_context=round(at_once * context), steps=1)
            chunk = group.prefill_chunk_tokens
            prefill_s = cost.step_s(
                prefill_tokens=chunk,
                prefill_context=round(chunk * context),
                decode=0,
                decode_context=0,
            )
            rate += group.count / (outputs * step_s / at_once + prompts * prefill_s / chunk)
            slowest_token_s = max(slowest_token_s, step_s)
        latency_s = max(
            plan.init_s
            + plan.reward_s
            + sum(turn.env_s for turn in plan.turns)
            + total[0] * slowest_token_s
            for plan, total in zip(plans, totals, strict=True)
        )
        lengths = [total[0] + total[1] for total in totals]
        scale = batch / len(plans)
        train_s = trainer.step_s(
            tokens=round(scale * sum(lengths)),
            context=round(scale * sum(length * (length + 1) / 2 for length in lengths)),
        )
        rollout_s = batch / rate
        if one.synchronous:
            return max(rollout_s, latency_s) + train_s
        return max(rollout_s, train_s, latency_s / (1 + max(1, one.pacing.alpha)))


def _rule(error: ConfigError) -> str:
    """Return an error without what was given."""
    return str(error).rpartition(", got")[0] or str(error)


def _sample(config: RunConfig, work: Mapping[str, Workload]) -> list[Plan]:
    """Return plans of the run's first groups, of all task domains, that have turns."""
    plans = [
        work[task.name].plan(index=index, member=member, attempt=0, seed=config.run.seed)
        for task in config.tasks
        for index in range(SAMPLED_GROUPS)
        for member in range(config.group_size(task.name))
    ]
    return [plan for plan in plans if plan.turns] or plans


def _tokens(plan: Plan) -> tuple[int, int, float]:
    """Return the output tokens of a plan, those of prompt and observations, and the
    mean context of an output token.
    """
    context, outputs, prompts, spans = plan.prompt_tokens, 0, plan.prompt_tokens, 0.0
    for turn in plan.turns:
        spans += turn.output_tokens * (context + turn.output_tokens / 2)
        outputs += turn.output_tokens
        prompts += turn.observation_tokens
        context += turn.output_tokens + turn.observation_tokens
    return outputs, prompts, spans / max(1, outputs)
