"""Optional mirrors of the metrics: TensorBoard and Weights & Biases.

Both are extras, imported only if `run.sinks` names them.
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

PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


class TensorBoard:
    """Writes event files to `<run>/tensorboard`."""

    def __init__(self, module: Any, run_dir: Path) -> None:
        self._writer = module.SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Mirrors to a W&B run of the same name, offline or online as the user's
    environment selects.

    `--resume` continues the same W&B run.
    """

    def __init__(self, module: Any, run_dir: Path, config: dict[str, Any]) -> None:
        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        self._run = module.init(
            project="rollweave",
            name=run_dir.name,
            dir=str(run_dir),
            config=config,
            id=id_file.read_text(),
            resume="allow",
        )
        self._run.define_metric("*", step_metric="training_step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "training_step": step})

    def close(self) -> None:
        self._run.finish()


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
        sinks.append(
            TensorBoard(module, run_dir)
            if name == "tensorboard"
            else WandB(module, run_dir, config)
        )
    return sinks
