"""`rollweave bench` runs a benchmark of `benchmarks/` and prints its figures as a
table; with `--json`, also as one line of JSON.
"""

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape
from rich.table import Table

from rollweave.cli.console import FAILED, err, out
from rollweave.io.machine import describe
from rollweave.package import DIRECTORY
from rollweave.schema.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.contract import Figure, Result

BENCHES = {
    "engine": "benchmarks.engine.bench:bench_engine",
    "gpu": "benchmarks.gpu.bench:bench_gpu",
    "demo": "benchmarks.learning:bench_learning",
    "fixed": "benchmarks.learning:bench_learning",
    "multitask": "benchmarks.learning:bench_learning",
    "longtail": "benchmarks.learning:bench_learning",
    "memory": "benchmarks.memory:bench_memory",
    "modes": "benchmarks.variants:bench_variants",
    "losses": "benchmarks.variants:bench_variants",
    "lora": "benchmarks.variants:bench_variants",
    "vllm": "packages.servers.benchmarks.bench:bench_vllm",
    "trl": "benchmarks.trl.bench:bench_trl",
    "sim": "packages.sim.benchmarks.bench:bench_sim",
    "faults": "packages.sim.benchmarks.faults:bench_faults",
    "fidelity": "packages.sim.benchmarks.fidelity:bench_fidelity",
    "affinity": "packages.sim.benchmarks.affinity:bench_affinity",
    "placement": "packages.papers.benchmarks.placement.bench:bench_placement",
    "predictors": "packages.papers.benchmarks.predictors:bench_predictors",
    "scheduling": "packages.sim.benchmarks.scheduling.bench:bench_scheduling",
    "phases": "packages.sim.benchmarks.phases.bench:bench_phases",
    "service": "packages.service.benchmarks.bench:bench_service",
    "coserve": "packages.sim.benchmarks.coserve.bench:bench_coserve",
    "agents": "benchmarks.agents.bench:bench_agents",
    "sandbox": "packages.sandbox.benchmarks.bench:bench_sandbox",
    "delta": "benchmarks.delta:bench_delta",
    "relay": "benchmarks.relay.bench:bench_relay",
    "weights": "packages.collective.benchmarks.bench:bench_weights",
    "soak": "benchmarks.soak.bench:bench_soak",
    "cluster": "packages.ray.benchmarks.bench:bench_cluster",
}
"""Benchmark → the function that runs it, as `module:function`: of `benchmarks/`, or of
the distribution that it measures.
"""

VLLM_LENDS = "packages.servers.benchmarks.lending.bench:bench_vllm_lends"
"""The function of `coserve --engine vllm`."""

NAMES = tuple(BENCHES)
SEEDED = (
    "demo",
    "fixed",
    "multitask",
    "longtail",
    "modes",
    "losses",
    "lora",
    "vllm",
    "trl",
    "faults",
    "fidelity",
)
"""Names of benchmarks that repeat a run with several seeds."""


WITH_MODEL = ("delta", "engine", "fidelity", "predictors", "trl")
"""Names of benchmarks that measure a pretrained model, where one is given."""


def bench(
    name: str,
    *,
    as_json: bool,
    quick: bool,
    seeds: int | None,
    profile: Path | None = None,
    model: Path | None = None,
    real: bool = False,
    programs: Path | None = None,
    install: bool = False,
    engine: str | None = None,
) -> None:
    """Run benchmark `name`; with `profile`, write an engine's measured step times to
    that file. `real`, `programs` and `install` are options of `bench agents`.

    Raises ConfigError for an unknown name, and for options that do not apply to the
    benchmark.
    """
    if name not in NAMES:
        raise ConfigError(f"NAME must be one of {', '.join(NAMES)}, got {name!r}")
    if name not in SEEDED and seeds is not None:
        raise ConfigError(
            f"--seeds must be left out for bench {name}, which does not use seeds, got {seeds}"
        )
    if name != "engine" and profile is not None:
        raise ConfigError(
            f"--profile must be left out for bench {name}: only engine measures "
            f"step times, got {profile}"
        )
    if engine is not None and (name, engine) != ("coserve", "vllm"):
        raise ConfigError(f"--engine must be vllm, with bench coserve, got {engine}")
    if real and name != "agents":
        raise ConfigError(f"--real must be left out for bench {name}: only agents runs programs")
    if not real and (install or programs is not None):
        raise ConfigError("--programs and --install must be given with --real")
    if profile is None and model is not None and name not in WITH_MODEL:
        raise ConfigError(
            f"--model must be left out for bench {name} without --profile, got {model}"
        )
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(f"--model must be a folder with config.json, got {model}")
    result = (
        _profile(profile, model, quick=quick)
        if profile is not None
        else _run(
            name,
            VLLM_LENDS if engine else BENCHES[name],
            quick=quick,
            seeds=seeds,
            model=model,
            real=real,
            programs=programs,
            install=install,
        )
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", overflow="fold")
    for name, figure in result.figures.items():
        table.add_row(escape(name), format_figure(figure))
    out.print(table)
    for name, condition in result.conditions.items():
        if isinstance(condition, str):
            out.print(f"[dim]{escape(name)}: {escape(condition)}[/]", soft_wrap=True)
    if as_json:
        sys.stdout.write(_benchmark("benchmarks.contract").json_line(result, describe()) + "\n")
    if result.broken:
        raise typer.Exit(FAILED)


def _benchmark(module: str) -> ModuleType:
    """Import a module of `benchmarks/` or `packages/`, which are next to `src/` in a
    checkout.

    Raises ConfigError if Rollweave does not run from a checkout.
    """
    root = DIRECTORY.parents[1]
    if not (root / "benchmarks" / "contract.py").is_file():
        raise ConfigError(
            "`rollweave bench` needs a checkout of Rollweave, with benchmarks/ "
            f"beside src/; {root} has none"
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return importlib.import_module(module)


def _profile(path: Path, model: Path | None, *, quick: bool) -> "Result":
    result: Result = _benchmark("packages.sim.benchmarks.profile").bench_profile(
        path, model, quick=quick
    )
    return result


def _run(name: str, place: str, **options: Any) -> "Result":
    module, _, function = place.partition(":")
    run = getattr(_benchmark(module), function)
    arguments = {"name": name, "progress": _print_progress, **options}
    result: Result = run(
        **{key: arguments[key] for key in inspect.signature(run).parameters if key in arguments}
    )
    return result


def _print_progress(text: str) -> None:
    err.print(text, markup=False, soft_wrap=True)


def format_figure(value: "Figure") -> str:
    """Return a figure as text: numbers with three digits or as integers; "-": None."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(format_figure(item) for item in value) or "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"
