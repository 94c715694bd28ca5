"""A wire between two hosts that cuts, corrupts or stalls the bytes from the source."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Literal

import msgspec

from rollweave.schema.weights import RelayAddress

Harm = Literal["cut", "flip", "stall"]


class Wire:
    """Passes bytes from the source up to number `at`, where it does `harm`.

    Counts the bytes that have passed.
    """

    def __init__(self, to: RelayAddress, harm: Harm, at: int) -> None:
        self._to, self._harm, self._at = to, harm, at
        self.passed = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source_reader, source_writer = await asyncio.open_connection(self._to.host, self._to.port)
        asking = asyncio.create_task(_pump(reader, source_writer))
        try:
            while data := bytearray(await source_reader.read(1 << 16)):
                at = self._at - self.passed
                if 0 <= at < len(data):
                    if self._harm == "flip":
                        data[at] ^= 0x10
                    else:
                        writer.write(data[:at])
                        await writer.drain()
                        self.passed += at
                        if self._harm == "stall":
                            await asyncio.get_running_loop().create_future()
                        return
                self.passed += len(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            asking.cancel()
            writer.close()
            source_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


@contextlib.asynccontextmanager
async def wired(to: RelayAddress, harm: Harm, at: int) -> AsyncIterator[RelayAddress]:
    """Return the address of a wire to `to`."""
    tasks: list[asyncio.Task[None]] = []
    wire = Wire(to, harm, at)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        with contextlib.suppress(asyncio.CancelledError):
            await wire.serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield msgspec.structs.replace(to, port=server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
