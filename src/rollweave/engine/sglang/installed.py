"""The parts that an SGLang must have in order to be an engine."""

from rollweave.engine.servers.installed import installed_version
from rollweave.engine.sglang.control import ABORT, GENERATE, LOADS, ROUTES

NEEDED = {
    "srt/entrypoints": (*ROUTES, GENERATE, ABORT, LOADS),
    "srt/managers": (
        '"retract"',
        "weight_versions",
        "extra_key",
        "disable_priority_preemption",
        "incremental_streaming_output",
    ),
}
"""Routes and words that an SGLang must have, by the folder whose modules mention
them.
"""


def sglang_version(python: str) -> str:
    """Return the version of the SGLang that the interpreter has.

    Raises ConfigError, whose text is the broken rule, if it has none, or one of a
    version that lacks what this engine needs.
    """
    return installed_version(
        "SGLang", python, package="sglang", distributions=("sglang",), needed=NEEDED
    )
