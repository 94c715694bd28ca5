"""The reasons for which a service refuses a request, whichever API received it."""

from rollweave.schema.errors import RollweaveError


class RefusedError(RollweaveError):
    """The service refuses a request."""


class UnknownError(RefusedError):
    """No such rollout, handler or engine exists."""


class ConflictError(RefusedError):
    """Another request already uses the id, or the engine must not be withdrawn."""


class TooLargeError(RefusedError):
    """One request exceeds a size limit."""


class FullError(RefusedError):
    """The queue, or the list of registered engines, is full."""


class GoneError(RefusedError):
    """The result existed, but can no longer be read."""


class ClosedError(RefusedError):
    """The service is shutting down."""
