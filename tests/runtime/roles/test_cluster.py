"""Clusters of workers on one machine: results, and workers that fail or are wrong."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollweave import Cluster, ConfigError, Worker, WorkerError, register
from rollweave.core.policy import waiting as policy
from rollweave.runtime import tasks
from rollweave.runtime.roles import group
from rollweave.runtime.roles.role import WorkerResources
from rollweave.runtime.roles.worker import hw_mapping
from rollweave.schema.roles import WorkerLostError
from tests.runtime.roles.workers import Adder, Ring, Sum
from tests.support.processes import alive

ROOT = Path(__file__).parents[3]
Start = Callable[..., Cluster[Any]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start clusters, and check in the end that they leave no process."""
    clusters: list[tuple[Cluster[Any], list[int]]] = []

    def begin(worker: type[Worker], resources: Any = 2, **options: Any) -> Cluster[Any]:
        cluster = Cluster(worker, resources, directory=tmp_path, **options)
        clusters.append((cluster, cluster.pid() if worker is Adder else []))
        return cluster

    yield begin
    for cluster, pids in clusters:
        cluster.close()
        assert not any(map(alive, pids))


def executed(script: Path, directory: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_results_are_in_the_order_of_ranks(start: Start) -> None:
    adders = start(Adder, 3, arguments={"start": 1})
    assert adders.world_size == 3
    assert adders.add(1.5) == [Sum(rank=rank, total=rank + 2.5) for rank in range(3)]
    assert adders.add(number=1)[2].total == 5.5
    assert adders.place() == (0, 3)
    scaled = adders.scale(np.arange(6).reshape(3, 2), [1.0, 2.0, 3.0])
    assert [part.tolist() for part in scaled] == [[0, 1], [4, 6], [12, 15]]
    env = adders.environment()[1]
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
    adders.close()
    logs = [(adders.logs / f"adder-{rank}.log").read_text() for rank in range(3)]
    assert logs == ["closed 0\n", "closed 1\n", "closed 2\n"]
    with pytest.raises(RuntimeError, match="before the cluster is closed"):
        adders.add(1)


def test_calls_of_one_go_to_the_worker_with_the_fewest(start: Start) -> None:
    adders = start(Adder)
    with ThreadPoolExecutor(4) as threads:
        ranks = list(threads.map(adders.rank_of_one, [0.2] * 4))
    assert sorted(ranks) == [0, 0, 1, 1]


def test_a_method_beside_the_others_runs_meanwhile(start: Start) -> None:
    adders = start(Adder)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(adders.wait_for, 3)
        adders.add(5)
        assert waiting.result(30) == [5, 6]


def test_a_wrong_worker_is_named_and_lives_on(start: Start) -> None:
    adders = start(Adder, 3)
    with pytest.raises(
        WorkerError,
        match=r"adder rank 1: ValueError: no luck on 1 \(.*workers.py:\d+\); and 1 more$",
    ) as raised:
        adders.fail([1, 2])
    expected = [(1, "ValueError", "no luck on 1"), (2, "ValueError", "no luck on 2")]
    assert [(one.rank, one.kind, one.text) for one in raised.value.failures] == expected
    with pytest.raises(
        WorkerError, match=r"rank 0: TypeError: Adder.add: argument 0: Expected `float`, got `str`"
    ):
        adders.add("one")
    with pytest.raises(WorkerError, match="the result must consist of numbers"):
        adders.unsendable()
    with pytest.raises(TypeError, match=r"Adder.add: missing a required argument: 'number'"):
        adders.add()
    with pytest.raises(
        TypeError, match="argument 0 must have one element for each of 3 workers, got 2"
    ):
        adders.scale([1, 2], [1, 2, 3])
    with pytest.raises(AttributeError, match=r"no method 'privat' is registered"):
        adders.privat()
    with pytest.raises(
        AttributeError, match=r"no method 'ad' is registered \(did you mean add\?\)"
    ):
        adders.ad()
    assert adders.place() == (0, 3)
    assert "ValueError: no luck on 2" in (adders.logs / "adder-2.log").read_text()


def test_a_killed_worker_ends_its_cluster(start: Start) -> None:
    adders = start(Adder)
    pids = adders.pid()
    with pytest.raises(
        WorkerLostError, match=r"^adder rank 1: ended \(signal SIGKILL\)(?s:.*)last words"
    ):
        adders.die(1)
    with pytest.raises(WorkerLostError, match="rank 1"):
        adders.add(1)
    adders.close()
    assert not any(map(alive, pids))


def test_a_worker_killed_between_calls_is_lost_to_the_next(start: Start) -> None:
    adders = start(Adder)
    os.kill(adders.pid()[0], signal.SIGKILL)
    # the call may find the worker dead, or be sent to it before its end is noticed
    with pytest.raises(WorkerLostError, match=r"rank 0: ended \(signal SIGKILL\)"):
        adders.wait_for(0)


def test_a_stopped_worker_is_lost_at_its_deadline(start: Start) -> None:
    adders = start(Adder)
    pids = adders.pid()
    began = time.monotonic()
    with pytest.raises(WorkerLostError, match=r"adder rank 1: did not answer hang\(\) within 1 s"):
        adders.hang(1)
    assert time.monotonic() - began < 20
    adders.close()
    assert not any(map(alive, pids))


def test_a_long_wait_is_named(
    start: Start, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(policy, "FIRST_S", 0.2)
    monkeypatch.setattr(tasks, "CHECK_S", 0.1)
    adders = start(Adder)
    with pytest.raises(WorkerLostError, match="within 1 s"):
        adders.hang(1)
    assert re.search(r"waiting \d s for adder: hang\(\) on rank 1\n", capfd.readouterr().err)


def test_workers_that_cannot_be_constructed_are_named(start: Start) -> None:
    with pytest.raises(WorkerError, match="adder rank 1: LookupError: no start"):
        start(Adder, arguments={"broken": 1})
    with pytest.raises(TypeError, match="Adder: got an unexpected keyword argument 'begin'"):
        start(Adder, arguments={"begin": 1})
    assert not [thread for thread in threading.enumerate() if "cluster" in thread.name]


def test_domains_are_routed_to_their_hardware(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = "".join(
        f"{index}, GPU-{index}, {kind}, 1000\n"
        for index, kind in enumerate(["Tesla fast", "Tesla large", "Tesla large"])
    )
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\ncat <<E\n{listing}E\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # a host with several kinds of GPUs belongs to the pools of all of them
    adders = start(
        Adder,
        [
            WorkerResources(hardware="fast", devices=1),
            WorkerResources(hardware="large", devices=1, workers=2),
        ],
    )
    environments = adders.environment()
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environments] == ["0", "1", "2"]
    # CUDA must count GPUs as the driver's listing does
    assert {env["CUDA_DEVICE_ORDER"] for env in environments} == {"PCI_BUS_ID"}
    assert adders.generate("a", "short") == (0, "fast")
    assert adders.generate("b", tag_name="code") == (1, "large")
    assert adders.generate("b") == (1, "large")
    assert adders.all_of("short") == [0]
    assert adders.all_of("long") == [0, 1, 2]  # no hardware is named for it
    with pytest.raises(ConfigError, match=r"ring rank 0: no host of pool fast has 4 devices"):
        start(Ring, [WorkerResources(hardware="fast", devices=4)])
    with pytest.raises(ConfigError, match=r"ring rank 3: its GPUs must be those of no other"):
        start(Ring, [WorkerResources(devices=1, workers=4)])
    hint = r"hardware must be a resource or GPU of a host .*, got 'lage' \(did you mean large\?\)"
    with pytest.raises(ConfigError, match=hint):
        start(Ring, [WorkerResources(hardware="lage")])


def test_a_worker_that_fails_while_others_wait_for_it_ends_them(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait as in a collective operation, which they never leave. Workers
    that have not met do not wait for each other.
    """
    monkeypatch.setattr(group, "ALONE_S", 0.2)
    adders = start(Adder)
    with pytest.raises(WorkerError, match="adder rank 1: ValueError: no luck"):
        adders.fail([1], slow=[0])
    adders.meet()
    with pytest.raises(WorkerLostError, match="adder rank 1: failed alone: ValueError: no luck"):
        adders.fail([1], waiting=[0])


class Odd(Worker):
    async def later(self) -> None: ...


def test_wrong_declarations_are_refused(tmp_path: Path) -> None:
    class Local(Worker): ...

    with pytest.raises(ValueError, match=r"mode must be one of execute_all, .*, got 'all'"):
        register(mode="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout_s must be positive, got 0"):
        register(timeout_s=0)
    with pytest.raises(TypeError, match="must have a parameter tag_name for hw_mapping"):
        hw_mapping({})(Adder.fail)
    cases: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("worker must be a subclass of Worker, got <class 'int'>", int, 1, {}),
        ("worker must be defined at the top level of a module", Local, 1, {}),
        ("resources: workers must be at least 1, got 0", Ring, 0, {}),
        ("resources must be of at least one worker, got none", Ring, [], {}),
        ("resources must be of class WorkerResources, got 'H800'", Ring, ["H800"], {}),
        ("resources: devices must be at least 0", Ring, [WorkerResources(devices=-1)], {}),
        ("resources: fallback needs hardware", Ring, [WorkerResources(fallback=("a",))], {}),
        ("ring rank 0: no host of this run has 9 devices", Ring, [WorkerResources(devices=9)], {}),
        ("timeout_s must be positive, got nan", Ring, 1, {"timeout_s": float("nan")}),
        (
            r"hardware of domain short must be one of resources \(fas\), got 'fast' \(did you mean fas\?\)",
            Adder,
            [WorkerResources(hardware="fas")],
            {},
        ),
        *(
            (f"argument cluster: {problem}", Ring, 1, {"cluster": settings})
            for problem, settings in (
                ("hosts must be .*, got 0", {"address": "127.0.0.1:0", "hosts": 0}),
                (r"unknown key host \(did you mean hosts\?\)", {"host": 2}),
                ("address must be given with launcher manual", {"hosts": 2}),
                ("hosts must be given with launcher local", {"launcher": "local"}),
            )
        ),
    ]
    for text, worker, resources, options in cases:
        with pytest.raises(ConfigError, match=text):
            Cluster(worker, resources, directory=tmp_path, **options)
    for name, method in (("world_size", Adder.add), ("close", Adder.add)):
        odd = type("Odd", (Odd,), {name: register()(method)})
        with pytest.raises(ConfigError, match=f"Odd.{name} must have another name"):
            Cluster(odd, directory=tmp_path)
    with pytest.raises(ConfigError, match=r"Odd.later must not be async"):
        Cluster(type("Odd", (Odd,), {"later": register()(Odd.later)}), directory=tmp_path)


SCRIPT = """
    import os, sys
    from rollweave import Cluster, Worker, register

    class Echo(Worker):
        @register()
        def pid(self) -> int:
            return os.getpid()

    if __name__ == "__main__":
        with Cluster(Echo, 2) as echoes:
            print(*echoes.pid(), flush=True)
            sys.stdin.read()
"""


@pytest.mark.variants
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_nothing_outlives_a_script(tmp_path: Path, number: signal.Signals) -> None:
    """The class is in the script itself, which each worker imports."""
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    with subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as script:
        assert script.stdout is not None
        pids = [int(text) for text in script.stdout.readline().split()]
        assert len(pids) == 2
        script.send_signal(number)
        script.wait(60)
    deadline = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(alive, pids))


@pytest.mark.variants
@pytest.mark.parametrize("hosts", ["None", '{"launcher": "local", "hosts": 2}'])
@pytest.mark.parametrize("status", [0, 1])
def test_a_cluster_that_is_open_at_exit_is_closed(tmp_path: Path, hosts: str, status: int) -> None:
    """It is closed after an exception, too, and not by a fork of the program."""
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            f"""
            import os
            from rollweave import Cluster
            from tests.runtime.roles.workers import Adder

            if __name__ == "__main__":
                adders = Cluster(Adder, 2, cluster={hosts})
                if os.fork() == 0:
                    raise SystemExit
                os.wait()
                assert len(adders.add(1)) == 2
                raise SystemExit({status})
            """
        )
    )
    done = executed(tmp_path / "script.py", tmp_path)
    assert done.returncode == status
    lines = {line for line in done.stderr.splitlines() if not line.endswith(" has joined")}
    assert lines == ({"waiting for 2 hosts"} if hosts != "None" else set())
    logs = [(tmp_path / f"runs/adder/logs/adder-{rank}.log").read_text() for rank in range(2)]
    assert logs == ["closed 0\n", "closed 1\n"]


def test_the_exit_is_delayed_for_a_limited_time(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            """
            import asyncio, os, time
            import rollweave.runtime.roles.cluster as module
            from tests.runtime.roles.workers import Adder

            if __name__ == "__main__":
                module.EXIT_S = 0.5
                adders = module.Cluster(Adder, 1)
                print(*adders.pid(), flush=True)

                async def block():
                    time.sleep(1000)

                asyncio.run_coroutine_threadsafe(block(), adders._loop._loop)
            """
        )
    )
    done = executed(tmp_path / "script.py", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    deadline = time.monotonic() + 30
    while alive(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(int(done.stdout))


def test_the_documented_example_runs(tmp_path: Path) -> None:
    page, program = (ROOT / "docs/ROLES.md").read_text(), ROOT / "examples/roles.py"
    assert f"```python\n{program.read_text()}```" in page
    done = executed(program, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"$ python examples/roles.py\n{done.stdout}```" in page
