"""Changed settings without effect are refused, and no others."""

import random
from collections.abc import Iterator

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rollweave.schema.config.effects import RULES, without_effect
from rollweave.schema.config.loading import dumps, loads, model_in, settings_of
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError

CONFIG = """
[run]
name = "lake"
[model.scratch]
hidden = 32
[[tasks]]
env = "frozenlake"
"""

CASES = [
    (["rollout.mode=sync", "rollout.alpha=2"], "rollout.alpha has no effect in mode sync, got 2"),
    (
        ["rollout.predictor=boosted"],
        "rollout.predictor has no effect where no policy predicts lengths, got boosted",
    ),
    (
        [
            "rollout.scheduling=trajectory",
            "ablation.policies=['fcfs', 'affinity']",
            "rollout.predictor=boosted",
        ],
        "rollout.predictor has no effect where no policy predicts lengths, got boosted",
    ),
    (
        ["rollout.mode=partial", "rollout.spare_groups=1"],
        "rollout.spare_groups has no effect in mode partial, got 1",
    ),
    (
        ["tasks.0.group_size=4", "rollout.group_size=6"],
        "rollout.group_size has no effect where each task domain has its own, got 6",
    ),
    (
        ["algorithm.kl_direction=forward"],
        "algorithm.kl_direction has no effect while algorithm.kl is 0, got forward",
    ),
    (
        ["algorithm.gamma=0.9"],
        "algorithm.gamma has no effect with algorithm.advantage grpo, got 0.9",
    ),
    (
        ["tasks.0.algorithm.loss=gspo", "algorithm.loss=cispo"],
        "algorithm.loss has no effect where each task domain has its own, got cispo",
    ),
    (
        ["tasks.0.algorithm.loss=gspo", "algorithm.clip_high=0.3"],
        "algorithm.clip_high has no effect where each task domain has its own, got 0.3",
    ),
    (
        ["algorithm.overlong=punish", "tasks.0.algorithm.overlong=drop"],
        "algorithm.overlong has no effect where each task domain has its own, got punish",
    ),
    (
        ["tasks.0.algorithm.gamma=0.9"],
        "tasks.0.algorithm.gamma has no effect with advantage grpo, got 0.9",
    ),
    (
        ["tasks.0.algorithm.reward_weight=0.9"],
        "tasks.0.algorithm.reward_weight has no effect with advantage grpo, got 0.9",
    ),
    (
        ["algorithm.gamma=0.9", "algorithm.advantage=gigpo", "tasks.0.algorithm.gamma=0.8"],
        "algorithm.gamma has no effect where each task domain has its own, got 0.9",
    ),
    (
        ["model.device=cpu", "trainer.save_memory=['activations', 'optimizer']"],
        "trainer.save_memory has no effect for optimizer on model.device cpu, got optimizer",
    ),
    (
        ["algorithm.reward_weight=2"],
        "algorithm.reward_weight has no effect with algorithm.advantage grpo, got 2.0",
    ),
    (
        ["critic.lr=0.1"],
        "critic.lr has no effect with algorithm.advantage grpo, which takes no critic, got 0.1",
    ),
    (
        ["algorithm.advantage=rloo", "critic.gae_lambda=1"],
        "critic.gae_lambda has no effect with algorithm.advantage rloo, which takes no critic, "
        "got 1.0",
    ),
    (["warmup.batch=3"], "warmup.batch has no effect while warmup.steps is 0, got 3"),
    (
        ["weights.transport=nixl"],
        "weights.transport has no effect while weights.relays is 0, got nixl",
    ),
    (
        ["workers.count=2", "workers.idle_s=5.0"],
        "workers.idle_s has no effect while the number of workers does not change "
        "(workers.minimum), got 5.0",
    ),
    (
        ["workers.pool=cpus", "pools.cpus.resource=cpu", "cluster.address=a:1", "cluster.hosts=1"],
        "workers.pool has no effect while workers.count is 0, got cpus",
    ),
    (
        ["sandbox.backend=zygote", "sandbox.mirror=/images"],
        "sandbox.mirror has no effect with sandbox.backend zygote, which has the host's image "
        "only, got /images",
    ),
    (
        ["sandbox.backend=plain", "sandbox.cache_dir=/images"],
        "sandbox.cache_dir has no effect with sandbox.backend plain",
    ),
    (
        ["sandbox.backend=plain", "sandbox.cache_gb=9"],
        "sandbox.cache_gb has no effect with sandbox.backend plain",
    ),
    (
        ["ablation.without=['deltas']"],
        "ablation.without has no effect for deltas while weights.relays is 0, got deltas",
    ),
    (
        ["pools.far.resource=a", "pools.far.site=b", "sim.model=qwen3-8b", "engines.pool=far"],
        "pools.far.site has no effect without [cluster], got b",
    ),
    (
        ["rollout.mode=sync", "trainer.colocated=true", "ablation.without=['staging']"],
        "ablation.without has no effect for staging with trainer.colocated, got staging",
    ),
    (
        ["model.device=cpu", "ablation.without=['cuda_graphs']"],
        "ablation.without has no effect for cuda_graphs on model.device cpu, got cuda_graphs",
    ),
    (
        ["engines.deterministic=true", "ablation.without=['cuda_graphs']"],
        "ablation.without has no effect for cuda_graphs where all engines are servers or "
        "deterministic, got cuda_graphs",
    ),
    (["eval.episodes=3"], "eval.episodes has no effect while eval.every is 0"),
    (["eval.stop_at=0.5"], "eval.stop_at has no effect while eval.every is 0"),
    (
        ["eval.final_episodes=0", "eval.temperature=1"],
        "eval.temperature has no effect without evaluations",
    ),
    (
        ["faults.latency_sigma=3"],
        "faults.latency_sigma has no effect without faults.latency_s, got 3.0",
    ),
    (
        ["engines={kind='vllm', prefill_chunk_tokens=64}", "model.scratch.hidden=64"],
        "engines.0.prefill_chunk_tokens has no effect with kind vllm, whose args has "
        "--max-num-batched-tokens, got 64",
    ),
    (
        ["engines={kind='sglang', prefill_chunk_tokens=64}"],
        "engines.0.prefill_chunk_tokens has no effect with kind sglang, whose args has "
        "--chunked-prefill-size, got 64",
    ),
    (["tasks.0.weight=3"], "tasks.0.weight has no effect with one task domain, got 3.0"),
]
USED = [
    ["rollout.mode=partial", "rollout.alpha=2"],
    ["rollout.mode=sync", "rollout.spare_groups=1"],
    ["rollout.mode=bounded", "rollout.spare_groups=1"],
    ["ablation.policies=['longest_first']", "rollout.predictor=boosted"],
    ["ablation.policies=['pinned']", "rollout.scheduling=trajectory", "rollout.predictor=history"],
    ["algorithm.kl=0.1", "algorithm.kl_direction=forward"],
    ["algorithm.advantage=gigpo", "algorithm.gamma=0.9"],
    ["algorithm.advantage=distill", "algorithm.reward_weight=2", "teacher.url=http://a:1"],
    [
        "tasks.0.algorithm.advantage=distill",
        "tasks.0.algorithm.reward_weight=2",
        "teacher={url='http://a:1', dialect='sglang', model='m', token_env='T', timeout_s=3}",
    ],
    ["tasks.0.algorithm.advantage=gigpo", "algorithm.gamma=0.9"],
    ["algorithm.advantage=gae_turn", "algorithm.gamma=0.9", "critic.lr=0.1"],
    ["tasks.0.algorithm.advantage=gae", "critic.gae_lambda=1"],
    ["tasks.0.algorithm.advantage=gigpo_no_std", "tasks.0.algorithm.gamma=0.9"],
    ["algorithm.loss=cispo", "algorithm.overlong=drop", "algorithm.clip_high=3"],
    ["algorithm.loss=gspo", "tasks.0.algorithm.clip_low=0.1", "algorithm.clip_high=0.3"],
    ["warmup.steps=1", "warmup.batch=3"],
    ["sandbox.mirror=https://a.b/c", "sandbox.cache_dir=~/images", "sandbox.cache_gb=9"],
    ["weights.relays=1", "weights.transport=nixl", "ablation.without=['deltas']"],
    ["cluster={address='127.0.0.1:0',hosts=1}", "ablation.without=['deltas']"],
    ["cluster={address='127.0.0.1:0',hosts=1}", "weights.transport=nixl"],
    ["cluster={address='127.0.0.1:0',hosts=1}", "pools.far.resource=a", "pools.far.site=b"],
    ["eval.every=2", "eval.episodes=3", "eval.stop_at=0.5"],
    ["faults.latency_s=1", "faults.latency_sigma=3"],
    ["eval.final_episodes=0", "eval.episodes=3"],
    ["rollout.group_size=6"],
    ["trainer.save_memory=['optimizer']"],
    ["model.device=cuda", "ablation.without=['cuda_graphs']"],
    ["model.device=cpu", "trainer.save_memory=['activations']"],
    ["trainer.ranks=4", "trainer.tensor_parallel=2", "model.implementation=transformers"],
    ["rollout.mode=sync", "trainer.colocated=true"],
]
DEFAULTS = ["rollout.mode=sync", "rollout.alpha=1", "eval.episodes=64", "tasks.0.weight=1"]


def refused(overrides: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        loads(CONFIG, overrides, name="my.toml")
    return str(error.value).splitlines()


def test_defaults_are_accepted_even_where_they_are_written() -> None:
    assert without_effect(loads(CONFIG)) == []
    assert loads(CONFIG, DEFAULTS).rollout.alpha == 1


@pytest.mark.parametrize("mode", ["sync", "one_step", "stream", "partial", "bounded", "decoupled"])
def test_what_was_dumped_has_nothing_without_effect(mode: str) -> None:
    config = loads(CONFIG, [f"rollout.mode={mode}"])
    assert loads(dumps(config)) == config


@pytest.mark.parametrize(("overrides", "line"), CASES, ids=["+".join(case[0]) for case in CASES])
def test_each_change_without_effect_is_refused_in_one_line(overrides: list[str], line: str) -> None:
    (text,) = refused(overrides)
    assert text.startswith(f"my.toml: {line}")


@pytest.mark.parametrize("overrides", USED, ids=["+".join(each) for each in USED])
def test_changes_with_an_effect_are_accepted(overrides: list[str]) -> None:
    assert without_effect(loads(CONFIG, overrides)) == []


def test_several_changes_are_all_refused() -> None:
    overrides = ["eval.stop_at=0.5", "algorithm.gamma=0.9", "warmup.batch=3"]
    random.Random(0).shuffle(overrides)
    assert sorted(line.split()[1] for line in refused(overrides)) == [
        "algorithm.gamma",
        "eval.stop_at",
        "warmup.batch",
    ]


def test_each_rule_is_of_a_setting_and_has_a_case() -> None:
    assert RULES.keys() <= set(settings_of(RunConfig))
    assert RULES.keys() <= {line.split()[0] for _, line in CASES}


def _fields(model: type[BaseModel]) -> Iterator[tuple[type[BaseModel], str, FieldInfo]]:
    """Yield the settings of `model` and of the sections in it."""
    for name, field in model.model_fields.items():
        inner = model_in(field.annotation)
        if inner is None:
            yield model, name, field
        else:
            yield from _fields(inner)


def test_there_are_few_settings_and_each_has_a_sentence() -> None:
    of_clusters = ("cluster.", "pools.", "sim.pools.", "workers.", "trainer.save_memory")
    of_clusters += ("trainer.tensor_parallel", "rollout.affinity", "tasks.pin")
    of_clusters += ("lora.", "critic.", "sandbox.cache_", "sandbox.mirror", "trainer.colocated")
    of_clusters += ("engines.kind", "engines.python", "engines.args", "engines.address")
    of_clusters += ("engines.token_", "engines.phase", "engines.borrowed", "sim.serving.")
    of_clusters += ("ablation.sharing",)
    of_clusters += ("model.implementation", "teacher.", "algorithm.reward_weight")
    of_clusters += ("algorithm.routing_replay", "rewards.", "tasks.env_weight")
    keys = [
        key
        for key in settings_of(RunConfig)
        if not key.startswith(of_clusters) and not key.endswith(".pool")
    ]
    # a domain's algorithm repeats settings of the run's
    keys = [key for key in keys if not key.startswith("tasks.algorithm.")]
    assert len(keys) <= 93, keys
    for model, name, field in _fields(RunConfig):
        assert (field.description or "").endswith("."), f"{model.__name__}.{name}"
