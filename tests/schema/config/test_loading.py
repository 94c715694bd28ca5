"""A config file: read, overridden, dumped; and every problem named with field, rule,
value and file.
"""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.schema.config.loading import dumps, load, loads, settings_of
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from tests.support.properties import examples

GOOD = """
[run]
name = "lake"
[model.scratch]
hidden = 32
[[tasks]]
env = "frozenlake"
options = { maps = "fixed", deep = { nothing = [1, 2] } }
[[tasks]]
env = "nim"
weight = 2.5
[rollout]
mode = "partial"
"""


def problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loads(text, overrides, name="my.toml")
    return str(caught.value).splitlines()


def test_reads_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(GOOD)
    config = load(tmp_path / "a.toml")
    assert config.rollout.mode is ModeName.PARTIAL
    assert config.tasks[1].weight == 2.5
    assert config.tasks[0].options == {"maps": "fixed", "deep": {"nothing": [1, 2]}}


def test_a_domain_has_its_own_algorithm() -> None:
    """What it leaves unset is the run's."""
    config = loads(
        GOOD,
        [
            "algorithm={advantage='rloo',clip=[0.2,0.5],aggregate='sequence_mean',kl=0.1}",
            "tasks.1.algorithm={advantage='grpo'}",
        ],
    )
    assert list(config.own_algorithms()) == ["nim"]
    own = config.own_algorithms()["nim"]
    assert own.loss_values == config.algorithm.loss_values == (0.2, 0.5, "sequence_mean")
    assert (own.advantage, own.kl) == ("grpo", 0.1)
    assert config.algorithm.advantage == "rloo"
    assert loads(dumps(config)) == config
    same = loads(GOOD, ["algorithm.advantage=rloo", "tasks.1.algorithm.advantage=rloo"])
    assert same.own_algorithms() == {}


def test_overrides() -> None:
    config = loads(
        GOOD,
        [
            "rollout.alpha=3",
            "tasks.1.max_turns = 7",
            "run.name=other",
            'run.dir="quo ted"',
            "eval.every=1",
            "eval.stop_at=0.5",
            "model.scratch.hidden=96",
            "tasks.0.options.maps=random",
            'run.sinks=["wandb"]',
        ],
    )
    assert (config.rollout.alpha, config.tasks[1].max_turns, config.eval.stop_at) == (3, 7, 0.5)
    assert (config.run.name, config.run.dir, config.run.sinks) == ("other", "quo ted", ("wandb",))
    assert config.model.scratch is not None
    assert config.model.scratch.hidden == 96
    assert config.tasks[0].options["maps"] == "random"


@settings(max_examples=examples(40))
@given(
    name=st.text("abc._-", max_size=5).map("a".__add__),
    seed=st.integers(0, 2**40),
    lr=st.floats(1e-9, 1),
    stop=st.none() | st.floats(0, 1),
    options=st.dictionaries(
        st.text(max_size=5), st.integers(-5, 5) | st.text(max_size=5), max_size=3
    ),
)
def test_what_was_dumped_loads_as_itself(
    name: str, seed: int, lr: float, stop: float | None, options: dict[str, object]
) -> None:
    config = RunConfig.model_validate(
        {
            "run": {"name": name, "seed": seed, "sinks": ["tensorboard"]},
            "model": {"path": "some/where"},
            "tasks": [{"env": "x", "options": options}],
            "trainer": {"lr": lr},
            "eval": {"every": 1, "stop_at": stop},
        }
    )
    assert loads(dumps(config)) == config


def test_an_override_is_valid_text() -> None:
    (problem,) = problems(GOOD, "run.name=a\udcff")
    assert problem == r"--set: run.name must be valid text, got 'a\udcff'"


def test_files_that_are_no_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: config must be a readable text file"):
        load(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="config must be a readable text file"):
        load("null\0byte.toml")
    with pytest.raises(ConfigError, match="config must have at most 1048576 bytes, got more"):
        load("/dev/zero")
    assert problems("= 3")[0].startswith("my.toml: config must be valid TOML")
    (tmp_path / "a.toml").write_bytes(b"[run]\nname = '\xff'")
    with pytest.raises(ConfigError, match=r"a\.toml:2: config must be UTF-8: .*byte 0xff"):
        load(tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("1" * 30, "tasks.0.options.x.y must be an integer of 64 bits, got one of 97"),
        ("[" * 5000 + "]" * 5000, "config must be valid TOML: maximum recursion depth exceeded"),
        ("[" * 200 + "]" * 200, "config must be at most 100 levels deep"),
    ],
)
def test_options_that_nothing_can_hold(value: str, problem: str) -> None:
    text = f"[[tasks]]\nenv = 'nim'\n[tasks.options.x]\ny = {value}"
    assert problems(text) == [f"my.toml: {problem}"]


def test_a_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(GOOD, encoding="utf-8-sig")
    assert load(tmp_path / "a.toml") == loads(GOOD)


LEAVES = [key for key in settings_of(RunConfig) if not key.startswith(("sim.", "allocation."))]
PLACES = {"tasks": "tasks.0", "pools": "pools.one"}
WRONG = [
    "true",
    "-1",
    "2.5",
    "inf",
    "nan",
    '"☃"',
    "''",
    "[]",
    "[true]",
    "{}",
    "{a = 1}",
    str(2**70),
    '"\\u0000"',
    "1979-05-27",
]


@pytest.mark.parametrize("value", ["1979-05-27", "07:32:00", "nan", "-inf", "[[1, 1979-05-27]]"])
def test_template_arguments_are_what_json_can_hold(value: str) -> None:
    text = '[run]\nname = "a"\n[model]\npath = "x"\n[[tasks]]\nenv = "frozenlake"\n'
    text = text.replace('"x"\n', '"x"\ntemplate_arguments = {{ a = true, b = {} }}\n')
    with pytest.raises(ConfigError) as error:
        loads(text.format(value))
    assert "model.template_arguments must hold text, finite numbers, booleans" in str(error.value)
    assert "\n" not in str(error.value)
    expected = {"a": True, "b": {"c": ["d", 1.5]}}
    assert loads(text.format('{ c = ["d", 1.5] }')).model.template_arguments == expected


def test_every_error_is_in_our_own_words() -> None:
    """No line of pydantic reaches the user, whatever is wrong with whichever field."""
    foreign = re.compile(r"[Ii]nput|[Vv]alue should|[Vv]alue error|pattern|String|should|type=")
    for leaf in LEAVES:
        section, _, field = leaf.rpartition(".")
        for value in WRONG:
            try:
                loads(GOOD, [f"{PLACES.get(section, section)}.{field}={value}"], name="my.toml")
            except ConfigError as error:
                for line in str(error).splitlines():
                    assert " must " in line or "unknown key" in line, line
                    assert not foreign.search(line), line
