"""The end of one engine: receives a version by a broadcast, or requests it."""

import asyncio
import logging
import secrets
import threading

import torch

from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import RelayAddress, WeightManifest
from rollweave.train.distributed import join_store
from rollweave.weights.memory import PayloadDigest
from rollweave.weights.publication import bytes_of, check_layout, tensors_in
from rollweave.weights.serve import pull
from rollweave.weights.tcp import Channel, Tcp
from rollweave.weights.transport import FetchError
from rollweave_collective.group import ERRORS, WAIT_S, Group
from rollweave_collective.messages import Alone, Gathered, Join, decode, next_answer

_log = logging.getLogger(__name__)


class Member:
    """The end of one engine, whose weights are on `device`. Thread-safe; one version is
    received at a time.
    """

    def __init__(self, device: torch.device, *, wait_s: float = WAIT_S) -> None:
        self._device = device if device.type == "cuda" else None
        self._wait_s, self._tcp = wait_s, Tcp(idle_timeout_s=wait_s, decode=decode)
        self._id = secrets.token_bytes(16)
        self._group: Group | None = None
        self._lock = threading.Lock()
        self.broadcasts = 0
        """Number of versions that came by a broadcast."""

    def read(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        """Return the tensors of a version, verified: on the device after a broadcast
        over NCCL, else on the CPU. Raises WeightsError.
        """
        check_layout(manifest)
        with self._lock:
            return tensors_in(manifest, asyncio.run(self._receive(manifest)))

    async def _receive(self, manifest: WeightManifest) -> torch.Tensor:
        assert manifest.sender is not None, "the version is not sent"
        channel = await self._tcp.connect(manifest.sender)
        try:
            answer, host = await self._join(channel, manifest), channel.host
        finally:
            channel.close()
        if isinstance(answer, Gathered):
            try:
                payload = await asyncio.to_thread(self._broadcast, answer, manifest, host)
                self.broadcasts += 1
                return payload
            except (*ERRORS, WeightsError) as error:
                self._leave()
                _log.warning("weights version %s by TCP: %s", manifest.version, error)
        return await self._pull(manifest, manifest.sender)

    async def _join(self, channel: Channel, manifest: WeightManifest) -> Gathered | Alone:
        await channel.send(
            Join(
                publication_id=manifest.publication_id,
                digest=manifest.digest,
                member=self._id,
                group=self._group.number if self._group is not None else 0,
                on_gpu=self._device is not None,
            )
        )
        return await next_answer(channel, Gathered, Alone)

    def _broadcast(self, answer: Gathered, manifest: WeightManifest, host: str) -> torch.Tensor:
        device = self._device if answer.on_gpu else None
        group = self._group
        if group is None or group.number != answer.group:
            self._leave()
            group = self._group = Group(
                join_store(answer.store, timeout_s=self._wait_s),
                answer.rank,
                answer.size,
                number=answer.group,
                host=host,
                device=device,
                wait_s=self._wait_s,
            )
        payload = torch.empty(manifest.nbytes, dtype=torch.uint8, device=device)
        content = PayloadDigest()
        group.broadcast(payload, lambda bucket: content.update(bytes_of(bucket.cpu())))
        if content.hexdigest() != manifest.digest:
            raise WeightsError(
                f"the digest of the broadcast must be {manifest.digest}, got {content.hexdigest()}"
            )
        return payload

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    async def _pull(self, manifest: WeightManifest, sender: RelayAddress) -> torch.Tensor:
        """Request the version over a channel. Raises FetchError."""
        payload = torch.empty(manifest.nbytes, dtype=torch.uint8)
        view = bytes_of(payload)
        await pull(
            self._tcp,
            sender,
            manifest,
            [(0, manifest.nbytes)],
            lambda start, stop: view[start:stop],
            on_piece=lambda start, stop: None,
        )
        content = PayloadDigest()
        content.update(view)
        if content.hexdigest() != manifest.digest:
            raise FetchError(
                "broken", f"the digest must be {manifest.digest}, got {content.hexdigest()}"
            )
        return payload
