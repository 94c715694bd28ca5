"""Regressors of remaining lengths, by their names in `ablation.changes`.

Their module needs scikit-learn, and is imported when a regressor is built.
"""

from rollweave.core.policy.predict import Regressor
from rollweave.core.policy.scheduling import scheduling
from rollweave.io.extras import how_to_install, missing_from
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.run import PREDICTORS
from rollweave.schema.errors import ConfigError, FieldError


def check_installed(config: RunConfig | None = None) -> None:
    """Raise FieldError if lengths are predicted and a package for that is missing.

    A predictor survives regressors that fail, so that a missing package would only make
    its predictions worse. Without `config`, lengths are predicted in any case.
    """
    if config is not None and not scheduling(config.rollout, config.ablation).predicts:
        return
    if missing := missing_from("predict"):
        rule = f"have {missing[0]} installed ({how_to_install('predict')})"
        name = config.ablation.predictor if config is not None else PREDICTORS[0]
        raise FieldError("rollout.scheduling", rule, f"the predictor {name}")


def build_regressor(name: str, *, checkpoint: str | None = None) -> Regressor:
    """Build an untrained regressor.

    `checkpoint` is the directory of the language model with which `lm` reads texts.
    Raises ConfigError.
    """
    if name == "lm":
        if checkpoint is None:
            raise ConfigError(
                "ablation.changes must not have lm without a checkpoint of a "
                "language model, got none"
            )
        from rollweave.train.regressors import SmallLm

        return SmallLm(checkpoint)
    if name not in PREDICTORS:
        raise ConfigError(f"a predictor must be one of {', '.join(PREDICTORS)}, got {name!r}")
    from rollweave.train.regressors import BY_NAME

    return BY_NAME[name]()
