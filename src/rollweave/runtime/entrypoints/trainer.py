"""The process of one trainer rank: `python -m rollweave.runtime.entrypoints.trainer`,
started by `runtime/links/trainer.py`.
"""

import os
import time
from pathlib import Path

import torch

from rollweave.envs.tasks import TaskSource
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.conversation import tokenize_transcript
from rollweave.runtime.links.trainer import TrainerSpec, serve
from rollweave.runtime.roles.worker import Worker
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.sections import TRAINER_THREADS
from rollweave.schema.errors import TrainerError
from rollweave.schema.training import TrainerReady
from rollweave.train.distributed import ALONE
from rollweave.train.scratch import build_checkpoint
from rollweave.train.trainer import Trainer

MODEL_S = 120.0
"""Maximum time for rank 0 to build a model from scratch, in seconds, before the other
ranks fail.
"""


def build(spec: TrainerSpec, worker: Worker) -> tuple[TrainerReady, Trainer]:
    """Build the trainer for the rank of `worker`.

    A model from scratch is built first if it does not exist; a fresh run warms it up.
    """
    config = RunConfig.model_validate_json(spec.config)
    torch.set_num_threads(TRAINER_THREADS)
    model_dir = Path(spec.model)
    ranks = worker.join_ranks(config.model.device) if worker.world_size > 1 else ALONE
    if config.model.scratch is not None and not model_dir.exists():
        if worker.rank == 0:
            build_checkpoint(
                model_dir,
                scratch=config.model.scratch,
                context=config.max_tokens,
                head_dim=config.head_dim,
                words=spec.words,
                seed=config.run.seed,
            )
        else:
            _await_model(model_dir)
    trainer = Trainer(config, model_dir, Path(spec.run_dir), ranks=ranks)
    if spec.warm_up and config.warmup.steps:
        source = TaskSource(config)
        codec = ChatCodec.from_directory(model_dir)
        trainer.warm_up(
            tokenize_transcript(codec, messages)
            for messages in source.transcripts(seed=config.run.seed)
        )
    return trainer.ready(), trainer


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
