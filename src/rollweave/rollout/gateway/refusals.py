"""The errors that answer a client: every refusal names field, rule and value."""

from rollweave.io.http.fields import openai_error, shown
from rollweave.schema.errors import RollweaveError


class RequestError(RollweaveError):
    """The client's request cannot be fulfilled.

    The attributes are the HTTP status and the fields of OpenAI's error object.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, object]:
        """Return OpenAI's error object."""
        return openai_error(self.status, str(self), param=self.param, code=self.code)


class TooLongError(RequestError):
    """A prompt does not fit into the context. Each API has its own text for this error,
    by which agent programs know that they must shorten their conversation. `tokens` is
    the number of tokens of the prompt, or a lower bound of it; `limit` is the maximum.
    """

    def __init__(self, message: str, *, param: str, tokens: int, limit: int) -> None:
        super().__init__(400, message, param=param, code="context_length_exceeded")
        self.tokens, self.limit = tokens, limit


def bad(param: str, rule: str, value: object) -> RequestError:
    """Return the refusal of a field's value."""
    return RequestError(400, f"{shown(param)} {rule}, got {value!r:.80}", param=param)
