"""The tables of docs/SIZING.md are what a dry run of its configuration says."""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollweave.cli.main import app
from rollweave.runtime.preflight.checks import failures
from rollweave.runtime.preflight.layout import Layout, Memory, check_layout, lay_out
from rollweave.runtime.preflight.site import Site
from rollweave.schema.config.loading import loads
from rollweave.schema.hosts import Device, Resources
from rollweave.weights.checkpoint import ModelShape, read_shape

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/SIZING.md").read_text()
GIB = 1 << 30
GPUS = {"23 GiB": 23, "44 GiB": 44, "79 GiB": 79, "139 GiB": 139}
"""Free memory of the GPUs of the tables in GiB, by the beginning of a column's head."""

POWERS = (1, 2, 4, 8, 16, 32, 64)
KV_UNIT = 1024
LONGEST = 8192
"""Maximum number of tokens of a trajectory of the page's configuration."""

OFFLOADED = 'trainer.save_memory=["activations","optimizer"]'
KINDS = {"all": (), "optimizer": (OFFLOADED,), "lora": ("lora.rank=16",)}
"""What is trained, and how, with the settings for it."""


def block(name: str) -> str:
    """Return the file of this name that the page shows."""
    (found,) = re.findall(rf"^`{name}`.*?:\n\n```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def rows(heading: str) -> dict[str, list[str]]:
    """Return the rows of the table below a heading, by their first cells."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|") and not line.startswith("|---")
    ]
    return {first: others for first, *others in cells}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, ModelShape]:
    """The models of the page, from the shapes that it gives."""
    config = json.loads((ROOT / "examples/qwen3_8b/config.json").read_text())
    found = {}
    for name, (layers, hidden, heads, kv_heads, ffn, tied, *_) in rows("Models").items():
        if name == "model":
            continue
        directory = tmp_path_factory.mktemp(name)
        own = {
            "num_hidden_layers": _number(layers),
            "hidden_size": _number(hidden),
            "num_attention_heads": _number(heads),
            "num_key_value_heads": _number(kv_heads),
            "intermediate_size": _number(ffn),
            "tie_word_embeddings": tied == "yes",
        }
        (directory / "config.json").write_text(json.dumps(config | own))
        found[name] = read_shape(directory)
    return found


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def planned(shape: ModelShape, gib: int, gpus: int, *sets: str) -> tuple[Layout, bool]:
    """Return the layout of the page's run on one host, and whether it is accepted."""
    config = loads(block("size.toml"), [*sets, "model.device=cuda"])
    devices = tuple(
        Device(index=index, kind="GPU", memory_bytes=gib * GIB) for index in range(gpus)
    )
    host = Resources(cpus=1024, memory_bytes=1 << 50, devices=devices, labels={})
    hosts = Site(described={"node": host}).hosts(config)
    layout = lay_out(config, shape, hosts)
    return layout, not failures(list(check_layout(config, layout, hosts)))


def memory_of(layout: Layout, kind: str) -> Memory:
    """Return the first GPU's memory that processes of this kind alone use."""
    return next(
        memory
        for memory in layout.memories
        if memory.device is not None and {user.kind for user in memory.users} == {kind}
    )


def shape_cells(shape: ModelShape) -> list[str]:
    kv = shape.kv_bytes(2) * KV_UNIT / (1 << 20)
    return [f"{shape.parameters():,}", f"{2 * shape.parameters() / GIB:.1f} GiB", f"{kv:.0f} MiB"]


def fewest(shape: ModelShape, gib: int, *sets: str) -> str:
    """Return the fewest ranks that fit, beside one engine on a GPU of its own."""
    for ranks in POWERS:
        layout, _ = planned(shape, gib, ranks + 1, f"trainer.ranks={ranks}", *sets)
        memory = memory_of(layout, "trainer rank")
        if memory.needed <= memory.nbytes:
            return str(ranks)
    return "–"


def tokens(shape: ModelShape, gib: int) -> str:
    """Return the most tokens of an engine with as few GPUs as leave room for one
    trajectory.
    """
    server = ('engines.kind="vllm"', f"engines.kv_tokens={LONGEST}")
    for degree in POWERS:
        layout, _ = planned(shape, gib, degree + 1, *server, f"engines.degree={degree}")
        memory = memory_of(layout, "engine")
        room = (memory.nbytes - memory.needed) * degree // shape.kv_bytes(2) + LONGEST
        if room >= LONGEST:
            count = f"{room // KV_UNIT:,}"
            return count if degree == 1 else f"{degree} GPUs: {count}"
    return "–"


def in_turn(shape: ModelShape, gib: int) -> str:
    turns = ('rollout.mode="sync"', "trainer.colocated=true")
    fit = [name for name, sets in KINDS.items() if planned(shape, gib, 1, *turns, *sets)[1]]
    return ", ".join(fit) or "–"


def trainers(shape: ModelShape, gib: int) -> str:
    return " / ".join(fewest(shape, gib, *sets) for sets in KINDS.values())


TABLES: dict[str, Callable[[ModelShape, int], str]] = {
    "GPUs of the trainer": trainers,
    "Tokens of an engine": tokens,
    "One GPU": in_turn,
}


def test_the_models_are_counted_as_a_dry_run_counts_them(
    shapes: Mapping[str, ModelShape],
) -> None:
    table = rows("Models")
    assert len(shapes) == 6
    assert {name: table[name][6:] for name in shapes} == {
        name: shape_cells(shape) for name, shape in shapes.items()
    }


@pytest.mark.parametrize("heading", TABLES)
def test_the_tables_are_what_a_dry_run_says(heading: str, shapes: Mapping[str, ModelShape]) -> None:
    table = rows(heading)
    columns = [
        next(gib for name, gib in GPUS.items() if head.startswith(name))
        for head in table.pop("model")
    ]
    assert columns == list(GPUS.values())
    assert table == {
        name: [TABLES[heading](shape, gib) for gib in columns] for name, shape in shapes.items()
    }


def uses(shape: ModelShape, *sets: str) -> dict[str, int]:
    """Return the uses of the GPUs of one of two ranks, and of an engine, in bytes."""
    layout, _ = planned(shape, 139, 3, "trainer.ranks=2", *sets)
    return {
        f"{process.kind} {need.what}": need.nbytes
        for process in layout.processes
        for need in process.of(on_device=True)
    }


def test_the_formulas_are_those_of_the_estimate(shapes: Mapping[str, ModelShape]) -> None:
    """Within a byte of each weight's share, as N is odd."""
    shape = shapes["Qwen3-8B"]
    share = shape.parameters() / 2
    plain = uses(shape)
    with_all = uses(shape, "trainer.minibatches=2", "algorithm.kl=0.1", "algorithm.advantage=gae")
    for use, factor in {
        "weights": 4,
        "gradients": 4,
        "optimizer": 8,
        "copy of the state": 12,
        "reference": 8,
        "critic": 16,
    }.items():
        assert with_all[f"trainer rank {use}"] == pytest.approx(factor * share, rel=1e-6), use
    assert plain.keys() == with_all.keys() - {
        "trainer rank copy of the state",
        "trainer rank reference",
        "trainer rank critic",
    }
    assert "trainer rank optimizer" not in uses(shape, OFFLOADED)
    assert plain["engine weights"] == 2 * shape.parameters()
    assert plain["engine KV cache"] == 65536 * shape.kv_bytes(2)
    lora = uses(shape, "lora.rank=16")
    assert lora["trainer rank weights"] == pytest.approx(
        4 * share + lora["trainer rank gradients"], rel=1e-6
    )
    assert lora["trainer rank gradients"] < plain["trainer rank gradients"] / 100


def commands() -> Iterator[list[str]]:
    for line in re.findall(r"^rollweave (train size.*)$", PAGE, re.MULTILINE):
        yield shlex.split(line)


def test_the_command_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("size.toml", "machine.toml"):
        Path(name).write_text(block(name))
    Path("Qwen3-8B").symlink_to(ROOT / "examples/qwen3_8b")
    (command,) = commands()
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "8,190,735,360 weights" in result.output
    assert "trainer ranks 0–3" in result.output
