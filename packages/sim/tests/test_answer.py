"""The answer of `rollweave advise` as text, as settings and as numbers, of three
candidates that are laid out.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from rollweave.schema.config.loading import loads
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.errors import ConfigError
from rollweave_sim import command_advise
from rollweave_sim.advise import Advice, Pool
from rollweave_sim.candidates import Candidate, EngineGroup, Pacing, Prediction, Split
from rollweave_sim.command_advise import COLUMNS, Asked, base_of, pools_of
from rollweave_sim.serving import _percentiles

CONFIG = """
[run]
name = "small"
[sim]
model = "qwen2.5-7b"
gpu = "h100"
[trainer]
ranks = 4
[[tasks]]
env = "dapo-math"
[rollout]
groups_per_step = 2
group_size = 2
[engines]
count = 3
degree = 2
"""
POOLED = """
[pools.compute]
resource = "H800"
[pools.bandwidth]
resource = "H20"
[[engines]]
count = 2
pool = "bandwidth"
[[engines]]
count = 1
pool = "compute"
"""
TWO_POOLS = Candidate(
    split=Split(
        pool="h800",
        trainer=4,
        engines=(
            EngineGroup(pool="h20", count=1, degree=2, phase="prefill"),
            EngineGroup(pool="h800", count=2, degree=1, phase="decode"),
        ),
    ),
    pacing=Pacing(mode=ModeName("bounded"), alpha=2),
)
IN_TURN = Candidate(
    split=Split(
        pool="", trainer=8, engines=(EngineGroup(pool="", count=8, degree=1),), colocated=True
    ),
    pacing=Pacing(mode=ModeName("sync")),
)
LARGE = Candidate(
    split=Split(pool="", trainer=8, engines=(EngineGroup(pool="", count=1, degree=8),)),
    pacing=Pacing(mode=ModeName("one_step")),
)


def prediction(step_s: float, **fields: Any) -> Prediction:
    known: dict[str, Any] = {
        "step_s": step_s,
        "step_tokens": 3000.0,
        "staleness": 0.0,
        "stalest": 0,
        "engines": {"busy": 0.75, "no work": 0.25},
        "trainer": {"busy": 0.5, "waits": 0.5},
        "kv_used": 0.4,
        "dropped": 0.05,
        "fastest_s": step_s - 1,
        "slowest_s": step_s + 1,
    }
    return Prediction(**{**known, **fields})


ADVICE = Advice(
    best=[TWO_POOLS, IN_TURN, LARGE],
    predictions={
        TWO_POOLS: prediction(9.0, staleness=1.25, stalest=2),
        IN_TURN: prediction(12.0),
        LARGE: prediction(11.0, staleness=1.0, fastest_s=9.5),
    },
    known={},
    gains={"engines": 0.1, "trainer": 0.3, "environment": -0.1, "weights": 0.0},
    considered=40,
    simulated=12,
    failed={LARGE: "b", IN_TURN: "a", TWO_POOLS: "b"},
)
TABLE: Any = SimpleNamespace(
    base=loads(CONFIG, [], name="x"),
    pools={"h20": Pool(gpu="h20", gpus=2, price=1.0), "h800": Pool(gpu="h800", gpus=6)},
    left_out=["engines of degree 8"],
    seeds=3,
    cost_per_step=lambda candidate, step_s: 2 * step_s,
)
EXPLAINED = """
Question: 2 h20 and 6 h800, qwen2.5-7b, dapo-math, 2 groups of 2 trajectories a step.
Fastest: mode bounded 2; 4 GPUs (h800) train beside 1 engine of 2 GPUs (h20) for prefill and 2 \
engines of 1 GPU (h800) for decode. A step takes 9.0 s (8.0 s to 10.0 s with 3 seeds).
It is limited by the engines: they have turns 75% of the time.
If one part were twice as fast, a step would be shorter by: training steps 30%, engine steps \
10%, transfers of weights 0%, environments and rewards 0%.
It trains on trajectories that are 1.25 steps old on average (at most 2); 5% of those started \
are not trained on.
With 0.00 steps of staleness (mode sync, in turn; 8 engines of 1 GPU and the trainer take turns \
on all GPUs) a step takes 1.33 times as long.
How sure: by the spread of seeds, number 3 may be as fast as number 1. Of 40 candidates, 12 \
were simulated; a closed form estimated the others to be slower.
Left out: engines of degree 8.
Learning is not simulated: a step on older data may teach less, and a mode that throws long \
trajectories away trains on fewer tokens. Compare modes by staleness and tokens/s, too.
Moving the trainer's state for engines in turn takes no simulated time.
"""
SETTINGS = """
[rollout]
mode = "bounded"
alpha = 2

[[engines]]
count = 1
degree = 2
phase = "prefill"
pool = "h20"

[[engines]]
count = 2
degree = 1
phase = "decode"
pool = "h800"

[trainer]
ranks = 4
pool = "h800"

[pools.h20]
resource = "H20"

[pools.h800]
resource = "H800"

[sim]  # for `rollweave simulate`
model = "qwen2.5-7b"
"""
SETTINGS_IN_TURN = """
[rollout]
mode = "sync"

[[engines]]
count = 8
degree = 1

[trainer]
ranks = 8
colocated = true

[sim]  # for `rollweave simulate`
model = "qwen2.5-7b"
gpu = "h100"
"""


def test_the_answer_explains_the_fastest_and_what_is_fresher() -> None:
    assert command_advise.explanation(TABLE, ADVICE) == EXPLAINED.strip().split("\n")
    apart = [prediction(20.0), prediction(30.0, staleness=1.0)]
    sure = Advice(
        best=[LARGE, TWO_POOLS],
        predictions=dict(zip((LARGE, TWO_POOLS), apart, strict=True)),
        known={},
        gains={},
        considered=2,
        simulated=2,
    )
    text = command_advise.explanation(TABLE, sure)
    assert text[1].startswith("Fastest: mode one_step; 8 GPUs train beside 1 engine of 8 GPUs. ")
    assert text[5].startswith("How sure: it is faster than the others by more than the spread")
    assert len(text) == 8, "nothing is fresher, and nothing takes turns"


def test_the_answer_is_a_configuration() -> None:
    assert command_advise.lines(TABLE, TWO_POOLS) == SETTINGS.strip().split("\n")
    alone: Any = SimpleNamespace(base=TABLE.base, pools={"": Pool(gpu="h100", gpus=8)})
    assert command_advise.lines(alone, IN_TURN) == SETTINGS_IN_TURN.strip().split("\n")


def test_the_answer_is_numbers() -> None:
    figures = command_advise.figures(TABLE, ADVICE)
    first, second, third = figures.pop("best")
    assert figures == {
        "gpus": {
            "h20": {"gpu": "h20", "gpus": 2, "price": 1.0},
            "h800": {"gpu": "h800", "gpus": 6, "price": None},
        },
        "saved_if_halved": ADVICE.gains,
        "considered": 40,
        "simulated": 12,
        "left_out": ["engines of degree 8"],
        "failed": ["a", "b"],
        "config": SETTINGS.strip().split("\n"),
    }
    engines = [
        {"pool": "h20", "count": 1, "degree": 2, "phase": "prefill"},
        {"pool": "h800", "count": 2, "degree": 1, "phase": "decode"},
    ]
    assert first == {
        "mode": "bounded",
        "alpha": 2,
        "step_s": 9.0,
        "step_tokens": 3000.0,
        "tokens_per_s": pytest.approx(3000 / 9),
        "dropped": 0.05,
        "staleness": {"mean": 1.25, "max": 2},
        "limit": "engines",
        "colocated": False,
        "trainer_gpus": 4,
        "trainer_pool": "h800",
        "engines": engines,
        "step_s_range": [8.0, 10.0],
        "cost": 18.0,
        "kv_used": 0.4,
        "engines_time": {"busy": 0.75, "no work": 0.25},
        "trainer_time": {"busy": 0.5, "waits": 0.5},
    }
    assert (second["alpha"], second["trainer_pool"], second["colocated"]) == (None, None, True)
    assert second["engines"] == [{"pool": None, "count": 8, "degree": 1, "phase": "both"}]
    assert third["step_s_range"] == [9.5, 12.0]


def test_the_answer_is_a_table() -> None:
    by, busy = "the engines: they have turns 75% of the time", ("25%", "50%")
    rows = [
        tuple(cell(one, ADVICE.predictions[one]) for cell in COLUMNS.values())
        for one in ADVICE.best
    ]
    layouts = ("1 x 2 h20 prefill + 2 x 1 h800 decode", "8 x 1", "1 x 8")
    assert rows == [
        (
            "bounded 2",
            layouts[0],
            "4 h800",
            "9.00",
            "3,000",
            "333",
            "5%",
            "1.25 (max 2)",
            *busy,
            by,
        ),
        ("sync, in turn", layouts[1], "8", "12", "3,000", "250", "5%", "0.00 (max 0)", *busy, by),
        ("one_step", layouts[2], "8", "11", "3,000", "273", "5%", "1.00 (max 0)", *busy, by),
    ]


# The question.


@pytest.mark.parametrize(
    ("settings", "asked", "expected"),
    [
        ([], {}, {"": ("h100", 10, None)}),
        ([], {"price": [3.0]}, {"": ("h100", 10, 3.0)}),
        ([], {"gpus": [16]}, {"": ("h100", 16, None)}),
        (["rollout.mode=sync", "trainer.colocated=true"], {}, {"": ("h100", 6, None)}),
        (
            [],
            {"gpus": [2, 4], "hardware": ["H20", "h800"], "price": [1.0, 2.0]},
            {"h20": ("h20", 2, 1.0), "h800": ("h800", 4, 2.0)},
        ),
    ],
)
def test_gpus_are_those_of_the_options_or_of_the_configuration(
    settings: list[str], asked: dict[str, Any], expected: dict[str, Any]
) -> None:
    pools = pools_of(loads(CONFIG, settings, name="x"), Asked(**asked))
    assert {name: (one.gpu, one.gpus, one.price) for name, one in pools.items()} == expected


def test_gpus_of_pools_are_counted_by_pool() -> None:
    text = CONFIG[: CONFIG.index("[engines]")] + POOLED
    for trainer, expected in (("compute", (2, 5)), ("bandwidth", (6, 1))):
        config = loads(text, [f"trainer.pool={trainer}"], name="x")
        pools = pools_of(config, Asked())
        assert {name: pool.gpus for name, pool in pools.items()} == dict(
            zip(("bandwidth", "compute"), expected, strict=True)
        )
        assert {name: pool.gpu for name, pool in pools.items()} == {
            "bandwidth": "h20",
            "compute": "h800",
        }
    with pytest.raises(ConfigError, match=r"--hardware must be distinct, got h20, h20"):
        pools_of(TABLE.base, Asked(gpus=[1, 2], hardware=["h20", "H20"]))


@pytest.mark.parametrize("missing", ["gpus", "model", "workload"])
def test_a_question_without_a_configuration_names_three_things(missing: str) -> None:
    given: dict[str, Any] = {"gpus": [8], "model": "qwen2.5-7b", "workload": "swe"}
    config = base_of(None, [], Asked(**given))
    assert (config.tasks[0].env, config.tasks[0].max_turns) == ("swe", 50)
    with pytest.raises(ConfigError, match="CONFIG must be given, or else --gpus, --hardware"):
        base_of(None, [], Asked(**{name: one for name, one in given.items() if name != missing}))


@pytest.mark.parametrize(
    ("workload", "limits"),
    [
        ("swe", (50, 32768, 16384)),
        ("trace.jsonl", (64, 32768, 16384)),
        ("tool-calling", (9, 18432, 16384)),
    ],
)
def test_a_workload_alone_has_its_own_limits(workload: str, limits: tuple[int, int, int]) -> None:
    (task,) = loads(command_advise._tasks(workload), ["sim.model=qwen3-8b"], name="x").tasks
    assert (task.max_turns, task.max_tokens, task.max_turn_tokens) == limits


def test_percentiles_are_of_the_sorted_values() -> None:
    assert _percentiles([]) == (0.0, 0.0, 0.0)
    assert _percentiles([7.0]) == (7.0, 7.0, 7.0)
    assert _percentiles([3.0, 1.0, 2.0, 4.0]) == (2.0, 4.0, 4.0)
    assert _percentiles([float(number) for number in range(100, 0, -1)]) == (50.0, 95.0, 99.0)
