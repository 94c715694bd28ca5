"""What papers state about workloads: the form of the file, the solver against brute
force, our values against trajectories as runs draw them, and the command.
"""

import itertools
import json
import math
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollweave.cli.main import app
from rollweave.schema.errors import ConfigError
from rollweave_papers import constraint_values
from rollweave_papers.constraint_solver import System
from rollweave_papers.constraint_tables import check
from rollweave_papers.constraint_values import drawn, value, value_of
from rollweave_papers.constraints import (
    QUANTITIES,
    RATES,
    STATED,
    USERS,
    Constraint,
    of_family,
    read,
    step_s,
)
from rollweave_sim.families import FAMILIES


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw few trajectories, as tests need no precise values."""
    monkeypatch.setattr(constraint_values, "SAMPLE", 512)


def one(quantity: str, **bounds: object) -> Constraint:
    fields = {"name": f"{quantity} {bounds}", "paper": "a", "says": "b", "families": ("swe",)}
    return Constraint(quantity=quantity, **fields | bounds)  # type: ignore[arg-type]


def test_every_family_and_each_paper_has_constraints_and_free_quantities() -> None:
    stated = read(STATED)
    for family in (*FAMILIES, *USERS):
        assert of_family(stated.constraints, family), family
        assert stated.free[family], family
    papers = {constraint.paper.split()[0] for constraint in stated.constraints}
    assert papers == {"RollArt", "ROSE", "Heddle", "Laminar", "ProRL"}


def test_every_stated_quantity_has_a_value_in_its_family() -> None:
    for constraint in read(STATED).constraints:
        for family in set(constraint.families) - set(USERS):
            found = value(family, constraint)
            if (family, constraint.quantity) != ("swe", "judge_s.mean"):
                assert found is not None, (family, constraint.name)
                assert found >= 0


def test_values_are_those_of_drawn_trajectories() -> None:
    plans = drawn(FAMILIES["coding"])
    turns = [turn for plan in plans for turn in plan.turns]
    outputs = sum(turn.output_tokens for turn in turns)
    seen = sum(turn.observation_tokens for turn in turns)
    prompts = sum(plan.prompt_tokens for plan in plans)
    constraint_values._seen.cache_clear()
    constraint_values.statistic.cache_clear()
    assert value_of("coding", "output.mean") == pytest.approx(outputs / len(turns))
    share = (prompts + seen) / (prompts + seen + outputs)
    assert value_of("coding", "prefill.share") == pytest.approx(share)
    longest = value("coding", one("sampled.longest", of=len(plans), at_most=1.0))
    assert longest == max(sum(turn.output_tokens for turn in plan.turns) for plan in plans)


NUMBERS = (1, 2, 4, 8)
"""Values of the grid on which brute force looks."""

SOLVED = ("turns.least", "turns.mean", "turns.most", "output.mean", "sampled.mean")


def points() -> list[dict[str, float]]:
    """Return all values of turns and outputs on the grid that can be."""
    return [
        {
            "turns.least": least,
            "turns.mean": mean,
            "turns.most": most,
            "sampled.mean": mean * output,
            "output.mean": output,
        }
        for least, mean, most, output in itertools.product(NUMBERS, repeat=4)
        if least <= mean <= most
    ]


def meets(point: dict[str, float], constraint: Constraint) -> bool:
    found = point[constraint.quantity]
    low, high = constraint.at_least, constraint.at_most
    return (low is None or found >= low) and (high is None or found <= high)


@pytest.mark.parametrize("seed", range(40))
def test_the_solver_agrees_with_brute_force(seed: int) -> None:
    """Bounds on the grid have their ends on it, so that what brute force does not find
    is contradictory, and an interval's ends are values that it finds.
    """
    draw = random.Random(seed)
    constraints = []
    for number in range(draw.randint(1, 5)):
        low, high = sorted(draw.choices(NUMBERS, k=2))
        bounds = draw.choice(
            ({"at_least": low}, {"at_most": high}, {"at_least": low, "at_most": high})
        )
        quantity = draw.choice(SOLVED[:4])
        constraints.append(one(quantity, name=f"{number}", **bounds))
    system = System(constraints, {})
    found = [point for point in points() if all(meets(point, each) for each in constraints)]
    verdict = system.verdict()
    assert bool(found) == (not verdict.contradictions)
    for wrong in verdict.contradictions:
        assert not any(all(meets(point, each) for each in wrong) for point in points())
        for part in itertools.combinations(wrong, len(wrong) - 1):
            assert any(all(meets(point, each) for each in part) for point in points())
    left = [each for each in constraints if each not in verdict.dropped]
    found = [point for point in points() if all(meets(point, each) for each in left)]
    assert found
    for quantity in SOLVED[:4]:
        ends = system.left_to(quantity, verdict)
        values = [point[quantity] for point in found]
        assert ends.low == pytest.approx(min(values), rel=1e-6, abs=1e-6)
        assert ends.high == pytest.approx(max(values), rel=1e-6) or max(values) == max(NUMBERS)


def test_what_every_distribution_obeys_is_obeyed_by_our_families() -> None:
    """The structure contradicts no family: each is within what its own values leave."""
    for name, family in FAMILIES.items():
        held = [
            one(quantity, name=quantity, at_least=found * 0.999, at_most=found * 1.001)
            for quantity in QUANTITIES
            if not QUANTITIES[quantity].of and not QUANTITIES[quantity].speed
            for found in [None if quantity in RATES else value_of(name, quantity)]
            if found is not None
        ]
        assert len(held) > 15, family.name
        assert not System(held, {}).verdict().contradictions, family.name


def test_a_share_of_prefill_bounds_outputs() -> None:
    """By hand: with 10 turns, 100 prompt tokens and 80 % of 1,000 tokens prefilled,
    a turn samples 20 and observes 70.
    """
    bounds = [
        one("turns.mean", at_least=10, at_most=10),
        one("prompt.mean", at_least=100, at_most=100),
        one("context.mean", at_least=1000, at_most=1000),
        one("prefill.share", at_least=0.8, at_most=0.8),
    ]
    system = System(bounds, {})
    verdict = system.verdict()
    for quantity, expected in (("output.mean", 20.0), ("observation.mean", 70.0)):
        found = system.left_to(quantity, verdict)
        assert (found.low, found.high) == pytest.approx((expected, expected))
    assert system.left_to("hang_s", verdict).high == math.inf


def test_stated_contradictions_are_found_with_their_names() -> None:
    stated = read(STATED)
    checked = check(stated.constraints, "swe", stated.free["swe"])
    names = [{found.name for found in wrong} for wrong in checked.verdict.contradictions]
    assert {"rollart-sec8-hangs", "rollart-sec8-success"} in names
    assert {"rollart-sec71-context", "rollart-sec8-responses"} in names


def test_the_speed_of_decoding_is_that_of_the_simulator() -> None:
    alone = step_s("qwen3-8b", "h800", tp=1, batch=1)
    assert alone < step_s("qwen3-8b", "h800", tp=1, batch=100)
    bound = one("decode_s.longest", of=16, model="qwen3-8b", at_most=10.0)
    assert bound.above == {"sampled.longest@16": alone}


def test_rates_of_users_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_values, "users", lambda family, rate: {"ttft_s.p99": rate})
    bound = one("ttft_s.p99", families=("users-7b",), at_least=2.0, at_most=4.0)
    low, high = constraint_values.rates("users-7b", bound)
    assert 2.0 / 1.1 <= low < 2.0 < 4.0 <= high < 4.4


# The command.

HEAD = '[[constraints]]\nname = "x"\npaper = "p"\nsays = "s"\n'
TURNS = f'{HEAD}families = ["swe"]\nquantity = "turns.mean"\n'


def invoke(*arguments: str) -> tuple[int, str, list[str]]:
    result = CliRunner().invoke(app, ["reproduce", "--constraints", *arguments])
    return result.exit_code, result.stdout, result.stderr.splitlines()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{TURNS}at_least = -1.0", "at_least must be a number of at least 0, got -1"),
        (TURNS, "at_least or at_most must be given, got neither"),
        (f"{TURNS}at_least = 3\nat_most = 2", "at_least must not exceed at_most"),
        (f"{TURNS}at_least = nan", "at_least must be a number of at least 0, got nan"),
        (
            f'{HEAD}families = ["frozenlak"]\nquantity = "turns.mean"\nat_least = 1',
            "did you mean 'frozenlake'?",
        ),
        (
            f'{HEAD}families = ["swe"]\nquantity = "turn.mean"\nat_least = 1',
            "did you mean 'turns.mean'?",
        ),
        (
            f'{HEAD}families = ["users-7b"]\nquantity = "turns.mean"\nat_least = 1',
            "families must be a family with turns.mean, got 'users-7b'",
        ),
        (
            f'{HEAD}families = ["swe"]\nquantity = "response.longest"\nat_least = 1',
            "of must be at least 1, the trajectories of a batch,",
        ),
        (f"{TURNS}of = 4\nat_least = 1", "of must be left out with turns.mean"),
        (f'{TURNS}gpu = "h20"\nat_least = 1', "gpu must be left out with turns.mean, got 'h20'"),
        (f"{TURNS}tp = 0\nat_least = 1", "tp must be left out with turns.mean, got 0"),
        (f"{TURNS}batch = 64\nat_least = 1", "batch must be left out with turns.mean, got 64"),
        ("", "must have at least one of [[constraints]], got none"),
        (
            f'{HEAD}families = ["swe"]\nquantity = "turn_decode_s.mean"\nat_least = 1',
            "model must name a model",
        ),
        (
            f'{HEAD}families = ["swe"]\nquantity = "turn_decode_s.mean"\nat_least = 1\nmodel = "x"',
            "model must be one of",
        ),
        (f"{HEAD}families = []\nquantity = 'turns.mean'\nat_least = 1", "at least one family"),
        (f"{TURNS}at_least = 1\n{TURNS}at_least = 1", "name must be given once"),
        (f"{TURNS}at_leat = 1", "unknown field `at_leat`"),
        ("constraints = []", "must have at least one of [[constraints]]"),
        ("constraints = [", "must be a TOML file of [[constraints]]"),
        (f'{TURNS}at_least = 1\n[free]\nswe = ["prompt.men"]', "did you mean 'prompt.mean'?"),
    ],
)
def test_a_wrong_file_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    code, out, errors = invoke(str(file))
    assert (code, out, len(errors)) == (2, "", 1)
    assert errors[0].startswith("error: ")
    assert words in errors[0]


def test_a_file_that_contradicts_itself_is_one_line_after_its_table(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    second = TURNS.replace('"x"', '"y"').replace("turns.mean", "turns.most")
    file.write_text(f"{TURNS}at_least = 30\n{second}at_most = 20\n")
    code, out, errors = invoke(str(file))
    assert code == 2
    assert "contradiction: x (turns.mean at least 30 turns) and y" in out
    assert len(errors) == 1
    assert "got for swe x (turns.mean at least 30 turns) and y (turns.most at most 20" in errors[0]


def test_a_file_is_checked_printed_and_written_between_marks(tmp_path: Path) -> None:
    file, page = tmp_path / "own.toml", tmp_path / "page.md"
    file.write_text(f"{TURNS}at_least = 30\nat_most = 31\n")
    page.write_text("Before.\n<!-- constraints -->\nold\n<!-- /constraints -->\nAfter.\n")
    code, out, _ = invoke(str(file), "--json", "--write", str(page))
    assert code == 0
    (family,) = json.loads(out.splitlines()[-1])
    assert (family["family"], family["constraints"][0]["holds"]) == ("swe", False)
    text = page.read_text()
    assert text.startswith("Before.\n<!-- constraints -->\n\n## Stated and ours")
    assert text.endswith("<!-- /constraints -->\nAfter.\n")
    assert "| x | turns.mean | 30 to 31 turns |" in text


def test_a_missing_file_and_a_second_one_are_refused(tmp_path: Path) -> None:
    assert invoke(str(tmp_path / "none.toml"))[0] == 2
    code, _, errors = invoke("a.toml", "b.toml")
    assert (code, errors) == (2, ["error: --constraints takes one FILE, got a.toml, b.toml"])
    with pytest.raises(ConfigError, match="readable TOML file"):
        read(tmp_path)
