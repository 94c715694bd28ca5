"""The sections `[[rewards]]` and their judges."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rollweave.schema.address import parse_url
from rollweave.schema.config.values import Finite, Positive, Section, Variable, listed, matching
from rollweave.schema.errors import FieldError

RUBRIC_FILES = (".md", ".txt")
"""Ends of a rubric that is the path of a file."""


UNIT_SCALE = (0.0, 1.0)
"""Scale of a judge that names none, and of a share of wins."""


class JudgeConfig(Section):
    """A model that grades trajectories, behind the `url` of the reward: any endpoint
    with OpenAI's chat completions.
    """

    model: str = Field(min_length=1, description="Its name at the endpoint.")
    rubric: str = Field(
        min_length=1,
        description="What it grades by: text, or the path of a file that ends in .md or .txt.",
    )
    reference: str | None = Field(
        None,
        description="Key of the task's payload under which its reference answer is, which the "
        "judge is shown, too.",
    )
    scale: tuple[Finite, Finite] = Field(
        UNIT_SCALE, description="Lowest and highest grade; the grade is the reward."
    )
    pairwise: bool = Field(
        False,
        description="Compare members of a group with each other; the reward is a member's share "
        "of wins.",
    )
    request: dict[str, Any] = Field(
        default_factory=dict,
        description="More fields of the request, such as max_tokens or reasoning_effort.",
    )

    @property
    def has_file(self) -> bool:
        """True if the rubric is the path of a file, not text."""
        return self.rubric.endswith(RUBRIC_FILES) and "\n" not in self.rubric

    @model_validator(mode="after")
    def _is_a_scale(self) -> Self:
        if not self.scale[0] < self.scale[1]:
            rule = "have a lower end below the upper one"
            raise FieldError("scale", rule, list(self.scale))
        return self


ENV_REWARD = "env"
"""Name of the reward of the environment or handler among the components of a
reward.
"""


class RewardConfig(Section):
    """A reward that is added to that of the environment, computed by a function of the
    user's, a URL, or a judge (`docs/REWARDS.md`).
    """

    name: Annotated[
        str, matching(r"[A-Za-z0-9_][A-Za-z0-9_-]*", "consist of letters, digits, _ and -")
    ] = Field(description="Its name in metrics, traces and errors.", max_length=100)
    weight: Finite = Field(1.0, description="Its weight in the sum of all rewards.")
    tasks: Annotated[tuple[str, ...], BeforeValidator(listed)] = Field(
        (), description="Task domains to which it applies; all if empty."
    )
    run: Literal["serverless"] | None = Field(
        None,
        description="serverless: behind its URL, or for a function by Ray Serve, which the run "
        "deploys it on. If unset, a function runs where the run evaluates its attempts.",
    )
    function: str | None = Field(
        None, description="The user's function, package.module:name (docs/REWARDS.md)."
    )
    url: str | None = Field(
        None,
        description="URL of an HTTP function that takes JSON and answers with the reward, or base "
        "URL of a judge's API, such as https://HOST/v1.",
    )
    judge: JudgeConfig | None = None
    token_env: Variable | None = Field(
        None, description="Environment variable with the bearer token of the URL."
    )
    timeout_s: Positive = Field(
        120.0,
        description="Maximum seconds for one reward, with all retries; then the attempt has no "
        "reward.",
    )

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        return None if url is None else parse_url(url)

    @property
    def deployed(self) -> bool:
        """True if it is a function that the run deploys on Ray Serve."""
        return self.run == "serverless" and self.function is not None

    @property
    def pairwise(self) -> bool:
        """True if it compares members of a group with each other."""
        return self.judge is not None and self.judge.pairwise

    @property
    def kind(self) -> Literal["function", "url", "judge"]:
        """The kind of source that computes the reward."""
        if self.function is not None:
            return "function"
        return "url" if self.judge is None else "judge"

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = [kind for kind in ("function", "url") if getattr(self, kind) is not None]
        if len(kinds) != 1:
            rule = "have exactly one of function and url"
            raise FieldError("", rule, " and ".join(kinds) or "neither")
        if self.judge is not None and self.url is None:
            raise FieldError("judge", "be left out with a function", "a section")
        if self.name == ENV_REWARD:
            rule = f"not be {ENV_REWARD}, the name of the environment's own reward"
            raise FieldError("name", rule, repr(self.name))
        return self
