"""Make the backends of engines that are registered with a service by address."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rollweave.engine.clients.base import EngineBackend
from rollweave.engine.clients.http import HttpEngine, HttpSpec
from rollweave.engine.clients.transport import OnRetry
from rollweave.io.reading import read_json
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.schema.address import Hosts
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, EngineError
from rollweave.schema.service import EngineRequest
from rollweave.weights.checkpoint import read_formats, weight_files

RESCORE_BYTES = 2 << 30
"""Maximum size of a checkpoint that is used to check an engine's log-probs: it is
briefly read into memory.
"""

RESCORE_S = 120.0
"""Maximum seconds for that check. After that the engine serves without it."""

START_S = 300.0
"""Maximum seconds until a registered engine's first answer, for which it may have to
compile. After that the core retries.
"""

BackendFactory = Callable[[EngineRequest, str, OnRetry, Callable[[str], None]], EngineBackend]
"""Makes the backend of a registered engine from its registration, its name, a callback
for failed attempts to reach it, and a callback for warnings.
"""


def backend_factory(config: RunConfig) -> BackendFactory:
    """Return the factory for engines that serve the model of `config`, of any
    architecture.
    """
    directory = Path(config.model.path or "")
    hosts = Hosts.parse(config.serve.engine_hosts, field="serve.engine_hosts")

    async def reference(prompt: Sequence[int], tokens: Sequence[int]) -> Sequence[float] | None:
        return await rescore(directory, prompt, tokens) if config.model.dtype == "float32" else None

    def make_backend(
        request: EngineRequest, name: str, failed: OnRetry, noted: Callable[[str], None]
    ) -> EngineBackend:
        try:
            vocab = vocab_size(directory)
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
        encode_text = None
        if request.text_only:
            arguments = config.model.template_arguments
            encode_text = ChatCodec.from_directory(directory, arguments).encode_turn
        return HttpEngine(
            spec,
            start_s=START_S,
            encode_text=encode_text,
            on_retry=failed,
            reference=reference,
            on_warning=noted,
            hosts=hosts,
        )

    return make_backend


async def rescore(
    directory: Path, prompt: Sequence[int], tokens: Sequence[int]
) -> list[float] | None:
    """Return a float32 checkpoint's log-probs of tokens that an engine sampled.

    Returns None for a checkpoint in another format, which engines need not compute in
    float32, for one larger than `RESCORE_BYTES`, and for an architecture that the
    trainer does not support.
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
    except OSError:  # for example, not enough memory for a process
        return None
    request = json.dumps({"path": str(directory), "prompt": list(prompt), "tokens": list(tokens)})
    try:
        async with asyncio.timeout(RESCORE_S):
            output, _ = await child.communicate(request.encode())
    except TimeoutError:
        return None
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    logprobs: list[float] | None = json.loads(output) if child.returncode == 0 else None
    return logprobs


def _is_comparable(directory: Path) -> bool:
    try:
        size = sum(file.stat().st_size for file in weight_files(directory))
        return 0 < size <= RESCORE_BYTES and read_formats(directory) == {"F32"}
    except (ConfigError, OSError):
        return False


def vocab_size(directory: Path) -> int:
    """Return the number of token ids that a model can sample, from its config.json.

    Raises ConfigError if the file does not define it.
    """
    config = read_json(directory / "config.json")
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(
            f"{directory / 'config.json'} must define a vocab_size of at least 1, got {size!r:.100}"
        )
    return size
