"""The process that checks the user's code before a run with rollout workers:
`python -m rollweave.runtime.entrypoints.examiner`, started by
`runtime/preflight/examiner.py`.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.runtime.preflight.checks import fail
from rollweave.runtime.preflight.environments import (
    BrokenError,
    declared_by,
    examine_domain,
    examine_rules,
)
from rollweave.runtime.preflight.examiner import BEAT_S, Assignment, Beat, Examined
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError


def examine(assignment: Assignment) -> Iterator[Examined]:
    """Yield the results, in order."""
    config = RunConfig.checked(assignment.config)
    match assignment.what:
        case "domains":
            for index in range(assignment.first, len(config.tasks)):
                with contextlib.chdir("."):  # the user's code may change the directory
                    domain, checks = examine_domain(config, index, deep=assignment.deep)
                yield Examined(domain=domain, checks=tuple(checks))
        case "rules":
            yield Examined(checks=tuple(examine_rules(config)))
        case "declared":
            try:
                yield Examined(declared=declared_by(config))
            except (ConfigError, BrokenError) as error:
                yield Examined(checks=(fail("tasks", str(error)),))


def main() -> None:
    """Answer the parent's assignment."""
    parent = Parent.from_arguments()

    def beat() -> None:
        while True:
            parent.send(encode(Beat()))
            time.sleep(BEAT_S)

    threading.Thread(target=beat, name="beat", daemon=True).start()
    for examined in examine(decoder_of(Assignment)(parent.receive())):
        parent.send(encode(examined))


if __name__ == "__main__":
    main()
    os._exit(0)  # calls that do not return are on threads
