"""Access to the world of a service, for those parts that exist before the world
does.
"""

from collections.abc import Callable

from rollweave.core.state import State
from rollweave.runtime.live_world import ServiceWorld
from rollweave.schema.events import Event


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
