"""The two cores of the bench: one is the serving engine's device, on which nothing else
runs, and everything else has the other.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from rollweave.schema.base import Struct


class Cores(Struct, frozen=True, kw_only=True):
    """The core of the serving engine, and those of everything else. A machine with a
    single core has no `device`.
    """

    device: int | None
    others: tuple[int, ...]

    @classmethod
    def of_machine(cls) -> "Cores":
        """Return the cores that this process may use, divided."""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            return cls(device=None, others=tuple(cores))
        return cls(device=cores[0], others=tuple(cores[1:]))

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Leave the device to the serving engine: this thread, and all processes that
        it starts in the context, run on the other cores.
        """
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.others)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def give_device(self, pid: int) -> None:
        """Move all threads of the serving engine's process to its core."""
        if self.device is None:
            return
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), {self.device})
