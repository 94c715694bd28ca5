"""A fake trainer without a model. Also a process: `python -m tests.live.fake_trainer`.

It trains by counting; `run_dir` ending in "broken" cannot start; a batch whose step is CRASH kills the process; FAIL fails;
NAN is not finite. Publications are empty payloads.
"""

import json
import os
import signal
from pathlib import Path

import msgspec

from rollweave.backends.parent import Parent
from rollweave.codec.wire import decoder_of, encode
from rollweave.live.trainer_link import TrainerSpec
from rollweave.schema.training import (
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
from rollweave.schema.weights import WeightManifest

CRASH, FAIL, NAN, RANK_1_DIES = 900, 901, 902, 903


class FakeTrainer:
    """`TrainerLike`."""

    def __init__(self, spec: TrainerSpec) -> None:
        if spec.run_dir.endswith("broken"):
            raise RuntimeError("the fake trainer cannot start")
        self._rank = spec.rank
        self.step = 0

    def handle(self, command: TrainerCommand, /) -> TrainerReply | None:
        match command:
            case TrainOn(batch=batch):
                if batch.step == CRASH or (batch.step == RANK_1_DIES and self._rank == 1):
                    os.kill(os.getpid(), signal.SIGKILL)
                if batch.step == RANK_1_DIES:
                    signal.pause()
                if batch.step in (FAIL, NAN):
                    return TrainFailed(error="no luck", nonfinite=batch.step == NAN)
                self.step = batch.step + 1
                metrics = TrainMetrics(values={"loss": 0.5, "rank": float(self._rank)}, tokens=1, train_s=0.0)
                return Trained(step=batch.step, part=batch.part, metrics=metrics)
            case Publish(version=version, weights_id=weights_id):
                manifest = WeightManifest(
                    version=version, weights_id=weights_id, location="", tensors=(), nbytes=0, digest="good"
                )
                return Published(manifest=manifest, publish_s=0.0)
            case Save(path=path):
                if "full" in path:
                    return SaveFailed(path=path, error="no space left on device")
                Path(path).mkdir(parents=True)
                (Path(path) / "trainer.json").write_text(json.dumps({"step": self.step}))
                return Saved(path=path, save_s=0.0)
            case Restore(path=path):
                try:
                    self.step = json.loads((Path(path) / "trainer.json").read_text())["step"]
                except OSError as error:
                    return TrainFailed(error=str(error))
                return Restored(step=self.step)
            case StopTrainer():
                return None


def build(spec: TrainerSpec) -> tuple[TrainerReady, FakeTrainer]:
    return TrainerReady(parameters=7), FakeTrainer(spec)


def main() -> None:
    parent = Parent.from_arguments()
    ready, trainer = build(decoder_of(TrainerSpec)(parent.receive()))
    assert os.environ["RANK"] == str(trainer._rank)
    parent.send(encode(ready))
    decode = decoder_of(TrainerCommand)
    while (reply := trainer.handle(decode(parent.receive()))) is not None:
        parent.send(encode(msgspec.structs.replace(reply)))


if __name__ == "__main__":
    main()
