"""The exception hierarchy.

A failure is attributed once, where it happens. From there on it is data (`StopReason`,
`Blame`).
"""

from collections.abc import Sequence


class RollweaveError(Exception):
    """The base of all exceptions of this package."""


class Interrupted(KeyboardInterrupt):
    """The user ends the run while code blocks the event loop. No code may catch
    this.
    """


class ConfigError(RollweaveError, ValueError):
    """User input violates a rule.

    The message names field, rule and value; the CLI exits with code 2.
    """


class FieldError(ConfigError):
    """A field of the user's input must keep a rule, and does not.

    `rule` follows the word "must". `got` is the value, or "" if the rule describes the
    value.
    """

    def __init__(self, field: str, rule: str, got: object = "") -> None:
        super().__init__(field, rule, got)
        self.field, self.rule, self.got = field, rule, got

    def __str__(self) -> str:
        return f"{self.field} {self.problem}"

    @property
    def problem(self) -> str:
        """The rule and the value, without the field."""
        return f"must {self.rule}" + ("" if self.got == "" else f", got {self.got}")

    def of(self, field: str) -> "FieldError":
        """Return the error for another field, from which the user's value came."""
        return FieldError(field, self.rule, self.got)


class FieldErrors(ConfigError):
    """Several fields of the user's input break rules, one line each."""

    def __init__(self, errors: Sequence[FieldError]) -> None:
        super().__init__(errors)
        self.errors = errors

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors))


class EnvError(RollweaveError):
    """An environment raised, or returned something that is not an observation."""


class RewardError(RollweaveError):
    """A reward function raised, or returned something that is not a finite number."""


class EngineError(RollweaveError):
    """An engine refused a request or failed while serving it."""


class EngineLostError(EngineError):
    """The engine's process or connection is gone."""


class PagesError(EngineError):
    """There are not enough pages of memory, or the system refuses to map them."""


class HostError(RollweaveError):
    """A host cannot join a run, or is lost to it."""


class TrainerError(RollweaveError):
    """The trainer failed while executing a command."""


class NonFiniteLossError(TrainerError):
    """The loss or the gradient norm is NaN or infinite. The weights are as before the
    step.
    """


class WeightsError(RollweaveError):
    """Weights do not match their manifest. The receiver keeps the version that it
    had.
    """


class DeltaError(WeightsError):
    """A delta is torn, damaged, or based on other weights. Nothing was written."""


class KvError(RollweaveError):
    """The KV cannot be moved. Engines and their caches are unchanged."""


class CorruptJournalError(RollweaveError):
    """A file of the run is damaged before its torn tail.

    `problem` names the place, and `remedy` what the user can do.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem = problem


class DiskError(RollweaveError, OSError):
    """A file of the run cannot be written, for example because the disk is full.

    Everything written before is complete, and the run can be resumed.
    """

    def __str__(self) -> str:
        return str(self.strerror)


class WireError(RollweaveError):
    """A peer sent bytes that are not a valid frame."""


class SandboxError(RollweaveError):
    """A sandbox, or a tool in it, failed."""


class ImageError(SandboxError):
    """The image of a sandbox cannot be obtained: no source has it, its build failed, or
    the cache has no room for it. The agent is not to blame.
    """


class SandboxLostError(SandboxError):
    """The sandbox's process or connection is gone, or it violated the protocol. Nothing
    more comes from it.
    """


class SandboxSpoiledError(SandboxLostError):
    """The sandbox is unusable because of the code in it, for example because the code
    exceeded a limit or ended the sandbox's server.

    The agent is to blame, so another attempt would not help.
    """


class SandboxTimeoutError(SandboxError):
    """The sandbox did not answer in time. It may still be alive."""


class SandboxRefusedError(SandboxError):
    """The sandbox is healthy but rejected the request; the message names the rule."""
