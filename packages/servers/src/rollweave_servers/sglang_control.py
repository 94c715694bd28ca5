"""The routes by which an SGLang server is paused and its weights are changed, and a
published version as a checkpoint that SGLang can load.

The weights are a safetensors file in the memory of this process, which is freed when
this process ends, in any way. SGLang finds it by a link in a folder that has the other
files of the model's checkpoint, too.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import NUMBER_BYTES, TensorMeta, WeightManifest
from rollweave.weights.checkpoint import ModelShape
from rollweave.weights.memory import READ_CHUNK, seal
from rollweave_servers.control import Calls, ControlError
from rollweave_servers.published import HeldWeights, verified

FORMATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""The names of number formats in safetensors."""

ALIGNMENT = 8
"""Multiple of the header's length, as the safetensors library writes it."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".safetensors.index.json", ".bin.index.json")
"""Endings of the files of a checkpoint that have weights or name such files."""


class CheckpointMemory:
    """A checkpoint in `folder`, whose weights are in memory file `fd`."""

    def __init__(self, manifest: WeightManifest, folder: Path, fd: int) -> None:
        self._manifest, self.folder, self._fd = manifest, folder, fd

    @property
    def manifest(self) -> WeightManifest:
        return self._manifest

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._fd)


def checkpoint_of(
    manifest: WeightManifest, shape: ModelShape, *, model: Path, parent: Path
) -> CheckpointMemory:
    """Verify a version, and make a checkpoint of it in a new folder of `parent`, with
    the other files of `model`. Raises WeightsError.
    """
    source, payload = verified(manifest, shape)
    os.close(source)
    try:
        fd = os.memfd_create(f"rollweave-sglang-{manifest.version}", os.MFD_ALLOW_SEALING)
        try:
            with memoryview(payload) as view:
                _write(fd, manifest.tensors, view)
            seal(fd)
            folder = Path(tempfile.mkdtemp(prefix=f"v{manifest.version}-", dir=parent))
            for file in model.iterdir():
                if not file.name.endswith(WEIGHTS):
                    (folder / file.name).symlink_to(file.absolute())
            (folder / "model.safetensors").symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise WeightsError(
            f"weights version {manifest.version}: no checkpoint for SGLang ({error})"
        ) from error
    return CheckpointMemory(manifest, folder, fd)


def _write(fd: int, tensors: Iterable[TensorMeta], payload: memoryview) -> None:
    """Write a safetensors file, whose tensors follow each other without gaps, those
    with wide numbers first, which keeps all aligned.
    """
    ordered = sorted(tensors, key=lambda meta: (-NUMBER_BYTES[meta.dtype], meta.offset))
    header, end = dict[str, object](), 0
    for meta in ordered:
        start, end = end, end + meta.nbytes
        header[meta.name] = {
            "dtype": FORMATS[meta.dtype],
            "shape": meta.shape,
            "data_offsets": (start, end),
        }
    head = msgspec.json.encode(header)
    head += b" " * (-len(head) % ALIGNMENT)
    with open(os.dup(fd), "wb", buffering=READ_CHUNK) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for meta in ordered:
            file.write(payload[meta.offset : meta.offset + meta.nbytes])


ROUTES = {
    "/pause_generation": "POST",
    "/continue_generation": "POST",
    "/update_weights_from_disk": "POST",
    "/weights_checker": "POST",
    "/model_info": "GET",
    "/server_info": "GET",
    "/ready": "GET",
}
"""The control routes that a server must have, and their methods."""

GENERATE = "/generate"
ABORT = "/abort_request"
LOADS = "/v1/loads"

LOADS_S = 2.0
"""Maximum seconds to read the loads, without which a sample is taken as well."""


class Load(msgspec.Struct, frozen=True):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float = 0.0


class Loads(msgspec.Struct, frozen=True):
    loads: tuple[Load, ...]


class Size(msgspec.Struct, frozen=True):
    tp_size: int


class Rank(msgspec.Struct, frozen=True):
    per_gpu_checksum: str


class Ranks(msgspec.Struct, frozen=True):
    ranks: tuple[Rank, ...]


class SglangControl(Calls):
    """The control routes of the server at `url`, which must have a cache of
    `kv_tokens`. A call takes at most `limit_s`.
    """

    def __init__(self, url: str, *, token: str, limit_s: float, kv_tokens: int) -> None:
        super().__init__("SGLang", url, ROUTES, token=token, limit_s=limit_s)
        self._degree, self._kv_tokens = 1, kv_tokens
        self._checksums: tuple[str, ...] = ()

    async def connect(self) -> None:
        """Check that the cache is as large as it must be, and count the ranks."""
        about = await self.call("/server_info")
        room = about.get("max_total_num_tokens")
        if not isinstance(room, int) or room < self._kv_tokens:
            raise ControlError(
                f"SGLang has room for {room} tokens of KV, engines.kv_tokens is {self._kv_tokens}"
            )
        try:
            self._degree = msgspec.convert(about, Size).tp_size
        except msgspec.ValidationError as error:
            raise ControlError(f"SGLang's answer to /server_info: {error}") from error
        self._checksums = await self._ranks()

    async def reset(self, label: str) -> None:
        """End the requests of a server whose state is unknown, and let it wait for its
        weights, which may be any.

        Requests that a pause has kept out of the scheduler come to it first, where this
        pause ends them; it answers when none is left.
        """
        await self.call("/continue_generation", {})
        await self.call("/pause_generation", {"mode": "abort"})
        await self._expect_ready("/pause_generation", False)

    async def pause(self) -> None:
        """Take back all requests, whose tokens stay, before the next step; their KV is
        computed again after `resume`.
        """
        await self.call("/pause_generation", {"mode": "retract"})
        await self._expect_ready("/pause_generation", False)
        # the call above does not wait for the scheduler, which answers this one next
        await self.call("/server_info")

    async def resume(self) -> None:
        await self.call("/continue_generation", {})
        await self._expect_ready("/continue_generation", True)

    async def check(self, weights: HeldWeights) -> None:
        """Do nothing: SGLang has no route that checks weights without loading them."""

    async def give_up(self, label: str) -> None:
        """Do nothing: no update has begun."""

    async def swap(self, weights: HeldWeights, label: str) -> None:
        """Have all ranks load the weights, and drop all prefixes.

        SGLang promises to restore its former weights if this fails, but reads them from
        the new files. Any failure is thus an unknown state.
        """
        assert isinstance(weights, CheckpointMemory), "weights for another kind of server"
        update = {
            "model_path": str(weights.folder),
            "weight_version": label,
            "flush_cache": True,
        }
        answer = await self.call("/update_weights_from_disk", update)
        if answer.get("success") is not True:
            raise ControlError(f"SGLang's update failed: {answer.get('message')!s:.400}")
        if (loaded := (await self.call("/model_info")).get("weight_version")) != label:
            raise ControlError(f"SGLang's weights must be version {label!r}, got {loaded!r}")
        former, self._checksums = self._checksums, await self._ranks()
        pairs = zip(former, self._checksums, strict=True)
        if len({before == after for before, after in pairs}) > 1:
            raise ControlError("SGLang's ranks have weights of several versions")

    async def gauges(self) -> dict[str, float]:
        """Return the loads that the server reports; none if it does not answer now."""
        try:
            answer = msgspec.json.decode(await self.sample(LOADS, LOADS_S), type=Loads)
        except msgspec.DecodeError:
            return {}
        return {
            "running": sum(load.num_running_reqs for load in answer.loads),
            "waiting": sum(load.num_waiting_reqs for load in answer.loads),
            "kv_share": max((load.token_usage for load in answer.loads), default=0.0),
        }

    async def _expect_ready(self, after: str, expected: bool) -> None:
        status, _ = await self.status("/ready")
        if (status == 200) is not expected:
            state = "ready" if status == 200 else "not ready"
            raise ControlError(f"SGLang is {state} after {after}")

    async def _ranks(self) -> tuple[str, ...]:
        """Return the checksum of each rank's weights; none if there is one rank, which
        itself reports whether it has loaded them.
        """
        if self._degree == 1:
            return ()
        answer: dict[str, Any] = await self.call("/weights_checker", {"action": "checksum"})
        try:
            ranks = msgspec.convert(answer, Ranks).ranks
        except msgspec.ValidationError as error:
            raise ControlError(f"SGLang's answer to /weights_checker: {error}") from error
        if len(ranks) != self._degree:
            raise ControlError(f"SGLang must have {self._degree} ranks, got {len(ranks)}")
        return tuple(rank.per_gpu_checksum for rank in ranks)
