"""The trainer's end of the line: one rank, built as its parent says, answers commands
until it is told to stop.

Invariant: a trainer that cannot start for a reason that will not change says so, and
leaves it to its parent to end it.
"""

from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.runtime.links.trainer import BuildTrainer, TrainerSpec, started
from rollweave.schema.training import Copied, TrainerCommand, TrainFailed


def serve(build: BuildTrainer) -> None:
    """Serve until `StopTrainer`, or until our parent is gone."""
    parent = Parent.from_arguments()
    found = started(build, decoder_of(TrainerSpec)(parent.receive()))
    parent.send(encode(found if isinstance(found, TrainFailed) else found[0]))
    commands = parent.queue()
    if isinstance(found, TrainFailed):
        commands.get()  # were we to end by ourselves, our end would be taken for the reason
        return
    _, trainer = found
    decode = decoder_of(TrainerCommand)
    while (reply := trainer.handle(decode(commands.get()))) is not None:
        parent.send(encode(reply))
        # only now; otherwise the reply that follows it could be sent first
        if isinstance(reply, Copied):
            trainer.write(lambda later: parent.send(encode(later)))
