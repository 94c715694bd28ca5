"""On one machine, too, engines and trainer ranks get GPUs of their own."""

from pathlib import Path

import pytest

from rollweave.core.mechanisms.membership.bindings import bind_all, bind_engine, groups_on_gpus
from rollweave.core.mechanisms.membership.members import first_engines
from rollweave.core.state import State
from rollweave.runtime.hosts.hosts import environment
from rollweave.runtime.launch import train
from rollweave.runtime.life import machine_of
from rollweave.schema.base import EngineId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.events import EngineSlot
from rollweave.schema.hosts import HostSlot, Program, Share

LISTING = "".join(f"{index}, GPU-{index}, NVIDIA H20, 97871\n" for index in range(4))


@pytest.fixture(autouse=True)
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for the driver's program."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nprintf '{LISTING}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return program


def config(tmp_path: Path, device: str = "auto", degree: int = 1) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "test", "steps": 1, "dir": str(tmp_path / "runs")},
            "model": {"scratch": {"hidden": 32}, "device": device},
            "tasks": [{"env": "frozenlake", "max_tokens": 256}],
            "engines": {"count": 3, "degree": degree},
            "trainer": {"ranks": 2},
        }
    )


def test_an_engine_whose_server_already_runs_has_no_gpu(tmp_path: Path) -> None:
    auto = config(tmp_path)
    attached = auto.engines[0].model_copy(update={"address": ("http://a:1",)})
    auto = auto.model_copy(update={"engines": (attached, *auto.engines[1:])})
    engines, _, unbound = bind_all(
        auto, first_engines(auto), machine_of(auto, relays=0, inproc=False)
    )
    assert {engine.devices for engine in engines if engine.group == 0} == {()}
    assert unbound == []


def test_ranks_and_engines_share_the_gpus_of_one_machine(tmp_path: Path) -> None:
    auto = config(tmp_path)
    machine = machine_of(auto, relays=0, inproc=False)
    engines, ranks, unbound = bind_all(auto, first_engines(auto), machine)
    assert [rank.devices for rank in ranks] == [(0,), (1,)]
    assert [engine.devices for engine in engines] == [(2,), (3,), (0,)]
    assert unbound == []
    wanted = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert environment(Program.ROLE, Share(devices=engines[1].devices)) == wanted
    serving, none, _ = bind_all(auto, first_engines(auto), machine, ranks=0)
    assert [engine.devices for engine in serving] == [(0,), (1,), (2,)]
    assert none == ()


def test_colocated_engines_have_the_gpus_of_the_ranks(tmp_path: Path) -> None:
    data = config(tmp_path).model_dump()
    data["trainer"]["colocated"], data["rollout"]["mode"] = True, "sync"
    run = RunConfig.model_validate(data)
    machine = machine_of(run, relays=0, inproc=False)
    engines, ranks, unbound = bind_all(run, first_engines(run), machine)
    assert [rank.devices for rank in ranks] == [(0,), (1,)]
    assert [engine.devices for engine in engines] == [(0,), (1,), (2,)]
    assert unbound == []
    state = State()
    state.hosts.up = {host.number: host for host in machine}
    state.hosts.ranks = list(ranks)
    more = bind_engine(run, state, EngineSlot(id=EngineId("e3")))
    assert more is not None
    assert more.devices == (0,)


def test_a_pool_without_gpus_is_used_by_auto_alone(tmp_path: Path) -> None:
    hosts = (
        HostSlot(number=0, pools=("fast",), devices=(0, 1, 2)),
        HostSlot(number=1, pools=("cores",), cpus=8),
    )
    pools = {
        "cluster": {"address": "127.0.0.1:0", "hosts": 2},
        "pools": {"fast": {"resource": "fast"}, "cores": {"resource": "cores"}},
        "engines": [{"pool": "fast"}, {"pool": "cores"}],
    }
    data = config(tmp_path).model_dump() | pools
    auto = RunConfig.model_validate(data)
    engines, ranks, unbound = bind_all(auto, first_engines(auto), hosts)
    assert [(engine.host, engine.devices) for engine in engines] == [(0, (2,)), (1, ())]
    assert [rank.devices for rank in ranks] == [(0,), (1,)]
    assert unbound == []
    cuda = RunConfig.model_validate(data | {"model": data["model"] | {"device": "cuda"}})
    _, _, unbound = bind_all(cuda, first_engines(auto), hosts)
    assert [one.process for one in unbound] == ["e1"]


def test_the_gpus_that_a_run_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    relayed = machine_of(config(tmp_path, "cuda"), relays=2, inproc=False)
    assert [host.devices for host in relayed] == [(3,), (1,)]
    for device, inproc in (("cpu", False), ("auto", True)):
        (machine,) = machine_of(config(tmp_path, device), relays=0, inproc=inproc)
        assert machine.devices == ()


def test_an_engine_of_several_cores_is_refused_where_there_are_gpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engines\.degree must be 1 on auto"):
        train(config(tmp_path, degree=2))


def test_a_driver_that_fails_is_named(gpus: Path, tmp_path: Path) -> None:
    gpus.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(ConfigError, match=r"model\.device: the GPUs of this host must be listed"):
        machine_of(config(tmp_path), relays=0, inproc=False)


def test_without_pools_auto_uses_the_gpus_of_every_host(tmp_path: Path) -> None:
    data = config(tmp_path).model_dump()
    data["model"]["device"] = "auto"
    run = RunConfig.model_validate(data)
    cpus = HostSlot(number=0, cpus=8)
    assert groups_on_gpus(run, [cpus]) == []
    assert groups_on_gpus(run, [cpus, HostSlot(number=1, devices=(0,))]) == [0]
