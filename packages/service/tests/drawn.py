"""An environment whose tasks are drawn slowly or are invalid: `make_task` logs its
start and its end to the file `log`.
"""

import time
from pathlib import Path
from typing import Any

from rollweave.envs.base import Options, new_task
from rollweave.schema.work import Task
from tests.support.game import Game


class Drawn(Game):
    def __init__(self, **_: Any) -> None:
        super().__init__()

    @classmethod
    def make_task(cls, *, index: int, options: Options, **_: object) -> Task:
        if options.get("flaw"):
            return Task(**{**_plain(), **options["flaw"]})
        log = Path(options["log"])
        with log.open("a") as file:
            file.write(f"begin {index}\n")
        while not Path(options["gate"]).exists():
            time.sleep(0.01)
        with log.open("a") as file:
            file.write(f"end {index}\n")
        return new_task(seed=index)


def _plain() -> dict[str, Any]:
    task = new_task(seed=0)
    return {name: getattr(task, name) for name in task.__struct_fields__}
