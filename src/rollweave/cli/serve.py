"""`rollweave serve`: rollouts as a service."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.markup import escape

from rollweave.cli.console import err, out
from rollweave.cli.runs import exported_checkpoint, find_run
from rollweave.record.rundir import RunDir
from rollweave.schema.commands import Warn
from rollweave.schema.config.loading import load
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.sections import ModelConfig
from rollweave.schema.errors import ConfigError
from rollweave.service import launch
from rollweave.service.backends import backend_factory

SUFFIX = "-service"
"""Of the directory of a service that serves a run's checkpoint, beside the run's."""


def serve(
    path: Path,
    overrides: Sequence[str],
    *,
    inproc: bool,
    no_token: bool = False,
    unsandboxed: bool = False,
) -> None:
    """Serve until a signal ends it."""
    config = (
        load(path, overrides)
        if path.is_file() or path.suffix == ".toml"
        else of_run(str(path), overrides)
    )
    launch.serve(
        config,
        observer=_Terminal(config),
        make_backend=backend_factory(config),
        inproc=inproc,
        no_token=no_token,
        unsandboxed=unsandboxed,
    )


def of_run(name: str, overrides: Sequence[str]) -> RunConfig:
    """The configuration that serves the best checkpoint of a trained run."""
    run = find_run(name)
    if not run.config.exists():
        raise ConfigError(f"{run.path} must hold config.toml, found none")
    step, model = exported_checkpoint(run, "best")
    del step
    trained = load(run.config, overrides)
    shape = ModelConfig(path=str(model), dtype=trained.model.dtype, device=trained.model.device)
    named = (
        trained.run.name
        if trained.run.name != load(run.config).run.name
        else f"{run.path.name}{SUFFIX}"
    )
    section = trained.run.model_copy(
        update={"name": named, "dir": str(run.path.parent), "sinks": ()}
    )
    return trained.model_copy(update={"model": shape, "run": section})


class _Terminal:
    """Says on the terminal what becomes of the service."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def on_ready(self, address: str, token: str | None, stop: Callable[[bool], None]) -> None:
        del stop  # signals do it
        names = ", ".join(task.name for task in self._config.tasks)
        out.print(f"serving [bold]{escape(names)}[/] on {address}", soft_wrap=True)
        out.print(
            f"[dim]its API: {address}/openapi.json; Ctrl-C ends it when what it has "
            "accepted is done[/]",
            soft_wrap=True,
        )
        if token is None:
            out.print(
                "[yellow]no token: every program of this host, of every user, may use it[/]",
                soft_wrap=True,
            )
        elif (variable := self._config.serve.token_env) is not None:
            out.print(f"[dim]its token: that of ${escape(variable)}[/]", soft_wrap=True)
        else:
            kept = RunDir(Path(self._config.run.dir) / self._config.run.name).token
            out.print(f"its token: {token} [dim](kept in {escape(str(kept))})[/]", soft_wrap=True)

    def on_warning(self, command: Warn) -> None:
        err.print(
            f"[yellow]{escape(command.component)}:[/] {escape(command.message)}", soft_wrap=True
        )

    def on_stopping(self, drain: bool) -> None:
        err.print(
            "finishing what was accepted; once more to cancel it"
            if drain
            else "cancelling what is left"
        )
