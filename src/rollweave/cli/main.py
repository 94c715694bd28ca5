"""The commands of `rollweave` and their options. The work of each command is in the
module of its name.

The commands import that module when they run, so that `rollweave --help` does not wait
for torch.
"""

import importlib.metadata
from pathlib import Path
from typing import Annotated

import typer

from rollweave.cli.bench import NAMES, SEEDED
from rollweave.cli.console import errors_reported
from rollweave.cli.interrupt import install_signals
from rollweave.io.extras import command

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(show: bool) -> None:
    if show:
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
Json = Annotated[bool, typer.Option("--json", help="End the output with one line of JSON.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting. May be repeated."),
]
InProcess = Annotated[
    bool, typer.Option("--inproc", help="Run everything in one process, for debugging.")
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host",
        metavar="NAME",
        help="Another host name under which clients reach this server. May be repeated.",
    ),
]
Lend = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Lend idle time to the run whose controller is at HOST:PORT.",
    ),
]
LendSecret = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="With --lend: the secret of the run, as for rollweave host."),
]
LendResource = Annotated[
    str | None,
    typer.Option(help="With --lend: the resource that the run's pool names; serving by default."),
]
LendJoin = Annotated[
    float | None,
    typer.Option(min=1.0, help="With --lend: seconds to wait for the run; 600 by default."),
]
TtftLimit = Annotated[
    float | None,
    typer.Option(help="With --lend: limit of the time to the first token (P99); 500 by default."),
]
TpotLimit = Annotated[
    float | None,
    typer.Option(help="With --lend: limit of the time per output token (P99); 150 by default."),
]
Beside = Annotated[
    Path | None,
    typer.Option(metavar="SOCKET", help="With --lend: beside the vLLM that serves CHECKPOINT."),
]
Deterministic = Annotated[
    bool,
    typer.Option("--deterministic", help="Make answers independent of other requests; slower."),
]
Template = Annotated[
    Path | None,
    typer.Option(
        "--chat-template",
        metavar="FILE",
        help="Jinja template of chats, instead of the checkpoint's.",
    ),
]
PrefillAt = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Decode only: the engine at URL, which has the same checkpoint and token, computes "
        "the prompts, and their KV moves here.",
    ),
]
PrefillOnly = Annotated[
    bool,
    typer.Option(
        "--prefill-only",
        help="Only compute prompts, for engines started with --prefill-at, and score texts; with "
        "--lend, there is no limit per output token.",
    ),
]
TokenEnv = Annotated[
    str | None,
    typer.Option(metavar="VARIABLE", help="Environment variable with the clients' token."),
]
NoToken = Annotated[
    bool,
    typer.Option(
        "--no-token",
        help="Admit every program of every user on this host; only on the loopback address.",
    ),
]


@app.command()
def train(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help="A TOML file, or a run directory, or its name under runs/, to resume.",
        ),
    ],
    overrides: Overrides = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="How far rollouts may run ahead of training: sync, one_step, stream, partial, "
            "bounded or decoupled."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Run all checks, list all processes, and do not train."),
    ] = False,
    hosts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --dry-run: a TOML file that describes the hosts of [cluster], so that "
            "they need not have joined; without that section, the machine of the run.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run where it ended or was killed.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="First delete an earlier run of the same name.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Start although memory is estimated not to suffice, with a warning."
        ),
    ] = False,
    inproc: InProcess = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Train on the Ray cluster at HOST:PORT, or, with auto, on the cluster to "
            "which this machine belongs.",
        ),
    ] = None,
) -> None:
    """Train an agent as configured in CONFIG."""
    with errors_reported():
        from rollweave.cli.train import train as work

        sets = [*(overrides or []), *([f"rollout.mode={mode}"] if mode is not None else [])]
        if cluster is not None:
            sets += [f"cluster.launcher={'ray' if cluster == 'auto' else f'ray:{cluster}'}"]
        work(
            config,
            sets,
            dry_run=dry_run,
            hosts=hosts,
            resume=resume,
            fresh=fresh,
            force=force,
            inproc=inproc,
        )


@app.command("eval")
def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CONFIG|CHECKPOINT",
            help="A run directory, or its name under runs/; a TOML file with model.path; or with "
            "--env a folder with a model in Hugging Face format.",
        ),
    ],
    env: Annotated[
        str | None,
        typer.Option(
            metavar="ENV", help="With CHECKPOINT: the environment or handler, as in tasks.env."
        ),
    ] = None,
    overrides: Overrides = None,
    episodes: Annotated[
        int | None,
        typer.Option(min=1, help="Episodes of each task; by default as configured."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Sampling temperature, 0 for greedy; by default as configured.",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="With RUN: best, last, or the number of a step; by default best, or last if no "
            "evaluation chose one."
        ),
    ] = None,
    inproc: InProcess = False,
) -> None:
    """Evaluate a model on held-out tasks, without training."""
    with errors_reported():
        from rollweave.cli.evaluate import evaluate as work

        work(
            target,
            env=env,
            overrides=overrides or (),
            episodes=episodes,
            temperature=temperature,
            checkpoint=checkpoint,
            inproc=inproc,
        )


@app.command()
def serve(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|RUN",
            help="A TOML file with run.name, model.path and tasks (docs/SERVICE.md has an "
            "example), or a trained run, whose best checkpoint is served.",
        ),
    ],
    overrides: Overrides = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")
    ] = 8300,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    names: AllowedHosts = None,
    token_env: TokenEnv = None,
    no_token: NoToken = False,
    networks: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="NETWORK",
            help="Network whose clients need no token, such as 10.0.0.0/8. May be repeated.",
        ),
    ] = None,
    unsandboxed: Annotated[
        bool,
        typer.Option(
            "--unsandboxed",
            help="Allow sandbox.backend = plain, with which clients' commands run as this user.",
        ),
    ] = False,
    registered: Annotated[
        bool,
        typer.Option(
            "--registered",
            help="Serve with the engines that clients register alone, and start none of "
            "[[engines]] on the model's checkpoint.",
        ),
    ] = False,
    engine_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-host",
            metavar="HOST",
            help="Host of engines that clients may register: a name, an address or a network "
            "such as 10.0.0.0/8, in place of this host and private networks. May be repeated.",
        ),
    ] = None,
    inproc: InProcess = False,
) -> None:
    """Serve rollouts of CONFIG's tasks over HTTP. The handler in a request is a task's
    tag, or its env if it has no tag.
    """
    with errors_reported():
        from rollweave.io.http.listening import Access

        access = Access(
            host=host,
            port=port,
            token_env=token_env,
            no_token=no_token,
            names=tuple(names or ()),
            networks=tuple(networks or ()),
        )
        command("serve")(
            config,
            overrides or [],
            inproc=inproc,
            access=access,
            unsandboxed=unsandboxed,
            registered=registered,
            engine_hosts=engine_hosts or (),
        )


@app.command()
def rescore(run: Run) -> None:
    """Ask again for the rewards that failed in RUN, and write the obtained rewards to
    its records. RUN must not be running.
    """
    with errors_reported():
        from rollweave.cli.rescore import rescore as work

        work(run)


@app.command()
def simulate(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]", help="A TOML file as for `train`, with a [sim] section."
        ),
    ] = None,
    overrides: Overrides = None,
    serving: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A TOML file that describes serving engines next to the run, which may borrow "
            "them (docs/SIMULATE.md).",
        ),
    ] = None,
    faults: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SEED",
            help="Inject the faults of SEED, or of a range A-B; without CONFIG, into a generated "
            "run. May be repeated.",
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Run CONFIG on simulated GPUs and show how their time is used, or search for
    faults that break the core.
    """
    with errors_reported():
        command("simulate")(
            config, overrides or [], serving=serving, faults=faults or [], as_json=json_
        )


@app.command()
def advise(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[CONFIG | RUN]", help="A TOML file as for `simulate`, or a run's directory."
        ),
    ] = None,
    overrides: Overrides = None,
    gpus: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Number of GPUs; those of CONFIG by default. Once for each kind."),
    ] = None,
    hardware: Annotated[
        list[str] | None,
        typer.Option(metavar="GPU", help="Kind of GPU, such as h100. May be repeated."),
    ] = None,
    price: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0, help="Price of one GPU for an hour, in any currency. Once for each kind."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Shape of the model, such as qwen3-8b.")] = None,
    workload: Annotated[
        str | None,
        typer.Option(help="A family of tasks, such as swe, a .jsonl trace or a run directory."),
    ] = None,
    json_: Json = False,
) -> None:
    """Search modes and splits of GPUs by simulation, and print the best five. For a
    run, search its modes and numbers of engines, with measured times.
    """
    with errors_reported():
        command("advise")(
            target,
            overrides or [],
            gpus=gpus or (),
            hardware=hardware or (),
            price=price or (),
            model=model,
            workload=workload,
            as_json=json_,
        )


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Experiments, or papers for all of their experiments; by default all papers. "
            "`ranges` and `ours` are not of papers. With --constraints, a file of constraints.",
        ),
    ] = None,
    constraints: Annotated[
        bool, typer.Option(help="Compare workloads with what the papers state, or with a file.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and smaller runs: a minute on two cores.")
    ] = False,
    json_: Json = False,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the tables as Markdown to FILE, between its two marks if it has them. "
            "Tables of experiments that are not named stay.",
        ),
    ] = None,
) -> None:
    """Run the papers' experiments on simulated GPUs, and compare with the published
    numbers.
    """
    with errors_reported():
        command("reproduce")(
            names or [], quick=quick, as_json=json_, write=write, constraints=constraints
        )


@app.command()
def engine(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A directory, or a model of the hub.")
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")
    ] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    names: AllowedHosts = None,
    token_env: TokenEnv = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of the token, instead of ~/.local/state/rollweave/engine.token.",
        ),
    ] = None,
    no_token: NoToken = False,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:N, or auto: a GPU if there is one.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="Number of CPU threads.")] = 1,
    slots: Annotated[
        int, typer.Option(min=1, help="Maximum requests that run at once; more are queued.")
    ] = 64,
    kv_tokens: Annotated[
        int, typer.Option(min=16, help="Size of the KV cache, in tokens.")
    ] = 65536,
    deterministic: Deterministic = False,
    template: Template = None,
    prefill_at: PrefillAt = None,
    prefill_only: PrefillOnly = False,
    lend: Lend = None,
    secret_file: LendSecret = None,
    resource: LendResource = None,
    join_s: LendJoin = None,
    ttft_ms: TtftLimit = None,
    tpot_ms: TpotLimit = None,
    beside: Beside = None,
) -> None:
    """Serve CHECKPOINT over HTTP with the embedded engine."""
    with errors_reported():
        from rollweave.cli.engine import EngineAccess, lending_to, phase_of
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
            kv_host=host,
        )
        phase = phase_of(prefill_at, prefill_only=prefill_only)
        access = EngineAccess(
            host=host,
            port=port,
            token_env=token_env,
            token_file=token_file,
            no_token=no_token,
            names=tuple(names or ()),
        )
        lending = lending_to(
            lend,
            secret_file=secret_file,
            resource=resource,
            join_s=join_s,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            phase=phase,
            beside=beside,
        )
        work(spec, access, lending, phase, template)


@app.command()
def host(
    join: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the run's controller.")
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of this host in the run; its host name by default.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Address at which the run's other hosts reach this host."),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the run's secret (host.secret in its directory); without it the "
            "secret is read from the environment variable ROLLWEAVE_HOST_SECRET.",
        ),
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--resource",
            metavar="NAME=COUNT",
            help="A resource by which a pool may select this host, and the number of processes on "
            "CPUs that the host offers to the pool; any number without =COUNT. May be repeated.",
        ),
    ] = None,
    join_s: Annotated[
        float, typer.Option(min=1.0, help="Maximum seconds to find the controller.")
    ] = 600.0,
    user_code: Annotated[
        bool,
        typer.Option(
            "--user-code",
            help="Run modules and files of the run's user here: rollout workers, roles, a warm-up "
            "with the user's tasks, and servers with options or an interpreter of the user's.",
        ),
    ] = False,
    variables: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME",
            help="Pass on to processes here an environment variable that cluster.env names. May be "
            "repeated.",
        ),
    ] = None,
) -> None:
    """Offer this host to a run, whose controller then starts Rollweave's own programs
    here.
    """
    with errors_reported():
        from rollweave.cli.fleet import Joining
        from rollweave.cli.fleet import host as work
        from rollweave.runtime.hosts.agent import Permissions

        work(
            Joining(
                controller=join,
                name=name,
                address=address,
                secret_file=secret_file,
                labels=labels or (),
                join_s=join_s,
                permissions=Permissions(user_code=user_code, variables=tuple(variables or ())),
            )
        )


@app.command()
def config(
    key: Annotated[
        str | None,
        typer.Argument(metavar="[SECTION|KEY]", help="Show this section or this setting."),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--json-schema", help="Print the JSON schema of a file, for editors.")
    ] = False,
    markdown: Annotated[
        bool,
        typer.Option("--markdown", help="Print the reference of all settings (docs/CONFIG.md)."),
    ] = False,
) -> None:
    """List the sections of a configuration file, or show the settings of one."""
    with errors_reported():
        from rollweave.cli.config import config as work

        work(key, schema=schema, markdown=markdown)


@app.command()
def doctor() -> None:
    """Check this installation and this machine."""
    with errors_reported():
        from rollweave.cli.doctor import doctor as work

        work()


@app.command()
def trace(
    run: Run,
    trajectory: Annotated[
        str | None,
        typer.Argument(metavar="[TRAJECTORY]", help="Show this trajectory turn by turn."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Show only this task.")] = None,
    stop: Annotated[str | None, typer.Option(help="Show only this stop reason.")] = None,
    reward: Annotated[
        str | None, typer.Option(help="Show only these rewards, such as 1, '>0.5' or '<=0'.")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(help="Show only trajectories that started with the weights of this step."),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, help="Maximum number of rows; the newest are shown.")
    ] = 40,
    json_: Json = False,
) -> None:
    """List the trajectories of RUN, or show one with its tokens, versions, log-probs,
    rewards, times and final result.
    """
    with errors_reported():
        from rollweave.cli.trace import trace as work

        work(
            run,
            trajectory,
            task=task,
            stop=stop,
            reward=reward,
            step=step,
            limit=limit,
            json_=json_,
        )


@app.command()
def engines(
    run: Run,
    add: Annotated[
        int | None, typer.Option(min=1, max=64, metavar="N", help="Add N engines.")
    ] = None,
    group: Annotated[
        int,
        typer.Option(
            min=0, help="With --add: index of the [[engines]] section to use, counted from 0."
        ),
    ] = 0,
    remove: Annotated[
        str | None,
        typer.Option(metavar="ENGINE", help="Remove this engine once its turns are done."),
    ] = None,
    now: Annotated[
        bool,
        typer.Option(
            "--now", help="With --remove: remove it immediately; other engines continue its turns."
        ),
    ] = False,
    json_: Json = False,
) -> None:
    """List the engines of RUN while it trains, or add or remove engines."""
    with errors_reported():
        from rollweave.cli.fleet import engines as work

        work(run, add=add, group=group, remove=remove, now=now, as_json=json_)


@app.command()
def report(run: Run) -> None:
    """Write the report of RUN as one self-contained HTML file."""
    with errors_reported():
        from rollweave.cli.records import report as work

        work(run)


@app.command()
def export(
    run: Run,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            help="jsonl or parquet, for data sets; inspect, for inspect_ai; or workload, the "
            "lengths and times of the training attempts, for `rollweave simulate`.",
        ),
    ] = "jsonl",
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File to write; by default named after RUN, in this directory."
        ),
    ] = None,
) -> None:
    """Write all trajectories of RUN, with their tokens, to one file."""
    with errors_reported():
        from rollweave.cli.records import export as work

        work(run, format_=format_, output=output)


@app.command()
def ui(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="A directory of runs, or one run; by default runs/."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")
    ] = 8400,
    token_env: TokenEnv = None,
) -> None:
    """Show the runs in DIR in a browser on this machine, as they proceed."""
    with errors_reported():
        command("ui")(directory, port=port, token_env=token_env)


@app.command()
def bench(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help=f"{', '.join(NAMES[:-1])} or {NAMES[-1]}.")
    ],
    json_: Json = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A short version of less than a minute.")
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help=f"Number of seeds, for {', '.join(SEEDED)}.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="With engine: file to write its step times to, for `sim.gpu`."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="With engine: a model directory, measured in place of random models. With "
            "--profile: the one whose step times are measured, by default the demo's. With delta: "
            "a chat model's, whose updates are measured as well. With fidelity and trl: a chat "
            "model, which learns sums. With predictors: the chat model that samples."
        ),
    ] = None,
    real: Annotated[
        bool,
        typer.Option("--real", help="With agents: run the programs of the package indexes."),
    ] = False,
    programs: Annotated[
        Path | None,
        typer.Option(
            help="With --real: the folder of installed programs; by default "
            "~/.cache/rollweave/agents."
        ),
    ] = None,
    install: Annotated[
        bool,
        typer.Option("--install", help="With --real: install the programs that are missing."),
    ] = False,
    engine: Annotated[
        str | None, typer.Option(help="With coserve: vllm, in place of the embedded engine.")
    ] = None,
) -> None:
    """Measure performance, and compare with peers in the same run.

    `engine` also measures vLLM if ROLLWEAVE_VLLM_PYTHON names the interpreter of an
    environment in which it is installed.
    """
    with errors_reported():
        from rollweave.cli.bench import bench as work

        work(
            name,
            as_json=json_,
            quick=quick,
            seeds=seeds,
            profile=profile,
            model=model,
            real=real,
            programs=programs,
            install=install,
            engine=engine,
        )


if __name__ == "__main__":
    install_signals()
    app()
