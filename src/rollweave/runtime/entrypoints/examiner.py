"""The process that checks the user's code before a run with rollout workers:
`python -m rollweave.runtime.entrypoints.examiner`, started by
`runtime/preflight/examiner.py`.
"""

import os
import threading
import time

from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.runtime.preflight.examiner import BEAT_S, Assignment, Beat, examine
from rollweave.schema.config.root import RunConfig


def main() -> None:
    """Answer the parent's assignment."""
    parent = Parent.from_arguments()

    def beat() -> None:
        while True:
            parent.send(encode(Beat()))
            time.sleep(BEAT_S)

    threading.Thread(target=beat, name="beat", daemon=True).start()
    asked = decoder_of(Assignment)(parent.receive())
    config = RunConfig.checked(asked.config)
    for examined in examine(config, what=asked.what, deep=asked.deep, first=asked.first):
        parent.send(encode(examined))


if __name__ == "__main__":
    main()
    os._exit(0)  # calls that do not return are on threads
