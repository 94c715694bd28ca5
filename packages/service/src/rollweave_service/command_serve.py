"""`rollweave serve`: serves rollouts over HTTP."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.markup import escape

from rollweave.cli.console import err, out
from rollweave.cli.runs import exported_checkpoint, find_run
from rollweave.io.http.listening import Access
from rollweave.record.rundir import RunDir
from rollweave.runtime.checkpoints import with_model
from rollweave.schema.address import Hosts
from rollweave.schema.commands import Warn
from rollweave.schema.config.loading import load
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import ModelConfig
from rollweave.schema.errors import ConfigError
from rollweave_service import launch
from rollweave_service.engines import PRIVATE_NETWORKS, backend_factory
from rollweave_service.preflight import examine_service

SUFFIX = "-service"
"""Suffix that the name of a service has after the name of the run whose checkpoint it
serves. The service's directory is next to the run's.
"""


def serve(
    path: Path,
    overrides: Sequence[str],
    *,
    inproc: bool,
    access: Access = launch.ON_LOOPBACK,
    unsandboxed: bool = False,
    registered: bool = False,
    engine_hosts: Sequence[str] = (),
) -> None:
    """Serve until a signal ends it. Engines may be registered on `engine_hosts`, or on
    this host and in private networks if there are none.

    Raises ConfigError for a host that is none.
    """
    hosts = Hosts.parse(engine_hosts, field="--engine-host") if engine_hosts else PRIVATE_NETWORKS
    config = (
        load(path, overrides)
        if path.is_file() or path.suffix == ".toml"
        else service_of_run(str(path), overrides)
    )
    config = with_model(config)
    config, warnings = examine_service(config, registered=registered)
    for check in warnings:
        err.print(f"[yellow]{escape(check.name)}:[/] {escape(check.detail)}", soft_wrap=True)
    launch.serve(
        config,
        observer=_Terminal(config, access),
        make_backend=backend_factory(config, hosts),
        inproc=inproc,
        access=access,
        unsandboxed=unsandboxed,
        registered=registered,
        engine_hosts=hosts,
    )


def service_of_run(name: str, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration that serves the best checkpoint of a trained run, or the
    last checkpoint if no evaluation chose the best. The run's pairwise judges are left
    out, because a service compares nothing.
    """
    run = find_run(name)
    if not run.config.exists():
        raise ConfigError(f"{run.path} must hold config.toml, got a directory without it")
    _, checkpoint = exported_checkpoint(run, None)
    trained = run.configuration(overrides)
    model = ModelConfig(
        path=str(checkpoint),
        template_arguments=trained.model.template_arguments,
        dtype=trained.model.dtype,
        device=trained.model.device,
    )
    is_renamed = trained.run.name != run.configuration().run.name
    service_name = trained.run.name if is_renamed else f"{run.path.name}{SUFFIX}"
    section = trained.run.model_copy(
        update={"name": service_name, "dir": str(run.path.parent), "sinks": ()}
    )
    rewards = tuple(reward for reward in trained.rewards if not reward.pairwise)
    # adapters are part of the exported weights
    served = trained.model_copy(
        update={"model": model, "run": section, "lora": None, "rewards": rewards}
    )
    # as the only reward, the environment's reward has no weight
    tasks = tuple(
        task if served.rewards_of(task.name) else task.model_copy(update={"env_weight": 1.0})
        for task in served.tasks
    )
    return served.model_copy(update={"tasks": tasks})


class _Terminal:
    """Prints the stages of a service on the terminal."""

    def __init__(self, config: RunConfig, access: Access) -> None:
        self._config, self._access = config, access

    def on_ready(self, address: str, token: str | None, stop: Callable[[bool], None]) -> None:
        del stop  # signals stop the service
        names = ", ".join(task.name for task in self._config.tasks)
        out.print(f"serving [bold]{escape(names)}[/] on {address}", soft_wrap=True)
        out.print(
            f"[dim]API: {address}/openapi.json; press Ctrl-C to stop once all accepted "
            "rollouts are done[/]",
            soft_wrap=True,
        )
        if token is None:
            out.print(
                "[yellow]no token: every program of every user on this host has access[/]",
                soft_wrap=True,
            )
        elif (variable := self._access.token_env) is not None:
            out.print(f"[dim]token: the value of ${escape(variable)}[/]", soft_wrap=True)
        else:
            file = RunDir(Path(self._config.run.dir) / self._config.run.name).token
            out.print(f"token: {token} [dim](stored in {escape(str(file))})[/]", soft_wrap=True)

    def on_warning(self, command: Warn) -> None:
        err.print(
            f"[yellow]{escape(command.component)}:[/] {escape(command.message)}", soft_wrap=True
        )

    def on_stopping(self, drain: bool) -> None:
        err.print(
            "finishing the accepted rollouts; press Ctrl-C again to cancel them"
            if drain
            else "cancelling the remaining rollouts"
        )
