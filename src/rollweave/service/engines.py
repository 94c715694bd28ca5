"""Engines that are registered with a service: from an address to a backend."""

from pathlib import Path

from rollweave.backends.base import EngineBackend
from rollweave.backends.http import HttpEngine, HttpSpec
from rollweave.codec.chat import ChatCodec
from rollweave.codec.template import read_json
from rollweave.schema.config import RunConfig
from rollweave.schema.errors import ConfigError, EngineError
from rollweave.schema.service import EngineRequest
from rollweave.service.launch import Connect

START_S = 300.0
"""Limit to a registered engine's first answer, for which it may have to compile; then the core tries again."""


def connector(config: RunConfig) -> Connect:
    """How a service of this configuration reaches engines of its model, of whatever architecture."""
    directory = Path(config.model.path or "")

    def connect(request: EngineRequest, name: str) -> EngineBackend:
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
        )
        encode_text = ChatCodec.from_directory(directory).spoken if request.text_only else None
        return HttpEngine(spec, start_s=START_S, encode_text=encode_text)

    return connect


def vocabulary(directory: Path) -> int:
    """Token ids that a model can sample, from its config.json. Raises ConfigError."""
    config = read_json(directory / "config.json")
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{directory / 'config.json'} must tell a vocab_size of at least 1, got {size!r:.100}")
    return size
