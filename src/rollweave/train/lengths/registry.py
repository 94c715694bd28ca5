"""Regressors by the names of `rollout.predictor`.

What a regressor needs is imported when it is built.
"""

from rollweave.core.policy.predict import Regressor
from rollweave.schema.errors import ConfigError

NAMES = ("ridge", "boosted", "lm", "prompt", "history")


def build(name: str, *, checkpoint: str | None = None) -> Regressor:
    """A fresh regressor.

    `checkpoint` is the directory of the language model that `lm` reads plans with.
    Raises ConfigError.
    """
    if name == "lm":
        if checkpoint is None:
            raise ConfigError(
                "rollout.predictor must not be lm where there is no checkpoint of a "
                "language model, got none"
            )
        from rollweave.train.lengths import small_lm

        return small_lm.SmallLm(checkpoint)
    if name not in NAMES:
        raise ConfigError(f"rollout.predictor must be one of {', '.join(NAMES)}, got {name!r}")
    from rollweave.train.lengths import regressors

    return regressors.BY_NAME[name]()
