"""The identity of a run and of its initial model: the file `run.json`.

Invariants: the id in the file is the id in the journal's first event, so a journal of
another run is recognized; the digests of the model's files are compared whenever the
run is resumed.
"""

import uuid
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from rollweave.io.disk import file_digest, replace_file
from rollweave.io.reading import whole
from rollweave.io.tokenizer import tokenizer_files
from rollweave.schema.base import Struct
from rollweave.schema.errors import ConfigError

Kind = Literal["training", "service", "simulation"]

MODEL_FILES = ("*.json", "*.safetensors", "*.bin", "*.model", "*.jinja", "merges.txt", "vocab.txt")
"""Patterns of the files from which a model and its tokenizer are read."""


FILE_BYTES = 64 << 20
"""Maximum size of the file: a digest for each file of a large model is far less."""


class Identity(Struct, frozen=True, kw_only=True):
    """A run's id, its model and its configuration.

    `model` has the size in bytes and the xxh3-128 of each of the model's files; None
    until the model exists. `config` is `config.toml` as the run wrote it last; None in
    runs of earlier versions. `digest` is the xxh3-64 of all other fields, in hex; "" in
    runs of earlier versions.
    """

    id: str
    kind: Kind
    model: dict[str, tuple[int, str]] | None = None
    config: str | None = None
    digest: str = ""


def new_identity(kind: Kind) -> Identity:
    return Identity(id=uuid.uuid4().hex, kind=kind)


def read_identity(path: Path) -> Identity | None:
    """Return the file's content; None if it does not exist. Raises ConfigError."""
    try:
        identity = msgspec.json.decode(whole(path, FILE_BYTES), type=Identity)
        if identity.digest not in ("", _digest(identity)):
            raise ValueError("its content does not match its checksum")
        return identity
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{path} must be readable and as the run wrote it: {reason}; bring it back, or "
            "delete it to resume without checking the journal and the model's files"
        ) from error


def run_id(path: Path) -> str:
    """Return the id in the file at `path`; the name of the run's directory if the user
    has deleted the file. Raises ConfigError.
    """
    identity = read_identity(path)
    return path.parent.name if identity is None else identity.id


def write_identity(path: Path, identity: Identity) -> None:
    """Write the file atomically. Raises DiskError."""
    identity = msgspec.structs.replace(identity, digest=_digest(identity))
    replace_file(path, msgspec.json.format(msgspec.json.encode(identity), indent=1) + b"\n")


def _digest(identity: Identity) -> str:
    content = msgspec.json.encode(msgspec.structs.replace(identity, digest=""))
    return f"{xxhash.xxh3_64_intdigest(content):016x}"


def model_digests(directory: Path) -> dict[str, tuple[int, str]]:
    """Return size and digest of every file from which the model in `directory` is read.

    Raises OSError.
    """
    files = {file for pattern in MODEL_FILES for file in directory.glob(pattern) if file.is_file()}
    files |= {directory / name for name in tokenizer_files(directory)}
    return {
        str(file.relative_to(directory)): (file.stat().st_size, file_digest(file))
        for file in sorted(files)
    }


def changed_files(directory: Path, known: dict[str, tuple[int, str]]) -> list[str]:
    """Compare the model in `directory` with the digests taken at the start; return one
    phrase for each file that differs.
    """
    try:
        digests = model_digests(directory)
    except OSError as error:
        return [f"{directory} cannot be read: {error}"]
    names = sorted(known.keys() | digests.keys())
    pairs = [(name, known.get(name), digests.get(name)) for name in names]
    return [
        f"{directory / name} {_difference(before, now)}"
        for name, before, now in pairs
        if before != now
    ]


def _difference(before: tuple[int, str] | None, now: tuple[int, str] | None) -> str:
    if now is None:
        return "is missing"
    return "was not there" if before is None else "has changed"
