"""The layout names the hosts of all processes, what they need there, and what does not
fit.
"""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.runtime.preflight.checks import Status
from rollweave.runtime.preflight.layout import Layout, check_layout, lay_out
from rollweave.runtime.preflight.site import Site
from rollweave.schema.config.loading import loads
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import ScratchModel
from rollweave.schema.hosts import Device, Resources
from rollweave.train.scratch import scratch_shape

GIB = 1 << 30
SHAPE = scratch_shape(ScratchModel(hidden=512, layers=4), 32_000, context=1024)
CLUSTER = """
[run]
name = "r"
[model.scratch]
[[tasks]]
env = "nim"
[cluster]
address = "10.0.0.1:7400"
hosts = 1
[pools.train]
resource = "T"
[pools.roll]
resource = "R"
fallback = ["train"]
[trainer]
pool = "train"
[engines]
pool = "roll"
"""


def config(*overrides: str) -> RunConfig:
    return loads(CLUSTER, overrides)


def host(gpus: int = 0, *, cpus: int = 64, gib: float = 64, **labels: float) -> Resources:
    devices = tuple(
        Device(index=index, kind="GPU", memory_bytes=int(gib * GIB)) for index in range(gpus)
    )
    return Resources(cpus=cpus, memory_bytes=512 * GIB, devices=devices, labels=labels)


def laid_out(run: RunConfig, hosts: Mapping[str, Resources]) -> tuple[Layout, list[str]]:
    """Return the layout, and the problems of it."""
    planned = Site(described=hosts).hosts(run)
    layout = lay_out(run, SHAPE, planned)
    checks = check_layout(run, layout, planned)
    return layout, [
        f"{check.name}: {check.detail}" for check in checks if check.status is Status.FAIL
    ]


def test_every_process_is_where_the_run_would_start_it() -> None:
    run = config("model.device=cuda", "trainer.ranks=2", "engines.count=3")
    layout, problems = laid_out(run, {"a": host(2, T=2), "b": host(2, R=2)})
    assert problems == []
    assert [
        (process.host, process.kind, process.name, process.pool, process.devices)
        for process in layout.processes
    ] == [
        ("10.0.0.1", "controller", "", "", ()),
        ("a", "relay", "0", "", ()),
        ("a", "trainer rank", "0", "train", (0,)),
        ("a", "trainer rank", "1", "train", (1,)),
        ("b", "relay", "1", "", ()),
        ("b", "engine", "e0", "roll", (0,)),
        ("b", "engine", "e1", "roll", (1,)),
        ("b", "engine", "e2", "roll", (0,)),
    ]
    shared, own, memory = (one for one in layout.memories if one.host == "b")
    assert [user.name for user in shared.users] == ["e0", "e2"]
    assert shared.needed == 2 * own.needed
    assert len(memory.users) == 4


def test_only_hosts_with_engines_keep_weights() -> None:
    """With ranks on two hosts, the relay beside the first one puts versions
    together.
    """
    run = config("model.device=cuda", "trainer.ranks=2", "engines.count=1")

    def storing(hosts: Mapping[str, Resources]) -> list[str]:
        layout, problems = laid_out(run, hosts)
        assert problems == []
        return [
            process.host
            for process in layout.processes
            if process.kind == "relay"
            and any(need.what == "published weights" for need in process.needs)
        ]

    roll, spare = host(1, R=1), host()
    assert storing({"a": host(2, T=2), "b": roll, "c": spare}) == ["b"]
    assert storing({"a": host(1, T=1), "b": host(1, T=1), "c": roll}) == ["a", "c"]


def test_engines_of_several_cores_are_refused_only_on_gpus() -> None:
    """With `auto`, those of a pool without GPUs run on cores beside a trainer on
    GPUs.
    """
    run = config("engines.degree=2", "pools.roll.fallback=[]")
    layout, problems = laid_out(run, {"a": host(1, T=1), "b": host(R=1)})
    assert problems == []
    (engine,) = [process for process in layout.processes if process.kind == "engine"]
    assert (engine.host, engine.devices, engine.threads) == ("b", (), 2)
    rule = "engines.degree: must be 1 on auto (an embedded engine has one GPU), got 2"
    assert laid_out(run, {"a": host(1, T=1), "b": host(2, R=1)})[1] == [rule]
    fallback = config("engines.degree=2")
    assert rule in laid_out(fallback, {"a": host(2, T=1), "b": host(R=1)})[1]


def test_a_policy_that_predicts_has_a_predictor_beside_the_controller() -> None:
    layout, _ = laid_out(config("rollout.scheduling=trajectory"), {"a": host(T=1)})
    predictor = layout.processes[1]
    assert (predictor.host, predictor.kind, predictor.name) == ("10.0.0.1", "predictor", "ridge")


def test_hosts_of_a_cluster_are_not_known_before_they_join() -> None:
    run = config("cluster.hosts=2", "engines.count=2")
    layout = lay_out(run, SHAPE, None)
    assert layout.memories == ()
    assert [(process.host, process.kind) for process in layout.processes] == [
        ("10.0.0.1", "controller"),
        ("", "relay"),
        ("", "relay"),
        ("", "trainer rank"),
        ("", "engine"),
        ("", "engine"),
    ]
    assert list(check_layout(run, layout, None)) == []


def test_relays_on_one_machine_share_its_memory() -> None:
    run = loads(
        '[run]\nname = "r"\n[model.scratch]\n[[tasks]]\nenv = "nim"\n[weights]\nrelays = 2\n'
        "[engines]\ncount = 2\n"
    )
    layout = lay_out(run, SHAPE, Site().hosts(run))
    (memory,) = layout.memories
    assert len(memory.users) == len(layout.processes) == 6
    assert {process.host for process in layout.processes} == {"host 0", "host 1"}


@pytest.mark.parametrize(
    ("overrides", "hosts", "problem"),
    [
        (["model.device=cuda"], {"a": host(T=1)}, "model.device: must be cpu on hosts without"),
        (
            ["model.device=cuda", "trainer.ranks=3"],
            {"a": host(2, T=2), "b": host(4, R=4)},
            "trainer.ranks: must be at most the number of GPUs of pool train (2), since NCCL "
            "requires one for each rank, got 3",
        ),
        (
            ["trainer.pool=roll", "pools.roll.fallback=[]"],
            {"a": host(T=1)},
            "trainer: must have a place, got trainer rank 0: there is no host of pool roll",
        ),
        (
            ["model.device=cuda", "engines.kv_tokens=8388608", "engines.count=2"],
            {"a": host(1, T=1), "b": host(2, R=2)},
            "engines.kv_tokens: must fit, beside all else, into the 64.0 GiB of GPU 0 of b (and of "
            "1 more), got 8388608: about 80.8 GiB are needed, 64.0 GiB of them for KV cache of "
            "engines",
        ),
        (
            ["engines.kv_tokens=8388608", "engines.count=5"],
            {"a": host(T=1)},
            "engines.kv_tokens: must fit, beside all else, into the 512.0 GiB of a, got 8388608",
        ),
        (
            ["model.device=cuda"],
            {"a": host(1, T=1, R=1, gib=4)},
            "trainer.micro_tokens: must fit, beside all else, into the 4.0 GiB of GPU 0 of a, got "
            "16384",
        ),
    ],
)
def test_what_has_no_place_or_too_little_memory_is_refused(
    overrides: list[str], hosts: dict[str, Resources], problem: str
) -> None:
    _, problems = laid_out(config(*overrides), hosts)
    (problem_line, *_) = problems
    assert problem in problem_line


def test_a_full_gpu_and_shared_cores_are_warned_of() -> None:
    run = config("model.device=cuda")
    layout, _ = laid_out(run, {"a": host(1, T=1), "b": host(1, R=1)})
    on_a = next(one for one in layout.memories if one.host == "a")
    tight = host(1, T=1, cpus=0, gib=on_a.needed / GIB / 0.9)
    planned = Site(described={"a": tight, "b": host(1, R=1, gib=24)}).hosts(run)
    checks = list(check_layout(run, lay_out(run, SHAPE, planned), planned))
    warnings = {check.name: check.detail for check in checks if check.status is Status.WARN}
    assert warnings["cores"] == "a: 1 trainer rank with 1 thread on 0 cores, which they share"
    assert warnings["GPU memory"].endswith("on GPU 0 of a: tight")


# Against a slow and obvious reference.


@settings(deadline=None)
@given(
    gpus=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    engines=st.integers(1, 9),
    ranks=st.integers(1, 5),
    kv=st.integers(64, 4096),
    cuda=st.booleans(),
)
def test_each_memory_holds_the_parts_of_the_processes_that_use_it(
    gpus: list[int], engines: int, ranks: int, kv: int, cuda: bool
) -> None:
    run = config(
        f"model.device={'cuda' if cuda else 'cpu'}",
        f"engines.count={engines}",
        f"engines.kv_tokens={16 * kv}",
        f"trainer.ranks={ranks}",
    )
    hosts = {f"h{number}": host(count, T=1, R=1) for number, count in enumerate(gpus)}
    layout, _ = laid_out(run, hosts)
    assert len(layout.processes) == 1 + len(gpus) + ranks + engines
    needed: dict[tuple[str, int | None], int] = {
        (name, index): 0
        for name, one in hosts.items()
        for index in [*range(len(one.devices)), None]
    }
    for process in layout.processes:
        for need in process.needs:
            where: int | None = None
            if cuda and need.on_device and process.devices:
                (where,) = process.devices
            if (process.host, where) in needed and not (
                cuda and need.on_device and not process.devices and process.on_gpu
            ):
                needed[process.host, where] += need.nbytes
    estimated = {
        (place.host, None if place.device is None else place.device.index): place.needed
        for place in layout.memories
    }
    assert estimated == needed


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_of_processes_that_take_turns_the_larger_counts(device: str) -> None:
    """On a GPU, the trainer's state is in the host's memory while the engines have
    it.
    """
    text = '[run]\nname = "r"\n[model.scratch]\n[[tasks]]\nenv = "nim"\n'
    overrides = ["rollout.mode=sync", f"model.device={device}", "engines.kv_tokens=2097152"]
    hosts = {"a": host(int(device == "cuda"))}
    apart, problems = laid_out(loads(text, overrides), hosts)
    in_turn, more = laid_out(loads(text, [*overrides, "trainer.colocated=true"]), hosts)
    assert problems == more == []
    rank, engine = (
        next(one for one in in_turn.processes if one.kind == kind)
        for kind in ("trainer rank", "engine")
    )
    kept = [need.what for need in rank.needs if need.on_device and not need.in_turn]
    assert kept == (["CUDA"] if device == "cuda" else ["weights", "optimizer"])
    given_back = sum(need.nbytes for need in rank.needs if need.in_turn)
    assert 0 < given_back < sum(need.nbytes for need in engine.needs if need.in_turn)
    assert apart.memories[0].needed - in_turn.memories[0].needed == given_back
    if device == "cuda":
        state = sum(need.nbytes for need in rank.needs if need.what in ("weights", "optimizer"))
        assert in_turn.memories[1].needed - apart.memories[1].needed == state
        assert in_turn.memories[0].largest()[1].what == "KV cache"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_on_several_hosts_the_larger_of_the_two_turns_counts_on_each(device: str) -> None:
    """Compared with the sums of runs that have nothing but engines, and nothing but
    ranks, in these places.
    """
    text = """
[run]
name = "r"
[model.scratch]
[cluster]
address = "10.0.0.1:7400"
hosts = 2
[rollout]
mode = "sync"
[trainer]
colocated = true
[[tasks]]
env = "nim"
"""
    overrides = [f"model.device={device}", "trainer.ranks=3", "engines.count=3"]
    gpus = 2 * (device == "cuda")
    layout, problems = laid_out(loads(text, overrides), {"a": host(gpus), "b": host(gpus)})
    assert problems == []
    ranks, engines = (
        [(one.host, one.devices) for one in layout.processes if one.kind == kind]
        for kind in ("trainer rank", "engine")
    )
    if gpus:
        assert ranks == engines == [("a", (0,)), ("a", (1,)), ("b", (0,))]
    for memory in layout.memories:
        expected: dict[str, int] = {"trainer rank": 0, "engine": 0}
        always = 0
        for user in memory.users:
            for need in user.needs:
                if (user.on_gpu and need.on_device) == (memory.device is not None):
                    always += need.nbytes * (not need.in_turn)
                    if need.in_turn:
                        expected["engine" if need.at_restart else user.kind] += need.nbytes
        assert memory.needed == always + max(expected.values())
        if memory.device is not None and memory.users:
            assert (memory.host, memory.device.index) in [("a", 0), ("a", 1), ("b", 0)]
            assert sorted(user.kind for user in memory.users) == ["engine", "trainer rank"]
            assert min(expected.values()) > 0


@pytest.mark.parametrize(("ranks", "gib"), [(1, 0), (2, 0), (2, 1)])
def test_restarted_ranks_have_their_weights_beside_the_engines(ranks: int, gib: int) -> None:
    """One rank loads its weights in the host's memory; shards are made on the device.
    `gib`: memory of the GPU less than what the engine and the shard need together.
    """
    text = '[run]\nname = "r"\n[model.scratch]\n[[tasks]]\nenv = "nim"\n'
    overrides = [
        "rollout.mode=sync",
        "model.device=cuda",
        "trainer.colocated=true",
        "engines.kv_tokens=2097152",
        f"trainer.ranks={ranks}",
        f"engines.count={ranks}",
    ]
    run = loads(text, overrides)
    layout, _ = laid_out(run, {"a": host(ranks)})
    rank, engine = (
        next(one for one in layout.processes if one.kind == kind)
        for kind in ("trainer rank", "engine")
    )
    weights = next(need.nbytes for need in rank.needs if need.what == "weights")
    restart = sum(need.nbytes for need in rank.needs if need.at_restart)
    assert restart == (weights if ranks > 1 else 0)
    cuda = sum(need.nbytes for need in rank.needs if need.on_device and not need.in_turn)
    needed = engine.device_bytes + cuda + restart
    assert layout.memories[0].needed == needed
    _, problems = laid_out(run, {"a": host(ranks, gib=needed / GIB - gib * weights / GIB / 2)})
    assert len(problems) == (gib > 0)


@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("fallback", ["[]", '["train"]'])
def test_engines_and_ranks_that_share_no_host_do_not_take_turns(gpus: int, fallback: str) -> None:
    overrides = [
        f"model.device={'cuda' if gpus else 'cpu'}",
        "trainer.ranks=1",
        "engines.count=2",
        "rollout.mode=sync",
        f"pools.roll.fallback={fallback}",
    ]
    hosts = {"a": host(gpus, T=2), "b": host(gpus, R=2)}
    _, apart = laid_out(config(*overrides), hosts)
    assert apart == []
    _, problems = laid_out(config(*overrides, "trainer.colocated=true"), hosts)
    assert problems == [
        "trainer.pool: must be of hosts that have engines, since both take turns on the same "
        "devices (trainer.colocated), got ranks on a and engines on b"
    ]
    both = {"a": host(gpus, T=2), "b": host(gpus, T=2, R=2)}
    _, problems = laid_out(config(*overrides, "trainer.colocated=true", "trainer.pool=roll"), both)
    assert problems == []


def test_a_slot_with_a_rank_has_no_worker() -> None:
    run = config("workers.count=1", "workers.pool=train")
    layout, problems = laid_out(run, {"a": host(T=1), "b": host(T=1), "c": host(R=1)})
    assert problems == []
    places = {one.kind: one.host for one in layout.processes}
    assert (places["trainer rank"], places["worker"]) == ("a", "b")


def test_workers_are_laid_out_in_their_pool() -> None:
    run = config("workers.count=3", "workers.pool=roll")
    layout, problems = laid_out(run, {"a": host(2, T=1), "b": host(2, R=3)})
    assert problems == []
    workers = [one for one in layout.processes if one.kind == "worker"]
    expected = [("w0", "b", "roll"), ("w1", "b", "roll"), ("w2", "b", "roll")]
    assert [(one.name, one.host, one.pool) for one in workers] == expected
