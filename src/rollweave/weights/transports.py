"""Transports by name. What a name needs is imported when it is chosen."""

from rollweave.schema.weights import TransportName
from rollweave.weights.transport import Tcp, Transport


def transport_of(name: TransportName, *, host: str) -> Transport:
    """The transport of that name, on the network of `host`. Raises ConfigError where its extra is not installed."""
    match name:
        case "tcp":
            return Tcp()
        case "mooncake":
            from rollweave.weights.mooncake import MooncakeCarrier

            return Tcp(carrier=MooncakeCarrier(host))
        case "nixl":
            from rollweave.weights.nixl import NixlCarrier

            return Tcp(carrier=NixlCarrier())
