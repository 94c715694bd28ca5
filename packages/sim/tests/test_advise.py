"""What advise arranges, estimates and leaves out, of workloads and costs that are laid
out.
"""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollweave.schema.config.loading import loads
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.errors import ConfigError
from rollweave_sim import advise, fleet
from rollweave_sim.advise import Pool, Splits
from rollweave_sim.candidates import Candidate, EngineGroup, Pacing, Split
from rollweave_sim.trial import Length
from rollweave_sim.workload import Plan, TurnPlan

CONFIG = """
[run]
name = "small"
seed = 5
[sim]
model = "qwen2.5-7b"
gpu = "h100"
[trainer]
ranks = 4
[[tasks]]
env = "dapo-math"
max_tokens = 18432
max_turn_tokens = 16384
[rollout]
groups_per_step = 2
group_size = 2
max_running = 8
[engines]
count = 4
max_slots = 64
"""
PLAN = Plan(
    prompt_tokens=100,
    init_s=3.0,
    turns=(
        TurnPlan(output_tokens=10, observation_tokens=50, env_s=1.0),
        TurnPlan(output_tokens=30, observation_tokens=0, env_s=2.0),
    ),
    reward_s=4.0,
    reward=1.0,
    success=True,
)
WORK: Any = {"dapo-math": SimpleNamespace(plan=lambda **_: PLAN)}
GROUP = EngineGroup(pool="", count=2, degree=2)


def table(*settings: str, **more: Any) -> Splits:
    pools = more.pop("pools", {"": Pool(gpu="h100", gpus=8, price=3.0)})
    given = {"rank_bytes": lambda config: 0, **more}
    return Splits(loads(CONFIG, settings, name="x"), pools, WORK, **given)


def candidate(
    *groups: EngineGroup, mode: str = "bounded", trainer: int = 4, **fields: Any
) -> Candidate:
    alpha = 2 if mode == "bounded" else 0
    split = Split(**{"pool": "", "trainer": trainer, "engines": groups or (GROUP,), **fields})
    return Candidate(split=split, pacing=Pacing(mode=ModeName(mode), alpha=alpha))


def test_a_candidate_is_a_configuration_without_what_it_does_not_compare() -> None:
    made = table("weights.relays=1").arranged(candidate())
    (group,) = made.engines
    assert (group.count, group.degree, group.phase, group.pool) == (2, 2, "both", None)
    assert (group.max_slots, group.kv_tokens, made.pools) == (64, 65536, {})
    assert (made.rollout.mode, made.rollout.alpha, made.rollout.affinity) == (
        ModeName.BOUNDED,
        2,
        "declared",
    )
    assert (made.trainer.ranks, made.trainer.colocated, made.trainer.pool) == (4, False, None)
    assert (made.weights.relays, made.eval.final_episodes) == (0, 0)
    assert (made.allocation, made.cluster, advise.section(made).gpu) == (None, None, "h100")
    in_turn = table().arranged(candidate(mode="sync", trainer=8, colocated=True))
    assert (in_turn.trainer.colocated, in_turn.rollout.alpha) == (True, None)


def test_a_candidate_of_two_pools_names_them() -> None:
    pools = {"h20": Pool(gpu="h20", gpus=2, price=1.0), "h800": Pool(gpu="h800", gpus=6)}
    both = table(pools=pools)
    groups = (
        EngineGroup(pool="h20", count=1, degree=2),
        EngineGroup(pool="h800", count=2, degree=1),
    )
    one = candidate(*groups, pool="h800")
    made = both.arranged(one)
    assert [(group.pool, group.count, group.degree) for group in made.engines] == [
        ("h20", 1, 2),
        ("h800", 2, 1),
    ]
    assert {name: pool.resource for name, pool in made.pools.items()} == {
        "h20": "h20",
        "h800": "h800",
    }
    assert (made.trainer.pool, advise.section(made).gpu) == ("h800", "h800")
    assert both.cost_per_step(one, 7200.0) is None, "one price is not known"
    only = candidate(groups[0], pool="h800", trainer=0)
    assert both.cost_per_step(only, 7200.0) == 2 * 1.0 * 2.0
    assert table().cost_per_step(candidate(), 1800.0) == 8 * 3.0 / 2


def test_a_trial_has_a_seed_of_its_own() -> None:
    trial = table().trial(candidate(), Length(warm=1, steps=3), seed=2, faster="engines")
    assert (trial.config.run.seed, trial.length.warm, trial.faster) == (7, 1, "engines")


@pytest.mark.parametrize(
    ("length", "ahead", "batches", "trained"),
    [((0, 2), 0, 3, 3), ((1, 3), 1, 7, 6), ((1, 3), 4, 13, 11)],
)
def test_a_trial_measures_a_wave_at_least(
    length: tuple[int, int], ahead: int, batches: int, trained: int
) -> None:
    of = Length(warm=length[0], steps=length[1])
    assert (of.batches(ahead), of.trained(ahead)) == (batches, trained)


def test_the_tokens_of_a_plan_are_counted_with_their_context() -> None:
    spans = 10 * (100 + 5) + 30 * (160 + 15)
    assert advise._tokens(PLAN) == (40, 150, spans / 40)
    empty = Plan(prompt_tokens=9, init_s=0.0, turns=(), reward_s=0.0, reward=0.0, success=False)
    assert advise._tokens(empty) == (0, 9, 0.0)


class Priced:
    """An engine whose decoding takes a second a sequence, and prefill one a token."""

    kv_tokens = 10**6

    def decode_s(self, *, decode: int, decode_context: int, steps: int) -> float:
        return steps * decode + decode_context / 1e6

    def step_s(self, *, prefill_tokens: int, prefill_context: int, **_: int) -> float:
        return prefill_tokens + prefill_context / 1e6


@pytest.mark.parametrize("mode", ["sync", "bounded", "one_step"])
def test_the_estimate_is_the_slowest_of_what_never_waits(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    trainer = SimpleNamespace(step_s=lambda *, tokens, context: tokens * 1.0 + context * 1e-3)
    costs = {("", 2): Priced(), ("", 1): Priced()}
    monkeypatch.setattr(advise, "costs_of", lambda config: (costs, trainer))
    groups = (GROUP, EngineGroup(pool="", count=2, degree=1))
    context = (10 * 105 + 30 * 175) / 40
    step_s = 2 + round(2 * context) / 1e6  # eight attempts on four engines
    prefill_s = 512 + round(512 * context) / 1e6
    rate = 4 / (40 * step_s / 2 + 150 * prefill_s / 512)
    length = 40 + 150
    train_s = 4 * length + 4 * length * (length + 1) / 2 * 1e-3
    latency_s = 3.0 + 4.0 + 3.0 + 40 * step_s
    whole = max(4 / rate, latency_s) + train_s
    overlapped = max(4 / rate, train_s, latency_s / {"bounded": 3, "one_step": 2}.get(mode, 1))
    found = table().estimate(candidate(*groups, mode=mode))
    assert found == pytest.approx(whole if mode == "sync" else overlapped)


def test_what_does_not_fit_is_left_out_with_the_reason() -> None:
    needed: list[int] = []

    def rank_bytes(config: Any) -> int:
        needed.append(config.trainer.ranks)
        return 10**15 if config.trainer.ranks < 5 else 80 << 30

    found = table(rank_bytes=rank_bytes)
    assert needed == [2, 3, 4, 5]
    assert {one.split.trainer for one in found.everything} >= {6}
    assert min(one.split.trainer for one in found.everything) >= 5
    assert [text.partition(":")[0] for text in found.left_out] == [
        "engines of degree 8 on h100",
        "training on h100",
    ]
    assert found.left_out[1].endswith(
        "4 GPUs need 931323 GiB each for a batch's longest trajectory, and have 80"
    )
    with pytest.raises(ConfigError, match=r"gpus must suffice .*, got 8 h100; engines of degree 8"):
        table(rank_bytes=lambda config: 10**15)
    assert advise._rule(ConfigError("tp must be 1, got 2")) == "tp must be 1"
    assert advise._rule(ConfigError("nothing fits")) == "nothing fits"


def test_a_simulated_engine_measures_itself_as_a_live_one() -> None:
    contexts = fleet.PROFILE_CONTEXTS
    profile = fleet._profile(cast(Any, Priced()), 6, 2 * contexts[0])
    found = [(time.batch, time.context, time.seconds) for time in profile]
    assert found[:2] == [(n, contexts[0], n + n * contexts[0] / 1e6) for n in (1, 2)]
    assert [row[:2] for row in found[2:]] == [(1, context) for context in contexts[1:]]
    wide = fleet._profile(cast(Any, Priced()), 6, 10**9)
    assert sorted({time.batch for time in wide}) == [1, 2, 4, 6]


def test_servers_never_take_turns_with_the_trainer() -> None:
    """Their memory stays theirs, so that a run refuses this."""
    made = table("engines.kind=vllm")
    assert made.everything
    assert not any(one.split.colocated for one in made.everything)
    assert any("engines.kind vllm keeps its memory" in text for text in made.left_out)
    for one in made.everything:
        made.arranged(one)
