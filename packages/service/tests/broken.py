"""An environment that fails in a configured method."""

from rollweave.envs.base import Episode, Observation, Options, Step
from rollweave.schema.work import Task


class Broken:
    def __init__(self, *, stage: str) -> None:
        self._stage = stage

    def reset(self, task: Task) -> Observation:
        self._break("reset")
        return Observation.of("go")

    def step(self, action: str) -> Step:
        self._break("step")
        return Step.of("over", reward=1.0, done=True)

    @classmethod
    def score(cls, episode: Episode, options: Options) -> float:
        if options["stage"] == "score":
            raise RuntimeError("broken on purpose")
        return 1.0

    def _break(self, stage: str) -> None:
        if stage == self._stage:
            raise RuntimeError("broken on purpose")
