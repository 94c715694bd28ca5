"""The common ground of a service's parts: the reasons for which a request is refused,
whichever API received it, and the service's world.
"""

from collections.abc import Callable

from rollweave.core.state import State
from rollweave.schema.errors import RollweaveError
from rollweave.schema.events import Event
from rollweave_service.world import ServiceWorld


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


class WorldPort:
    """Posts events to a world and reads its state. `world` must be set before use."""

    def __init__(self) -> None:
        self.world: ServiceWorld | None = None
        self.closed = False
        """True if the service refuses new requests."""

    @property
    def state(self) -> State:
        return self._attached.core.state

    def post(self, event: Event, on_handled: Callable[[], None] | None = None) -> None:
        """Post an event to the core; `on_handled` is called once the core has handled
        it.
        """
        self._attached.pump.post(event, on_handled)

    def stop(self, *, drain: bool) -> None:
        """Refuse new requests, and end the world: after the accepted rollouts are done
        (`drain`), or at once.
        """
        self.closed = True
        self._attached.stop(drain=drain)

    @property
    def _attached(self) -> ServiceWorld:
        assert self.world is not None, "the world is attached first"
        return self.world
