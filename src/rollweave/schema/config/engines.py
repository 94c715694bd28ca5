"""The sections `[[engines]]`, `[allocation]` and `[loans]`: where tokens are
sampled.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rollweave.schema.address import parse_address
from rollweave.schema.config.values import Flag, PositiveInt, Section, Variable, listed
from rollweave.schema.serving import SERVER_PYTHON, ServerName

BLOCK_TOKENS = 16
"""Tokens in one KV block."""


EnginePhase = Literal["both", "prefill", "decode"]
"""Parts of turns that an engine computes."""


class EngineConfig(Section):
    """A group of equal engines.

    `[engines]` is one group, several `[[engines]]` are several.
    """

    kind: Literal["embedded", "vllm", "sglang"] = Field(
        "embedded",
        description="embedded is Rollweave's own engine; vllm and sglang are servers that the run "
        "starts, or, with address, servers that already run.",
    )
    count: PositiveInt = Field(1, description="Engine processes.")
    pool: str | None = Field(
        None, description="Pool of hosts on which these engines run; any host if unset."
    )
    phase: EnginePhase = Field(
        "both",
        description="decode: the engine samples, and prefill engines compute prompts for it, from "
        "which the KV moves, where that saves time; prefill: it samples nothing; both: it "
        "computes its own prompts.",
    )
    degree: PositiveInt = Field(
        1,
        description="Parallel degree of one engine: CPU threads, a server's tensor parallelism, "
        "or GPUs in a simulation.",
    )
    python: str = Field(
        SERVER_PYTHON, description="Interpreter that has vLLM or SGLang, on the engine's host."
    )
    args: tuple[str, ...] = Field(
        (), description="More arguments of the server, which take precedence."
    )
    address: Annotated[tuple[str, ...], BeforeValidator(listed)] = Field(
        (),
        description="Address of a server that already runs, http://HOST:PORT, as the host of "
        "the engine reaches it, or a list of them, one for each engine.",
    )
    token_env: Variable | None = Field(
        None, description="Environment variable that holds the token of the servers at address."
    )
    max_slots: PositiveInt = Field(
        64, description="Maximum number of sequences that one engine decodes at once."
    )
    kv_tokens: Annotated[PositiveInt, Field(multiple_of=BLOCK_TOKENS)] = Field(
        65536,
        description="Size of one engine's KV cache in tokens; a simulation lowers it to what its "
        "GPUs have room for.",
    )
    prefill_chunk_tokens: PositiveInt = Field(
        512, description="Maximum number of prompt tokens that one engine step computes."
    )
    deterministic: Flag = Field(
        False,
        description="Use fixed tiles, so that results do not depend on the rest of the batch, bit "
        "for bit; slower.",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_for_each_address(cls, data: Any) -> Any:
        if isinstance(data, dict) and "count" not in data:
            addresses = listed(data.get("address"))
            if isinstance(addresses, list | tuple) and addresses:
                return {**data, "count": len(addresses)}
        return data

    @field_validator("address")
    @classmethod
    def _are_addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(parse_address(address) for address in addresses)

    @property
    def server(self) -> ServerName | None:
        """The kind of the engines' inference servers; None if they have none."""
        return None if self.kind == "embedded" else self.kind

    @property
    def moves_kv(self) -> bool:
        """True if these engines can export KV to others of their kind and import it."""
        return self.kind == "embedded" or (self.kind == "vllm" and not self.address)


class LoansConfig(Section):
    """Serving engines that the run borrows while they lend their slack (ROSE §4), so
    far in simulations (`rollweave simulate --serving`).
    """

    engines: PositiveInt = Field(
        description="Maximum number of serving engines that the run borrows at once, those with "
        "the lowest use of KV. A borrowed engine computes prompts and samples, and has the other "
        "settings of the first of [[engines]].",
    )


class AllocationConfig(Section):
    """Engines of several degrees, as many of each as `core/mechanisms/placement`
    finds best for the lengths seen (Heddle §6).
    """

    budget: PositiveInt = Field(description="Sum of all engines' degrees.")
    degrees: Annotated[tuple[PositiveInt, ...], Field(min_length=2)] = Field(
        (1, 2, 4, 8), description="Degrees to choose from; unless set, those within the budget."
    )

    @model_validator(mode="before")
    @classmethod
    def _within_budget(cls, data: Any) -> Any:
        if isinstance(data, dict) and "degrees" not in data and isinstance(data.get("budget"), int):
            return {
                **data,
                "degrees": tuple(
                    degree for degree in (1, 2, 4, 8) if degree <= max(2, data["budget"])
                ),
            }
        return data
