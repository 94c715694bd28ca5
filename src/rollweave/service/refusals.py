"""Why the service does not do what it was asked for, whichever door it was asked at."""

from rollweave.schema.errors import RollweaveError


class RefusedError(RollweaveError):
    """The service does not do what it was asked for."""


class UnknownError(RefusedError):
    """There is no such rollout, handler or engine."""


class ConflictError(RefusedError):
    """The id is taken by another request."""


class TooLargeError(RefusedError):
    """One request asks for more than it may."""


class FullError(RefusedError):
    """As many rollouts wait as may."""


class GoneError(RefusedError):
    """What it came to was there, and cannot be read any more."""


class ClosedError(RefusedError):
    """The service is ending."""
