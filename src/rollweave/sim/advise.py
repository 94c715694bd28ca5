"""Search for the best use of GPUs in the simulated world: the split between engines and
trainer, the engines' degree, the mode and its bound.

Candidates and choices are those of `core/policy/ratio`; this module turns a candidate
into a configuration, gives it a rough estimate, and has it simulated, in rounds. Equal
questions have equal answers, however long a simulation takes.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from rollweave.core.policy.ratio import (
    DEGREES,
    PREFILL_SHARES,
    Candidate,
    Pacing,
    Prediction,
    candidates,
    divided,
    fastest,
    fastest_first,
    listed,
    screened,
    splits,
    survivors,
)
from rollweave.schema.base import Struct
from rollweave.schema.config.cluster import PoolConfig
from rollweave.schema.config.engines import EngineConfig
from rollweave.schema.config.loading import validated
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.simulation import SimPoolConfig
from rollweave.schema.config.training import EvalConfig, WeightsConfig
from rollweave.schema.errors import ConfigError
from rollweave.sim.cost import EngineCost, TrainerCost
from rollweave.sim.effort import Effort
from rollweave.sim.hardware import gpu, link
from rollweave.sim.models import model
from rollweave.sim.scaled import Factors
from rollweave.sim.trial import Length, ahead, together
from rollweave.sim.trials import Result, Trial
from rollweave.sim.workload import Plan, Workload
from rollweave.sim.world import ONLY_SERVE, costs_of, section

BRIEF, LONG = Length(warm=0, steps=2), Length(warm=1, steps=3)
"""Steps of the first round, and of all others."""

SEEDS = 3
"""Seeds of the last round."""

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

FASTER = 0.5
"""Factor of a part's time in the question what limits the best candidate."""

PARTS = ("engines", "trainer", "environment", "weights")


class Pool(Struct, frozen=True, kw_only=True):
    """Equal GPUs. `price` is that of one GPU for an hour, in any currency; None if
    unknown.
    """

    gpu: str
    gpus: int
    price: float | None = None


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request for advice. `base` has a [sim] section, and all settings that the
    search leaves unchanged; `pools` are the GPUs by the name of their pool.

    `rank_bytes` estimates the memory of a trainer's rank, from a configuration; None
    leaves it to the simulator, which counts the training state alone.
    """

    base: RunConfig
    pools: Mapping[str, Pool]
    work: Mapping[str, Workload]
    rank_bytes: Callable[[RunConfig], int] | None = None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The answer: `predictions` of the `best` candidates, in their order.

    `left_out` says what was not considered, and why. `gains` are the shares of a step
    of the best candidate that are saved if a part takes half its time. `others` are the
    predictions of earlier rounds, which are less certain, and `failed` why a candidate
    has none. `apart` are predictions of the candidate `whole`, the best otherwise, if
    some of its engines compute prompts for the others. `considered` and `simulated`
    count candidates.
    """

    best: list[Candidate]
    predictions: dict[Candidate, Prediction]
    others: dict[Candidate, Prediction]
    left_out: list[str]
    gains: dict[str, float]
    considered: int
    simulated: int
    failed: dict[Candidate, str] = field(default_factory=dict)
    apart: dict[Candidate, Prediction] = field(default_factory=dict)
    whole: Candidate | None = None


def pacings_of(base: RunConfig) -> list[Pacing]:
    """Return the modes to compare, with their bounds."""
    modes = [ModeName.SYNC, ModeName.ONE_STEP, ModeName.DECOUPLED]
    if base.trainer.minibatches > 1:  # with one mini-batch it is one_step
        modes.append(ModeName.STREAM)
    alphas = sorted({*ALPHAS, max(1, base.rollout.alpha)})
    bounded = [Pacing(mode=ModeName.BOUNDED, alpha=alpha) for alpha in alphas]
    partial = Pacing(mode=ModeName.PARTIAL, alpha=max(1, base.rollout.alpha))
    return [*(Pacing(mode=mode) for mode in modes), partial, *bounded]


Run = Callable[[Sequence[Trial]], Iterable[Result]]
"""Runs the trials of a round."""

Progress = Callable[[float, str], None]
"""Is told the share of the search that is done, about, and what the next round is; ""
after a trial.
"""

GAINS, APART = len(PARTS), len(PREFILL_SHARES)
SEEDED = LISTED * (SEEDS - 1)
"""Numbers of trials of the last rounds, at most."""


def advise(question: Question, run: Run, progress: Progress) -> Advice:
    """Search. Raises ConfigError where nothing fits."""
    everything, left_out = considered(question)
    rollout = question.base.rollout
    batch = rollout.groups_per_step * rollout.group_size
    most = min(MOST, max(FEWEST, BUDGET // (batch * BRIEF.batches(1))))
    estimates = {one: estimate(question, one) for one in everything}
    first = screened(estimates, most)
    rounds = _Rounds(question, run, progress)
    rounds.announce(f"{len(everything)} candidates, {len(first)} of them are simulated")
    brief = rounds.simulate(first, BRIEF, later=FINALISTS + SEEDED + APART + GAINS)
    if not brief:
        raise ConfigError(f"no candidate can be simulated: {next(iter(rounds.failed.values()))}")
    chosen = survivors(brief, FINALISTS)
    rounds.announce(f"{len(chosen)} of them for {LONG.steps} more steps")
    longer = rounds.simulate(chosen, LONG, later=SEEDED + APART + GAINS)
    finalists = listed(longer, LISTED)
    rounds.announce(f"{len(finalists)} of them with {SEEDS} seeds")
    seeds = rounds.simulate_seeds(finalists, longer, later=APART + GAINS)
    best = fastest_first(seeds)
    whole = best[0]
    if divided(whole.split):
        rounds.announce("the fastest with prefill and decode apart")
    apart = rounds.apart(whole)
    faster = [one for one in fastest_first(apart) if apart[one].step_s < longer[whole].step_s]
    if faster:
        seeds |= rounds.simulate_seeds(faster[:1], apart, later=GAINS)
        best = listed(seeds, LISTED)
    rounds.announce("the fastest with each part twice as fast")
    return Advice(
        best=best,
        predictions=seeds,
        others={**brief, **longer},
        left_out=left_out,
        gains=rounds.gains(best[0], {**longer, **apart}[best[0]]),
        apart=apart,
        whole=whole,
        considered=len(everything),
        simulated=len(first),
        failed=rounds.failed,
    )


class _Rounds:
    """The rounds of a search, and the candidates that could not be simulated."""

    def __init__(self, question: Question, run: Run, progress: Progress) -> None:
        self._question, self._runs, self._progress = question, run, progress
        self._effort = Effort()
        self.failed: dict[Candidate, str] = {}

    def announce(self, text: str) -> None:
        """Say what is simulated next."""
        self._progress(self._effort.share, text)

    def _run(self, trials: Sequence[Trial], *, later: int) -> list[Result]:
        """Run a round, after which about `later` trials follow."""
        waves = [ahead(trial.config) for trial in trials]
        steps = [trial.length.trained(wave) for trial, wave in zip(trials, waves, strict=True)]
        long = statistics.fmean(map(LONG.trained, waves)) if waves else 0.0
        self._effort.round(sum(steps), later=round(later * long))
        results = []
        for count, result in zip(steps, self._runs(trials), strict=True):
            results.append(result)
            self._effort.trial(count)
            self._progress(self._effort.share, "")
        return results

    def simulate(
        self, chosen: Sequence[Candidate], length: Length, *, later: int
    ) -> dict[Candidate, Prediction]:
        """Return the predictions of those that can be simulated."""
        results = self._run([self._trial(one, length) for one in chosen], later=later)
        predictions = {}
        for one, result in zip(chosen, results, strict=True):
            if isinstance(result, str):
                self.failed[one] = result
            else:
                predictions[one] = result
        return predictions

    def simulate_seeds(
        self, chosen: Sequence[Candidate], known: Mapping[Candidate, Prediction], *, later: int
    ) -> dict[Candidate, Prediction]:
        """Add the other seeds to the predictions under the first one."""
        others = [(one, seed) for one in chosen for seed in range(1, SEEDS)]
        results = self._run(
            [self._trial(one, LONG, seed=seed) for one, seed in others], later=later
        )
        predictions_of = {one: [known[one]] for one in chosen}
        for (one, _), result in zip(others, results, strict=True):
            if not isinstance(result, str):
                predictions_of[one].append(result)
        return {one: together(predictions) for one, predictions in predictions_of.items()}

    def apart(self, best: Candidate) -> dict[Candidate, Prediction]:
        """Return the predictions of a candidate some of whose engines compute prompts
        for the others, by how many do.
        """
        splits = divided(best.split)
        chosen = [structs.replace(best, split=split) for split in splits]
        return self.simulate(chosen, LONG, later=GAINS)

    def gains(self, best: Candidate, before: Prediction) -> dict[str, float]:
        """Return the share of a step that is saved if a part takes half its time, from
        `before`, the prediction under the first seed.
        """
        changes = [Factors(**{part: FASTER}) for part in PARTS]
        results = self._run(
            [self._trial(best, LONG, factors=change) for change in changes], later=0
        )
        return {
            part: 1 - result.step_s / before.step_s
            for part, result in zip(PARTS, results, strict=True)
            if not isinstance(result, str)
        }

    def _trial(
        self, one: Candidate, length: Length, *, seed: int = 0, factors: Factors | None = None
    ) -> Trial:
        config = arranged(self._question, one)
        run = config.run.model_copy(update={"seed": config.run.seed + seed})
        return Trial(
            config=config.model_copy(update={"run": run}),
            length=length,
            factors=factors or Factors(),
        )


def considered(question: Question) -> tuple[list[Candidate], list[str]]:
    """Return the candidates whose memory suffices, and why others are left out."""
    base, pools, left_out = question.base, question.pools, list[str]()
    sim = section(base)
    shape, longest = model(sim.model), base.max_tokens
    degrees: dict[str, list[int]] = {}
    least: dict[str, int] = {}
    for name, pool in pools.items():
        where, chip = f" on {pool.gpu}", gpu(pool.gpu)
        for degree in DEGREES:
            try:
                room = EngineCost(gpu=chip, model=shape, tp=degree).kv_tokens
            except ConfigError as error:
                left_out.append(f"engines of degree {degree}{where}: {_rule(error)}")
                continue
            if room < longest:
                left_out.append(
                    f"engines of degree {degree}{where}: their KV cache has room for {room:,} "
                    f"tokens, a trajectory has up to {longest:,}"
                )
            else:
                degrees.setdefault(name, []).append(degree)
        if pool.gpu in ONLY_SERVE:
            left_out.append(f"training{where}: these GPUs only generate")
            continue
        fewest, reason = _least(question, name)
        if reason:
            left_out.append(f"training{where}: {reason}")
        if fewest:
            least[name] = fewest
    runnable = candidates(
        splits({name: pool.gpus for name, pool in pools.items()}, degrees, least),
        pacings_of(base),
    )
    if not runnable:
        raise ConfigError(
            "gpus must suffice for engines and a trainer, got "
            + "; ".join([" and ".join(f"{p.gpus} {p.gpu}" for p in pools.values()), *left_out])
        )
    return runnable, left_out


def _least(question: Question, name: str) -> tuple[int, str]:
    """Return the minimum number of GPUs that train in this pool, 0 if none do, and why
    fewer do not.
    """
    pool, sim = question.pools[name], section(question.base)
    chip, shape, reason = gpu(pool.gpu), model(sim.model), ""
    for count in range(1, pool.gpus + 1):
        try:
            TrainerCost(gpu=chip, model=shape, gpus=count, link=link(sim.link))
        except ConfigError as error:
            reason = _rule(error)
            continue
        if question.rank_bytes is None:
            return count, reason
        trainer = question.base.trainer.model_copy(
            update={"ranks": count, "tensor_parallel": 1, "colocated": False}
        )
        needed = question.rank_bytes(question.base.model_copy(update={"trainer": trainer}))
        if needed <= chip.hbm_bytes:
            return count, reason
        reason = (
            f"{count} GPUs need {needed / 2**30:.0f} GiB each for a batch's longest trajectory, "
            f"and have {chip.hbm_bytes / 2**30:.0f}"
        )
    return 0, reason


def _rule(error: ConfigError) -> str:
    """Return an error without what was given."""
    return str(error).rpartition(", got")[0] or str(error)


def arranged(question: Question, candidate: Candidate) -> RunConfig:
    """Return the configuration of a candidate, whose task domains use any engine.
    Raises ConfigError where `base` does not allow it.
    """
    base, pools, split = question.base, question.pools, candidate.split
    sim, alone = section(base), len(question.pools) == 1
    update = {
        "rollout": base.rollout.model_copy(
            update={
                "mode": candidate.pacing.mode,
                "alpha": max(1, candidate.pacing.alpha),
                "affinity": "declared",
            }
        ),
        "trainer": base.trainer.model_copy(
            update={
                "colocated": split.colocated,
                "pool": None if alone else split.pool,
                "ranks": 1,
                "tensor_parallel": 1,
            }
        ),
        "engines": tuple(
            base.engines[0].model_copy(
                update={
                    "count": group.count,
                    "degree": group.degree,
                    "phase": group.phase,
                    "pool": None if alone else group.pool,
                    "address": (),
                    "token_env": None,
                    "kv_tokens": EngineConfig.model_fields["kv_tokens"].default
                    if base.max_tokens <= EngineConfig.model_fields["kv_tokens"].default
                    else 1 << 30,
                }
            )
            for group in split.engines
        ),
        "pools": {}
        if alone
        else {name: PoolConfig(resource=pool.gpu) for name, pool in pools.items()},
        "sim": sim.model_copy(
            update={
                "gpu": pools[split.pool].gpu,
                "trainer_gpus": split.trainer,
                "pools": {}
                if alone
                else {name: SimPoolConfig(gpu=pool.gpu) for name, pool in pools.items()},
            }
        ),
        "tasks": tuple(task.model_copy(update={"pool": None, "pin": False}) for task in base.tasks),
        "cluster": None,
        "allocation": None,
        "weights": WeightsConfig(),
        "eval": EvalConfig(final_episodes=0),
    }
    made = base.model_copy(update=update)
    return validated(RunConfig, made.model_dump(), "the candidate")


def estimate(question: Question, candidate: Candidate) -> float:
    """Return the seconds of a step if nothing ever waited: a rough lower bound that
    only orders candidates of one mode.
    """
    config = arranged(question, candidate)
    engines, trainer = costs_of(config)
    rollout, plans = config.rollout, sample(config, question.work)
    batch = rollout.groups_per_step * rollout.group_size
    totals = [_tokens(plan) for plan in plans]
    outputs, prompts = (statistics.fmean(column) for column in list(zip(*totals, strict=True))[:2])
    context = max(1.0, statistics.fmean(total[2] for total in totals))
    rate, slowest_token_s = 0.0, 0.0  # trajectories a second of all engines
    for group in config.engines:
        cost = engines[(group.pool or "", group.degree)]
        running = rollout.max_running / sum(one.count for one in config.engines)
        at_once = max(1, round(min(running, group.max_slots, cost.kv_tokens / context)))
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
    waits = [plan.init_s + plan.reward_s + sum(turn.env_s for turn in plan.turns) for plan in plans]
    latency_s = max(
        wait + total[0] * slowest_token_s for wait, total in zip(waits, totals, strict=True)
    )
    lengths = [total[0] + total[1] for total in totals]
    scale = batch / len(plans)
    train_s = trainer.step_s(
        tokens=round(scale * sum(lengths)),
        context=round(scale * sum(length * (length + 1) / 2 for length in lengths)),
    )
    rollout_s = batch / rate
    if candidate.synchronous:
        return max(rollout_s, latency_s) + train_s
    return max(rollout_s, train_s, latency_s / (1 + max(1, candidate.pacing.alpha)))


def sample(config: RunConfig, work: Mapping[str, Workload]) -> list[Plan]:
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


def cost_per_step(question: Question, candidate: Candidate, step_s: float) -> float | None:
    """Return the price of a step; None where that of a used pool is not known."""
    hourly = 0.0
    for name, pool in question.pools.items():
        used = candidate.split.gpus_of(name)
        if used and pool.price is None:
            return None
        hourly += used * (pool.price or 0.0)
    return hourly * step_s / 3600


def fresher(advice: Advice, candidate: Candidate) -> Candidate | None:
    """Return the fastest of the best that trains on fresher data than `candidate`."""
    age = advice.predictions[candidate].staleness
    return fastest(advice.predictions, lambda one: advice.predictions[one].staleness < age - 0.05)
