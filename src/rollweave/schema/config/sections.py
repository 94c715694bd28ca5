"""All sections of the user's configuration, and what follows from them.

`schema/config/root.py` has the rules between the settings.
"""

from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, field_serializer, field_validator, model_validator

from rollweave.schema.config.engines import (
    GPUS_OF_A_HOST,
    AllocationConfig,
    ClusterConfig,
    EngineConfig,
    LoansConfig,
    PoolConfig,
    RoleConfig,
    RoleName,
    WorkersConfig,
)
from rollweave.schema.config.rollout import BufferConfig, RewardConfig, RolloutConfig, TaskConfig
from rollweave.schema.config.run import (
    POLICIES,
    AblationConfig,
    RunSection,
    SandboxConfig,
    WatchdogConfig,
)
from rollweave.schema.config.simulation import SimConfig
from rollweave.schema.config.training import (
    HEAD_DIM,
    OF_CRITIC,
    VLLM_HEAD_DIM,
    AlgorithmConfig,
    CriticConfig,
    EvalConfig,
    LoraConfig,
    ModelConfig,
    TeacherConfig,
    TrainerConfig,
    WarmupConfig,
    WeightsConfig,
)
from rollweave.schema.config.values import Section

SIMULATED_MODEL = "sim.model"
"""`model.path` of a run that is only simulated, where [model] is missing: it has no
weights.
"""

DEFAULT_POOLS = {"trainer": "compute", "engines": "bandwidth", "workers": "cpu", "roles": "local"}
"""The pool of the processes of a section that names none, if the run has a pool of that
name (RollArt §5.2).
"""

P = TypeVar("P", TrainerConfig, EngineConfig, WorkersConfig, RoleConfig)


class Sections(Section):
    run: RunSection
    model: ModelConfig
    tasks: Annotated[tuple[TaskConfig, ...], Field(min_length=1)]
    rollout: RolloutConfig = RolloutConfig()
    engines: Annotated[tuple[EngineConfig, ...], Field(min_length=1)] = (EngineConfig(),)
    allocation: AllocationConfig | None = None
    loans: LoansConfig | None = None
    buffer: BufferConfig = BufferConfig()
    trainer: TrainerConfig = TrainerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    lora: LoraConfig | None = None
    teacher: TeacherConfig | None = None
    rewards: tuple[RewardConfig, ...] = ()
    warmup: WarmupConfig = WarmupConfig()
    cluster: ClusterConfig | None = None
    pools: dict[str, PoolConfig] = Field(default_factory=dict)
    workers: WorkersConfig = WorkersConfig()
    roles: dict[RoleName, RoleConfig] = Field(default_factory=dict)
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    sandbox: SandboxConfig = SandboxConfig()
    sim: SimConfig | None = None
    ablation: AblationConfig = AblationConfig()

    @model_validator(mode="before")
    @classmethod
    def _simulated_model(cls, data: Any) -> Any:
        """Fill in a model for a run that is only simulated: it has no weights, and its
        shape is `sim.model`.
        """
        if isinstance(data, dict) and data.get("sim") is not None and "model" not in data:
            return {**data, "model": {"path": SIMULATED_MODEL, "device": "cuda"}}
        return data

    @model_validator(mode="after")
    def _default_pools(self) -> Self:
        """Fill in `DEFAULT_POOLS`, unless trainer and engines share their devices."""

        def placed(part: P, pool: str) -> P:
            default = part.pool is None and pool in self.pools
            return part.model_copy(update={"pool": pool}) if default else part

        if self.pools and not self.trainer.colocated:
            trainer, engines, workers, roles = DEFAULT_POOLS.values()
            vars(self).update(
                trainer=placed(self.trainer, trainer),
                engines=tuple(placed(group, engines) for group in self.engines),
                workers=placed(self.workers, workers) if self.workers.maximum else self.workers,
                roles={name: placed(role, roles) for name, role in self.roles.items()},
            )
        return self

    @field_validator("engines", mode="before")
    @classmethod
    def _one_group(cls, engines: Any) -> Any:
        return (engines,) if isinstance(engines, dict | EngineConfig) else engines

    @field_serializer("engines")
    def _as_given(self, engines: tuple[EngineConfig, ...]) -> Any:
        decided = {"count"} if self.allocation is not None else set()
        groups = [group.model_dump(exclude=decided) for group in engines]
        return groups[0] if len(groups) == 1 else groups

    def own_group_sizes(self) -> dict[str, int]:
        """Return the group size of each task domain that sets one."""
        return {task.name: task.group_size for task in self.tasks if task.group_size is not None}

    def group_size(self, name: str) -> int:
        """Return the number of trajectories in a group of task domain `name`."""
        return self.own_group_sizes().get(name, self.rollout.group_size)

    def own_algorithms(self) -> dict[str, AlgorithmConfig]:
        """Return the algorithm of each task domain that differs from the run's."""
        algorithms = {task.name: task.algorithm.over(self.algorithm) for task in self.tasks}
        return {name: own for name, own in algorithms.items() if own != self.algorithm}

    def algorithm_of(self, name: str) -> AlgorithmConfig:
        """Return the algorithm of task domain `name`."""
        return self.own_algorithms().get(name, self.algorithm)

    @property
    def relayed(self) -> bool:
        """True if relays carry the weights between hosts."""
        between_hosts = self.weights.relays > 0 or self.cluster is not None
        return between_hosts and not self.weights.collective

    @property
    def has_critic(self) -> bool:
        """True if the estimator of any task domain needs a critic."""
        return any(self.algorithm_of(task.name).advantage in OF_CRITIC for task in self.tasks)

    @property
    def chooses_groups(self) -> bool:
        """True if the buffer may hold more groups than a step takes."""
        ahead = self.rollout.mode in ("partial", "bounded") and (self.rollout.alpha or 0) > 1
        return self.rollout.mode == "decoupled" or (ahead and not self.trainer.colocated)

    def distills(self, name: str) -> bool:
        """Return whether task domain `name` learns from the teacher."""
        return self.algorithm_of(name).advantage == "distill"

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of any trajectory: the context of a model from
        scratch.
        """
        return max(task.max_tokens for task in self.tasks)

    @property
    def profiled_context(self) -> int:
        """The tokens of each sequence in the steps by which engines set their slots."""
        return max(1, self.max_tokens // 2)

    @property
    def batch_tokens(self) -> int:
        """The maximum number of tokens of one training batch."""
        largest = max(self.group_size(task.name) for task in self.tasks)
        return self.rollout.groups_per_step * largest * self.max_tokens

    @property
    def head_dim(self) -> int:
        """The width of an attention head of a model from scratch."""
        return VLLM_HEAD_DIM if any(group.kind == "vllm" for group in self.engines) else HEAD_DIM

    @property
    def _with_heads(self) -> str:
        kind = "vllm" if self.head_dim == VLLM_HEAD_DIM else "embedded"
        return f"{kind} (a model from scratch with heads of {self.head_dim})"

    def strays_from(self, former: "Sections") -> list[str]:
        """Return the settings that a run started as `former` cannot continue with, one
        line per problem.

        Weights have a fixed shape, the buffer holds trajectories of its domains, and
        the seed keeps held-out tasks apart.
        """
        fixed: dict[str, tuple[Any, Any]] = {"run.seed": (former.run.seed, self.run.seed)}
        then, now = (
            former.model.model_dump(exclude={"dtype", "device"}),
            self.model.model_dump(exclude={"dtype", "device"}),
        )
        fixed |= {f"model.{field}": (then[field], now[field]) for field in then}
        fixed["lora"] = (_shown(former.lora), _shown(self.lora))
        if self.model.scratch is not None:
            fixed["engines.kind"] = (former._with_heads, self._with_heads)
        envs = {task.name: task.env for task in self.tasks}
        fixed |= {
            f"tasks ({task.name}).env": (task.env, envs.get(task.name)) for task in former.tasks
        }
        names = {task.name for task in self.tasks}
        fixed |= {  # buffered trajectories have the teacher's log-probs, or lack them
            f"tasks ({task.name}).algorithm.advantage": (
                former.algorithm_of(task.name).advantage,
                self.algorithm_of(task.name).advantage,
            )
            for task in former.tasks
            if task.name in names and former.distills(task.name) != self.distills(task.name)
        }
        if self.model.scratch is not None and self.max_tokens > former.max_tokens:
            # the model was built for no longer sequences
            fixed["tasks.max_tokens"] = (former.max_tokens, self.max_tokens)
        return [
            f"{field} must stay as the run began, {before!r}, got {after!r}"
            for field, (before, after) in fixed.items()
            if before != after
        ]

    def rewards_of(self, name: str) -> tuple[RewardConfig, ...]:
        """Return the rewards of task domain `name` beside that of its environment."""
        return tuple(one for one in self.rewards if not one.tasks or name in one.tasks)

    def pools_of(self, pool: str | None) -> tuple[str, ...]:
        """Return a pool and its fallbacks; empty if `pool` is None, for any host."""
        return () if pool is None else (pool, *self.pools[pool].fallback)

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degrees from which [allocation] chooses, in ascending order: that of the
        engines, its double, and so on up to the GPUs of a host; empty without
        [allocation]. The first two are there whatever the budget is.
        """
        if self.allocation is None:
            return ()
        least = self.engines[0].degree
        most = max(2 * least, min(GPUS_OF_A_HOST, self.allocation.budget))
        return tuple(least << doublings for doublings in range((most // least).bit_length()))

    @property
    def placement(self) -> str:
        """The placement of turns: that of [ablation], or the preset's."""
        return self.ablation.placement or POLICIES[self.rollout.scheduling][1]

    @property
    def scales_logprobs(self) -> bool:
        """True if vLLM must return log-probs at the request's temperature, since its
        own are at temperature 1.
        """
        evaluated = self.eval.every or self.eval.final_episodes
        temperatures = {self.rollout.temperature, self.eval.temperature if evaluated else 0.0}
        return not temperatures <= {0.0, 1.0}


def _shown(lora: LoraConfig | None) -> dict[str, Any] | None:
    return None if lora is None else lora.model_dump()
