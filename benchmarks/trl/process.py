"""TRL's process: found, started, read line by line, and ended in every case."""

import contextlib
import os
import subprocess
import threading
from collections.abc import Generator
from pathlib import Path

import msgspec

from benchmarks.harness import ROOT, environment
from benchmarks.trl.protocol import TrlCheckpoint, TrlSpec
from benchmarks.usage import Usage
from rollweave.envs.tasks import TaskSource
from rollweave.io.child import log_tail, status_text
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import TRAINER_THREADS
from rollweave.schema.errors import ConfigError, RollweaveError
from rollweave.schema.work import Purpose
from rollweave.train.state import BETAS

VARIABLE = "ROLLWEAVE_TRL_PYTHON"
FOLDER = ".venv-trl"
MISSING = (
    f"TRL is not installed here: `make trl` makes {FOLDER}, or {VARIABLE} names the interpreter "
    "of an environment that has it"
)

CHECKPOINT_S = 3600.0
"""Maximum seconds until the next checkpoint: on a quiet machine, a step of the fixed
lake takes about a second and a step of a pretrained model some minutes.
"""

TAIL_LINES = 6
"""Number of lines of the process's output that an error quotes."""

MODULE = "benchmarks.trl.training"
OWN = {
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))),
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "PYTHONUNBUFFERED": "1",
}
"""Environment variables of TRL's process: this checkout, and no network."""

VERSION = "import importlib.metadata; print(importlib.metadata.version('trl'))"
VERSION_S = 60.0
"""Maximum seconds to ask an interpreter, most of which the disk takes."""


def interpreter(root: Path = ROOT) -> str | None:
    """Return the interpreter that has TRL: the one that the environment names, else
    that of `make trl`, else None.
    """
    if named := os.environ.get(VARIABLE):
        return named
    made = root / FOLDER
    return str(made / "bin" / "python") if (made / "ready").exists() else None


def trl_version(python: str) -> str:
    """Return the version of the interpreter's TRL. Raises ConfigError if it has
    none.
    """
    problem = f"{VARIABLE} must be an interpreter that has TRL, got {python!r}"
    try:
        answer = subprocess.run(
            [python, "-I", "-c", VERSION], capture_output=True, text=True, timeout=VERSION_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{problem}: {error}") from None
    if answer.returncode != 0:
        raise ConfigError(f"{problem}: {answer.stderr.strip()[-200:]}")
    return answer.stdout.strip()


def spec_of(config: RunConfig, directory: Path) -> TrlSpec:
    """Return the training of TRL that is `config`'s."""
    (task,) = config.tasks
    trainer, values = config.trainer, config.algorithm.loss_values
    source = TaskSource(config)
    assert config.model.path is not None, "both start from one checkpoint"
    return TrlSpec(
        model=config.model.path,
        directory=str(directory),
        tasks=tuple(
            source.draw(task.name, index, Purpose.TRAIN)
            for index in range(config.run.steps * config.rollout.groups_per_step)
        ),
        options=task.options,
        steps=config.run.steps,
        save_every=config.eval.every,
        groups_per_step=config.rollout.groups_per_step,
        group_size=config.rollout.group_size,
        temperature=config.rollout.temperature,
        lr=trainer.peak_lr,
        betas=BETAS,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        clip_low=values.clip_low,
        clip_high=values.clip_high,
        threads=TRAINER_THREADS,
        seed=config.run.seed,
    )


def checkpoints(python: str, spec: TrlSpec) -> Generator[tuple[TrlCheckpoint, int]]:
    """Train as specified, in the working directory, and yield each checkpoint with the
    peak of the process's memory in bytes; the training waits until the next one is
    asked for. Closing the iterator ends it.

    Raises RollweaveError with the process's last output if it fails or hangs.
    """
    directory = Path(spec.directory)
    directory.mkdir(parents=True)
    path, log = directory / "spec.json", directory / "trl.log"
    path.write_bytes(msgspec.json.encode(spec))
    threads = str(spec.threads)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [os.path.expanduser(python), "-m", MODULE, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env=environment(**OWN, OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads),
            # like our children, and so with the same share of the CPU
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    usage = Usage(process.pid)
    try:
        while True:
            backstop = threading.Timer(CHECKPOINT_S, process.kill)
            backstop.start()
            line = process.stdout.readline()
            backstop.cancel()
            if not line:
                break
            yield msgspec.json.decode(line, type=TrlCheckpoint), usage.peak
            process.stdin.write(b"\n")
            process.stdin.flush()
        if status := process.wait():
            tail = "\n".join(log_tail(log).splitlines()[-TAIL_LINES:])
            raise RollweaveError(f"TRL ended with {status_text(status)}; its last output:\n{tail}")
    except BrokenPipeError:
        raise RollweaveError(f"TRL ended; its last output:\n{log_tail(log)}") from None
    finally:
        usage.stop()
        process.kill()
        process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
