"""Regressors of remaining lengths, by the names of `rollout.predictor`.

Their modules need scikit-learn or torch, and are imported when a regressor is built.
"""

from rollweave.core.policy.predict import Regressor
from rollweave.core.policy.scheduling import scheduling
from rollweave.io.extras import how_to_install, missing_from
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, FieldError

REGRESSORS = ("ridge", "boosted", "lm", "prompt", "history")


def check_installed(config: RunConfig | None = None) -> None:
    """Raise FieldError if lengths are predicted and a package for that is missing.

    A predictor survives regressors that fail, so that a missing package would only make
    its predictions worse. Without `config`, lengths are predicted in any case.
    """
    if config is not None and not scheduling(config.rollout, config.ablation).predicts:
        return
    if missing := missing_from("predict"):
        rule = f"have {missing[0]} installed ({how_to_install('predict')})"
        raise FieldError("rollout.predictor", rule, config.rollout.predictor if config else "")


def build_regressor(name: str, *, checkpoint: str | None = None) -> Regressor:
    """Build an untrained regressor.

    `checkpoint` is the directory of the language model with which `lm` reads plans.
    Raises ConfigError.
    """
    if name == "lm":
        if checkpoint is None:
            raise ConfigError(
                "rollout.predictor must not be lm without a checkpoint of a "
                "language model, got none"
            )
        from rollweave.train.lengths import small_lm

        return small_lm.SmallLm(checkpoint)
    if name not in REGRESSORS:
        raise ConfigError(f"rollout.predictor must be one of {', '.join(REGRESSORS)}, got {name!r}")
    from rollweave.train.lengths import regressors

    return regressors.BY_NAME[name]()
