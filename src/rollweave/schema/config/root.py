"""The user's configuration: one TOML file, read into `RunConfig`. Unknown keys and
broken rules are errors.

Every setting has a sentence in its section, in the module of its subject beside this
one. `schema/config/loading.py` reads files and overrides into a `RunConfig`.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, field_serializer, field_validator, model_validator

from rollweave.schema.config.ablation import PARTITIONS, POLICIES, AblationConfig
from rollweave.schema.config.algorithm import (
    GROUPLESS,
    OF_CRITIC,
    OF_TURNS,
    AlgorithmConfig,
    CriticConfig,
    TeacherConfig,
)
from rollweave.schema.config.cluster import ClusterConfig, PoolConfig, WorkersConfig
from rollweave.schema.config.engines import AllocationConfig, EngineConfig
from rollweave.schema.config.model import HEAD_DIM, VLLM_HEAD_DIM, LoraConfig, ModelConfig
from rollweave.schema.config.rewards import RewardConfig
from rollweave.schema.config.rollout import ModeName, RolloutConfig
from rollweave.schema.config.run import (
    RATES,
    Fault,
    Faults,
    RunSection,
    SandboxConfig,
    ServeConfig,
    WatchdogConfig,
)
from rollweave.schema.config.simulation import SimConfig
from rollweave.schema.config.tasks import BufferConfig, TaskConfig
from rollweave.schema.config.training import EvalConfig, TrainerConfig, WarmupConfig, WeightsConfig
from rollweave.schema.config.values import NotNegative, Section
from rollweave.schema.text import did_you_mean

SIMULATED_MODEL = "sim.model"
"""`model.path` of a run that is only simulated, where [model] is missing: it has no
weights.
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
    critic: CriticConfig = CriticConfig()
    lora: LoraConfig | None = None
    teacher: TeacherConfig | None = None
    rewards: tuple[RewardConfig, ...] = ()
    warmup: WarmupConfig = WarmupConfig()
    cluster: ClusterConfig | None = None
    pools: dict[str, PoolConfig] = Field(default_factory=dict)
    workers: WorkersConfig = WorkersConfig()
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    faults: dict[Fault, NotNegative] = Field(
        default_factory=dict,
        description="Failures injected into real environments, for tests and benches; none in a "
        "simulation.",
    )
    watchdog: WatchdogConfig = WatchdogConfig()
    sandbox: SandboxConfig = SandboxConfig()
    sim: SimConfig | None = None
    serve: ServeConfig = ServeConfig()
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

    def own_algorithms(self) -> dict[str, AlgorithmConfig]:
        """Return the algorithm of each task domain that differs from the run's."""
        algorithms = {task.name: task.algorithm.over(self.algorithm) for task in self.tasks}
        return {name: own for name, own in algorithms.items() if own != self.algorithm}

    def algorithm_of(self, name: str) -> AlgorithmConfig:
        """Return the algorithm of task domain `name`."""
        return self.own_algorithms().get(name, self.algorithm)

    @property
    def has_critic(self) -> bool:
        """True if the estimator of any task domain needs a critic."""
        return any(self.algorithm_of(task.name).advantage in OF_CRITIC for task in self.tasks)

    def distills(self, name: str) -> bool:
        """Return whether task domain `name` learns from the teacher."""
        return self.algorithm_of(name).advantage == "distill"

    @property
    def injected(self) -> Faults:
        """The failures of [faults]."""
        return Faults.model_validate(self.faults)

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of any trajectory: the context of a model from
        scratch.
        """
        return max(task.max_tokens for task in self.tasks)

    @property
    def head_dim(self) -> int:
        """The width of an attention head of a model from scratch."""
        return VLLM_HEAD_DIM if any(group.kind == "vllm" for group in self.engines) else HEAD_DIM

    @property
    def _with_heads(self) -> str:
        kind = "vllm" if self.head_dim == VLLM_HEAD_DIM else "embedded"
        return f"{kind} (a model from scratch with heads of {self.head_dim})"

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
        if (self.cluster is not None or self.pools) and self.weights.relays:
            raise ValueError(
                "weights.relays must be left out with [cluster], whose hosts have one each, and "
                f"with [pools], got {self.weights.relays}"
            )
        self._check_pools()
        self._check_own_pace()
        for kind, rate in self.faults.items():
            if kind in RATES and rate > 1:
                raise ValueError(f"faults.{kind} must be at most 1, got {rate}")
        migration = self.ablation.migration
        if migration not in (None, "never") and self._placement not in PARTITIONS:
            raise ValueError(
                "ablation.policies must have the migration never unless the placement is "
                f"{' or '.join(PARTITIONS)}, got {migration}"
            )
        for name in names:
            algorithm, size = self.algorithm_of(name), self.group_size(name)
            advantage = algorithm.advantage
            rewarded = algorithm.reward_weight and advantage == "distill"
            if (rewarded or advantage not in GROUPLESS) and size < 2:
                section = name if name in self.own_group_sizes() else "rollout"
                which = f"{advantage} with a reward_weight" if rewarded else advantage
                raise ValueError(f"{section}.group_size must be at least 2 for {which}, got {size}")
        if self.rollout.spare_groups == "learned" and not self.rollout.dynamic_sampling:
            raise ValueError(
                "rollout.spare_groups must be a number without rollout.dynamic_sampling, which "
                "filters groups, got learned"
            )
        self._check_teacher()
        self._check_rewards()
        self._check_kl_direction()
        if self.trainer.tensor_parallel > 1:
            self._check_tensor_parallel(self.trainer.tensor_parallel)
        engines = (
            self.allocation.budget
            if self.allocation is not None
            else sum(group.count for group in self.engines if not group.borrowed)
        )
        if self.weights.relays > engines:
            raise ValueError(
                f"weights.relays must be at most the engines ({engines}), got {self.weights.relays}"
            )
        if self.algorithm.routing_replay:
            self._check_routing_replay()
        if self.trainer.colocated:
            self._check_colocated()
        if self.lora is not None:
            self._check_lora(self.lora)
        longest = self.max_tokens
        for group in self.engines:
            if longest > group.kv_tokens:
                raise ValueError(
                    f"engines.kv_tokens must hold one trajectory ({longest} tokens), "
                    f"got {group.kv_tokens}"
                )
        if self.allocation is not None:
            self._check_allocation(self.allocation)
        for number, group in enumerate(self.engines):
            self._check_address(number, group)
            self._check_server(number, group)
        self._check_phases()
        self._check_borrowed()
        if self.model.device == "cuda" and self.sim is None:
            self.check_on_gpus()
        return self

    def _check_borrowed(self) -> None:
        """Check that there is something to borrow, and that the run begins without."""
        serving = self.sim.serving if self.sim is not None else None
        if serving is not None:
            serving.check_requests(self.ablation.sharing)
        borrowed = [number for number, group in enumerate(self.engines) if group.borrowed]
        for number in borrowed:
            group, field = self.engines[number], f"engines.{number}.borrowed"
            if serving is None:
                raise ValueError(
                    f"{field} must be false without [sim.serving], which describes the engines "
                    "that lend, got true"
                )
            if group.phase != "both" or group.kind != "embedded":
                raise ValueError(
                    f"{field} must be false unless kind is embedded and phase is both, got kind "
                    f"{group.kind} and phase {group.phase}"
                )
        if not borrowed:
            return
        if len(borrowed) == len(self.engines):
            raise ValueError(
                "engines.0.borrowed must be false for at least one group of engines, with which "
                "the run begins, got true for all"
            )
        if self.rollout.mode is ModeName.DECOUPLED or self.trainer.colocated:
            which = "mode decoupled" if not self.trainer.colocated else "trainer.colocated"
            raise ValueError(f"engines.{borrowed[0]}.borrowed must be false with {which}, got true")

    def _check_teacher(self) -> None:
        """Check that there is a teacher if a task domain learns from one, and that its
        log-probs are comparable with those of the student.
        """
        if not any(self.distills(task.name) for task in self.tasks):
            if self.teacher is not None:
                raise ValueError(
                    "teacher must be left out unless algorithm.advantage is distill, got "
                    f"{self.algorithm.advantage}"
                )
            return
        if self.teacher is None:
            raise ValueError("teacher.url must be given with algorithm.advantage distill, got none")
        if self.rollout.temperature != 1:
            raise ValueError(
                "rollout.temperature must be 1 with algorithm.advantage distill, since a teacher's "
                f"log-probs are at temperature 1, got {self.rollout.temperature}"
            )
        if self.rollout.dynamic_sampling:
            raise ValueError(
                "rollout.dynamic_sampling must be false with algorithm.advantage distill, which "
                "also learns from groups of equal rewards, got true"
            )

    def rewards_of(self, name: str) -> tuple[RewardConfig, ...]:
        """Return the rewards of task domain `name` beside that of its environment."""
        return tuple(one for one in self.rewards if not one.tasks or name in one.tasks)

    def _check_rewards(self) -> None:
        """Check that rewards have distinct names and domains that exist, and that they
        can be computed where they are declared to be.
        """
        names, domains = [one.name for one in self.rewards], [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            raise ValueError(f"rewards must have distinct names, got {names}")
        place = "workers" if self.workers.count else "inline"
        for number, reward in enumerate(self.rewards):
            field = f"rewards.{number}"
            for domain in reward.tasks:
                if domain not in domains:
                    raise ValueError(
                        f"{field}.tasks must be among the task domains {domains}, got "
                        f"{domain!r}{did_you_mean(domain, domains)}"
                    )
            if reward.function is not None and reward.run not in (None, place, "serverless"):
                raise ValueError(
                    f"{field}.run must be {place} with {self.workers.count} rollout workers "
                    f"(workers.count), got {reward.run}"
                )
            launcher = self.cluster.launcher if self.cluster is not None else "local"
            if reward.deployed and self.workers.count and launcher not in ("local", "ray"):
                raise ValueError(
                    f"{field}.run serverless needs cluster.launcher ray for a function that "
                    f"rollout workers on other hosts call, got {launcher}"
                )
            if reward.pairwise:
                self._check_opponents(field, reward)
            if self.cluster is not None and self.workers.count:
                self._check_token_on_hosts(field, reward)
        for number, task in enumerate(self.tasks):
            advantage = self.algorithm_of(task.name).advantage
            if task.env_weight != 1 and advantage in OF_TURNS:
                raise ValueError(
                    f"tasks.{number}.env_weight must be 1 with advantage {advantage}, which takes "
                    f"each turn's reward from the environment, got {task.env_weight:g}"
                )

    def _check_opponents(self, field: str, reward: RewardConfig) -> None:
        """Check that the groups of a pairwise judge have several members."""
        for domain in reward.tasks or [task.name for task in self.tasks]:
            if (size := self.group_size(domain)) < 2:
                raise ValueError(
                    f"{field}.judge.pairwise needs groups of at least 2 members to compare, got "
                    f"group_size {size} of {domain}"
                )

    def _check_token_on_hosts(self, field: str, reward: RewardConfig) -> None:
        """Check that rollout workers on other hosts have a reward's token."""
        if reward.token_file is not None:
            raise ValueError(
                f"{field}.token_file must be left out with [cluster] and rollout workers, whose "
                f"hosts lack the file (use token_env and cluster.env), got {reward.token_file!r}"
            )
        given = self.cluster.env if self.cluster is not None else ()
        if reward.token_env is not None and reward.token_env not in given:
            raise ValueError(
                f"{field}.token_env must be among cluster.env, which rollout workers on other "
                f"hosts get, got {reward.token_env}"
            )

    def _check_address(self, number: int, group: EngineConfig) -> None:
        """Check the settings of servers that the run does not start."""
        field = f"engines.{number}"
        if not group.address:
            for name in ("token_env", "token_file"):
                if getattr(group, name) is not None:
                    raise ValueError(
                        f"{field}.{name} must be left out without {field}.address, got "
                        f"{getattr(group, name)!r}"
                    )
            return
        if group.server is None:
            raise ValueError(
                f"{field}.address must be left out unless kind is vllm or sglang, got kind "
                f"{group.kind}"
            )
        for name in ("python", "args", "degree"):
            if (value := getattr(group, name)) != EngineConfig.model_fields[name].default:
                raise ValueError(
                    f"{field}.{name} must be left out with {field}.address, whose server already "
                    f"runs, got {value!r}"
                )
        if group.count != len(group.address):
            raise ValueError(
                f"{field}.count must be the number of addresses ({len(group.address)}) or left "
                f"out, got {group.count}"
            )
        addresses = [address for group in self.engines for address in group.address]
        for address in group.address:
            if addresses.count(address) > 1:
                raise ValueError(
                    f"{field}.address must name each server once in all [[engines]], got {address} "
                    f"{addresses.count(address)} times"
                )
        if (group.token_env is None) is (group.token_file is None):
            given = "neither" if group.token_env is None else "both"
            raise ValueError(
                f"{field} must have one of token_env and token_file with address, got {given}"
            )
        if self.model.path is None and self.sim is None:
            raise ValueError(
                f"model.path must be given with {field}.address, whose server has loaded a "
                "checkpoint, got none"
            )

    def _check_kl_direction(self) -> None:
        forward = self.algorithm.kl and self.algorithm.kl_direction == "forward"
        if forward and self.trainer.ranks > 1:
            raise ValueError(
                "algorithm.kl_direction must be reverse with several trainer.ranks, got "
                f"{self.trainer.ranks} ranks"
            )

    def _check_routing_replay(self) -> None:
        """Check that the engines return the experts that they choose."""
        if self.model.scratch is not None:
            raise ValueError(
                "algorithm.routing_replay must be false for a model from scratch, which has no "
                "experts, got true"
            )
        for group in self.engines:
            if group.kind != "vllm":
                raise ValueError(
                    "algorithm.routing_replay must be false unless all engines are of kind vllm, "
                    f"which returns the experts that it chooses, got {group.kind}"
                )
            if group.address:
                raise ValueError(
                    "algorithm.routing_replay must be false with engines.address, whose servers "
                    f"already run, got {group.address[0]}"
                )
        if "prefix_cache" in self.ablation.without:
            raise ValueError(
                "algorithm.routing_replay must be false without prefix_cache, where vLLM keeps "
                "the experts that it has chosen, got true"
            )

    def _check_server(self, number: int, group: EngineConfig) -> None:
        """Check that inference servers can be the engines of this run, and that others
        have no settings of servers.
        """
        if group.server is None:
            for name in ("python", "args"):
                if (value := getattr(group, name)) != EngineConfig.model_fields[name].default:
                    raise ValueError(
                        f"engines.{number}.{name} must be left out unless kind is vllm or sglang, "
                        f"got {value!r}"
                    )
            return
        field = f"engines.{number}.kind"
        if self.trainer.colocated:
            raise ValueError(
                f"{field} must be embedded with trainer.colocated, for which engines give back "
                f"their memory, got {group.kind}"
            )
        if group.kind == "vllm":
            self._check_vllm(number, group)

    def _check_phases(self) -> None:
        """Check that prompts can be computed on one engine for another."""
        phases = [group.phase for group in self.engines]
        split = {number: phase for number, phase in enumerate(phases) if phase != "both"}
        if not split:
            return
        for number, phase in split.items():
            group, field = self.engines[number], f"engines.{number}.phase"
            other = "decode" if phase == "prefill" else "prefill"
            if other not in phases:
                raise ValueError(
                    f"{field} must be both unless other engines have phase {other}, got {phase}"
                )
            if not group.moves_kv:
                where = "address" if group.address else f"kind {group.kind}"
                raise ValueError(
                    f"{field} must be both with {where}, whose engines cannot move KV, got {phase}"
                )
            if self.allocation is not None:
                raise ValueError(f"{field} must be both with [allocation], got {phase}")
            if "prefix_cache" in self.ablation.without:
                raise ValueError(
                    f"{field} must be both without prefix_cache, from which KV moves, got {phase}"
                )
        kinds = [self.engines[number].kind for number in split]
        if len(set(kinds)) > 1:
            raise ValueError(
                "engines.kind must be the same for all prefill and decode engines, which exchange "
                f"KV, got {kinds}"
            )
        exact = {self.engines[number].deterministic for number in split}
        if len(exact) > 1:
            raise ValueError(
                "engines.deterministic must be the same for all prefill and decode engines, which "
                f"exchange KV, got {[self.engines[number].deterministic for number in split]}"
            )

    def _check_vllm(self, number: int, group: EngineConfig) -> None:
        """Check what vLLM requires beside what all servers require."""
        if group.deterministic:
            raise ValueError(
                f"engines.{number}.deterministic must be false with kind vllm, got true"
            )
        scratch = self.model.scratch
        if scratch is not None and scratch.hidden % (2 * VLLM_HEAD_DIM):
            raise ValueError(
                f"model.scratch.hidden must be a multiple of {2 * VLLM_HEAD_DIM} with engines of "
                f"kind vllm, got {scratch.hidden}"
            )
        if self.scales_logprobs and self.rollout.top_p < 1:
            raise ValueError(
                "rollout.top_p must be 1 on engines of kind vllm unless all temperatures are 0 "
                f"or 1, got {self.rollout.top_p}"
            )

    @property
    def scales_logprobs(self) -> bool:
        """True if vLLM must return log-probs at the request's temperature, since its
        own are at temperature 1.
        """
        return not {self.eval.temperature, self.rollout.temperature} <= {0.0, 1.0}

    def check_on_gpus(self, groups: Iterable[int] | None = None) -> None:
        """Raise ValueError for settings that are impossible on GPUs: an embedded engine
        has one.

        `groups` are the groups of engines that run there; None stands for all.
        """
        numbers = list(range(len(self.engines)) if groups is None else groups)
        if numbers and self.allocation is not None and self.cluster is not None:
            raise ValueError(
                f"allocation must be left out with [cluster] on {self.model.device}: the GPUs of "
                "an engine are on one host, and the plan does not know which hosts have enough, "
                f"got {self.allocation}"
            )
        for number in numbers:
            group = self.engines[number]
            if group.degree > 1 and group.kind == "embedded":
                raise ValueError(
                    f"engines.degree must be 1 on {self.model.device} (an embedded engine has one "
                    f"GPU), got {group.degree}"
                )
            if self.allocation is not None and group.kind == "embedded":
                raise ValueError(
                    f"allocation must be left out on {self.model.device}: an embedded engine has "
                    f"one GPU, got {self.allocation}"
                )

    def pools_of(self, pool: str | None) -> tuple[str, ...]:
        """Return a pool and its fallbacks; empty if `pool` is None, for any host."""
        return () if pool is None else (pool, *self.pools[pool].fallback)

    def _check_pools(self) -> None:
        """Check that every named pool exists, and that [pools] have hosts to
        describe.
        """
        if self.pools and self.cluster is None and self.sim is None:
            raise ValueError(
                f"pools must be left out without [cluster] and [sim], got {list(self.pools)}"
            )
        named = {
            "trainer.pool": self.trainer.pool,
            "workers.pool": self.workers.pool,
            **{f"engines.{n}.pool": group.pool for n, group in enumerate(self.engines)},
            **{f"tasks.{n}.pool": task.pool for n, task in enumerate(self.tasks)},
            **{
                f"pools.{name}.fallback": other
                for name, pool in self.pools.items()
                for other in pool.fallback
            },
        }
        if self.sim is not None:
            named |= {f"sim.pools.{name}": name for name in self.sim.pools}
        for field, name in named.items():
            _check_pool(field, name, "the pools", list(self.pools))
        of_engines = list(dict.fromkeys(group.pool for group in self.engines if group.pool))
        for number, task in enumerate(self.tasks):
            _check_pool(f"tasks.{number}.pool", task.pool, "the pools of engines", of_engines)
            if task.pool is not None and self.rollout.mode is ModeName.DECOUPLED:
                raise ValueError(
                    f"tasks.{number}.pool must be left out in mode decoupled, in which engines "
                    "launch trajectories of all domains as their weights allow, and pass them on "
                    f"to others with the same weights, got {task.pool!r}"
                )
        self._check_learned_affinity(of_engines)

    def _check_learned_affinity(self, of_engines: Sequence[str]) -> None:
        """Check that there are pools among which domains can move."""
        learned = self.rollout.affinity == "learned"
        for number, task in enumerate(self.tasks):
            if task.pin and (not learned or task.pool is None):
                raise ValueError(
                    f"tasks.{number}.pin must be left out unless rollout.affinity is learned and "
                    f"tasks.{number}.pool is given, got {task.pin}"
                )
        if not learned:
            return
        if self.rollout.mode is ModeName.DECOUPLED:
            raise ValueError(
                "rollout.affinity must be declared in mode decoupled, in which engines launch "
                "trajectories of all domains, got learned"
            )
        if len(of_engines) < 2 or any(group.pool is None for group in self.engines):
            raise ValueError(
                "rollout.affinity must be declared unless each group of engines names a pool, and "
                f"they name two or more, got learned with {[group.pool for group in self.engines]}"
            )

    def _check_own_pace(self) -> None:
        """Check the settings of mode decoupled, in which a trajectory stays on its
        engine. The buffer's settings have no effect in other modes.
        """
        rollout = self.rollout
        if "early_updates" in self.ablation.without and rollout.mode is not ModeName.BOUNDED:
            raise ValueError(
                "ablation.without must not have early_updates unless rollout.mode is bounded, "
                f"got mode {rollout.mode.value}"
            )
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
            if "repack" in self.ablation.without:
                raise ValueError(
                    "ablation.without must not have repack unless rollout.mode is decoupled, "
                    f"got mode {rollout.mode.value}"
                )
            return
        ablation = self.ablation
        fixed = {
            "placement": (ablation.placement, "pinned"),
            "migration": (ablation.migration, "never"),
        }
        for name, (value, only) in fixed.items():
            if value not in (None, only):
                raise ValueError(
                    f"ablation.policies must have the {name} {only} in mode decoupled, got {value}"
                )
        for mechanism in ("free_stepping", "reward_overlap"):
            if mechanism in ablation.without:
                raise ValueError(
                    f"ablation.without must not have {mechanism} in mode decoupled, got "
                    f"{list(ablation.without)}"
                )
        if rollout.spare_groups:
            raise ValueError(
                f"rollout.spare_groups must be 0 in mode decoupled, got {rollout.spare_groups}"
            )
        if self.allocation is not None:
            raise ValueError("allocation must be left out in mode decoupled, got one")
        if self.buffer.groups is not None and self.buffer.groups < rollout.groups_per_step:
            raise ValueError(
                "buffer.groups must be at least rollout.groups_per_step "
                f"({rollout.groups_per_step}), got {self.buffer.groups}"
            )

    @property
    def _placement(self) -> str:
        return self.ablation.placement or POLICIES[self.rollout.scheduling][1]

    def _check_lora(self, lora: LoraConfig) -> None:
        if self.has_critic:
            raise ValueError(
                "lora must be left out with the estimators gae and gae_turn, whose critic is "
                f"trained in full, got rank {lora.rank}"
            )
        if lora.path is not None and self.model.scratch is not None:
            raise ValueError(f"lora.path must be left out with [model.scratch], got {lora.path!r}")

    def _check_tensor_parallel(self, size: int) -> None:
        """Check that the trainer's ranks can divide the layers of the model."""
        field = "trainer.tensor_parallel must"
        if self.trainer.ranks % size:
            raise ValueError(f"{field} divide trainer.ranks ({self.trainer.ranks}), got {size}")
        if self.model.implementation != "transformers":
            raise ValueError(
                f"{field} be 1 unless model.implementation is transformers, whose models have the "
                f"plan, got {size} with {self.model.implementation or 'none'}"
            )
        if self.has_critic:
            raise ValueError(
                f"{field} be 1 with the estimators gae and gae_turn, whose critic is not divided, "
                f"got {size}"
            )

    def _check_colocated(self) -> None:
        """Check that engines and trainer can take turns on the same devices."""
        problem = "trainer.colocated must be false"
        if self.rollout.mode is not ModeName.SYNC:
            raise ValueError(
                f"{problem} unless rollout.mode is sync, the only one that does not train while it "
                f"rolls out, got mode {self.rollout.mode.value}"
            )
        if self.allocation is not None:
            raise ValueError(f"{problem} with [allocation], got true")

    def _check_allocation(self, allocation: AllocationConfig) -> None:
        if any(group.address for group in self.engines):
            raise ValueError(
                "allocation must be left out with engines.address, whose servers already run, got "
                f"{allocation}"
            )
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
                "engines must be one group without count and degree where [allocation] decides "
                f"them, got {given}"
            )


def _shown(lora: LoraConfig | None) -> dict[str, Any] | None:
    return None if lora is None else lora.model_dump()


def _check_pool(field: str, name: str | None, what: str, known: Sequence[str]) -> None:
    """Raise ValueError if the pool `name` is not one of those `known`."""
    if name is not None and name not in known:
        raise ValueError(
            f"{field} must be one of {what} {list(known)}, got {name!r}{did_you_mean(name, known)}"
        )
