"""A fake relay that holds ids of weights and no bytes: `python -m
tests.runtime.fake_relay`.

It fetches nothing from other relays. It finds the faults that a test has placed in the
model's directory through its log, which is in the run's: `kill-r0-1` kills relay r0
when it fetches weights 1, `base-r0-1` lets it refuse them as a delta.
"""

import os
import signal
import threading
from pathlib import Path

from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.schema import weights
from tests.support.echo_engine import sign_in, take_fault


def main() -> None:
    parent = Parent.from_arguments()
    spec = decoder_of(weights.RelaySpec)(parent.receive())
    model = str(Path(os.readlink("/proc/self/fd/1")).parent.parent.parent / "model")
    sign_in(model)
    frames, decode = parent.queue(), decoder_of(weights.RelayCommand)

    def send_reply(reply: weights.RelayReply) -> None:
        parent.send(encode(reply))

    def beat() -> None:
        while True:
            send_reply(weights.RelayHeartbeat())
            threading.Event().wait(weights.HEARTBEAT_S)

    send_reply(weights.RelayReady(address=weights.RelayAddress(host=spec.host, port=1, secret=b"")))
    threading.Thread(target=beat, daemon=True).start()
    while not isinstance(command := decode(frames.get()), weights.StopRelay):
        send_reply(answer(command, spec.id, model))


def answer(command: weights.FetchVersion, name: str, model: str) -> weights.FetchReply:
    publication_id = command.manifest.publication_id
    if take_fault(model, f"kill-{name}-{publication_id}"):
        os.kill(os.getpid(), signal.SIGKILL)
    if command.base_id is not None and take_fault(model, f"base-{name}-{publication_id}"):
        return weights.VersionFailed(
            publication_id=publication_id, reason="base", error="another base"
        )
    return weights.VersionFetched(manifest=command.manifest, nbytes=0, seconds=0.0)


if __name__ == "__main__":
    main()
    os._exit(0)
