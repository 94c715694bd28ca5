"""Engines that are registered with a service: from an address to a backend."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rollweave.engine.clients.base import EngineBackend
from rollweave.engine.clients.http import HttpEngine, HttpSpec
from rollweave.engine.clients.transport import Failed
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.template import read_json
from rollweave.schema.address import Hosts
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, EngineError
from rollweave.schema.service import EngineRequest
from rollweave.service.launch import Connect
from rollweave.weights.checkpoint import read_formats

RESCORED_BYTES = 2 << 30
"""Maximum size of a checkpoint with whose log-probs an engine's are compared: it is
briefly read into memory.
"""

RESCORE_S = 120.0
"""Maximum seconds for that comparison; after that the engine serves without it."""

START_S = 300.0
"""Limit to a registered engine's first answer, for which it may have to compile; then
the core tries again.
"""


def connector(config: RunConfig) -> Connect:
    """How a service of this configuration reaches engines of its model, of whatever
    architecture.
    """
    directory = Path(config.model.path or "")
    hosts = Hosts.parse(config.serve.engine_hosts, field="serve.engine_hosts")

    async def reference(prompt: Sequence[int], tokens: Sequence[int]) -> Sequence[float] | None:
        return (
            await rescored(directory, prompt, tokens) if config.model.dtype == "float32" else None
        )

    def connect(
        request: EngineRequest, name: str, failed: Failed, noted: Callable[[str], None]
    ) -> EngineBackend:
        try:
            vocab = vocabulary(directory)
        except ConfigError as error:
            raise EngineError(f"{name} cannot be used: {error}") from error
        spec = HttpSpec(
            name=name,
            url=request.address,
            vocab=vocab,
            dialect=request.dialect,
            slots=request.slots,
            kv_tokens=request.kv_tokens,
            text_only=request.text_only,
            token=request.token,
        )
        encode_text = ChatCodec.from_directory(directory).encode_turn if request.text_only else None
        return HttpEngine(
            spec,
            start_s=START_S,
            encode_text=encode_text,
            failed=failed,
            reference=reference,
            noted=noted,
            hosts=hosts,
        )

    return connect


async def rescored(
    directory: Path, prompt: Sequence[int], tokens: Sequence[int]
) -> list[float] | None:
    """Return a float32 checkpoint's log-probs of tokens that an engine sampled.

    None for a checkpoint in another format, which engines need not compute in float32,
    for one of more than `RESCORED_BYTES`, and for an architecture that the trainer does
    not support.
    """
    if not await asyncio.to_thread(_is_comparable, directory):
        return None
    try:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rollweave.train.rescoring",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:  # no memory for a process
        return None
    asked = json.dumps({"path": str(directory), "prompt": list(prompt), "tokens": list(tokens)})
    try:
        async with asyncio.timeout(RESCORE_S):
            said, _ = await child.communicate(asked.encode())
    except TimeoutError:
        return None
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    found: list[float] | None = json.loads(said) if child.returncode == 0 else None
    return found


def _is_comparable(directory: Path) -> bool:
    try:
        size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        return 0 < size <= RESCORED_BYTES and read_formats(directory) == {"F32"}
    except (ConfigError, OSError):
        return False


def vocabulary(directory: Path) -> int:
    """Token ids that a model can sample, from its config.json. Raises ConfigError."""
    config = read_json(directory / "config.json")
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(
            f"{directory / 'config.json'} must tell a vocab_size of at least 1, got {size!r:.100}"
        )
    return size
