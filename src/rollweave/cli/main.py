"""`rollweave`: the commands and their options. Each command is a line or two; the work
is in the module of its name.

Imports of the work are inside the commands: `rollweave --help` must not wait for torch.
"""

import importlib.metadata
from pathlib import Path
from typing import Annotated

import typer

from rollweave.cli.bench import NAMES
from rollweave.cli.console import reported
from rollweave.cli.interrupt import enter

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rollweave {importlib.metadata.version('rollweave')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Train LLM agents with reinforcement learning, each trajectory at its own pace."""


Run = Annotated[
    str, typer.Argument(metavar="RUN", help="A run directory, or its name under runs/.")
]
Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]


@app.command()
def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="A TOML file, or a run directory to resume.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a knob, repeatedly.")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(help="Pacing: sync, one_step, stream, partial, bounded or decoupled."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything that can be known before, and stop.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run where it ended or was killed.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete a former run of this name first.")
    ] = False,
    inproc: Annotated[
        bool, typer.Option("--inproc", help="One process with threads, for debugging.")
    ] = False,
) -> None:
    """Train an agent as CONFIG says."""
    with reported():
        from rollweave.cli.train import train as work

        sets = [*(overrides or []), *([f"rollout.mode={mode}"] if mode is not None else [])]
        work(config, sets, dry_run=dry_run, resume=resume, fresh=fresh, inproc=inproc)


@app.command("eval")
def evaluate(
    run: Run,
    episodes: Annotated[
        int | None,
        typer.Option(min=1, help="Episodes of each task; the run's own number if not given."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 is greedy; the run's own if not given.")
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="best, last, or a step.")] = "best",
    inproc: Annotated[
        bool, typer.Option("--inproc", help="One process with threads, for debugging.")
    ] = False,
) -> None:
    """Evaluate a checkpoint of RUN on held-out tasks, with the same loop and no
    training.
    """
    with reported():
        from rollweave.cli.evaluate import evaluate as work

        work(run, episodes=episodes, temperature=temperature, checkpoint=checkpoint, inproc=inproc)


@app.command()
def serve(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|RUN",
            help="A TOML file with model.path; or a trained run, to serve its best.",
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a knob, repeatedly.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0: any that is free.")
    ] = None,
    no_token: Annotated[
        bool,
        typer.Option(
            "--no-token",
            help="Let every program of this host use it, of every user; on the loopback alone.",
        ),
    ] = False,
    unsandboxed: Annotated[
        bool,
        typer.Option(
            "--unsandboxed",
            help="Allow sandbox.backend = plain: what clients ask for runs as this user.",
        ),
    ] = False,
    inproc: Annotated[
        bool, typer.Option("--inproc", help="One process with threads, for debugging.")
    ] = False,
) -> None:
    """Serve rollouts of CONFIG's tasks over HTTP, to whoever asks."""
    with reported():
        from rollweave.cli.serve import serve as work

        sets = [*(overrides or []), *([f"serve.port={port}"] if port is not None else [])]
        work(config, sets, inproc=inproc, no_token=no_token, unsandboxed=unsandboxed)


@app.command()
def simulate(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]", help="A TOML file as for `train`, with a [sim] section."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a knob, repeatedly.")
    ] = None,
    faults: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SEED",
            help="Break things as SEED (or A-B) says, repeatedly; without CONFIG, "
            "in a run of its own.",
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Run CONFIG on simulated GPUs, and say where their time goes; or search for faults
    that break the core.
    """
    with reported():
        from rollweave.cli.simulate import work

        work(config, overrides or [], faults=faults or [], as_json=json_)


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="Experiments, or papers for all of theirs; all if none."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and smaller runs: a minute on two cores.")
    ] = False,
    json_: Json = False,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write Markdown: between its marks, or as a page."),
    ] = None,
) -> None:
    """Run the papers' experiments on simulated GPUs, beside the published numbers."""
    with reported():
        from rollweave.cli.reproduce import work

        work(names or [], quick=quick, as_json_=json_, write=write)


@app.command()
def engine(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A directory in Hugging Face format.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: one that is free.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Another name by which clients call this server, repeatedly.",
        ),
    ] = None,
    token_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="Take the clients' token from here.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep the token here, not in ~/.local/state/rollweave/engine.token.",
        ),
    ] = None,
    no_token: Annotated[
        bool,
        typer.Option(
            "--no-token",
            help="Let every program of this host use it, of every user; on the loopback alone.",
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="Of the CPU.")] = 1,
    slots: Annotated[int, typer.Option(min=1, help="Requests that run at once; more wait.")] = 64,
    kv_tokens: Annotated[int, typer.Option(min=16, help="Tokens that the KV cache holds.")] = 65536,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Same answers whatever else runs; slower.")
    ] = False,
) -> None:
    """Serve CHECKPOINT over HTTP with the embedded engine."""
    with reported():
        from rollweave.cli.engine import Access
        from rollweave.cli.engine import engine as work
        from rollweave.schema.base import EngineId
        from rollweave.schema.serving import EngineSpec

        spec = EngineSpec(
            id=EngineId("http"),
            model=str(checkpoint),
            device=device,
            dtype=dtype,
            threads=threads,
            max_slots=slots,
            kv_tokens=kv_tokens,
            deterministic=deterministic,
        )
        access = Access(
            host=host,
            port=port,
            token_env=token_env,
            token_file=token_file,
            no_token=no_token,
            names=tuple(names or ()),
        )
        work(spec, access)


@app.command()
def doctor() -> None:
    """Check this installation and this machine."""
    with reported():
        from rollweave.cli.doctor import doctor as work

        work()


@app.command()
def trace(
    run: Run,
    trajectory: Annotated[
        str | None, typer.Argument(metavar="[TRAJECTORY]", help="Show this one turn by turn.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only this task.")] = None,
    stop: Annotated[str | None, typer.Option(help="Only this stop reason.")] = None,
    reward: Annotated[
        str | None, typer.Option(help="Only these rewards: 1, '>0.5', '<=0'.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Only those that weights of this step started.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows at most, the newest.")] = 40,
) -> None:
    """List the trajectories of RUN, or show one with its tokens, versions, log-probs,
    rewards and times.
    """
    with reported():
        from rollweave.cli.trace import trace as work

        work(run, trajectory, task=task, stop=stop, reward=reward, step=step, limit=limit)


@app.command()
def engines(
    run: Run,
    add: Annotated[
        int | None, typer.Option(min=1, max=64, metavar="N", help="Start so many more.")
    ] = None,
    group: Annotated[
        int,
        typer.Option(min=0, help="With --add: which of several [[engines]] they are like, from 0."),
    ] = 0,
    remove: Annotated[
        str | None,
        typer.Option(metavar="ENGINE", help="Do without this one: it ends what it began."),
    ] = None,
    now: Annotated[
        bool, typer.Option("--now", help="With --remove: at once; its turns go on elsewhere.")
    ] = False,
    json_: Json = False,
) -> None:
    """List the engines of RUN while it trains, and have more of them, or fewer."""
    with reported():
        from rollweave.cli.engines import engines as work

        work(run, add=add, group=group, remove=remove, now=now, as_json=json_)


@app.command()
def report(run: Run) -> None:
    """Write RUN's report: one HTML file that needs nothing else."""
    with reported():
        from rollweave.cli.report import report as work

        work(run)


@app.command()
def bench(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help=f"{', '.join(NAMES[:-1])} or {NAMES[-1]}.")
    ],
    json_: Json = False,
    quick: Annotated[bool, typer.Option("--quick", help="Under a minute, for a look.")] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds of the training benches and of faults.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="With engine: write its step times here, for `sim.profile`.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="With --profile: a model directory; else the demo's model.")
    ] = None,
) -> None:
    """Measure, and compare with peers in the same run.

    `engine` compares with vLLM where ROLLWEAVE_VLLM_PYTHON names the interpreter of an
    environment that has it.
    """
    with reported():
        from rollweave.cli.bench import bench as work

        work(name, as_json=json_, quick=quick, seeds=seeds, profile=profile, model=model)


if __name__ == "__main__":
    enter()
    app()
