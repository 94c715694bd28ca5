"""The versions of the weights in each part of a streamed answer: vLLM names them in the
last part only, since a client may count on nothing before.

Invariant: they are those that vLLM itself would name if the answer ended there. A vLLM
without these functions streams without versions.
"""

from typing import Any


def register() -> None:
    """Have vLLM name the versions in each part, in the process that answers requests.
    Later calls have no effect.
    """
    try:
        from vllm.v1.engine.output_processor import RequestState
    except ImportError:
        return
    spans = getattr(RequestState, "_weight_version_spans", None)
    former = getattr(RequestState, "_new_completion_output", None)
    if spans is None or former is None or hasattr(former, "names_versions"):
        return

    def output_with_versions(state: Any, *args: Any, **options: Any) -> Any:
        output = former(state, *args, **options)
        if output.weight_versions is None:
            output.weight_versions = spans(state)
        return output

    output_with_versions.names_versions = True  # type: ignore[attr-defined]
    RequestState._new_completion_output = output_with_versions
