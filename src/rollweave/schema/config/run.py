"""The sections `[run]`, `[watchdog]`, `[sandbox]` and `[serve]`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rollweave.schema.address import Hosts
from rollweave.schema.config.values import (
    Count,
    Positive,
    Section,
    Seed,
    matching,
)

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
        "is more: those of engines, relays, rollout workers and the trainer, and of judges, "
        "teachers and rewards behind HTTP until they have answered.",
    )
    restarts: Count = Field(
        3,
        description="Maximum number of restarts of one engine, relay or rollout worker, or of "
        "the trainer.",
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


class ServeConfig(Section):
    """`rollweave serve`: rollouts over HTTP."""

    engines: Literal["local", "registered"] = Field(
        "local",
        description="local: [[engines]] on the model's checkpoint, and those that are registered; "
        "registered: only the latter.",
    )
    engine_hosts: tuple[str, ...] = Field(
        ("127.0.0.0/8", "::1", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"),
        description="Hosts of engines that clients may register: names, addresses, networks.",
    )

    @model_validator(mode="after")
    def _hosts_are_hosts(self) -> Self:
        Hosts.parse(self.engine_hosts, field="engine_hosts")
        return self
