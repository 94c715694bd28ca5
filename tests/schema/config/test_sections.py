"""Settings of a section, and what follows from them."""

from rollweave.schema.config.loading import dumps, loads
from rollweave.schema.config.root import RunConfig
from rollweave_sim.run import ignored

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


def test_there_is_one_engine_for_each_address() -> None:
    config = loads(CHECKPOINT + ATTACHED)
    assert config.engines[0].count == 2
    assert loads(dumps(config)) == config
    one = loads(CHECKPOINT + ATTACHED, ["engines.0.address='http://10.0.0.7:8000/'"]).engines[0]
    assert (one.address, one.count) == (("http://10.0.0.7:8000",), 1)


def test_engines_may_return_the_experts() -> None:
    config = loads(CHECKPOINT + VLLM, ["algorithm.routing_replay=true"])
    assert config.algorithm.routing_replay
