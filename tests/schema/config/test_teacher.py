"""The settings of a teacher."""

from rollweave.schema.config.loading import dumps, loads

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


def test_a_resumed_run_keeps_the_domains_that_have_a_teacher() -> None:
    config = loads(CONFIG)
    assert config.strays_from(config) == []
    assert loads(CONFIG, ["tasks.1.algorithm.advantage=grpo"]).strays_from(config) == []
    assert loads(CONFIG, ["tasks.1.algorithm.advantage=distill"]).strays_from(config) == [
        "tasks (nim).algorithm.advantage must stay as the run began, 'rloo', got 'distill'"
    ]
