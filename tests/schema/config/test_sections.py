"""Settings of a section, and what follows from them."""

import pytest

from rollweave.schema.config.loading import dumps, loads
from rollweave.schema.config.root import RunConfig
from rollweave.sim.run import ignored

SCRATCH = """
[run]
name = "lake"
[model.scratch]
hidden = 64
[[tasks]]
env = "frozenlake"
"""

VLLM = """
[[engines]]
kind = "vllm"
python = "/opt/vllm/bin/python"
args = ["--max-num-batched-tokens", "8192"]
count = 2
degree = 2
"""

CHECKPOINT = SCRATCH.replace("[model.scratch]\nhidden = 64", '[model]\npath = "moe"')

TAUGHT = """
[[tasks]]
env = "nim"
algorithm = { advantage = "rloo" }
[algorithm]
advantage = "distill"
[teacher]
url = "http://127.0.0.1:8000/"
"""

ATTACHED = """
[[engines]]
kind = "vllm"
address = ["http://10.0.0.7:8000", "http://10.0.0.8:8000"]
"""

HOSTS = """
[cluster]
address = "[fe80::1]:80"
hosts = 2
[pools.compute]
resource = "H800"
[pools.bandwidth]
resource = "H20"
fallback = ["compute"]
[trainer]
pool = "compute"
[engines]
pool = "bandwidth"
"""


def strays(former: RunConfig, now: RunConfig) -> list[str]:
    """Return the settings with which `now` cannot continue."""
    assert now.strays_from(now) == []
    return now.strays_from(former)


def test_a_domain_learns_from_the_teacher_and_another_from_rewards() -> None:
    config = loads(SCRATCH + TAUGHT)
    assert config.teacher is not None
    assert config.teacher.url == "http://127.0.0.1:8000"
    assert (config.distills("frozenlake"), config.distills("nim")) == (True, False)
    assert loads(dumps(config)) == config
    assert strays(config, loads(SCRATCH + TAUGHT, ["tasks.1.algorithm.advantage=grpo"])) == []
    assert strays(config, loads(SCRATCH + TAUGHT, ["tasks.1.algorithm.advantage=distill"])) == [
        "tasks (nim).algorithm.advantage must stay as the run began, 'rloo', got 'distill'"
    ]


def test_a_role_uses_its_pool_and_then_the_fallbacks() -> None:
    run = loads(CHECKPOINT + HOSTS)
    assert run.pools_of(run.trainer.pool) == ("compute",)
    assert run.pools_of(run.engines[0].pool) == ("bandwidth", "compute")
    assert run.pools_of(None) == ()
    assert run.cluster is not None
    assert (run.cluster.host, run.cluster.port) == ("fe80::1", 80)


def test_a_section_gives_the_model_adapters_which_a_run_keeps() -> None:
    plain, small, large = (loads(SCRATCH, sets) for sets in ([], ["lora.rank=8"], ["lora.rank=9"]))
    assert plain.lora is None
    assert small.lora is not None
    assert (small.lora.scale, small.lora.targets) == (4.0, ("all-linear",))
    assert loads(dumps(small)) == small
    assert "lora" in ignored(small)
    for former, now in ((plain, small), (small, plain), (small, large)):
        (line,) = strays(former, now)
        assert line.startswith("lora must stay as the run began, ")


@pytest.mark.parametrize("given", ["q_proj", "['q_proj']"])
def test_one_target_may_stand_alone(given: str) -> None:
    lora = loads(SCRATCH, [f"lora.targets={given}"]).lora
    assert lora is not None
    assert lora.targets == ("q_proj",)


def test_groups_of_all_kinds_may_be_in_one_run() -> None:
    config = loads(SCRATCH + VLLM + '[[engines]]\n[[engines]]\nkind = "sglang"\n')
    assert [group.server for group in config.engines] == ["vllm", None, "sglang"]
    assert loads(dumps(config)) == config


def test_a_server_may_have_several_gpus_and_sglang_may_be_deterministic() -> None:
    """An embedded engine has one GPU."""
    assert loads(SCRATCH + VLLM, ["model.device=cuda"]).engines[0].degree == 2
    sets = ["engines={kind='sglang', deterministic=true, degree=2}", "model.device=cuda"]
    (group,) = loads(SCRATCH, sets).engines
    assert (group.deterministic, group.degree) == (True, 2)


def test_the_run_may_decide_how_many_engines_of_each_degree_there_are() -> None:
    config = loads(SCRATCH, ["engines.kind=sglang", "allocation.budget=4", "model.device=cuda"])
    assert config.degrees == (1, 2, 4)
    for degree, budget, degrees in ((2, 64, (2, 4, 8)), (8, 64, (8, 16)), (3, 7, (3, 6))):
        sets = [f"engines={{kind='sglang', degree={degree}}}", f"allocation.budget={budget}"]
        assert loads(SCRATCH, sets).degrees == degrees


def test_a_model_from_scratch_has_heads_that_vllm_computes_and_keeps_them() -> None:
    narrow, wide = loads(SCRATCH), loads(SCRATCH + VLLM)
    assert (narrow.head_dim, wide.head_dim) == (16, 32)
    (line,) = strays(narrow, wide)
    assert line.startswith("engines.kind must stay as the run began, ")
    assert "heads of 16" in line
    assert "heads of 32" in line


def test_other_log_probs_are_asked_for_only_if_a_temperature_needs_them() -> None:
    assert not loads(SCRATCH, ["eval.temperature=1"]).scales_logprobs
    unevaluated = ["eval.temperature=0.5", "eval.every=0", "eval.final_episodes=0"]
    assert not loads(SCRATCH, unevaluated).scales_logprobs
    assert loads(SCRATCH, ["eval.temperature=0.5"]).scales_logprobs
    sets = ["engines.kind=sglang", "rollout.temperature=0.5", "rollout.top_p=0.9"]
    assert loads(SCRATCH, sets).scales_logprobs


def test_there_is_one_engine_for_each_address() -> None:
    config = loads(CHECKPOINT + ATTACHED)
    assert config.engines[0].count == 2
    assert loads(dumps(config)) == config
    one = loads(CHECKPOINT + ATTACHED, ["engines.0.address='http://10.0.0.7:8000/'"]).engines[0]
    assert (one.address, one.count) == (("http://10.0.0.7:8000",), 1)


def test_engines_may_return_the_experts() -> None:
    config = loads(CHECKPOINT + VLLM, ["algorithm.routing_replay=true"])
    assert config.algorithm.routing_replay
