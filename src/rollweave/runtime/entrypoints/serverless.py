"""The process that deploys the reward functions of a run on Ray Serve
(`runtime/hosts/on_serve.py`).
"""

import os
import sys

from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.runtime.hosts.on_serve import Functions
from rollweave.schema.errors import ConfigError
from rollweave.schema.serverless import (
    DeployFailed,
    DeployFunctions,
    FunctionsDeployed,
    ServeCommand,
)


def serve(parent: Parent) -> None:
    """Deploy, and remove the functions when the parent asks."""
    decode = decoder_of(ServeCommand)
    frames = parent.queue()
    command = decode(frames.get())
    assert isinstance(command, DeployFunctions), "it comes first"
    functions = None
    try:
        functions = Functions(command)
        urls = functions.deploy()
    except ConfigError as error:
        if functions is not None:
            functions.remove()
        parent.send(encode(DeployFailed(error=str(error))))
        return
    parent.send(encode(FunctionsDeployed(urls=urls)))
    frames.get()
    functions.remove()


def main() -> None:
    """Serve the parent."""
    serve(Parent.from_arguments())


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # nothing outlives the process
