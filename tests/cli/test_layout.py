"""The process table of a dry run: that of the example of two nodes, and wrong input."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from rollweave.cli.layout import show_layout
from rollweave.package import DIRECTORY
from rollweave.runtime.preflight import dryrun
from rollweave.schema.config.loading import load, load_hosts
from tests.support.commands import invoke

EXAMPLES = DIRECTORY.parents[1] / "examples"
IN_TURN = str(EXAMPLES / "two_nodes_in_turn.toml")
IN_TURN_HOSTS = str(EXAMPLES / "two_nodes_in_turn_hosts.toml")
RUN, HOSTS = str(EXAMPLES / "two_nodes.toml"), str(EXAMPLES / "two_nodes_hosts.toml")

TABLE = """
19 processes ───────────────────────────────────────────────────────────────────
host      process            pool      devices     GPU memory         memory
10.0.0.1  controller         -         -                    -      400.0 MiB
trainer   relay              -         -                    -      400.0 MiB
          trainer rank 0     training  GPU 0         31.6 GiB       42.3 GiB
          trainer ranks 1–7  training  GPUs 1–7  7 × 31.6 GiB   7 × 11.8 GiB
rollout   relay              -         -                    -       46.2 GiB
          engines e0–e7      rollouts  GPUs 0–7  8 × 54.2 GiB  8 × 400.0 MiB

memory of one process, estimated ───────────────────────────────────────────────
process            where      each  of which
relay              host   46.2 GiB  published weights 45.8 GiB,
                                    process 400.0 MiB
trainer ranks 0–7  GPU    31.6 GiB  weights 3.8 GiB, gradients 3.8 GiB,
                                    optimizer 7.6 GiB, activations 4.3 GiB,
                                    gathered layers 11.4 GiB, CUDA 640.0 MiB
trainer rank 0     host   42.3 GiB  copy for a checkpoint 11.4 GiB,
                                    published weights 30.5 GiB,
                                    process 400.0 MiB
trainer ranks 1–7  host   11.8 GiB  copy for a checkpoint 11.4 GiB,
                                    process 400.0 MiB
engines e0–e7      GPU    54.2 GiB  weights 15.3 GiB, KV cache 36.0 GiB,
                                    one step 2.3 GiB, CUDA 640.0 MiB

memory that all of them need ───────────────────────────────────────────────────
host     memory    kind                   needed of all
trainer  GPUs 0–7  H100 80GB HBM3  31.6 GiB of 79.6 GiB  ████░░░░░░  40%
         host                      125.6 GiB of 2.0 TiB  █░░░░░░░░░   6%
rollout  GPUs 0–7  H20             54.2 GiB of 95.6 GiB  ██████░░░░  57%
         host                       49.3 GiB of 1.0 TiB  ░░░░░░░░░░   5%

Not included: environments, their sandboxes, and rewards.
"""


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example names its model from there."""
    monkeypatch.chdir(EXAMPLES.parent)


def shown(width: int, *overrides: str, run: str = RUN, hosts: str = HOSTS) -> str:
    planned = dryrun.plan(load(run, overrides), hosts=load_hosts(Path(hosts)), deep=False)
    assert planned.layout is not None
    text = io.StringIO()
    show_layout(planned.layout, Console(file=text, width=width))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def test_the_table_of_two_nodes_fits_80_columns() -> None:
    assert shown(80).strip() == TABLE.strip()


TURNS = """
35 processes ───────────────────────────────────────────────────────────────────
host      process             devices             GPU memory         memory
10.0.0.1  controller          -                            -      400.0 MiB
node-0    relay               -                            -       46.2 GiB
          trainer rank 0      GPU 0 in turn         24.0 GiB       42.3 GiB
          trainer ranks 1–7   GPUs 1–7 in turn  7 × 24.0 GiB   7 × 11.8 GiB
          engines e0–e7       GPUs 0–7 in turn  8 × 54.2 GiB  8 × 400.0 MiB
node-1    relay               -                            -       46.2 GiB
          trainer ranks 8–15  GPUs 0–7 in turn  8 × 24.0 GiB   8 × 11.8 GiB
          engines e8–e15      GPUs 0–7 in turn  8 × 54.2 GiB  8 × 400.0 MiB
"""


def test_on_two_nodes_in_turn_the_larger_need_counts() -> None:
    """The larger need is that of an engine with the CUDA context of a rank, and with
    its weights when it is restarted: 54.2 + 0.6 + 1.9 GiB.
    """
    text = shown(80, run=IN_TURN, hosts=IN_TURN_HOSTS)
    assert text.strip().startswith(TURNS.strip())
    assert text.count("GPUs 0–7  H100 80GB HBM3  56.7 GiB of 79.6 GiB") == 2
    assert "take turns: the larger of their needs counts" in " ".join(text.split())


def test_a_wider_table_has_fewer_lines() -> None:
    assert max(map(len, shown(120).splitlines())) <= 120
    assert len(shown(120).splitlines()) < len(TABLE.strip().splitlines())


def test_shared_gpus_are_marked() -> None:
    text = shown(120, "engines.count=12", "engines.kv_tokens=65536")
    assert "engines e0–e11 rollouts GPUs 0–7 shared" in " ".join(text.split())


def test_workers_are_named_by_their_numbers() -> None:
    text = " ".join(shown(80, "workers.count=4", "workers.pool=rollouts").split())
    assert "workers w0–w3 rollouts - - 4 × 400.0 MiB" in text


def test_a_dry_run_prints_the_table_and_passes() -> None:
    code, output, errors = invoke("train", RUN, "--dry-run", "--hosts", HOSTS)
    assert (code, errors) == (0, [])
    assert "19 processes" in output
    assert "ready: all checks passed" in output
    assert "only config.json is here" in output


def test_hosts_without_gpus_offer_an_unlimited_resource(tmp_path: Path) -> None:
    """They offer what agents with `--resource train` do; an amount of one has room for
    one rank.
    """
    hosts = tmp_path / "hosts.toml"
    host = '[[hosts]]\nname = "{}"\ncpus = 8\nmemory_gib = 2048\nresources = {{ {} = {} }}\n'
    arguments = ["--set", "pools.training.resource=train", "--set", "pools.rollouts.resource=roll"]
    one_host = list[bool]()
    for amount in ("inf", "1"):
        text = host.format("a", "train", amount) + host.format("b", "train", amount)
        hosts.write_text(text + host.format("c", "roll", "inf"))
        code, output, errors = invoke(
            "train", RUN, "--dry-run", "--hosts", str(hosts), *arguments,
            "--set", "trainer.ranks=2", "--set", "model.device=cpu", "--set", "model.dtype=float32",
        )  # fmt: skip
        assert (code, errors) == (0, []), output
        words = " ".join(output.split())
        one_host.append(
            re.search(r"trainer rank 0 training \S+ GiB trainer rank 1", words) is not None
        )
    assert one_host == [True, False]


def test_a_dry_run_without_hosts_names_what_is_unknown() -> None:
    code, output, _ = invoke(
        "train",
        str(EXAMPLES / "frozenlake.toml"),
        "--dry-run",
        "--fresh",
        "--set",
        'cluster={address="127.0.0.1:0", hosts=2}',
    )
    assert code == 0
    assert "not known" in output
    assert "--hosts FILE describes them in advance" in output


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["--set", "pools.training.resource=H10O"],
            "pools.training.resource: must be a resource or GPU of a host (NVIDIA H100 80GB HBM3, "
            "NVIDIA H20), got 'H10O' (did you mean H100?)",
        ),
        (
            ["--set", "trainer.ranks=9"],
            "trainer.ranks: must be at most the number of GPUs of pool training (8), since NCCL "
            "requires one for each rank, got 9",
        ),
        (
            ["--set", "engines.kv_tokens=1048576"],
            "engines.kv_tokens: must fit, beside all else, into the 95.6 GiB of GPU 0 of rollout "
            "(and of 7 more), got 1048576",
        ),
        (["--set", "cluster.hosts=3"], "cluster.hosts: must be at most the number of hosts"),
        (["--hosts", "nowhere.toml"], "nowhere.toml: config must be a readable text file"),
        (
            ["--set", "model.path=examples"],
            "model: model.path must be a folder with config.json, got examples",
        ),
    ],
)
def test_wrong_input_prints_one_line_and_exits_with_2(arguments: list[str], error: str) -> None:
    code, _, errors = invoke("train", RUN, "--dry-run", "--hosts", HOSTS, *arguments)
    assert (code, len(errors)) == (2, 1)
    assert errors[0].startswith(f"error: {error}")


def test_force_overrides_estimates_and_no_other_check() -> None:
    too_much = ["--dry-run", "--hosts", HOSTS, "--set", "engines.kv_tokens=1048576"]
    code, _, (error,) = invoke("train", RUN, *too_much)
    assert code == 2
    assert error.endswith("(an estimate, which --force overrides)")
    code, shown, errors = invoke("train", RUN, *too_much, "--force")
    assert (code, errors) == (0, [])
    assert "! --force" in " ".join(shown.split())
    wrong = ["--set", "trainer.ranks=9"]
    code, _, errors = invoke("train", RUN, *too_much, *wrong, "--force")
    assert code == 2
    assert [error.startswith("error: trainer.ranks: must be") for error in errors] == [True]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([RUN, "--hosts", HOSTS], "--hosts must be left out without --dry-run, got "),
        (
            [str(EXAMPLES / "frozenlake.toml"), "--dry-run", "--fresh", "--hosts", HOSTS],
            "--hosts: must describe one host without [cluster], got 2",
        ),
    ],
)
def test_hosts_are_for_dry_runs_of_clusters(arguments: list[str], error: str) -> None:
    code, _, errors = invoke("train", *arguments)
    assert (code, len(errors)) == (2, 1)
    assert errors[0].startswith(f"error: {error}")
