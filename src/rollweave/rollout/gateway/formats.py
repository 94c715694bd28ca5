"""The form that a client demands of an answer: `response_format`, and the fields of
vLLM and SGLang that mean the same. Pure: grammars are compiled later, by another
process (`engine/matchers`).

Invariant: a form that cannot be constrained is refused by the name of its field;
nothing is sampled without the constraint that the client asked for.
"""

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollweave.engine.matchers import refused_text
from rollweave.rollout.gateway.refusals import bad
from rollweave.schema.serving import Constraint

ANY_OBJECT = '{"type": "object"}'
"""The schema of `json_object`."""

MAX_CHOICES = 1000
"""Maximum number of choices of one request."""

Schema = dict[str, Any] | bool


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Named(_Strict):
    name: str
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Named | None = None


Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_CHOICES)]


class _Structured(_Strict):
    """vLLM's `structured_outputs`."""

    json_: Schema | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None


class Formats(BaseModel):
    """The fields of a request that demand a form of its answer: OpenAI's, vLLM's,
    vLLM's former fields, SGLang's.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    response_format: ResponseFormat | None = None
    structured_outputs: _Structured | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    regex: str | None = None
    json_schema: str | None = None

    def constraint(self) -> tuple[Constraint | None, str]:
        """Return the constraint, if there is one, and its field. Raises RequestError
        for several constraints, and for a constraint that is too long.
        """
        wanted = self.response_format
        if wanted is not None and (wanted.type == "json_schema") is (wanted.json_schema is None):
            rule = f"must be given if, and only if, type is json_schema, and it is {wanted.type}"
            raise bad("response_format.json_schema", rule, wanted.json_schema)
        given = list(self._constraints())
        if not given:
            return None, ""
        field, constraint = given[0]
        if len(given) > 1:
            other, refused = given[1]
            raise bad(other, f"must be null where {field} is given", refused.text)
        return checked(field, constraint), field

    def _constraints(self) -> Iterator[tuple[str, Constraint]]:
        """Yield each constraint with the name of its field."""
        wanted, also = self.response_format, self.structured_outputs
        if wanted is not None and wanted.type == "json_object":
            yield "response_format", of_schema(ANY_OBJECT)
        if wanted is not None and wanted.json_schema is not None:
            schema = wanted.json_schema.schema_
            yield "response_format.json_schema.schema", of_schema({} if schema is None else schema)
        if also is not None:
            if also.json_ is not None:
                yield "structured_outputs.json", of_schema(also.json_)
            if also.json_object:
                yield "structured_outputs.json_object", of_schema(ANY_OBJECT)
            if also.regex is not None:
                yield "structured_outputs.regex", Constraint(kind="regex", text=also.regex)
            if also.choice:
                yield "structured_outputs.choice", _of_choices(also.choice)
        if self.guided_json is not None:
            yield "guided_json", of_schema(self.guided_json)
        if self.json_schema is not None:
            yield "json_schema", of_schema(self.json_schema)
        for name in ("guided_regex", "regex"):
            if (regex := getattr(self, name)) is not None:
                yield name, Constraint(kind="regex", text=regex)
        if self.guided_choice:
            yield "guided_choice", _of_choices(self.guided_choice)


def of_schema(schema: Schema | str) -> Constraint:
    """Return the constraint of a JSON schema, or of its text."""
    if schema is True:
        schema = {}
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Constraint(kind="json", text=text)


def checked(field: str, constraint: Constraint) -> Constraint:
    """Return the constraint. Raises RequestError if it is too long."""
    if why := refused_text(constraint):
        raise bad(field, why.removeprefix("it "), constraint.text)
    return constraint


def _of_choices(choices: list[str]) -> Constraint:
    return Constraint(kind="regex", text="|".join(map(re.escape, choices)))
