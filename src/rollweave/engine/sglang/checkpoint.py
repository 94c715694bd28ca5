"""A published version as a checkpoint that SGLang can load.

The weights are a safetensors file in the memory of this process, which is freed when
this process ends, in any way. SGLang finds it by a link in a folder that has the other
files of the model's checkpoint, too.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rollweave.engine.servers.published import verified
from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import NUMBER_BYTES, TensorMeta, WeightManifest
from rollweave.weights.checkpoint import ModelShape
from rollweave.weights.memory import READ_CHUNK, seal

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
