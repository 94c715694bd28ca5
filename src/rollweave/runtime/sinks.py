"""Optional mirrors of the metrics: TensorBoard, Trackio, and Weights & Biases.

All are extras, imported only if `run.sinks` names them.
"""

import importlib
import importlib.util
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollweave.io.extras import how_to_install
from rollweave.runtime.metrics import Sink
from rollweave.schema.errors import ConfigError

PACKAGES = {
    "tensorboard": "torch.utils.tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}


class TensorBoard:
    """Writes event files to `<run>/tensorboard`."""

    def __init__(self, module: Any, run_dir: Path) -> None:
        self._writer = module.SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Trackio:
    """Mirrors to a run of Trackio's project `rollweave`, in the database of this
    machine; `trackio show --project rollweave` shows it.

    Its name is that of the run and a number of the run directory, so that `--resume`
    continues it, and no other run of the same name does.
    """

    def __init__(self, module: Any, run_dir: Path, config: dict[str, Any]) -> None:
        self._run = module.init(
            project="rollweave",
            name=f"{run_dir.name}-{_kept_id(run_dir / 'trackio_id')}",
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class WandB:
    """Mirrors to a W&B run of the same name, offline or online as the user's
    environment selects.

    `--resume` continues the same W&B run.
    """

    def __init__(self, module: Any, run_dir: Path, config: dict[str, Any]) -> None:
        self._run = module.init(
            project="rollweave",
            name=run_dir.name,
            dir=str(run_dir),
            config=config,
            id=_kept_id(run_dir / "wandb_id"),
            resume="allow",
        )
        self._run.define_metric("*", step_metric="training_step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "training_step": step})

    def close(self) -> None:
        self._run.finish()


def _kept_id(file: Path) -> str:
    """Return the run's id there; a new one that is written to the file if it is
    absent.
    """
    if not file.exists():
        file.write_text(secrets.token_hex(4))
    return file.read_text()


def missing_sinks(names: Sequence[str]) -> list[str]:
    """Return those of `names` whose package is not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def open_sinks(names: Sequence[str], run_dir: Path, config: dict[str, Any]) -> list[Sink]:
    """Open the sinks of `run.sinks`. Raises ConfigError if a package is missing."""
    missing = missing_sinks(names)
    if missing:
        raise ConfigError(f"run.sinks: {missing[0]} is not installed; {how_to_install(missing[0])}")
    sinks: list[Sink] = []
    for name in names:
        module = importlib.import_module(PACKAGES[name])
        match name:
            case "tensorboard":
                sinks.append(TensorBoard(module, run_dir))
            case "trackio":
                sinks.append(Trackio(module, run_dir, config))
            case _:
                sinks.append(WandB(module, run_dir, config))
    return sinks
