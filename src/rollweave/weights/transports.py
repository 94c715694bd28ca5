"""Transports by name."""

from rollweave.schema.weights import TransportName
from rollweave.weights.carriers import MooncakeCarrier, NixlCarrier
from rollweave.weights.tcp import Tcp
from rollweave.weights.transport import Transport


def transport_of(name: TransportName, *, host: str) -> Transport:
    """The transport of that name, for a process that listens on `host`.

    Raises ConfigError where its extra is not installed.
    """
    match name:
        case "tcp":
            return Tcp()
        case "mooncake":
            return Tcp(carrier=MooncakeCarrier(host))
        case "nixl":
            return Tcp(carrier=NixlCarrier())
