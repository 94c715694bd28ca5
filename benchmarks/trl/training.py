"""TRL's side of the bench, in TRL's interpreter: `python -m benchmarks.trl.training
SPEC` trains with its GRPOTrainer and its generation by transformers.

Standard output carries lines of the protocol alone; everything that TRL prints goes to
standard error.
"""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import msgspec
import torch
from transformers import TrainerCallback

from benchmarks.trl.episodes import play
from benchmarks.trl.protocol import TrlCheckpoint, TrlSpec
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.schema.work import Task

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


class EpisodeRollouts:
    """A `rollout_func`: the prompts are tasks, and turns are sampled by the trainer's
    own generation.
    """

    def __init__(self, spec: TrlSpec) -> None:
        self._options, self._codec = spec.options, ChatCodec.from_directory(spec.model)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any] | None]:
        """Return one completion for each prompt, in order, and its reward."""

        def generate(contexts: list[list[int]]) -> list[list[int]]:
            turns: list[list[int]] = trainer._generate_single_turn(contexts, None, {}, 1)[0]
            return turns

        tasks = [msgspec.json.decode(prompt, type=Task) for prompt in prompts]
        episodes = play(tasks, options=self._options, codec=self._codec, generate=generate)
        return {
            "prompt_ids": [one.prompt for one in episodes],
            "completion_ids": [one.completion for one in episodes],
            "logprobs": None,  # of the same weights that are trained: their ratio is 1
            "env_mask": [one.mask for one in episodes],
            "episode_reward": [one.reward for one in episodes],
        }


def episode_reward(episode_reward: list[float], **_: Any) -> list[float]:
    """Return the environments' rewards: a reward function."""
    return list(episode_reward)


class Clock(TrainerCallback):
    """Times the steps, by the wall clock and by the processor time, writes the
    checkpoints, and stops its time while one is evaluated.
    """

    def __init__(self, spec: TrlSpec, answers: TextIO) -> None:
        self._spec, self._answers = spec, answers
        self._seconds, self._since, self._computed = 0.0, 0.0, 0.0
        self._steps: list[float] = []
        self._cpu: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._since, self._computed = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args
        self._steps.append(time.perf_counter() - self._since)
        self._cpu.append(time.process_time() - self._computed)
        self._seconds += self._steps[-1]
        if state.global_step % self._spec.save_every == 0:
            self._save(state.global_step, kwargs["model"])
            if not sys.stdin.readline():  # the bench has ended
                control.should_training_stop = True
        self._since, self._computed = time.perf_counter(), time.process_time()

    def _save(self, step: int, model: Any) -> None:
        path = Path(self._spec.directory, f"step-{step}")
        model.save_pretrained(path)
        for name in TOKENIZER:
            shutil.copy(Path(self._spec.model, name), path)
        line = TrlCheckpoint(
            step=step,
            seconds=self._seconds,
            step_s=tuple(self._steps),
            cpu_s=tuple(self._cpu),
            path=str(path),
        )
        print(msgspec.json.encode(line).decode(), file=self._answers, flush=True)
        self._steps.clear()
        self._cpu.clear()


def settings(spec: TrlSpec) -> dict[str, Any]:
    """Return the arguments of GRPOConfig."""
    return {
        "output_dir": spec.directory,
        "use_cpu": True,
        "bf16": False,
        "model_init_kwargs": {"dtype": "float32"},
        "gradient_checkpointing": False,
        "per_device_train_batch_size": spec.groups_per_step * spec.group_size,
        "gradient_accumulation_steps": 1,
        "num_generations": spec.group_size,
        # the length of one generation, which is a turn
        "max_completion_length": spec.tasks[0].limits.max_turn_tokens,
        "temperature": spec.temperature,
        "learning_rate": spec.lr,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "adam_beta1": spec.betas[0],
        "adam_beta2": spec.betas[1],
        "weight_decay": spec.weight_decay,
        "max_grad_norm": spec.max_grad_norm,
        "loss_type": "dapo",  # the average over all tokens of the batch
        "scale_rewards": "group",
        "epsilon": spec.clip_low,
        "epsilon_high": spec.clip_high,
        "beta": 0.0,
        "max_steps": spec.steps,
        "shuffle_dataset": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": spec.seed,
    }


def train(spec: TrlSpec, answers: TextIO) -> None:
    """Train as specified, and write a line for each checkpoint to `answers`."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(spec.threads)
    rows = [{"prompt": msgspec.json.encode(task).decode()} for task in spec.tasks]
    GRPOTrainer(
        model=spec.model,
        args=GRPOConfig(**settings(spec)),
        train_dataset=Dataset.from_list(rows),
        rollout_func=EpisodeRollouts(spec),
        reward_funcs=episode_reward,
        callbacks=[Clock(spec, answers)],
    ).train()


def main() -> None:
    """Train as the file that the first argument names specifies."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        train(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=TrlSpec), answers)


if __name__ == "__main__":
    main()
