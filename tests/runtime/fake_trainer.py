"""A fake trainer without a model. Also a process: `python -m
tests.runtime.fake_trainer`.

It trains by counting, and measures that the newest group is nearest to the policy. A
file `hold` in the model's directory contains the number of scored trajectories that
must exist before a step ends. With a file `no-trainer` there it fails to start, and
with `refused` it always would. A batch whose step is CRASH kills the process, FAIL
fails, and NAN is not finite. Publications are empty. A checkpoint in the background is
written at once, except that a checkpoint whose path ends in "beside" is written in the
middle of the next step.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from rollweave.record.rundir import RunDir
from rollweave.record.store import TrajectoryReader
from rollweave.runtime.roles.worker import Worker
from rollweave.runtime.supervisors.trainer_link import TrainerSpec, serve
from rollweave.schema import training
from rollweave.schema.errors import NonFiniteLossError
from rollweave.schema.weights import WeightManifest
from rollweave.schema.work import Batch, Measures
from tests.support.echo_engine import sign_in, take_fault

CRASH, FAIL, NAN, RANK_1_DIES = 900, 901, 902, 903


class FakeTrainer:
    """A `TrainerLike` without a model."""

    def __init__(self, spec: TrainerSpec, rank: int) -> None:
        if (Path(spec.model) / "no-trainer").exists():
            raise RuntimeError("the fake trainer cannot start")
        if (Path(spec.model) / "refused").exists():
            raise NonFiniteLossError("the fake warm-up is not finite")
        self._rank, self._model, self._config = rank, spec.model, spec.config
        self.step = 0
        self._copied = ""
        self._later: Callable[[training.TrainerReply], None] | None = None

    def write(self, later: Callable[[training.TrainerReply], None], /) -> None:
        if self._copied.endswith("beside"):
            self._later = later
        else:
            later(self._save(self._copied))

    def _save(self, path: str) -> training.TrainerReply:
        if take_fault(self._model, "full-disk"):
            return training.SaveFailed(path=path, error="no space left on device")
        # it exists already if the journal lost its event
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "trainer.json").write_text(json.dumps({"step": self.step}))
        return training.Saved(path=path, save_s=0.0)

    def _take_faults(self, step: int) -> None:
        if take_fault(self._model, f"kill-trainer-{step}"):
            os.kill(os.getpid(), signal.SIGKILL)
        if take_fault(self._model, f"kill-controller-{step}"):
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()

    def _hold(self) -> None:
        hold = Path(self._model) / "hold"
        while True:
            try:
                least = int(hold.read_text())
            except FileNotFoundError:
                return
            run = json.loads(self._config)["run"]
            entries = TrajectoryReader(RunDir(Path(run["dir"], run["name"])).trajectories).entries
            if sum(entry.score is not None for entry in entries) >= least:
                return
            time.sleep(0.01)

    def _log(self, batch: Batch) -> None:
        ids = [trajectory.id for group in batch.groups for trajectory in group.trajectories]
        assert all(
            trajectory.reward is not None
            for group in batch.groups
            for trajectory in group.trajectories
        )
        if Path(self._model).is_dir():
            with (Path(self._model) / "trained.jsonl").open("a") as file:
                file.write(json.dumps({"step": batch.step, "ids": ids}) + "\n")

    def handle(self, command: training.TrainerCommand, /) -> training.TrainerReply | None:
        match command:
            case training.TrainOn(batch=batch):
                # the background checkpoint is complete in the middle of a step
                if self._later is not None:
                    self._later(training.Saved(path="beside", save_s=0.0))
                    self._later = None
                if batch.step == CRASH or (batch.step == RANK_1_DIES and self._rank == 1):
                    os.kill(os.getpid(), signal.SIGKILL)
                if batch.step == RANK_1_DIES:
                    signal.pause()
                self._take_faults(batch.step)
                if batch.step in (FAIL, NAN) or take_fault(self._model, f"nan-{batch.step}"):
                    return training.TrainFailed(error="no luck", nonfinite=batch.step != FAIL)
                self._hold()
                self._log(batch)
                self.step = batch.step + 1
                metrics = training.TrainMetrics(
                    values={"loss": 0.5, "rank": float(self._rank)}, tokens=1, train_s=0.0
                )
                return training.Trained(step=batch.step, part=batch.part, metrics=metrics)
            case training.Measure(step=step, groups=groups):
                assert step == self.step
                assert all(
                    trajectory.sequences for group in groups for trajectory in group.trajectories
                )
                self._take_faults(step)
                if take_fault(self._model, f"nan-measure-{step}"):
                    return training.TrainFailed(error="no number", nonfinite=True)
                if take_fault(self._model, f"fail-measure-{step}"):
                    return training.TrainFailed(error="no luck")
                # the last group is the first by each of them
                return training.Measured(
                    groups=tuple(
                        Measures(
                            ratio=1.0 / (len(groups) - place),
                            entropy=float(place),
                            td_error=2.0 * place,
                        )
                        for place in range(len(groups))
                    )
                )
            case training.Publish(version=version, publication_id=publication_id):
                manifest = WeightManifest(
                    version=version,
                    publication_id=publication_id,
                    location="",
                    tensors=(),
                    nbytes=0,
                    digest="good",
                )
                return training.Published(manifest=manifest, publish_s=0.0)
            case training.Save(path=path, background=True):
                self._copied = path
                return training.Copied(path=path, copy_s=0.0)
            case training.Save(path=path):
                return self._save(path)
            case training.Restore(path=path):
                try:
                    self.step = json.loads((Path(path) / "trainer.json").read_text())["step"]
                except OSError as error:
                    return training.TrainFailed(error=str(error))
                return training.Restored(step=self.step)
            case training.StopTrainer():
                return None


def build(spec: TrainerSpec, worker: Worker) -> tuple[training.TrainerReady, FakeTrainer]:
    return training.TrainerReady(parameters=7), FakeTrainer(spec, worker.rank)


def build_rank(spec: TrainerSpec, worker: Worker) -> tuple[training.TrainerReady, FakeTrainer]:
    sign_in(spec.model)
    return build(spec, worker)


if __name__ == "__main__":
    serve(build_rank)
