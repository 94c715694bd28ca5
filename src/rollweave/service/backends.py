"""Make the backends of engines that are registered with a service by address."""

from collections.abc import Callable
from pathlib import Path

from rollweave.engine.clients.base import Generates
from rollweave.engine.clients.http import HttpEngine, HttpSpec
from rollweave.engine.clients.transport import OnRetry
from rollweave.io.reading import read_json
from rollweave.schema.address import Hosts
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, EngineError
from rollweave.schema.service import EngineRequest

START_S = 300.0
"""Maximum seconds until a registered engine's first answer, for which it may have to
compile. After that the core retries.
"""

BackendFactory = Callable[[EngineRequest, str, OnRetry], Generates]
"""Makes the backend of a registered engine from its registration, its name and a
callback for failed attempts to reach it.
"""


def backend_factory(config: RunConfig) -> BackendFactory:
    """Return the factory for engines that serve the model of `config`, of any
    architecture.
    """
    directory = Path(config.model.path or "")
    hosts = Hosts.parse(config.serve.engine_hosts, field="serve.engine_hosts")

    def make_backend(request: EngineRequest, name: str, failed: OnRetry) -> Generates:
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
            token=request.token,
        )
        return HttpEngine(spec, start_s=START_S, on_retry=failed, hosts=hosts)

    return make_backend


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
