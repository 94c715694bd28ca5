"""The trainer: one command in, one reply out.

Invariants: `handle` never raises for bad input, but replies with a failure; a failed
step leaves weights, optimizer and step as they were, unless memory ran out in the
update itself; versions of weights are the
controller's business, and the trainer only counts completed steps; with several ranks
every rank gets every command and gives the same reply; in a colocated run the state is
on the devices from `TrainOn` to the next `Publish` alone, and for the warm-up.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import torch

from rollweave.io.machine import computed_dtype, device_named, return_freed_memory
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import TRAINER_THREADS
from rollweave.schema.errors import NonFiniteLossError, RollweaveError, TrainerError
from rollweave.schema.training import (
    Copied,
    Measure,
    Measured,
    Publish,
    Published,
    Restore,
    Restored,
    Save,
    Saved,
    SaveFailed,
    StopTrainer,
    Trained,
    TrainerCommand,
    TrainerReady,
    TrainerReply,
    TrainFailed,
    TrainMetrics,
    TrainOn,
)
from rollweave.schema.work import Batch, Measures, TokenSequence
from rollweave.train import checkpoint
from rollweave.train.critic import Critic
from rollweave.train.distributed import ALONE, RankGroup, shutdown_ranks, with_tensor_groups
from rollweave.train.loading import load_trained_model
from rollweave.train.lora import NewAdapters
from rollweave.train.passes import DOMAIN_TRANSCRIPTS, SCRATCH_LR, Passes, policy_measures, warm_up
from rollweave.train.publishing import WeightPublisher
from rollweave.train.rows import Row, batch_rows, overlong_fraction, teacher_kl
from rollweave.train.state import (
    TrainedState,
    clone_parameters,
    load_named_tensors,
    named_tensors,
    swapped_weights,
    trained_parameters,
)
from rollweave.train.tensor_parallel import division_of
from rollweave.train.update import Update

EXPECTED = (RollweaveError, OSError, ValueError, RuntimeError, IndexError, ArithmeticError)
"""Exceptions that data, disks and devices raise. Any other is a bug of ours and ends
the process.
"""


class Trainer:
    """Holds the model, the optimizer and the step.

    `handle` is the whole interface of a run; `warm_up` comes before it.
    """

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        *,
        ranks: RankGroup = ALONE,
        before_pass: Callable[[], None] = lambda: None,
    ) -> None:
        """Load `model_dir`, as one of `ranks`. `before_pass` is called before each
        pass.

        Raises `TrainerError` for a model that it cannot train.
        """
        torch.set_num_threads(TRAINER_THREADS)
        self._config = config
        self._model_dir = model_dir
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        device = device_named(config.model.device)
        if device.type == "cpu":
            return_freed_memory()
        self._ranks = ranks = with_tensor_groups(ranks, config.trainer.tensor_parallel, device)
        # engines may have the device now; shards are made there, and leave immediately
        alone = config.trainer.colocated and ranks.world_size == 1
        self._model = load_trained_model(
            model_dir,
            config.model.implementation,
            dtype=computed_dtype(config.model.dtype, device.type),
            device=torch.device("cpu") if alone else device,
            ranks=ranks,
            adapters=None if config.lora is None else NewAdapters(config.lora, config.run.seed),
        )
        self._model.recompute_activations("activations" in config.trainer.save_memory)
        if config.algorithm.kl_forward:
            self._model.output_weights()
        self._division = division_of(self._model)
        self._parameters = sum(
            self._division.shape(name, each).numel()
            for name, each in trained_parameters(self._model).items()
        )
        trainer = config.trainer
        self._written = threading.Event()
        """Set unless a checkpoint is still to be written from the state itself."""
        self._written.set()
        self._copies = device.type != "cpu" and "optimizer" not in trainer.save_memory
        self._state = TrainedState(self._model, trainer, ranks, device, on_device=not alone)
        self._passes = Passes(
            self._model,
            self._ranks,
            micro_tokens=trainer.micro_tokens,
            device=device,
            before_pass=before_pass,
        )
        published: torch.dtype = getattr(torch, config.model.dtype)
        self._publisher = WeightPublisher(
            self._model,
            self._ranks,
            stored=self._model.stored if config.lora is None else None,
            constants=self._model.constants() if config.lora is None else None,
            dtype=published,
            device=device,
            collective=config.weights.collective,
        )
        self._reference: list[torch.Tensor] | None = None
        self._critic = (
            Critic(config, model_dir, ranks=ranks, device=device, on_device=not alone)
            if config.has_critic
            else None
        )
        self._states = [self._state, *([] if self._critic is None else [self._critic.state])]
        for state in self._states:
            state.optimizer.register_step_pre_hook(lambda *_: self._await_written())
        if trainer.colocated and not alone:
            self._leave()
        self._step = 0
        self._parts_done = 0
        self._writer: threading.Thread | None = None
        self._writing = False  # a checkpoint, in the background
        self._unwritten: tuple[Save, checkpoint.Checkpoint, float] | None = None

    @property
    def step(self) -> int:
        """The number of completed training steps."""
        return self._step

    def ready(self) -> TrainerReady:
        return TrainerReady(parameters=self._parameters)

    def warm_up(self, transcripts: Iterator[TokenSequence]) -> list[float]:
        """Run the supervised warm-up configured by `[warmup]`, before step 0; every
        rank is given the same transcripts. See `warmup`.
        """
        config = self._config
        self._enter()
        # a model from scratch learns the language of the observations, too
        scratch = config.model.scratch is not None
        losses = warm_up(
            self._passes,
            transcripts,
            steps=config.warmup.steps,
            batch=DOMAIN_TRANSCRIPTS * len(config.tasks),
            lr=SCRATCH_LR if scratch else config.trainer.peak_lr,
            observations=scratch,
            trainer=config.trainer,
        )
        if self._critic is not None:
            self._critic.start_from(self._model)
        return losses

    def handle(self, command: TrainerCommand) -> TrainerReply | None:
        """Execute one command.

        Every command is answered except `StopTrainer`, after which this object cannot
        be used.
        """
        match command:
            case TrainOn():
                return self._reply_to(lambda: self._train(command.batch), command.batch)
            case Measure(step=step, part=part, groups=groups):
                batch = Batch(step=step, version=step, part=part, parts=part + 1, groups=groups)
                return self._reply_to(lambda: self._measure(batch), batch)
            case Publish():
                return self._reply_to(lambda: self._publish(command))
            case Save():
                try:
                    return self._save(command)
                except EXPECTED as error:
                    return SaveFailed(path=command.path, error=_error_text(error))
            case Restore():
                return self._reply_to(lambda: self._restore(Path(command.path)))
            case StopTrainer():
                self.close()
                return None

    def close(self) -> None:
        """Release published weights and leave the other ranks, after a checkpoint in
        progress is written.
        """
        if self._writer is not None:
            self._writer.join()
        self._publisher.close()
        shutdown_ranks(self._ranks)

    def _reply_to(
        self, execute: Callable[[], TrainerReply], batch: Batch | None = None
    ) -> TrainerReply:
        groups = tuple(str(group.id) for group in batch.groups) if batch is not None else ()
        try:
            return execute()
        except NonFiniteLossError as error:
            return TrainFailed(error=str(error), nonfinite=True, groups=groups)
        except EXPECTED as error:
            return TrainFailed(error=_error_text(error), groups=groups)

    def _train(self, batch: Batch) -> Trained:
        started = time.perf_counter()
        self._enter()
        rows = self._rows(batch)
        if self._critic is not None:
            rows = self._critic.estimated(batch, rows)
        if self._config.algorithm.kl and self._reference is None:
            self._reference = clone_parameters(self._model)
        if self._reference is not None:
            self._await_written()  # the update sets the weights aside
        update = Update(
            self._config,
            self._passes,
            self._state.optimizer,
            batch=batch,
            rows=rows,
            reference=self._reference,
            critic=self._critic,
        )
        with self._unchanged_on_failure():
            values = update.run()
        train_s = time.perf_counter() - started
        rewards = [
            t.reward for group in batch.groups for t in group.trajectories if t.reward is not None
        ]
        mean = math.fsum(rewards) / max(1, len(rewards))
        values["reward_mean"] = mean
        values["overlong_fraction"] = overlong_fraction(batch)
        values |= teacher_kl(batch)
        values["reward_std"] = math.hypot(*(reward - mean for reward in rewards)) / math.sqrt(
            max(1, len(rewards))
        )
        values["tokens_per_s"] = values["input_tokens"] * self._config.trainer.epochs / train_s
        self._parts_done += 1
        if self._parts_done >= batch.parts:
            self._step, self._parts_done = self._step + 1, 0
        metrics = TrainMetrics(
            values=values, tokens=sum(row.tokens for row in rows), train_s=train_s
        )
        return Trained(step=batch.step, part=batch.part, metrics=metrics)

    def _measure(self, batch: Batch) -> Measured:
        """Measure with a forward pass of the policy over the whole batch, or of the
        critic for strategy `td_error`, or of both for a user's function.
        """
        self._enter()
        rows, strategy = self._rows(batch), self._config.buffer.sample
        groups = [Measures() for _ in batch.groups]
        if strategy != "td_error":
            temperature = self._config.rollout.temperature
            groups = policy_measures(self._passes, rows, batch.groups, temperature=temperature)
        if self._critic is not None and strategy not in ("ratio", "entropy"):
            errors = self._critic.td_errors(batch, rows)
            groups = [
                msgspec.structs.replace(group, td_error=error)
                for group, error in zip(groups, errors, strict=True)
            ]
        return Measured(groups=tuple(groups))

    def _rows(self, batch: Batch) -> list[Row]:
        """Return the batch's rows. Raises `TrainerError` for a batch that is not the
        next one, or has another vocabulary.
        """
        if (batch.step, batch.part) != (self._step, self._parts_done):
            raise TrainerError(
                f"expected part {self._parts_done} of step {self._step}, got part {batch.part} of "
                f"step {batch.step}"
            )
        config = self._config
        rows = batch_rows(batch, config.algorithm, config.own_algorithms())
        vocabulary = self._model.vocab
        for row in rows:
            if not 0 <= int(row.example.tokens.min()) <= int(row.example.tokens.max()) < vocabulary:
                raise TrainerError(
                    f"token ids must be in [0, {vocabulary}), got {row.example.tokens.tolist()}"
                )
        return rows

    @contextlib.contextmanager
    def _unchanged_on_failure(self) -> Iterator[None]:
        """Restore the state from before the batch if it fails.

        A failing minibatch changes nothing itself, but the minibatches before it did: a
        copy is kept only if there are several minibatches.
        """
        several = self._config.trainer.epochs * self._config.trainer.minibatches > 1
        before = [state.snapshot() if several else None for state in self._states]
        try:
            yield
        except BaseException:
            for state, snapshot in zip(self._states, before, strict=True):
                state.undo(snapshot)
            raise

    def _enter(self) -> None:
        """Move the state to the device."""
        self._state.enter(self._reference)
        if self._critic is not None:
            self._critic.state.enter(None)

    def _leave(self) -> None:
        """Move the state to the host's memory."""
        if self._critic is not None:
            self._critic.state.leave(None)
        self._state.leave(self._reference)

    def _publish(self, command: Publish) -> Published:
        started = time.perf_counter()
        manifest = self._publisher.publish(command)
        if command.release:
            self._leave()
        doubts = self._publisher.doubts()
        return Published(manifest=manifest, publish_s=time.perf_counter() - started, doubts=doubts)

    def _save(self, command: Save) -> Copied | Saved:
        """Copy the checkpoint, and write it, or leave the writing to `write`. Every
        rank copies its own shards.
        """
        started = time.perf_counter()
        state, error = None, ""
        try:
            state = self._copy()
        except EXPECTED as problem:
            error = _error_text(problem)
        self._ranks.raise_together(error)
        assert state is not None, "no rank has an error"
        if self._writer is not None and not self._ranks.is_first:
            self._writer.join()  # the first rank has finished the previous checkpoint
        if command.background:
            if not self._copies:
                self._written.clear()
            self._unwritten = (command, state, started)
            return Copied(path=command.path, copy_s=time.perf_counter() - started)
        if error := self._write(command, state):
            raise TrainerError(error)
        return Saved(path=command.path, save_s=time.perf_counter() - started)

    def _copy(self) -> checkpoint.Checkpoint:
        """Return this rank's part of the state: copies of what is not on the CPU, and
        the rest itself, for whose writing updates wait. Raises `TrainerError` if no
        state can be saved now.
        """
        if self._parts_done:
            raise TrainerError(
                f"step {self._step} is incomplete: {self._parts_done} parts are trained"
            )
        if self._writing and self._ranks.is_first:
            raise TrainerError("the previous checkpoint is still being written")
        critic = self._critic
        return checkpoint.Checkpoint(
            step=self._step,
            model=self._state.tensors(),
            optimizer=self._state.optimizer_tensors(),
            rng=_rng_state(),
            reference=self._named_reference(),
            stored=self._model.stored if self._config.lora is None else None,
            constants=self._constants(),
            critic=None if critic is None else critic.state.tensors(),
            critic_optimizer=None if critic is None else critic.state.optimizer_tensors(),
        )

    def _constants(self) -> dict[str, torch.Tensor]:
        """Return the checkpoint's tensors that training does not change, in the host's
        memory; nothing with adapters, with which training changes none of the model's.
        """
        if self._config.lora is not None:
            return {}
        return {name: tensor.cpu() for name, tensor in self._model.constants().items()}

    def write(self, on_done: Callable[[TrainerReply], None]) -> None:
        """Write the copy on another thread, which then calls `on_done` on the first
        rank.
        """
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is not None:
            self._writer = threading.Thread(
                target=self._write_in_background,
                args=(*unwritten, on_done),
                name="checkpoint",
                daemon=True,
            )
            self._writing = True
            self._writer.start()

    def _write_in_background(
        self,
        command: Save,
        state: checkpoint.Checkpoint,
        started: float,
        on_done: Callable[[TrainerReply], None],
    ) -> None:
        error = self._write(command, state)
        # before the report: the next checkpoint may follow immediately
        self._writing = False
        if not self._ranks.is_first:
            return
        if error:
            on_done(SaveFailed(path=command.path, error=error))
        else:
            on_done(Saved(path=command.path, save_s=time.perf_counter() - started))

    def _write(self, command: Save, state: checkpoint.Checkpoint) -> str:
        """Write a checkpoint, and return the error, or "" on success."""
        lora, source = self._config.lora, self._model_dir if command.export else None

        def written() -> None:
            state.forget_trained()
            self._written.set()

        try:
            checkpoint.save(
                Path(command.path),
                state,
                ranks=self._ranks,
                export_from=source,
                export_dtype=self._dtype,
                adapted=None if lora is None else checkpoint.Adapted(lora, self._model.stored),
                on_written=written,
            )
        except EXPECTED as problem:
            return _error_text(problem)
        finally:
            self._written.set()
        return ""

    def _await_written(self) -> None:
        """Wait until the state may change. Raises `TrainerError` if it takes long."""
        limit_s = self._config.watchdog.train_s
        if not self._written.wait(limit_s):
            raise TrainerError(f"the checkpoint before step {self._step} takes over {limit_s:g} s")

    def _restore(self, path: Path) -> Restored:
        self._await_written()
        state = checkpoint.load(path, ranks=self._ranks, splits=self._division.splits)
        reference: list[torch.Tensor] | None = None
        if state.reference is not None:
            with swapped_weights(self._model, clone_parameters(self._model)):
                load_named_tensors(self._model, state.reference)
                reference = clone_parameters(self._model)
        self._state.load(state.model, state.optimizer)
        if self._critic is not None:
            if state.critic is None:  # the run had no critic before
                self._critic.start_from(self._model)
            else:
                self._critic.state.load(state.critic, state.critic_optimizer or {})
        _set_rng_state(state.rng)
        self._reference = reference
        self._step, self._parts_done = state.step, 0
        return Restored(step=state.step)

    def _named_reference(self) -> dict[str, torch.Tensor] | None:
        if self._reference is None:
            return None
        return named_tensors(self._model, self._ranks, self._reference)


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _error_text(error: BaseException) -> str:
    return str(error) if isinstance(error, RollweaveError) else f"{type(error).__name__}: {error}"
