"""The sections `[[engines]]`, `[allocation]` and `[loans]`: where tokens are sampled;
and `[cluster]`, `[pools]`, `[workers]` and `[roles]`: the hosts of a run, and the
processes with the user's code.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)
from typing_extensions import TypedDict

from rollweave.schema.address import parse_address
from rollweave.schema.config.values import (
    FORMS,
    MAX_PROCESSES,
    Count,
    Flag,
    PositiveInt,
    Processes,
    Section,
    Variable,
    either,
    form,
    listed,
    matching,
)
from rollweave.schema.errors import FieldError
from rollweave.schema.roles import ROLE_NAME
from rollweave.schema.serving import SERVER_PYTHON, ServerName

BLOCK_TOKENS = 16
"""Tokens in one KV block."""


PROFILED_SLOTS = 256
"""Highest limit of sequences that an engine sets itself from its profile."""


EnginePhase = Literal["both", "prefill", "decode"]
"""Parts of turns that an engine computes."""


class EngineConfig(Section):
    """A group of equal engines.

    `[engines]` is one group, several `[[engines]]` are several.
    """

    kind: Literal["embedded", "vllm", "sglang"] = Field(
        "embedded",
        description="embedded is Rollweave's own engine; vllm and sglang are servers that the run "
        "starts, or, with address, servers that already run; they need rollweave-servers.",
    )
    count: Processes = Field(1, description="Engine processes.")
    pool: str | None = Field(
        None, description="Pool of hosts on which they run; unset: bandwidth (docs/CLUSTER.md)."
    )
    phase: Literal["both", "prefill", "decode", "either"] = Field(
        "both",
        description="decode: the engine samples, and prefill engines compute prompts for it, from "
        "which the KV moves, where that saves time; prefill: it samples nothing; both: it "
        "computes its own prompts; either: the run makes one of them a prefill engine and the "
        "others decode engines, and moves one between the two after a step where it has measured "
        "that this pays.",
    )
    degree: PositiveInt = Field(
        1,
        description="Parallel degree of one engine: CPU threads, a server's tensor parallelism, "
        "or GPUs in a simulation. With [allocation], the least degree.",
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
        "the engine reaches it, or a list of them, one for each engine. The servers have the token "
        "that the environment holds as ROLLWEAVE_ENGINE_TOKEN.",
    )
    max_slots: Annotated[
        PositiveInt | Literal["profiled"], either("be a whole number of at least 1, or profiled")
    ] = Field(
        64,
        description="Maximum number of sequences that one engine decodes at once. profiled: each "
        "engine measures its steps when it starts, over contexts of half the longest "
        f"tasks.max_tokens, and sets the fewest sequences, at most {PROFILED_SLOTS} and as many as "
        "its KV cache holds, that decode nearly as many tokens in a second as any other number "
        "(ROSE App. A).",
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
    def most_slots(self) -> int:
        """The limit of sequences, or the highest that a profile can give."""
        return PROFILED_SLOTS if self.max_slots == "profiled" else self.max_slots

    @property
    def first_phase(self) -> EnginePhase:
        """The phase of an engine that starts."""
        return "decode" if self.phase == "either" else self.phase

    @property
    def moves_kv(self) -> bool:
        """True if these engines can export KV to others of their kind and import it."""
        return self.kind == "embedded" or (self.kind == "vllm" and not self.address)


class LoansConfig(Section):
    """Serving engines that the run borrows while they lend their slack (ROSE §4):
    `rollweave engine --lend`, or `rollweave simulate --serving`.
    """

    engines: PositiveInt = Field(
        description="Maximum number of serving engines that the run borrows at once, those with "
        "the lowest use of KV over the last hour. A borrowed engine computes prompts and samples, "
        "and has the other settings of the first of [[engines]].",
    )


GPUS_OF_A_HOST = 8
"""Largest degree from which [allocation] chooses, unless it needs a larger one: the
GPUs that a host usually has.
"""


class AllocationConfig(Section):
    """Engines of several degrees, as many of each as `core/mechanisms/placement`
    finds best for the lengths seen (Heddle §6).
    """

    budget: PositiveInt = Field(
        description="Sum of all engines' degrees. Each is engines.degree or its double, and so on "
        "up to 8, within the budget."
    )


ENDPOINT = r"(\[[0-9a-fA-F:.]+\]|[^\[\]:@/?#\s]+):[0-9]{1,5}"
"""Pattern of an address and a port."""

Endpoint = Annotated[str, matching(ENDPOINT, "be an address and a port, HOST:PORT")]
Launcher = Annotated[
    str, matching(f"manual|local|ray(:{ENDPOINT})?", "be manual, local, ray, or ray:HOST:PORT")
]


class ClusterConfig(Section):
    """The hosts of a run. Without this section, it uses this machine alone.

    Every host runs an agent, which joins the controller; the controller's own machine
    takes part only if an agent is there, too.
    """

    launcher: Launcher = Field(
        "manual",
        description="How agents are started: manual, by the user (`rollweave host`); ray, by Ray, "
        "on the nodes of the cluster of the node that runs here, or, with ray:HOST:PORT, of the "
        "cluster with this address, of which this machine is a node (it needs rollweave-ray); "
        "local, by the controller on this machine, to try a configuration.",
    )
    address: Endpoint | None = Field(
        None,
        description="Address of this machine, and port, on which the controller listens for "
        "hosts; port 0 is any free one. Unset: the loopback address with launcher local, the "
        "address of this node with launcher ray.",
    )
    hosts: PositiveInt | None = Field(
        None,
        description="Number of hosts that must have joined before the run begins; others may join "
        "later. With [loans], hosts that lend engines do not count. With launcher ray, also the "
        "maximum number of nodes that the run takes; unset: all nodes, and the run begins with the "
        "nodes that Ray has at its start.",
    )
    env: tuple[Variable, ...] = Field(
        (),
        description="Environment variables of the controller that processes on all hosts get, too; "
        "for example HF_TOKEN.",
    )
    files: tuple[str, ...] = Field(
        (),
        description="Files and folders below the working directory that every host gets, beside "
        "the modules and files that the tasks name.",
    )

    @property
    def on_ray(self) -> bool:
        """True if Ray starts the agents."""
        return self.launcher.startswith("ray")

    @property
    def host(self) -> str:
        """The address without the port; "" if it is unset."""
        return (self.address or "").rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port; 0 if it is unset."""
        return 0 if self.address is None else int(self.address.rpartition(":")[2])

    @model_validator(mode="after")
    def _launcher_has_what_it_needs(self) -> Self:
        if self.hosts is None and not self.on_ray:
            raise FieldError("hosts", f"be given with launcher {self.launcher}", "none")
        if self.address is None and self.launcher == "manual":
            raise FieldError("address", "be given with launcher manual", "none")
        if self.port >= 1 << 16:
            raise FieldError("address", f"have a port below {1 << 16}", self.address)
        return self


class PoolConfig(Section):
    """A class of hosts with the same resource (RollArt §5.2)."""

    resource: str = Field(
        min_length=1,
        description="Resource of all hosts of this pool: one that the agent names "
        "(`--resource`), or whole words of the name of the GPUs. If it has an amount, that "
        "limits the processes on a host's CPUs.",
    )
    fallback: tuple[str, ...] = Field(
        (), description="Pools that are used where this one has no free devices, in this order."
    )
    site: str = Field(
        "",
        description="Name of the cluster or data center of these hosts, if the link to the others "
        "is slow: each version of the weights crosses the link between two sites once.",
    )


class WorkerCounts(TypedDict):
    """The bounds of a number of workers that changes."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    minimum: Count
    maximum: Processes


class WorkersConfig(Section):
    """Rollout workers: processes that run environments, handlers and rewards (RollArt
    §6.1).
    """

    count: Annotated[
        Annotated[Annotated[Count, Field(le=MAX_PROCESSES)], Tag(FORMS[0])]
        | Annotated[WorkerCounts, Tag(FORMS[1])],
        Discriminator(form),
    ] = Field(
        0,
        description="Number of worker processes; 0: all of this runs in the controller. Or, as "
        "{ minimum = 0, maximum = 4 }: so many are always there, and so many at most, which start "
        "when attempts wait for a place, and end when they have not been needed for a minute, or "
        "for as long as a start takes if that is more.",
    )
    pool: str | None = Field(
        None, description="Pool of hosts on which they run; unset: cpu (docs/CLUSTER.md)."
    )

    @property
    def maximum(self) -> int:
        """The number of workers that there may be at once."""
        return self.count if isinstance(self.count, int) else self.count["maximum"]

    @property
    def first(self) -> int:
        """The number of workers with which a world begins."""
        return self.count if isinstance(self.count, int) else self.count["minimum"]

    @property
    def elastic(self) -> bool:
        """True if the number of workers changes."""
        return self.first < self.maximum

    @model_validator(mode="after")
    def _minimum_is_at_most_maximum(self) -> Self:
        if self.first > self.maximum:
            rule = f"have a minimum of at most its maximum ({self.maximum})"
            raise FieldError("count", rule, self.first)
        return self


RoleName = Annotated[str, matching(ROLE_NAME, "consist of letters, digits, _ and -")]


class RoleConfig(Section):
    """A role of the run: processes, each with an object of a class, whose registered
    methods rewards, environments and handlers call by the name of the role (RollArt
    §5.1, `docs/ROLES.md`).
    """

    cls: Annotated[
        str, matching(r"[\w.]+:[\w.]+|", "be package.module:Class, or be left out for a judge")
    ] = Field(
        "",
        description="The user's class, package.module:Class, a subclass of rollweave.Worker. Left "
        "out for the model of the judge of the reward with the name of the role, whose place this "
        "section gives.",
    )
    count: Processes = Field(1, description="Number of processes.")
    gpus: Count = Field(
        0, description="GPUs of each process, which no other process of the run has."
    )
    pool: str | None = Field(
        None, description="Pool of hosts on which they run; unset: local (docs/CLUSTER.md)."
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the constructor of the class, by name."
    )
