"""The reasons for which a service refuses a request, whichever API received it.

`status` is the HTTP status.
"""

from rollweave.schema.errors import RollweaveError


class RefusedError(RollweaveError):
    """The service refuses a request."""

    status = 400


class UnknownError(RefusedError):
    """No such rollout, handler or engine exists."""

    status = 404


class ConflictError(RefusedError):
    """Another request already uses the id, or the engine must not be withdrawn."""

    status = 409


class GoneError(RefusedError):
    """The result existed, but can no longer be read."""

    status = 410


class TooLargeError(RefusedError):
    """One request exceeds a size limit."""

    status = 413


class FullError(RefusedError):
    """The queue, or the list of registered engines, is full."""

    status = 429


class ClosedError(RefusedError):
    """The service is shutting down."""

    status = 503
