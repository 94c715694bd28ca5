"""The process of one trainer rank: `python -m rollweave.runtime.entrypoints.trainer`,
started by `runtime/supervisors/trainer_link.py`.
"""

import dataclasses
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rollweave.envs.tasks import TaskSource
from rollweave.io.machine import device_named
from rollweave.io.spare_cores import SpareCores
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.conversation import tokenize_transcript
from rollweave.runtime.roles.worker import Worker, address_of
from rollweave.runtime.supervisors.trainer_link import TrainerSpec, serve
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import TRAINER_THREADS
from rollweave.schema.errors import TrainerError
from rollweave.schema.training import Save, Saved, TrainerReady
from rollweave.train.checkpoint import EXPORT
from rollweave.train.distributed import ALONE, RankGroup
from rollweave.train.scratch import build_checkpoint
from rollweave.train.trainer import Trainer

RANDOM, WARM = "random", "warm"
"""Directories beside the model, while the base of adapters is made."""

MODEL_S = 120.0
"""Maximum time for rank 0 to build a model from scratch, in seconds, before the other
ranks fail.
"""


def build(spec: TrainerSpec, worker: Worker) -> tuple[TrainerReady, Trainer]:
    """Build the trainer for the rank of `worker`.

    A model from scratch is built first if it does not exist; a fresh run warms it up. A
    base of adapters is warmed up before it gets its name, so that all read the same
    one.
    """
    config = RunConfig.checked(spec.config)
    torch.set_num_threads(TRAINER_THREADS)
    model_dir = Path(spec.model)
    ranks = dataclasses.replace(ALONE, address=address_of(worker))
    if worker.world_size > 1:
        ranks = worker.join_ranks(config.model.device)
    scratch = config.model.scratch
    if scratch is not None and not model_dir.exists():
        random_dir = model_dir if config.lora is None else model_dir.with_name(RANDOM)
        if worker.rank == 0:
            build_checkpoint(
                random_dir,
                scratch=scratch,
                context=config.max_tokens,
                head_dim=config.head_dim,
                words=spec.words,
                seed=config.run.seed,
            )
        else:
            _await_model(random_dir)
        if config.lora is not None:
            _make_base(config, random_dir, model_dir, ranks)
    trainer = Trainer(config, model_dir, ranks=ranks, before_pass=_follow_cores(config))
    if spec.warm_up and config.warmup.steps and (scratch is None or config.lora is None):
        _warm_up(trainer, config, model_dir)
    return trainer.ready(), trainer


def _follow_cores(config: RunConfig) -> Callable[[], None]:
    """Return what gives the trainer the cores that are idle. A run with deterministic
    engines keeps its threads: sums of floats depend on their number.
    """
    on_cpu = device_named(config.model.device).type == "cpu"
    if not on_cpu or any(group.deterministic for group in config.engines):
        return lambda: None
    cores = SpareCores(TRAINER_THREADS)

    def follow() -> None:
        if cores.follow() != torch.get_num_threads():
            torch.set_num_threads(cores.threads)

    return follow


def _warm_up(trainer: Trainer, config: RunConfig, model_dir: Path) -> None:
    source = TaskSource(config)
    codec = ChatCodec.from_directory(model_dir, config.model.template_arguments)
    trainer.warm_up(
        tokenize_transcript(codec, messages)
        for messages in source.transcripts(seed=config.run.seed)
    )


def _make_base(config: RunConfig, random_dir: Path, model_dir: Path, ranks: RankGroup) -> None:
    """Warm up all weights of a model from scratch, as the base of its adapters."""
    whole = config.model_copy(update={"lora": None})
    trainer = Trainer(whole, random_dir, ranks=ranks)
    if config.warmup.steps:
        _warm_up(trainer, whole, random_dir)
    warm = model_dir.with_name(WARM)
    reply = trainer.handle(Save(path=str(warm), export=True))
    if not isinstance(reply, Saved):
        raise TrainerError(f"the model cannot be saved: {getattr(reply, 'error', reply)}")
    if ranks.is_first:
        (warm / EXPORT).rename(model_dir)
        shutil.rmtree(warm)
        shutil.rmtree(random_dir)
    else:
        _await_model(model_dir)


def _await_model(model_dir: Path) -> None:
    """Wait for the directory, which is renamed into place once it is complete."""
    deadline = time.monotonic() + MODEL_S
    while not model_dir.exists():
        if time.monotonic() > deadline:
            raise TrainerError(f"rank 0 has not built {model_dir} within {MODEL_S:g} s")
        time.sleep(0.05)


def main() -> None:
    """Serve until the rank is stopped, or its parent ends."""
    serve(build)


if __name__ == "__main__":
    main()
    # nothing outlives the process, and the interpreter would take a second to unload
    # torch
    os._exit(0)
