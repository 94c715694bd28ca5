"""The settings of a teacher."""

import pytest

from rollweave.schema.config.loading import dumps, loads
from rollweave.schema.errors import ConfigError

CONFIG = """
[run]
name = "lake"
[model.scratch]
[[tasks]]
env = "frozenlake"
[[tasks]]
env = "nim"
algorithm = { advantage = "rloo" }
[algorithm]
advantage = "distill"
[teacher]
url = "http://127.0.0.1:8000/"
"""


def test_a_domain_learns_from_the_teacher_and_another_from_rewards() -> None:
    config = loads(CONFIG)
    assert config.teacher is not None
    assert config.teacher.url == "http://127.0.0.1:8000"
    assert (config.distills("frozenlake"), config.distills("nim")) == (True, False)
    assert loads(dumps(config)) == config


def test_single_attempts_suffice_without_a_weight_of_the_reward() -> None:
    assert loads(CONFIG, ["tasks.0.group_size=1"]).group_size("frozenlake") == 1


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["algorithm.advantage=grpo"],
            "teacher must be left out unless algorithm.advantage is distill, got grpo",
        ),
        (["teacher.url=10.0.0.1:80"], "teacher.url must be http://host:port or https://host:port"),
        (["teacher.url=http://a:1/v1"], "teacher.url must be http://host:port"),
        (["teacher.dialect=ollama"], "teacher.dialect must be "),
        (["teacher.timeout_s=0"], "teacher.timeout_s must be "),
        (
            ["teacher.token_env=a b"],
            "teacher.token_env must be the name of an environment variable",
        ),
        (
            ["rollout.temperature=0.7"],
            "rollout.temperature must be 1 with algorithm.advantage distill",
        ),
        (["rollout.dynamic_sampling=true"], "rollout.dynamic_sampling must be false with "),
        (
            ["tasks.0.group_size=1", "algorithm.reward_weight=1"],
            "frozenlake.group_size must be at least 2 for distill with a reward_weight, got 1",
        ),
    ],
)
def test_impossible_settings_are_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        loads(CONFIG, overrides, name="my.toml")
    (line,) = str(error.value).splitlines()
    assert problem in line


def test_the_estimator_needs_a_teacher() -> None:
    with pytest.raises(ConfigError, match=r"teacher.url must be given with algorithm.advantage"):
        loads(CONFIG.partition("[teacher]")[0])


def test_a_resumed_run_keeps_the_domains_that_have_a_teacher() -> None:
    config = loads(CONFIG)
    assert config.strays_from(config) == []
    assert loads(CONFIG, ["tasks.1.algorithm.advantage=grpo"]).strays_from(config) == []
    assert loads(CONFIG, ["tasks.1.algorithm.advantage=distill"]).strays_from(config) == [
        "tasks (nim).algorithm.advantage must stay as the run began, 'rloo', got 'distill'"
    ]
