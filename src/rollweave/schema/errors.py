"""The exception tree.

A failure is attributed once, where it happens; from there on it is data (`StopReason`,
`Blame`).
"""


class RollweaveError(Exception):
    """Base of all our exceptions."""


class Interrupted(KeyboardInterrupt):
    """The user ends the run while code blocks the event loop, so that the run cannot
    react. Nothing may catch this.
    """


class ConfigError(RollweaveError, ValueError):
    """The user's input breaks a rule.

    The message names field, rule and value; the CLI exits with code 2.
    """


class EnvError(RollweaveError):
    """An environment raised, or returned something that is not an observation."""


class RewardError(RollweaveError):
    """A reward function raised, or returned something that is not a finite number."""


class EngineError(RollweaveError):
    """An engine refused a request or failed while serving it."""


class EngineLostError(EngineError):
    """The engine's process or connection is gone."""


class TrainerError(RollweaveError):
    """The trainer failed while executing a command."""


class NonFiniteLossError(TrainerError):
    """Loss or gradient norm is NaN or infinite; the weights were left as before the
    step.
    """


class WeightsError(RollweaveError):
    """Weights do not match their manifest; the receiver keeps the version it had."""


class DeltaError(WeightsError):
    """A delta is torn, damaged or made from another base; nothing was written."""


class KvError(RollweaveError):
    """KV cannot be moved; engines and their caches are as they were."""


class CorruptJournalError(RollweaveError):
    """One of the run's files is damaged before its torn tail.

    `problem` says where, `remedy` what a user can do.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem = problem


class DiskError(RollweaveError, OSError):
    """The run's own files cannot be written: no space, say.

    What was written before is whole, and the run can be resumed.
    """

    def __str__(self) -> str:
        return str(self.strerror)


class WireError(RollweaveError):
    """A peer sent bytes that are not a frame of ours."""


class SandboxError(RollweaveError):
    """A sandbox, or a tool in it, failed."""


class SandboxLostError(SandboxError):
    """The sandbox's process or connection is gone, or sent what it never would: nothing
    more comes from it.
    """


class SandboxSpoiledError(SandboxLostError):
    """The sandbox is unusable because of the code in it, which exceeded a limit or
    ended its server, for example.

    The agent is to blame, so another attempt would not help.
    """


class SandboxTimeoutError(SandboxError):
    """The sandbox did not answer in time. It may still be there."""


class SandboxRefusedError(SandboxError):
    """The sandbox is well but refused what was asked: the message names the rule."""
