"""The sections `[run]`, `[watchdog]` and `[sandbox]`; and `[ablation]`:
policies of the papers in place of ours, and mechanisms that can be left out.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rollweave.schema.config.values import (
    Count,
    Positive,
    Section,
    Seed,
    matching,
)
from rollweave.schema.errors import FieldError

START_S = 900.0
"""Seconds that every start may take: a server that compiles, or reads a large
checkpoint from a slow disk, takes minutes.
"""


class WatchdogConfig(Section):
    """Deadlines, in seconds. A wait that exceeds its deadline is logged by name, acted
    on and counted.
    """

    turn_s: Positive = Field(
        60.0,
        description="Maximum seconds of one turn on an engine, after which it is aborted and "
        "retried elsewhere.",
    )
    train_s: Positive = Field(
        600.0,
        description="Maximum seconds of one training step, measurement, publication or checkpoint. "
        "A tenth of it is the maximum of an engine that receives new weights, suspends, loads or "
        "resumes, and of a relay that fetches a version. Starts may take 900 s, or train_s if that "
        "is more: those of engines, relays, rollout workers, workers of roles and the trainer, "
        "and of judges, teachers and rewards behind HTTP until they have answered.",
    )
    restarts: Count = Field(
        3,
        description="Maximum number of restarts of one engine, relay or rollout worker, of the "
        "trainer, or, without an answered call in between, of a worker of a role.",
    )

    @property
    def start_s(self) -> float:
        """Maximum seconds until an engine with its server, a relay, a rollout worker or
        the trainer with its warm-up is ready, until functions of rewards are deployed,
        and until a judge, a teacher or the URL of a reward first answers. Other limits
        begin then.
        """
        return max(START_S, self.train_s)

    @property
    def weights_s(self) -> float:
        """Maximum seconds in which an engine receives new weights, suspends, loads or
        resumes, or a relay fetches a version.
        """
        return self.train_s / 10


class RunSection(Section):
    """The run: its name, its length and its checkpoints."""

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
    checkpoint_every: Count | None = Field(
        None,
        description="Steps between checkpoints, in addition to those by time: at least 30 s apart, "
        "and 20 times as long as writing one takes. Unset: by time alone; 0: none before the "
        "end.",
    )
    sinks: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = Field(
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
    mirror: (
        Annotated[
            str,
            matching(r"https?://[^\s/]+\S*|/[^\x00]*", "be http(s)://HOST/… or an absolute path"),
        ]
        | None
    ) = Field(
        None,
        description="Source of images that no host of the run has: an http or https URL, or a "
        "directory, which also receives the images that the run builds (docs/SANDBOX.md). Each "
        "host keeps images in rollweave/images in $XDG_CACHE_HOME, or in ~/.cache.",
    )


PRIORITIES = ("fcfs", "round_robin", "shortest_first", "longest_first")
PLACEMENTS = (
    "affinity",
    "earliest",
    "pinned",
    "least_load",
    "hybrid",
    "partition",
    "presorted",
)
MIGRATIONS = ("never", "rank", "gain")
PREDICTORS = ("ridge", "boosted", "lm", "policy", "prompt", "history")
"""The scheduling policies, by what they decide (core/policy/), and the predictors of
lengths (train/lengths/).
"""

PARTITIONS = ("partition", "presorted")
"""Placements that divide the trajectories among the engines by their length."""

POLICIES = {
    "turn": ("fcfs", "affinity", "never"),
    "trajectory": ("longest_first", "partition", "gain"),
    "heddle": ("longest_first", "presorted", "rank"),
}
"""Priority, placement and migration of each preset."""

MECHANISMS = (
    "free_stepping",
    "reward_overlap",
    "early_updates",
    "repack",
    "buffer_places",
    "mixed_groups",
    "deltas",
    "staging",
    "prefix_cache",
    "cuda_graphs",
)
"""Mechanisms of a run that can be left out."""

NO = "no_"
"""Prefix of the name of a mechanism in `ablation.changes`."""


class AblationConfig(Section):
    """Baselines and ablations. They exist for comparisons with the papers' baselines; a
    run for its own sake leaves them out.
    """

    changes: tuple[str, ...] = Field(
        (),
        description="Policies in place of those of rollout.scheduling, at most one of each kind. "
        "The order in which turns run: fcfs, round_robin, shortest_first, longest_first. "
        "The engine that runs a turn: affinity, earliest (the one on which the turn should finish "
        "first), pinned, least_load, hybrid; or the way in "
        "which trajectories are divided by length: partition by their work, presorted by "
        "Heddle's eq. 2. When a trajectory moves to the engine of its new rank: never, "
        "rank (whenever that engine differs), gain (if the predicted gain exceeds the "
        "exposed cost). The predictor of lengths: ridge, unless another one is given; boosted, lm "
        "(which reads prompts and first turns), policy (ridge with the model's own hidden states, "
        "which Rollweave's engine gives with each turn), "
        "and the baselines prompt and history. And mechanisms to do without: "
        "no_free_stepping (all environments wait for the "
        "slowest one before each turn), no_reward_overlap (rewards wait until the whole "
        "batch is rolled out), no_early_updates (mode bounded: engines take new weights when the "
        "next batch is complete, as in RollArt §6.2), no_repack (mode decoupled: the tail of an "
        "engine's batch stays), no_buffer_places (mode decoupled: engines start trajectories "
        "also where the buffer has no place left, and the stalest groups are evicted, as in "
        "Laminar), no_mixed_groups (mode decoupled: all members of a group begin under the "
        "weights of the first one, for which some wait), no_deltas (relays send whole "
        "weights), no_staging (engines stop while they receive new weights), no_prefix_cache "
        "(an engine forgets finished turns), "
        "no_cuda_graphs (an engine on a GPU launches the kernels of each decoding step).",
    )

    @model_validator(mode="after")
    def _one_of_each_kind(self) -> Self:
        policies = (*PRIORITIES, *PLACEMENTS, *MIGRATIONS, *PREDICTORS)
        known = [*policies, *(f"{NO}{name}" for name in MECHANISMS)]
        for name in self.changes:
            if name not in known:
                raise FieldError("changes", f"be among {', '.join(known)}", repr(name))
        for kind in (PRIORITIES, PLACEMENTS, MIGRATIONS, PREDICTORS):
            chosen = [name for name in self.changes if name in kind]
            if len(chosen) > 1:
                rule = f"have at most one of {', '.join(kind)}"
                raise FieldError("changes", rule, " and ".join(chosen))
        return self

    @property
    def without(self) -> tuple[str, ...]:
        """The mechanisms to do without."""
        return tuple(name.removeprefix(NO) for name in self.changes if name.startswith(NO))

    @property
    def priority(self) -> str | None:
        """The order of turns, if it is not the preset's."""
        return self._chosen(PRIORITIES)

    @property
    def placement(self) -> str | None:
        """The placement of turns, if it is not the preset's."""
        return self._chosen(PLACEMENTS)

    @property
    def migration(self) -> str | None:
        """The rule by which trajectories migrate, if it is not the preset's."""
        return self._chosen(MIGRATIONS)

    @property
    def predictor(self) -> str:
        """The predictor of lengths."""
        return self._chosen(PREDICTORS) or PREDICTORS[0]

    def _chosen(self, kind: tuple[str, ...]) -> str | None:
        return next((name for name in self.changes if name in kind), None)
