"""Receives new weights while the engine generates, so that it stops for the swap only
(RollArt §6.2).

A side thread maps and verifies the published bytes, and copies them into a second copy
of the parameters. Between two steps the loop exchanges the two copies, and the memory
of the former one is freed. Invariants: parameters do not change while they are in use;
each `Stage` is answered once, by `Staged` or `StageFailed`; there are never more than
two copies; all public methods belong to the loop's thread.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator

import torch

from rollweave.engine.model import Decoder, DecoderWeights
from rollweave.io.machine import yield_to_others
from rollweave.schema.errors import WeightsError
from rollweave.schema.serving import EngineReply, Staged, StageFailed
from rollweave.schema.weights import WeightManifest
from rollweave.weights.memory import available_bytes
from rollweave.weights.publication import read_tensors
from rollweave.weights.transport import VersionReceiver, group_end

SPARE_BYTES = 64 << 20
"""Minimum bytes of the host's memory that remain free beside a second copy."""

SPARE_SHARE = 0.1
"""Minimum share of a GPU's memory that remains free beside a second copy: the trainer
may be on the same GPU, and needs more during a step.
"""

CLOSE_S = 5.0
"""Maximum seconds to wait for the thread when the engine ends."""


class Incoming:
    """Reads versions for an engine on `device`: from the memory of its host, or as a
    member of the trainer's group, whose code is imported then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @functools.cached_property
    def _member(self) -> VersionReceiver:
        member: VersionReceiver = group_end("member")(self._device)
        return member

    def read(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        """Return the tensors of a version, verified. Raises WeightsError."""
        return read_tensors(manifest) if manifest.sender is None else self._member.read(manifest)


class WeightStaging:
    """The second copy of an engine's parameters.

    `call_between_steps` queues a function for the loop's thread, and `read` reads a
    version.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        read: Callable[[WeightManifest], dict[str, torch.Tensor]],
        call_between_steps: Callable[[Callable[[], None]], None],
        reply: Callable[[EngineReply], None],
    ) -> None:
        self._model, self._read = model, read
        self._call_between_steps, self._reply = call_between_steps, reply
        self._receiving: WeightManifest | None = None
        self._staged: tuple[WeightManifest, DecoderWeights] | None = None
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()
        self._on_end: Callable[[], None] | None = None

    def has_room(self) -> bool:
        """Return whether a second copy fits into the free memory now."""
        return missing_bytes(self._model) <= 0

    def start(self, manifest: WeightManifest) -> None:
        """Receive this version in the background, and drop any other staged version."""
        self._cancelled.set()
        self._staged, self._receiving = None, manifest
        self._cancelled = cancelled = threading.Event()
        former = self._thread
        self._thread = threading.Thread(
            target=self._receive, args=(manifest, cancelled, former), name="staging", daemon=True
        )
        self._thread.start()

    def is_receiving(self, manifest: WeightManifest) -> bool:
        return self._receiving == manifest

    def when_received(self, function: Callable[[], None]) -> None:
        """Call the function once the version that is being received is staged, or has
        failed.
        """
        self._on_end = function

    def take(self, manifest: WeightManifest) -> DecoderWeights | None:
        """Return this version if it is staged. The caller owns it from now on."""
        if self._staged is None or self._staged[0] != manifest:
            return None
        weights, self._staged = self._staged[1], None
        return weights

    def loaded(self, publication_id: int) -> None:
        """Release a staged version that is not newer than these weights, which are now
        in use.
        """
        if self._staged is not None and self._staged[0].publication_id <= publication_id:
            self._staged = None

    def cancel(self) -> None:
        """Drop the second copy, staged or not."""
        self._cancelled.set()
        self._staged = self._receiving = None

    def close(self) -> None:
        """Stop the thread."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    # On the side thread.

    def _receive(
        self,
        manifest: WeightManifest,
        cancelled: threading.Event,
        former: threading.Thread | None,
    ) -> None:
        if former is not None:
            former.join()  # it may still hold a copy
        weights, error = None, ""
        try:
            weights = self._copy(manifest, cancelled)
        except (WeightsError, OSError, ValueError, RuntimeError, MemoryError) as raised:
            error = str(raised) or type(raised).__name__  # torch's errors are RuntimeErrors
        self._call_between_steps(lambda: self._ended(manifest, weights, error))

    def _copy(self, manifest: WeightManifest, cancelled: threading.Event) -> DecoderWeights:
        """Return a second copy of the parameters, with these weights.

        Raises WeightsError, OSError, ValueError, RuntimeError, MemoryError.
        """
        model = self._model
        with torch.inference_mode(), _side_stream(model.device):
            tensors = self._read(manifest)
            model.check(tensors)
            missing = missing_bytes(model)
            if missing > 0:
                raise WeightsError(f"a second copy of the weights lacks {missing} bytes of memory")
            weights = model.allocate()
            weights.load(_until(cancelled, model.incoming(tensors)))
        return weights

    # On the loop's thread.

    def _ended(self, manifest: WeightManifest, weights: DecoderWeights | None, error: str) -> None:
        current = self._receiving is manifest
        if weights is not None and not current:
            error = "another version took its place"
        if current:
            self._receiving = None
            self._staged = (manifest, weights) if weights is not None else None
        key = {"version": manifest.version, "publication_id": manifest.publication_id}
        self._reply(StageFailed(**key, error=error) if error else Staged(**key))
        if current and self._on_end is not None:
            function, self._on_end = self._on_end, None
            function()


def missing_bytes(model: Decoder) -> int:
    """Return how many bytes a second copy of the model's weights lacks; 0 or less if it
    fits into the free memory.
    """
    if model.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)
        return model.weight_bytes + int(SPARE_SHARE * total) - free
    return model.weight_bytes + SPARE_BYTES - available_bytes()


def read_beside(
    model: Decoder,
    read: Callable[[], dict[str, torch.Tensor]],
    *,
    update: Callable[[DecoderWeights], None],
    between_steps: Callable[[Callable[[], None]], None],
    loaded: Callable[[], None],
    failed: Callable[[str], None],
) -> None:
    """Read and verify weights on another thread, which yields to the steps, and put
    them in use between two of them: by `update` with a second copy if there is room for
    one, else by a copy of each parameter. Then `loaded` is called, or `failed` with the
    error, also between two steps.
    """

    def swap(put: Callable[[], None]) -> None:
        put()
        loaded()

    def work() -> None:
        yield_to_others()
        try:
            with torch.inference_mode(), _side_stream(model.device):
                tensors = read()
                model.check(tensors)
                if missing_bytes(model) > 0:
                    incoming = model.incoming(tensors)
                    between_steps(lambda: swap(lambda: model.weights.load(incoming)))
                    return
                weights = model.allocate()
                weights.load(model.incoming(tensors))
        except (WeightsError, OSError, ValueError, RuntimeError, MemoryError) as raised:
            error = str(raised) or type(raised).__name__
            between_steps(lambda: failed(error))
            return
        between_steps(lambda: swap(lambda: update(weights)))

    threading.Thread(target=work, name="loading", daemon=True).start()


def _until(
    cancelled: threading.Event, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for item in tensors:
        if cancelled.is_set():
            raise WeightsError("another version took its place")
        yield item


@contextlib.contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """Queue work on a stream beside the model's, and wait for it at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
