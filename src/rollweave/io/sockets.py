"""Sockets that listen on one address of this host."""

import socket


def bound_socket(address: str, port: int) -> socket.socket:
    """Return a TCP socket, IPv4 or IPv6, that is bound to this address and port. Raises
    OSError.

    A port that a former process used is free immediately. Port 0 stands for any free
    port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
    except BaseException:
        sock.close()
        raise
    return sock
