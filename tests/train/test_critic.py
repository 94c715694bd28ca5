"""The critic learns returns beside the policy, and is saved and restored with it;
generalized advantages equal the sums of their definition, step by step.
"""

import math
import random
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import assume, given, settings

from rollweave.schema.base import GroupId
from rollweave.schema.config.training import AlgorithmConfig
from rollweave.schema.training import Measure, Measured, TrainOn
from rollweave.schema.work import (
    Batch,
    ScoredGroup,
    Segment,
    SegmentKind,
    TokenSequence,
    Trajectory,
    TurnSpan,
)
from rollweave.train.critic import (
    Critic,
    Estimate,
    _explained,
    estimate,
    load_value_model,
    standardized,
)
from rollweave.train.distributed import ALONE
from rollweave.train.model import load_model
from rollweave.train.packing import Example, pack
from rollweave.train.rows import batch_rows
from rollweave.train.state import load_named_tensors
from rollweave.train.trainer import Trainer
from tests.support import trainers
from tests.support.architectures import build, read
from tests.support.properties import examples
from tests.support.variants import mostly_extended, mostly_slow
from tests.train.asking import changed, published, refused, restore_from, same, save_to, trained
from tests.train.compare import assert_all_close


def critic_of(trainer: Trainer) -> Critic:
    assert trainer._critic is not None
    return trainer._critic


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return all weights, and the critic's optimizer."""
    policy = {f"policy/{name}": each for name, each in published(trainer, trainer.step).items()}
    critic = critic_of(trainer)
    tensors = policy | critic.state.tensors() | critic.state.optimizer_tensors()
    return {name: tensor.clone() for name, tensor in tensors.items()}


def test_a_value_is_a_product_of_the_hidden_state_before_the_token(model_dir: Path) -> None:
    config = trainers.make_config(advantage="gae")
    critic = Critic(config, model_dir, ranks=ALONE, device=trainers.CPU, on_device=True)
    trunk = load_model(model_dir, dtype="float32", device=trainers.CPU)
    row = batch_rows(trainers.make_batch(1), config.algorithm)[0]
    packed = pack([row.example])
    assert not critic.model(packed, 1.0).logprobs.any()
    with torch.no_grad():
        critic.model.value.copy_(torch.arange(32) / 32)
        values = critic.model(packed, 1.0).logprobs
        expected = trunk.hidden(packed) @ (torch.arange(32) / 32)
    torch.testing.assert_close(values, expected)
    assert "lm_head.weight" not in critic.state.tensors()


@pytest.mark.parametrize(
    "name",
    mostly_extended(
        ["qwen3", "qwen3_moe", "gemma3", "deepseek_v3", "qwen2_5_vl"], {"qwen3_moe", "gemma3"}
    ),
)
def test_a_value_of_a_model_of_transformers_is_one_of_its_own_hidden_states(
    tmp_path: Path, name: str
) -> None:
    path = build(name, tmp_path / "m")
    model = load_value_model(path, "transformers", dtype="float32", device=trainers.CPU)
    examples = trainers.make_examples(4)
    assert not model(pack(examples), 1.0).logprobs.any()
    head = torch.arange(len(model.value)) / len(model.value)
    with torch.no_grad():
        model.value.copy_(head)
        values = model(pack(examples), 1.0).logprobs
        base = read(path).base_model
        expected = [
            base(input_ids=each.tokens[None]).last_hidden_state[0, each.targets - 1] @ head
            for each in examples
        ]
    torch.testing.assert_close(values, torch.cat(expected), atol=1e-4, rtol=1e-4)
    model(pack(examples), 1.0).logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert model.value.grad is not None
    assert "lm_head.weight" not in dict(model.named_parameters())


@pytest.mark.extended
@pytest.mark.parametrize("tied", mostly_slow([True, False], {True}))
def test_both_implementations_learn_the_same(tmp_path: Path, tied: bool) -> None:
    path = trainers.make_model(tmp_path / "m") if tied else build("qwen3", tmp_path / "m")
    batch, steps, gradients = trainers.make_batch(3), [], []
    weights: dict[str, torch.Tensor] = {}
    for implementation in ("native", "transformers"):
        config = trainers.make_config(
            advantage="gae",
            implementation=implementation,
            trainer={"minibatches": 2, "epochs": 2, "save_memory": ["activations"]},
        )
        trainer = Trainer(config, path)
        steps.append([trained(trainer, trainers.make_batch(step, step=step)) for step in range(3)])
        critic = critic_of(trainer)
        weights = weights or critic.state.tensors()
        load_named_tensors(critic.model, weights)  # rounding has grown in three steps
        rows = critic.estimated(batch, batch_rows(batch, config.algorithm))
        critic.backward(rows, range(len(rows)), step=3)
        gradients.append(
            {f"advantage/{at}": row.advantages for at, row in enumerate(rows)}
            | {name: each.grad for name, each in critic.model.named_parameters()}
        )
    ours, theirs = gradients
    assert_all_close(theirs, ours, atol=1e-6)
    for one, other in zip(*steps, strict=True):
        for name in ("critic_loss", "critic_grad_norm", "critic_explained", "loss"):
            assert other[name] == pytest.approx(one[name], rel=1e-2, abs=1e-4)


@pytest.mark.extended
@pytest.mark.parametrize("advantage", mostly_slow(["gae", "gae_turn"], {"gae_turn"}))
def test_the_critic_learns_the_returns(model_dir: Path, tmp_path: Path, advantage: str) -> None:
    """Trained on one batch again and again, it explains the returns ever better."""
    config = trainers.make_config(advantage=advantage, steps=60, trainer={"lr": 3e-3, "epochs": 2})
    trainer = Trainer(config, model_dir)
    explained, losses = [], []
    for step in range(25):
        batch = msgspec.structs.replace(trainers.make_batch(7), step=step, version=step)
        values = trained(trainer, batch)
        explained.append(values["critic_explained"])
        losses.append(values["critic_loss"])
    assert explained[0] == 0.0  # it starts with 0
    assert explained[-1] > 0.5
    assert losses[-1] < losses[0] / 2
    assert values["critic_grad_norm"] > 0
    assert values["updates"] == 2


@pytest.mark.parametrize(
    ("returns", "valued", "explained"),
    [
        ([[]], [[]], 0.0),
        ([[1.0, 2.0], [9.0]], [[False, False], [False]], 0.0),
        ([[3.0, 3.0], [3.0, 7.0]], [[True, True], [True, False]], 0.0),
        ([[0.0, 4.0], [8.0, 5.0]], [[True, True], [True, False]], 0.75),
    ],
)
def test_values_explain_a_share_of_the_variance(
    returns: list[list[float]], valued: list[list[bool]], explained: float
) -> None:
    """Values half as large as the returns, and 10 more, leave a quarter of it."""
    pairs = []
    for row, where in zip(map(torch.tensor, returns), valued, strict=True):
        mask = torch.tensor(where, dtype=torch.bool)
        pairs.append((row / 2 + 10, Estimate(row, row, mask, mask)))
    assert _explained(pairs) == pytest.approx(explained)


def test_a_minibatch_is_half_the_mean_squared_error(model_dir: Path, tmp_path: Path) -> None:
    """Before its first step every value is 0, so that a return is a reward-to-go."""
    config = trainers.make_config(advantage="gae", trainer={"micro_tokens": 30})
    trainer = Trainer(config, model_dir)
    batch = trainers.make_batch(2)
    values = trained(trainer, batch)
    squares = []
    for group in batch.groups:
        for trajectory in group.trajectories:
            (sequence,) = trajectory.sequences
            # λ = 0.95 of the reward for each token until the last one
            count = sum(sequence.output_mask())
            assert trajectory.reward is not None
            squares += [(trajectory.reward * 0.95**left) ** 2 for left in range(count)]
    assert values["critic_loss"] == pytest.approx(sum(squares) / len(squares) / 2, rel=1e-5)
    critic_of(trainer)._losses, critic_of(trainer)._norms = [1.0, 3.0], [2.0, 6.0]
    assert list(critic_of(trainer).metrics().values())[:2] == [2.0, 4.0]


def test_a_domain_without_critic_beside_one_with(model_dir: Path, tmp_path: Path) -> None:
    config = trainers.make_config(advantage="grpo", own={"other": {"advantage": "gae_turn"}})
    trainer = Trainer(config, model_dir)
    assert "critic_loss" not in trained(trainer, trainers.make_batch(0))
    before = state_of(trainer)
    assert "critic_loss" in trained(trainer, trainers.make_batch(1, step=1, envs=("none", "other")))
    after = state_of(trainer)
    assert not torch.equal(before["value"], after["value"])


@pytest.mark.variants
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_restored_trainer_continues_bitwise(
    model_dir: Path, tmp_path: Path, implementation: str
) -> None:
    config = trainers.make_config(
        advantage="gae", trainer={"minibatches": 2, "epochs": 2}, implementation=implementation
    )
    first = Trainer(config, model_dir)
    for step in range(4):
        trained(first, trainers.make_batch(step, step=step))
        if step == 1:
            save_to(first, tmp_path / "c", export=True)
    second = Trainer(config, model_dir)
    trained(second, trainers.make_batch(9))  # a step that the restore discards
    restore_from(second, tmp_path / "c", step=2)
    for step in (2, 3):
        trained(second, trainers.make_batch(step, step=step))
    assert same(state_of(first), state_of(second))


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_run_may_get_a_critic_and_lose_it_again(
    model_dir: Path, tmp_path: Path, implementation: str
) -> None:
    plain = trainers.make_config(implementation=implementation)
    with_critic = trainers.make_config(advantage="gae", implementation=implementation)
    first = Trainer(plain, model_dir)
    trained(first, trainers.make_batch(0))
    save_to(first, tmp_path / "s1")
    second = Trainer(with_critic, model_dir)
    restore_from(second, tmp_path / "s1", step=1)
    policy = {name[7:]: t for name, t in state_of(second).items() if name.startswith("policy/")}
    trunk = critic_of(second).state.tensors()
    assert all(torch.equal(trunk[name], policy[name]) for name in trunk.keys() - {"value"})
    trained(second, trainers.make_batch(1, step=1))
    save_to(second, tmp_path / "s2")
    third = Trainer(plain, model_dir)
    restore_from(third, tmp_path / "s2", step=2)
    trained(third, trainers.make_batch(2, step=2))


@pytest.mark.parametrize("passes", [{}, {"epochs": 2, "minibatches": 3}])
def test_a_policy_that_fails_does_not_change_the_critic(
    model_dir: Path, tmp_path: Path, passes: dict[str, Any]
) -> None:
    trainer = Trainer(trainers.make_config(advantage="gae", trainer=passes), model_dir)
    trained(trainer, trainers.make_batch(0))
    before = state_of(trainer)
    reply = refused(
        trainer, TrainOn(batch=trainers.poisoned(trainers.make_batch(1, step=1), math.nan))
    )
    assert reply.nonfinite
    assert same(state_of(trainer), before)


def test_its_learning_rate_is_its_own(model_dir: Path, tmp_path: Path) -> None:
    config = trainers.make_config(advantage="gae", trainer={"lr": 1e-3})
    config = changed(config, "critic", lr=5e-3)
    trainer = Trainer(config, model_dir)
    assert trained(trainer, trainers.make_batch(0))["lr"] == 1e-3
    assert critic_of(trainer).state.optimizer.param_groups[0]["lr"] == 5e-3


# TD errors of buffered groups.


@pytest.mark.parametrize("advantage", ["gae", "gae_turn"])
def test_td_errors_are_those_of_the_values(model_dir: Path, advantage: str) -> None:
    """The value of each token's state, computed alone, gives the errors by hand."""
    gamma = 0.5
    config = trainers.make_config(
        advantage="grpo", own={"other": {"advantage": advantage}}, gamma=gamma
    )
    config = changed(config, "buffer", sample="own:function")
    trainer = Trainer(config, model_dir)
    critic = critic_of(trainer)
    with torch.no_grad():
        critic.model.value.copy_(torch.arange(32) / 32)
    batch = trainers.make_batch(5, envs=("none", "other"))
    reply = trainer.handle(Measure(step=0, part=0, groups=batch.groups))
    assert isinstance(reply, Measured), reply
    for group, found in zip(batch.groups, reply.groups, strict=True):
        assert found.ratio is not None
        assert found.entropy is not None
        if group.env == "none":
            assert found.td_error is None
            continue
        errors = []
        for trajectory in group.trajectories:
            (sequence,) = trajectory.sequences
            every = Example(
                tokens=torch.tensor(sequence.tokens), targets=torch.arange(1, len(sequence.tokens))
            )
            with torch.no_grad():
                values = [0.0, *critic.model(pack([every]), 1.0).logprobs.tolist()]
            states = [  # place, and whether the next state is of another turn
                (place, place == (turn.start if advantage == "gae_turn" else turn.end - 1))
                for turn in sequence.turns
                for place in range(turn.start, turn.end)
                if advantage == "gae" or place == turn.start
            ]
            for (place, ends), after in zip(states, [*states[1:], None], strict=True):
                then = 0.0 if after is None else values[after[0]]
                reward = 0.0 if after else trajectory.reward or 0.0  # turns have none
                errors.append(abs(reward + (gamma if ends else 1.0) * then - values[place]))
        assert found.td_error == pytest.approx(sum(errors) / len(errors), rel=1e-4)


@pytest.mark.parametrize(
    ("sample", "names"),
    [
        ("ratio", {"ratio", "entropy"}),
        ("entropy", {"ratio", "entropy"}),
        ("td_error", {"td_error"}),
        ("own:function", {"ratio", "entropy", "td_error"}),
    ],
)
def test_each_strategy_costs_the_passes_that_it_needs(
    model_dir: Path, sample: str, names: set[str]
) -> None:
    config = changed(trainers.make_config(advantage="gae"), "buffer", sample=sample)
    trainer = Trainer(config, model_dir)
    before = state_of(trainer)
    reply = trainer.handle(Measure(step=0, part=0, groups=trainers.make_batch(5).groups))
    assert isinstance(reply, Measured), reply
    for group in reply.groups:
        values = msgspec.structs.asdict(group)
        assert {name for name, value in values.items() if value is not None} == names
    assert same(state_of(trainer), before)


def test_td_errors_that_are_no_numbers_are_answered(model_dir: Path) -> None:
    config = changed(trainers.make_config(advantage="gae"), "buffer", sample="td_error")
    trainer = Trainer(config, model_dir)
    with torch.no_grad():
        critic_of(trainer).model.value.fill_(math.nan)
    batch = trainers.make_batch(5)
    reply = refused(trainer, Measure(step=0, part=0, groups=batch.groups))
    assert reply.nonfinite
    assert reply.error == f"TD errors of group {batch.groups[0].id}: their mean is nan"


# Generalized advantages.


def sequence_of(rng: random.Random) -> TokenSequence:
    """Build one to four turns, with or without an observation between two of them. An
    engine that returns text only leaves no output tokens; a token may follow the last
    turn.
    """
    segments: list[Segment] = []
    turns: list[TurnSpan] = []

    def add(count: int, kind: SegmentKind = SegmentKind.OBSERVATION) -> None:
        start = segments[-1].end if segments else 0
        version = 0 if kind is SegmentKind.OUTPUT else -1
        if count:
            segments.append(Segment(start=start, end=start + count, kind=kind, version=version))

    add(rng.randint(1, 2), SegmentKind.PROMPT)
    for _ in range(rng.randint(1, 4)):
        add(rng.randint(0, 1))
        start = segments[-1].end
        add(rng.randint(1, 3), rng.choice([SegmentKind.OUTPUT] * 3 + [SegmentKind.OBSERVATION]))
        reward = rng.choice([0.0, 1.0, -0.1])
        turns.append(TurnSpan(start=start, end=segments[-1].end, reward=reward))
    add(rng.choice([0, 0, 1]), SegmentKind.OUTPUT)
    length = segments[-1].end
    return TokenSequence(
        tokens=tuple(range(4, 4 + length)),
        segments=tuple(segments),
        logprobs=(0.0,) * length,
        turns=tuple(turns),
    )


class State(NamedTuple):
    """A state with a value: the turn's number in the trajectory, and the places among
    the output tokens of its sequence that have its advantage.
    """

    turn: int
    sequence: int
    places: list[int]
    value: float


def by_definition(
    states: list[State], rewards: list[float], gamma: float, gae_lambda: float
) -> list[float]:
    """Return A_k = Σ_l λ^(l-k) γ^(turns from k to l) δ_l, where δ is the reward on the
    way to the next state, the discounted value there, minus the value.
    """
    deltas = []
    for state, after in zip(states, [*states, None][1:], strict=True):
        end = len(rewards) if after is None else after.turn
        on_the_way = sum(
            gamma ** (turn - state.turn) * rewards[turn] for turn in range(state.turn, end)
        )
        then = 0.0 if after is None else gamma ** (after.turn - state.turn) * after.value
        deltas.append(on_the_way + then - state.value)
    return [
        sum(
            gae_lambda**distance * gamma ** (states[k + distance].turn - states[k].turn) * delta
            for distance, delta in enumerate(deltas[k:])
        )
        for k in range(len(states))
    ]


def states_of(trajectory: Trajectory, values: dict[int, list[float]], by_turn: bool) -> list[State]:
    states, turn = [], 0
    for number, sequence in enumerate(trajectory.sequences):
        outputs = [at for at, sampled in enumerate(sequence.output_mask()) if sampled]
        for span in sequence.turns:
            inside = [place for place, at in enumerate(outputs) if span.start <= at < span.end]
            for place in inside[:1] if by_turn else inside:
                value = values[number][place]
                states.append(State(turn, number, inside if by_turn else [place], value))
            turn += 1
    return states


@settings(max_examples=examples(200))
@given(
    seed=st.integers(0, 100_000),
    gamma=st.sampled_from([0.5, 0.9, 1.0]),
    gae_lambda=st.sampled_from([0.0, 0.7, 1.0]),
    by_turn=st.booleans(),
)
def test_estimates(seed: int, gamma: float, gae_lambda: float, by_turn: bool) -> None:
    rng = random.Random(seed)
    algorithm = AlgorithmConfig(advantage="gae_turn" if by_turn else "gae", gamma=gamma)
    sequences = tuple(sequence_of(rng) for _ in range(rng.randint(1, 3)))
    rewards = [span.reward for sequence in sequences for span in sequence.turns]
    rewards[-1] += rng.choice([0.0, 2.0])  # a final evaluation, of which no turn knows
    trajectory = trainers.make_trajectory("t", sequences, sum(rewards))
    group = ScoredGroup(id=GroupId("g"), env="none", trajectories=(trajectory,))
    rows = batch_rows(Batch(step=0, version=0, part=0, parts=1, groups=(group,)), algorithm)
    assume(rows)
    values = {row.sequence: [rng.uniform(-1, 2) for _ in range(row.outputs)] for row in rows}
    states = states_of(trajectory, values, by_turn)
    advantages = by_definition(states, rewards, gamma, gae_lambda)

    given_values = [torch.tensor(values[row.sequence]) for row in rows]
    made = estimate(trajectory, rows, given_values, gae_lambda=gae_lambda)
    for row, each in zip(rows, made, strict=True):
        advantage, to_predict = [0.0] * row.outputs, {}
        covered = set()
        for state, expected in zip(states, advantages, strict=True):
            if state.sequence == row.sequence:
                for place in state.places:
                    advantage[place] = expected
                to_predict[state.places[0]] = expected + state.value
                covered.update(state.places)
        assert each.advantages.tolist() == pytest.approx(advantage, abs=1e-5)
        assert each.covered.nonzero().flatten().tolist() == sorted(covered)
        assert each.valued.nonzero().flatten().tolist() == sorted(to_predict)
        assert each.returns.tolist() == pytest.approx(
            [to_predict.get(place, 0.0) for place in range(row.outputs)], abs=1e-5
        )


@settings(max_examples=examples(100))
@given(
    rows=st.dictionaries(
        st.integers(0, 9),
        st.lists(
            st.tuples(st.sampled_from([-1.0, 0.2, 3.0]), st.sampled_from(["", "c", "vc"])),
            min_size=1,
            max_size=4,
        ),
        min_size=1,
        max_size=3,
    ).filter(lambda rows: any(kind for row in rows.values() for _, kind in row))
)
def test_standardized_over_the_tokens_of_turns(rows: dict[int, list[tuple[float, str]]]) -> None:
    made = standardized(
        {
            index: Estimate(
                advantages=torch.tensor([value for value, _ in row]),
                returns=torch.zeros(len(row)),
                valued=torch.tensor(["v" in kind for _, kind in row]),
                covered=torch.tensor(["c" in kind for _, kind in row]),
            )
            for index, row in rows.items()
        }
    )
    flat = [value for row in rows.values() for value, kind in row if kind]
    mean, deviation = statistics.fmean(flat), statistics.pstdev(flat)
    for index, row in rows.items():
        assert made[index].tolist() == pytest.approx(
            [(value - mean) / deviation if kind and deviation else 0.0 for value, kind in row],
            abs=1e-5,
        )
