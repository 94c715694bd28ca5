"""The exception tree. A failure is attributed once, where it happens; from there on it is data (`StopReason`, `Blame`)."""


class RollweaveError(Exception):
    """Base of all our exceptions."""


class ConfigError(RollweaveError, ValueError):
    """The user's input breaks a rule. The message names field, rule and value; the CLI exits with code 2."""


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
    """Loss or gradient norm is NaN or infinite; the weights were left as before the step."""


class WeightsError(RollweaveError):
    """Weights do not match their manifest; the receiver keeps the version it had."""


class DeltaError(WeightsError):
    """A delta is torn, damaged or made from another base; nothing was written."""


class KvError(RollweaveError):
    """KV cannot be moved; engines and their caches are as they were."""


class CorruptJournalError(RollweaveError):
    """A journal record before the tail does not match its checksum."""


class DiskError(RollweaveError, OSError):
    """The run's own files cannot be written: no space, say. What was written before is whole, and the run can be resumed."""

    def __str__(self) -> str:
        return str(self.strerror)


class WireError(RollweaveError):
    """A peer sent bytes that are not a frame of ours."""


class SandboxError(RollweaveError):
    """A sandbox, or a tool in it, failed."""


class SandboxLostError(SandboxError):
    """The sandbox's process or connection is gone, or sent what it never would: nothing more comes from it."""


class SandboxTimeoutError(SandboxError):
    """The sandbox did not answer in time. It may still be there."""


class SandboxRefusedError(SandboxError):
    """The sandbox is well but refused what was asked: the message names the rule."""
