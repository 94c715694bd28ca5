"""The section `[sim]`: simulated hardware, and serving engines with their users."""

from collections.abc import Iterator

from pydantic import Field

from rollweave.schema.config.ablation import WITHOUT_USERS, Sharing
from rollweave.schema.config.values import Count, Positive, PositiveInt, Section
from rollweave.schema.errors import FieldError


class SimPoolConfig(Section):
    """The simulated hosts of a pool."""

    gpu: str | None = Field(
        None,
        description="GPU of these hosts, by name (sim/hardware.py); the one that the pool's "
        "`resource` names if unset.",
    )
    hosts: PositiveInt | None = Field(
        None,
        description="Number of these hosts, with eight GPUs each; as many as the pool's engines "
        "need if unset.",
    )


class SimServingConfig(Section):
    """Simulated serving engines beside a run, and their users' requests (ROSE §3.2)."""

    model: str | None = Field(
        None,
        description="Shape of the model that is served (sim/models.py); must be given unless "
        "ablation.sharing is serverless or spot, whose engines serve none.",
    )
    engines: PositiveInt = Field(description="Number of serving engines; all of them lend.")
    prefill: Count = Field(
        0,
        description="Number of these that compute prompts for the others, which sample; 0: each "
        "does both.",
    )
    rate: Positive | None = Field(
        None, le=100_000, description="Mean number of requests per second, drawn with bursts."
    )
    trace: str | None = Field(
        None,
        description="CSV file of requests instead, with the columns TIMESTAMP, ContextTokens and "
        "GeneratedTokens, as the public Azure traces have. With ablation.sharing spot: of the "
        "columns TIMESTAMP and Engines, the number of them from that second on; drawn if unset.",
    )
    ttft_s: Positive = Field(0.5, description="Promised seconds to the first token.")
    tpot_s: Positive = Field(0.15, description="Promised seconds of each further token.")
    lease_s: Positive = Field(
        10.0, description="Seconds for which rollouts keep the KV of a finished turn (ROSE App. C)."
    )

    def broken_rules(self, sharing: Sharing) -> Iterator[FieldError]:
        """Yield an error for each rule of the requests that does not hold."""
        where = "sim.serving"
        if sharing in WITHOUT_USERS:
            return
        if self.model is None:
            rule = f"be given unless ablation.sharing is {' or '.join(WITHOUT_USERS)}"
            yield FieldError(f"{where}.model", rule, "none")
        if (self.rate is None) == (self.trace is None):
            yield FieldError(
                where, "have a rate or a trace", f"rate {self.rate} and trace {self.trace}"
            )
        if self.prefill >= self.engines:
            rule = f"be less than the {self.engines} engines"
            yield FieldError(f"{where}.prefill", rule, self.prefill)


class SimConfig(Section):
    """The simulated engines, environments and trainer of `rollweave simulate`
    (sim/).
    """

    model: str = Field(description="Model shape, by name (sim/models.py).")
    gpu: str = Field(
        "h800",
        description="GPU of engines and trainer, by name (sim/hardware.py), or a .json file with "
        "measured step times of an engine; an h800 trains where this one does not. Pools have "
        "their own.",
    )
    pools: dict[str, SimPoolConfig] = Field(default_factory=dict)
    trainer_gpus: PositiveInt = Field(8, description="GPUs of the trainer.")
    serving: SimServingConfig | None = None
    link: str = Field(
        "rdma",
        description="Link over which weights reach the engines and the relays of other sites, by "
        "name (sim/hardware.py).",
    )
