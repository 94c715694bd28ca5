"""The sections of a configuration: every knob is stated once, here, with a sentence.

`root.py` combines them.
"""

import enum
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from rollweave.schema.address import Hosts, check_names
from rollweave.schema.weights import TransportName
from rollweave.schema.work import Limits

# Strict: `true` is no number, nor is a number in quotes. Whole numbers pass as floats.
Flag = Annotated[bool, Field(strict=True)]
# Whole numbers fit into 64 bits, as journals and messages require.
PositiveInt = Annotated[int, Field(ge=1, lt=2**63, strict=True)]
Count = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]  # torch takes no larger one
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(ge=0, le=1, strict=True)]

EVAL_EPISODES = 1_000_000
"""Maximum episodes of a task domain in one evaluation. The tasks of periodic and final
evaluations are drawn from separate ranges of this size.
"""


def matching(pattern: str, rule: str) -> AfterValidator:
    """Require text to match the whole `pattern`; otherwise the error says that the
    field must `rule`.
    """

    def check(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise PydanticCustomError("rule", rule)
        return value

    return AfterValidator(check)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModeName(enum.StrEnum):
    """Presets of launch, update, in-flight and acceptance policy
    (`core/policy/modes.py`).
    """

    SYNC = "sync"
    ONE_STEP = "one_step"
    STREAM = "stream"
    PARTIAL = "partial"
    BOUNDED = "bounded"
    DECOUPLED = "decoupled"


class ScratchModel(Section):
    """Architecture of a Qwen3-style model that starts from random weights, with a
    word-level tokenizer of the tasks' words.
    """

    hidden: PositiveInt = 64
    layers: PositiveInt = 2
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    head_dim: Annotated[PositiveInt, Field(multiple_of=2)] = 16  # rotary embeddings turn pairs
    ffn: PositiveInt = 192
    init_std: Positive = 0.06
    rope_theta: Positive = 10000.0
    context: PositiveInt = 2048

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(
                "model.scratch.heads must be a multiple of kv_heads, got "
                f"{self.heads} and {self.kv_heads}"
            )
        return self


class ModelConfig(Section):
    path: str | None = Field(
        None,
        description="Checkpoint directory (config.json, safetensors, tokenizer) to start from.",
    )
    scratch: ScratchModel | None = Field(
        None, description="Start from random weights of this shape instead of a checkpoint."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Number format of weights and activations."
    )
    device: Annotated[str, matching(r"cpu|cuda(:\d+)?", "be cpu, cuda or cuda:N")] = Field(
        "cpu", description="torch device of engines and trainer."
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("model must have exactly one of path and [model.scratch]")
        return self


class TaskConfig(Section):
    """One task domain. Groups are drawn from the domains in proportion to `weight`."""

    env: str = Field(
        description="Registered environment or handler, or `package.module:Class` of your own."
    )
    tag: str = Field(
        "", description="Name of the task domain in metrics; the environment's name if empty."
    )
    weight: Positive = Field(1.0, description="Share of groups drawn from this domain.")
    warmup_weight: Positive = Field(
        1.0, description="Share of the warm-up's transcripts drawn from this domain."
    )
    group_size: PositiveInt | None = Field(
        None, description="Trajectories in a group of this domain; rollout.group_size if unset."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Passed to the environment as keyword arguments."
    )
    max_turns: PositiveInt = Field(16, description="Maximum number of turns of one trajectory.")
    max_tokens: PositiveInt = Field(
        1024,
        description="Maximum number of tokens of one trajectory, prompt and observations included.",
    )
    max_turn_tokens: PositiveInt = Field(
        128, description="Maximum number of tokens that the agent may sample in one turn."
    )
    time_s: Positive = Field(
        300.0, description="Maximum active seconds of one trajectory over init, run and eval."
    )
    step_s: Positive = Field(
        60.0, description="Maximum seconds of one call of the environment or reward."
    )
    isolation: Literal["inline", "process"] = Field(
        "inline",
        description="Where the environment runs: inline, its plain methods on a thread of the "
        "controller, or in a process, which is killed if a call hangs.",
    )

    @property
    def name(self) -> str:
        return self.tag or self.env

    @property
    def limits(self) -> Limits:
        """Bounds of one of its trajectories."""
        return Limits(
            max_turns=self.max_turns,
            max_tokens=self.max_tokens,
            max_turn_tokens=self.max_turn_tokens,
            time_s=self.time_s,
            step_s=self.step_s,
        )


class RolloutConfig(Section):
    mode: ModeName = Field(ModeName.BOUNDED, description="Preset of the four pacing policies.")
    alpha: Count = Field(
        1,
        description="Maximum staleness in steps (bounded: α of RollArt §6.2; partial: η of AReaL).",
    )
    groups_per_step: PositiveInt = Field(8, description="Groups in one training batch.")
    group_size: PositiveInt = Field(8, description="Trajectories of one task in a group.")
    spare_groups: Count = Field(
        0,
        description="Groups launched beyond the batch; the slowest are cancelled (sync, one_step).",
    )
    spare_members: Count = Field(
        0, description="Members launched beyond group_size; the slowest are cancelled."
    )
    min_members: PositiveInt = Field(
        2,
        description="Minimum number of members with which a group that lost others to failures is "
        "trained on.",
    )
    dynamic_sampling: Flag = Field(
        False, description="Drop groups whose rewards are all equal and draw others (DAPO)."
    )
    max_running: PositiveInt = Field(
        64, description="Maximum number of trajectories whose environments are alive at once."
    )
    init_slots: PositiveInt = Field(
        16, description="Maximum number of environments that start at once (INIT pool)."
    )
    eval_slots: PositiveInt = Field(
        16, description="Maximum number of rewards that are computed at once (EVAL pool)."
    )
    temperature: Positive = Field(1.0, description="Sampling temperature in training.")
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] = Field(
        1.0, description="Nucleus sampling in training."
    )
    top_k: Count = Field(0, description="Top-k sampling in training; 0 is off.")
    retries: Count = Field(
        2, description="Number of retries of a turn or an environment start after a failure."
    )
    engine_batch: PositiveInt | None = Field(
        None,
        description="Maximum number of trajectories on one engine in mode decoupled, within its "
        "share of max_running; twice its slots if unset.",
    )
    repack: Flag = Field(
        True,
        description="In mode decoupled, move the tail of an engine's batch to other engines, so "
        "that it is free for new weights (Laminar §5).",
    )
    env_stepping: Literal["trajectory", "batch"] = Field(
        "trajectory",
        description="`batch` makes all environments wait for the slowest one before each turn "
        "(RollArt's baseline).",
    )
    reward: Literal["overlap", "after_rollout"] = Field(
        "overlap",
        description="`after_rollout` computes rewards only once the whole batch is rolled out "
        "(RollArt's baseline).",
    )
    scheduling: Literal["turn", "trajectory"] = Field(
        "turn",
        description="Preset of the next three settings (core/policy/scheduling.py). turn: fcfs, "
        "affinity, never; trajectory: longest_first, partition, gain (Heddle).",
    )
    priority: Literal["fcfs", "round_robin", "shortest_first", "longest_first"] | None = Field(
        None, description="The order in which turns run; set by the preset if unset."
    )
    placement: (
        Literal["affinity", "pinned", "least_load", "hybrid", "partition", "presorted"] | None
    ) = Field(
        None,
        description="The engine that runs a turn (core/policy/routing.py), or the way in which "
        "trajectories are divided by length: partition by their work, presorted by "
        "Heddle's eq. 2; set by the preset if unset.",
    )
    migration: Literal["never", "rank", "gain"] | None = Field(
        None,
        description="When a trajectory moves to the engine of its new rank (partition, presorted): "
        "never, whenever that engine differs (rank), or if the predicted gain exceeds "
        "the exposed cost (gain); set by the preset if unset.",
    )
    predictor: Literal["ridge", "boosted", "lm", "prompt", "history"] = Field(
        "ridge",
        description="The predictor of trajectory lengths (train/lengths/), for policies that need "
        "one.",
    )


class EngineConfig(Section):
    """A group of equal engines.

    `[engines]` is one group, several `[[engines]]` are several.
    """

    count: PositiveInt = Field(1, description="Engine processes.")
    degree: PositiveInt = Field(
        1, description="Parallel degree of one engine: CPU threads, or GPUs in a simulation."
    )
    max_slots: PositiveInt = Field(
        64, description="Maximum number of sequences that one engine decodes at once."
    )
    kv_tokens: PositiveInt = Field(
        65536,
        description="Size of one engine's KV cache in tokens; a simulation lowers it to what its "
        "GPUs have room for.",
    )
    block_tokens: PositiveInt = Field(16, description="Tokens in one KV block.")
    prefill_chunk_tokens: PositiveInt = Field(
        512, description="Maximum number of prompt tokens that one engine step computes."
    )
    prefix_cache: Flag = Field(True, description="Keep the KV of finished turns for the next turn.")
    deterministic: Flag = Field(
        False,
        description="Use fixed tiles, so that results do not depend on the rest of the batch, bit "
        "for bit; slower.",
    )

    @model_validator(mode="after")
    def _whole_blocks(self) -> Self:
        if self.kv_tokens % self.block_tokens:
            raise ValueError(
                f"engines.kv_tokens must be a multiple of block_tokens ({self.block_tokens}), got "
                f"{self.kv_tokens}"
            )
        return self


class AllocationConfig(Section):
    """Engines of several degrees, as many of each as `core/policy/allocation` finds
    best for the lengths seen (Heddle §6).
    """

    budget: PositiveInt = Field(description="Sum of all engines' degrees.")
    degrees: Annotated[tuple[PositiveInt, ...], Field(min_length=2)] = Field(
        (1, 2, 4, 8), description="Degrees to choose from; unless set, those within the budget."
    )
    every: PositiveInt = Field(5, description="Training steps between plans.")

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


class TrainerConfig(Section):
    ranks: PositiveInt = Field(
        1, description="Trainer processes (FSDP2 over gloo or NCCL beyond one)."
    )
    threads: PositiveInt = Field(1, description="CPU threads of one trainer process.")
    lr: Positive = Field(1e-5, description="Peak learning rate.")
    final_lr: Share = Field(
        1.0,
        description="Learning rate at the last step, as a share of the peak; linear in between.",
    )
    warmup_steps: Count = Field(5, description="Steps of linear learning-rate warm-up.")
    beta2: Annotated[float, Field(gt=0, lt=1, strict=True)] = Field(
        0.95, description="AdamW's second beta; the first is 0.9."
    )
    weight_decay: NotNegative = Field(0.0, description="AdamW's decoupled weight decay.")
    max_grad_norm: Positive = Field(
        1.0, description="Gradient norm above which gradients are scaled down."
    )
    epochs: PositiveInt = Field(1, description="Passes over one batch.")
    minibatches: PositiveInt = Field(1, description="Optimizer steps in one pass.")
    micro_tokens: PositiveInt = Field(
        16384, description="Tokens packed into one forward pass; gradients accumulate beyond it."
    )


class AlgorithmConfig(Section):
    advantage: Literal["grpo", "grpo_no_std", "rloo", "reinforce_pp", "gigpo", "gigpo_no_std"] = (
        Field("grpo", description="Advantage estimator (train/advantages.py).")
    )
    gamma: Annotated[float, Field(gt=0, le=1, strict=True)] = Field(
        1.0, description="Discount per turn, for environments with rewards per turn."
    )
    clip_low: Share = Field(0.2, description="PPO ratio bound below 1.")
    clip_high: NotNegative = Field(0.28, description="PPO ratio bound above 1 (clip-higher, DAPO).")
    aggregate: Literal["token_mean", "sequence_mean"] = Field(
        "token_mean", description="How token losses are averaged."
    )
    correction: Literal["bypass", "decoupled", "tis"] = Field(
        "bypass",
        description="bypass: the ratio to the rollout's log-probs; decoupled: to recomputed ones, "
        "weighted by proximal/behavior; tis: to recomputed ones, weighted by the "
        "truncated token ratio.",
    )
    is_cap: Positive = Field(
        2.0, description="Cap of the importance weight of `decoupled` and `tis`."
    )
    kl: NotNegative = Field(
        0.0, description="Coefficient of the KL divergence to the starting weights."
    )
    kl_direction: Literal["reverse", "forward"] = Field(
        "reverse",
        description="reverse: k3 estimate of KL(policy, start) on sampled tokens; forward: exact "
        "KL(start, policy) over the vocabulary, which keeps every choice of the start alive.",
    )
    kl_until: Share = Field(
        1.0,
        description="Share of the run after which the KL term is zero; it falls linearly over the "
        "second half of that share. 1 keeps it constant.",
    )
    entropy: NotNegative = Field(0.0, description="Coefficient of the entropy bonus.")


class WarmupConfig(Section):
    """Supervised warm-up on scripted transcripts before RL.

    The environment says what they contain.
    """

    steps: Count = Field(0, description="Optimizer steps; 0 is no warm-up.")
    batch: PositiveInt = Field(16, description="Transcripts in one step.")
    lr: Positive = Field(1e-2, description="Learning rate, decayed linearly to a tenth.")
    observations: Flag = Field(
        False, description="Also predict observation tokens, not only the agent's."
    )


class BufferConfig(Section):
    """Groups that are rolled out and not yet trained on, in mode decoupled (Laminar
    §3.1, §6).
    """

    groups: PositiveInt | None = Field(
        None,
        description="Maximum number of groups in the buffer, including those under way, counted by "
        "trajectories; if unset, one batch plus the larger of another batch and what "
        "the engines run at once.",
    )
    sample: Annotated[
        str,
        matching(
            r"fifo|newest|advantage|ratio|staleness|[\w.]+:\w+",
            "be fifo, newest, advantage, ratio, staleness or package.module:function",
        ),
    ] = Field(
        "fifo",
        description="The order in which groups are trained on (core/policy/experience.py): fifo, "
        "newest, advantage (greatest first), ratio (nearest to 1; costs a forward pass "
        "over the whole buffer before each step that has a choice), staleness (at "
        "random, fresher ones more often), or `package.module:function`.",
    )
    evict: Annotated[
        str, matching(r"age|size|[\w.]+:\w+", "be age, size or package.module:function")
    ] = Field(
        "age",
        description="The order in which groups leave a full buffer: age, size (in tokens), or "
        "`package.module:function`.",
    )
    max_age: Count | None = Field(
        None,
        description="Maximum staleness in steps of what is trained on; unlimited if unset (inherent"
        " staleness).",
    )


class WeightsConfig(Section):
    """How weights reach the engines."""

    relays: Count = Field(
        0,
        description="Number of machines among which engines are divided, each with a relay that "
        "holds the weights for them (Laminar §4); 0: engines read the trainer's memory.",
    )
    delta: Flag = Field(
        True,
        description="Relays send only the changes since a version that both hold.",
    )
    transport: TransportName = Field("tcp", description="Transport of weights between relays.")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Number format of published weights; model.dtype if unset."
    )


class EvalConfig(Section):
    every: Count = Field(
        0,
        description="Steps between held-out evaluations, which choose the checkpoint `best`; the "
        "last step always has one. 0: only the final one.",
    )
    episodes: Annotated[Count, Field(le=EVAL_EPISODES)] = Field(
        64, description="Episodes of each task domain in a periodic evaluation."
    )
    final_episodes: Annotated[Count, Field(le=EVAL_EPISODES)] = Field(
        200, description="Episodes of each task domain in the final evaluation; 0: none."
    )
    temperature: NotNegative = Field(
        0.0, description="Sampling temperature of evaluations; 0 is greedy."
    )
    stop_at: Share | None = Field(
        None,
        description="Stop training once the held-out success of every task domain reaches this "
        "rate; its environment must define success.",
    )


class FaultsConfig(Section):
    """Failures injected into real environments, for tests and benches; none in a
    simulation. Rates are per environment call.
    """

    env_error: Share = Field(0.0, description="Rate of calls that raise.")
    env_hang: Share = Field(0.0, description="Rate of calls that never return.")
    env_garbage: Share = Field(
        0.0, description="Rate of calls that return something other than an observation."
    )
    reward_error: Share = Field(0.0, description="Rate of rewards that raise.")
    latency_s: NotNegative = Field(
        0.0, description="Median of a log-normal latency added to each step; 0 is none."
    )
    latency_sigma: NotNegative = Field(
        1.0, description="Sigma of that latency's logarithm: the weight of its tail."
    )


class WatchdogConfig(Section):
    """Deadlines, in seconds. A wait that exceeds its deadline is logged by name, acted
    on and counted.
    """

    start_s: Positive = Field(
        120.0, description="Maximum seconds until an engine, relay or trainer process is ready."
    )
    turn_s: Positive = Field(
        60.0,
        description="Maximum seconds of one turn on an engine, after which it is aborted and "
        "retried elsewhere.",
    )
    weights_s: Positive = Field(
        60.0,
        description="Maximum seconds in which an engine suspends, loads or resumes, or a relay "
        "fetches a version.",
    )
    train_s: Positive = Field(
        600.0,
        description="Maximum seconds of one training step, measurement, publication or checkpoint.",
    )
    restarts: Count = Field(
        3, description="Maximum number of restarts of one engine, relay or the trainer."
    )


class SimConfig(Section):
    """The simulated engines, environments and trainer of `rollweave simulate` (sim/)."""

    model: str = Field(description="Model shape, by name (sim/models.py).")
    gpu: str = Field("h800", description="GPU of the engines, by name (sim/hardware.py).")
    trainer_gpu: str = Field("", description="GPU of the trainer; that of the engines if empty.")
    trainer_gpus: PositiveInt = Field(8, description="GPUs of the trainer.")
    link: str = Field(
        "rdma", description="Link over which weights reach the engines, by name (sim/hardware.py)."
    )
    colocated: Flag = Field(
        False, description="Engines and trainer share the same GPUs in turn (mode sync)."
    )
    workloads: dict[str, str] = Field(
        default_factory=dict,
        description="Workload of each task domain: a family (sim/families.py), a .jsonl trace or a "
        "run; the environment's name if missing.",
    )
    serverless: Flag = Field(
        False, description="Rewards run on instances that start on demand and stop when idle."
    )
    controller_s: NotNegative = Field(
        0.0, description="Seconds that the controller takes for one event; later events wait."
    )
    profile: str | None = Field(
        None,
        description="File with measured step times of an engine, in place of the GPU's roofline.",
    )


class RunSection(Section):
    name: Annotated[
        str,
        matching(
            r"[A-Za-z0-9_][A-Za-z0-9._-]*",
            "consist of letters, digits and . _ -, and not begin with . or -",
        ),
    ] = Field(
        description="Name of the run directory: letters, digits, `._-`; dot and hyphen not first.",
        max_length=100,
    )
    dir: Annotated[str, matching(r"[^\x00]+", "be a path, without a null byte")] = Field(
        "runs", description="Directory in which run directories are created."
    )
    seed: Seed = Field(0, description="Seed of tasks, sampling and training.")
    steps: Count = Field(100, description="Training steps.")
    checkpoint_every: Count = Field(
        0, description="Steps between checkpoints; 0: checkpoint_s decides."
    )
    checkpoint_s: NotNegative = Field(
        30.0,
        description="Minimum seconds between checkpoints, each taken after a step; longer if "
        "writing one takes more than a twentieth of that. 0: none by time.",
    )
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        (), description="Metric sinks in addition to metrics.jsonl."
    )


class SandboxConfig(Section):
    """The sandboxes in which handlers run what their agents write."""

    backend: Literal["bubblewrap", "zygote", "apptainer", "plain"] | None = Field(
        None,
        description="Kind of sandbox (docs/SANDBOX.md); bubblewrap if unset. plain isolates "
        "nothing.",
    )
    warm: Count = Field(
        0,
        description="Number of started sandboxes of each kind that are kept ready for the next "
        "attempts.",
    )


class ServeConfig(Section):
    """`rollweave serve`: rollouts over HTTP."""

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on. The default accepts connections from this machine only.",
    )
    port: Annotated[int, Field(ge=0, le=65535, strict=True)] = Field(
        8300, description="Port to listen on; 0: any free port."
    )
    token_env: str | None = Field(
        None,
        description="Environment variable with the bearer token that requests must carry; if unset,"
        " a token is generated and kept.",
    )
    hosts: tuple[str, ...] = Field(
        (),
        description="Names, or name:port, by which clients call the service, in addition to "
        "localhost and its addresses.",
    )
    queue: Annotated[int, Field(ge=1, le=100_000, strict=True)] = Field(
        10_000, description="Maximum number of rollouts that wait to start; more are refused (429)."
    )
    queue_mb: PositiveInt = Field(
        1024,
        description="Maximum MiB of requests and tasks that are not done; more are refused (429).",
    )
    engines: Literal["local", "registered"] = Field(
        "local",
        description="local: [[engines]] on the model's checkpoint, and those that are registered; "
        "registered: only the latter.",
    )
    engine_hosts: tuple[str, ...] = Field(
        ("127.0.0.0/8", "::1", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"),
        description="Hosts of engines that clients may register: names, addresses, networks.",
    )
    keep: PositiveInt = Field(
        100_000, description="Number of the newest finished rollouts whose results are kept."
    )

    @model_validator(mode="after")
    def _hosts_are_hosts(self) -> Self:
        check_names(self.hosts, field="serve.hosts")
        Hosts.parse(self.engine_hosts, field="serve.engine_hosts")
        return self
