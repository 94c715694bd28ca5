"""The real trainer, which stops itself while it writes a checkpoint, so that a test can
kill it there.
"""

import os
import signal
from pathlib import Path

from rollweave.runtime.entrypoints import trainer as trainer_process
from rollweave.train import checkpoint


def save_tensors(tensors: object, path: Path) -> None:
    """Stand in for the function that `train/checkpoint.py` calls for each file, and
    halt before the optimizer's file of step 2 is written.
    """
    if path.name == "optimizer.safetensors" and path.parent.name.startswith("step-000002.partial"):
        os.kill(os.getpid(), signal.SIGSTOP)
    _save_tensors(tensors, path)  # type: ignore[arg-type]


_save_tensors = checkpoint._save_tensors
checkpoint._save_tensors = save_tensors  # type: ignore[assignment]

if __name__ == "__main__":
    trainer_process.main()
