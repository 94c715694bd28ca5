"""The user's configuration: one TOML file, read into `RunConfig`. Unknown keys and
broken rules are errors.

Every knob has a sentence in `sections.py`. `schema/config/loading.py` reads files and
overrides into a `RunConfig`.
"""

from typing import Annotated, Any, Self

from pydantic import Field, field_serializer, field_validator, model_validator

from rollweave.schema.config.sections import (
    AlgorithmConfig,
    AllocationConfig,
    BufferConfig,
    EngineConfig,
    EvalConfig,
    FaultsConfig,
    ModelConfig,
    ModeName,
    RolloutConfig,
    RunSection,
    SandboxConfig,
    Section,
    ServeConfig,
    SimConfig,
    TaskConfig,
    TrainerConfig,
    WarmupConfig,
    WatchdogConfig,
    WeightsConfig,
)

SIMULATED_CONTEXT = 1 << 24
"""Context of the model that stands for `sim.model` if [model] is missing: longer than
any trajectory. It is never trained.
"""


class RunConfig(Section):
    run: RunSection
    model: ModelConfig
    tasks: Annotated[tuple[TaskConfig, ...], Field(min_length=1)]
    rollout: RolloutConfig = RolloutConfig()
    engines: Annotated[tuple[EngineConfig, ...], Field(min_length=1)] = (EngineConfig(),)
    allocation: AllocationConfig | None = None
    buffer: BufferConfig = BufferConfig()
    trainer: TrainerConfig = TrainerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    warmup: WarmupConfig = WarmupConfig()
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    faults: FaultsConfig = FaultsConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    sandbox: SandboxConfig = SandboxConfig()
    sim: SimConfig | None = None
    serve: ServeConfig = ServeConfig()

    @model_validator(mode="before")
    @classmethod
    def _simulated_model(cls, data: Any) -> Any:
        """Fill in a model for a run that is only simulated: it has no weights, and its
        shape is `sim.model`.
        """
        if isinstance(data, dict) and data.get("sim") is not None and "model" not in data:
            return {**data, "model": {"scratch": {"context": SIMULATED_CONTEXT}}}
        return data

    @field_validator("engines", mode="before")
    @classmethod
    def _one_group(cls, engines: Any) -> Any:
        return (engines,) if isinstance(engines, dict | EngineConfig) else engines

    @field_serializer("engines")
    def _as_given(self, engines: tuple[EngineConfig, ...]) -> Any:
        decided = {"count", "degree"} if self.allocation is not None else set()
        groups = [group.model_dump(exclude=decided) for group in engines]
        return groups[0] if len(groups) == 1 else groups

    def own_group_sizes(self) -> dict[str, int]:
        """Return the group size of each task domain that sets one."""
        return {task.name: task.group_size for task in self.tasks if task.group_size is not None}

    def group_size(self, name: str) -> int:
        """Return the number of trajectories in a group of task domain `name`."""
        return self.own_group_sizes().get(name, self.rollout.group_size)

    @property
    def published_dtype(self) -> str:
        """The number format of published weights, as torch names it."""
        return self.weights.dtype or self.model.dtype

    def strays_from(self, former: "RunConfig") -> list[str]:
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
        envs = {task.name: task.env for task in self.tasks}
        fixed |= {
            f"tasks ({task.name}).env": (task.env, envs.get(task.name)) for task in former.tasks
        }
        return [
            f"{field} must stay as the run began, {before!r}, got {after!r}"
            for field, (before, after) in fixed.items()
            if before != after
        ]

    @model_validator(mode="after")
    def _rules(self) -> Self:
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            raise ValueError(f"tasks must have distinct names (set tag), got {names}")
        rollout = self.rollout
        if rollout.mode is ModeName.BOUNDED and rollout.alpha < 1:
            raise ValueError(
                "rollout.alpha must be at least 1 in mode bounded (0 is mode sync), "
                f"got {rollout.alpha}"
            )
        self._check_own_pace()
        partition = (rollout.placement or rollout.scheduling) in (
            "partition",
            "presorted",
            "trajectory",
        )
        if rollout.migration not in (None, "never") and not partition:
            raise ValueError(
                "rollout.migration must be never unless rollout.placement is partition or "
                f"presorted, got {rollout.migration}"
            )
        relative = self.algorithm.advantage != "reinforce_pp"
        for name, size in {"rollout": rollout.group_size, **self.own_group_sizes()}.items():
            if relative and size < 2:
                raise ValueError(
                    f"{name}.group_size must be at least 2 for {self.algorithm.advantage}, got "
                    f"{size}"
                )
            if rollout.min_members > size:
                raise ValueError(
                    f"rollout.min_members must be at most {name}.group_size "
                    f"({size}), got {rollout.min_members}"
                )
        if (
            self.algorithm.kl
            and self.algorithm.kl_direction == "forward"
            and self.trainer.ranks > 1
        ):
            raise ValueError(
                "algorithm.kl_direction must be reverse with several trainer.ranks, got "
                f"{self.trainer.ranks} ranks"
            )
        engines = (
            self.allocation.budget
            if self.allocation is not None
            else sum(group.count for group in self.engines)
        )
        if self.weights.relays > engines:
            raise ValueError(
                f"weights.relays must be at most the engines ({engines}), got {self.weights.relays}"
            )
        if self.sim is not None and self.sim.colocated and self.weights.relays:
            raise ValueError(
                f"weights.relays must be 0 with sim.colocated, got {self.weights.relays}"
            )
        if self.sim is not None and self.sim.colocated and rollout.mode is not ModeName.SYNC:
            raise ValueError(
                f"sim.colocated must go with rollout.mode sync, got mode {rollout.mode.value}"
            )
        longest = max(task.max_tokens for task in self.tasks)
        for group in self.engines:
            if longest > group.kv_tokens:
                raise ValueError(
                    f"engines.kv_tokens must hold one trajectory ({longest} tokens), "
                    f"got {group.kv_tokens}"
                )
            if group.degree > 1 and self.model.device != "cpu" and self.sim is None:
                raise ValueError(
                    f"engines.degree must be 1 on {self.model.device} (an embedded engine has one "
                    f"GPU), got {group.degree}"
                )
        if self.allocation is not None:
            self._check_allocation(self.allocation)
        if self.model.scratch is not None and longest > self.model.scratch.context:
            raise ValueError(
                f"model.scratch.context must hold one trajectory ({longest} tokens), got "
                f"{self.model.scratch.context}"
            )
        return self

    def _check_own_pace(self) -> None:
        """Check the settings of mode decoupled, in which a trajectory stays on its
        engine. The buffer's settings have no effect in other modes.
        """
        rollout = self.rollout
        if rollout.mode is not ModeName.DECOUPLED:
            if self.buffer != BufferConfig():
                raise ValueError(
                    "buffer must be left out unless rollout.mode is decoupled, got "
                    f"mode {rollout.mode.value}"
                )
            if rollout.engine_batch is not None:
                raise ValueError(
                    "rollout.engine_batch must be left out unless rollout.mode is decoupled, got "
                    f"{rollout.engine_batch}"
                )
            if not rollout.repack:
                raise ValueError(
                    "rollout.repack must be left out unless rollout.mode is "
                    f"decoupled, got {rollout.repack}"
                )
            return
        if rollout.scheduling != "turn":
            raise ValueError(
                "rollout.scheduling must be turn in mode decoupled, where a trajectory keeps to "
                "its engine (its order alone: "
                f'rollout.priority = "longest_first"), got {rollout.scheduling}'
            )
        must = {
            "placement": (rollout.placement, (None, "pinned")),
            "migration": (rollout.migration, (None, "never")),
            "env_stepping": (rollout.env_stepping, ("trajectory",)),
            "reward": (rollout.reward, ("overlap",)),
            "spare_groups": (rollout.spare_groups, (0,)),
        }
        for name, (value, allowed) in must.items():
            if value not in allowed:
                raise ValueError(
                    f"rollout.{name} must be {allowed[-1]} in mode decoupled, got {value}"
                )
        if self.allocation is not None:
            raise ValueError("allocation must be left out in mode decoupled, got one")
        if self.buffer.groups is not None and self.buffer.groups < rollout.groups_per_step:
            raise ValueError(
                "buffer.groups must be at least rollout.groups_per_step "
                f"({rollout.groups_per_step}), got {self.buffer.groups}"
            )

    def _check_allocation(self, allocation: AllocationConfig) -> None:
        if max(allocation.degrees) > allocation.budget:
            raise ValueError(
                f"allocation.degrees must be at most the budget ({allocation.budget}), got "
                f"{max(allocation.degrees)}"
            )
        if len(set(allocation.degrees)) != len(allocation.degrees):
            raise ValueError(
                f"allocation.degrees must differ from each other, got {list(allocation.degrees)}"
            )
        if len(self.engines) > 1 or self.engines[0].model_fields_set & {"count", "degree"}:
            given = [
                {name: getattr(group, name) for name in ("count", "degree")}
                for group in self.engines
            ]
            raise ValueError(
                "engines must be one group without count and degree where "
                f"[allocation] decides them, got {given}"
            )
        if self.model.device != "cpu" and self.sim is None:
            raise ValueError(
                f"allocation must be left out on {self.model.device}: an embedded engine has one "
                f"GPU, got {allocation}"
            )
