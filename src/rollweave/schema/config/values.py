"""The kinds of values that settings have, and the base of all sections."""

import re
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from rollweave.schema.serving import COLDEST

# Strict: `true` is no number, nor is a number in quotes. Whole numbers pass as floats.
Flag = Annotated[bool, Field(strict=True)]
# Whole numbers fit into 64 bits, as journals and messages require.
PositiveInt = Annotated[int, Field(ge=1, lt=2**63, strict=True)]
Count = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
# More would leave no memory for their names alone.
MAX_PROCESSES = 100_000
Processes = Annotated[PositiveInt, Field(le=MAX_PROCESSES)]
Many = Annotated[PositiveInt, Field(le=10 * MAX_PROCESSES)]  # of groups, or of their members
Spare = Annotated[Count, Field(le=10 * MAX_PROCESSES)]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]  # torch takes no larger one
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Finite = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(ge=0, le=1, strict=True)]


def _warm(temperature: float) -> float:
    if 0 < temperature < COLDEST:
        rule = "be at least {coldest}, or 0 where that is allowed"
        raise PydanticCustomError("rule", rule, {"coldest": COLDEST})
    return temperature


WARM = AfterValidator(_warm)
"""A rule of temperatures: by a smaller one, logits overflow."""


FORMS = ("(number)", "(table)")
"""Tags of the forms of a setting that is a number or a table. They are no keys."""


def form(given: Any) -> str:
    """Return the tag of the form in which such a setting is given."""
    return FORMS[isinstance(given, dict)]


def matching(pattern: str, rule: str) -> AfterValidator:
    """Require text to match the whole `pattern`; otherwise the error says that the
    field must `rule`.
    """

    def check(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise PydanticCustomError("rule", rule)
        return value

    return AfterValidator(check)


def either(rule: str) -> WrapValidator:
    """Give a setting that is a number or a word one error, which says that it must
    `rule`, in place of an error for each of the two.
    """

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("rule", rule) from None

    return WrapValidator(check)


Variable = Annotated[str, matching(r"[A-Za-z_]\w*", "be the name of an environment variable")]


def listed(given: Any) -> Any:
    """Return a list of one name for a name alone."""
    return (given,) if isinstance(given, str) else given


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
