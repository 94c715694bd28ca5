"""A world of relays whose fetches a test completes by hand."""

from rollweave.core.core import Core
from rollweave.core.mechanisms.relays.state import Fetch, Relay, Relays
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from tests.support.core import config


class Driver:
    """A core with `relays` hosts of one engine each, driven event by event."""

    device = "cpu"

    def __init__(self, relays: int, *, restarts: int = 3, delta: bool = True) -> None:
        run_config = config(
            "partial",
            engines={"count": relays},
            weights={"relays": relays},
            ablation={"changes": [] if delta else ["no_deltas"]},
            watchdog={"restarts": restarts},
            model={"path": "m", "device": self.device},
        )
        self.config, self.core, self.now, self.published = run_config, Core(run_config), 0.0, -1
        self.relays = relays
        self.send(self.begin())

    def begin(self) -> e.RunStarted:
        slots = tuple(
            e.EngineSlot(id=EngineId(f"e{number}"), host=number) for number in range(self.relays)
        )
        return e.RunStarted(engines=slots, relays=self.relays)

    def send(self, event: e.Event) -> list[c.Command]:
        out = self.core.handle(self.now, event)
        self.core.check()
        return out

    def up(self) -> "Driver":
        """Relays and trainer are ready, and the first weights are published. Engines
        are not ready.
        """
        for relay in list(self.chain.relays):
            self.send(e.RelayJoined(relay_id=relay, epoch=0))
        self.send(e.TrainerReady(epoch=0, step=0))
        return self

    def engines_up(self) -> list[c.Command]:
        return [
            command
            for engine in list(self.core.state.engines)
            for command in self.send(
                e.EngineJoined(engine_id=engine, epoch=0, max_slots=3, kv_total_tokens=9)
            )
        ]

    def publish(self) -> list[c.Command]:
        trainer, publication_id = (
            self.core.state.trainer,
            self.core.state.publication.next_id - 1,
        )
        return self.send(
            e.WeightsPublished(
                epoch=trainer.epoch, version=trainer.step, publication_id=publication_id
            )
        )

    def publish_again(self) -> list[c.Command]:
        """Lose the trainer and restart it: it publishes its version again, under a new
        id.
        """
        self.send(e.TrainerLost(epoch=self.core.state.trainer.epoch, error="killed"))
        self.send(e.TrainerReady(epoch=self.core.state.trainer.epoch, step=0))
        return self.publish()

    def hold(self, relay: str, publication_id: int) -> list[c.Command]:
        epoch = self.relay(relay).epoch
        return self.send(
            e.WeightsFetched(relay_id=relay, epoch=epoch, publication_id=publication_id)
        )

    def lose(self, relay: str) -> list[c.Command]:
        return self.send(e.RelayLost(relay_id=relay, epoch=self.relay(relay).epoch, error="killed"))

    def join(self, relay: str) -> list[c.Command]:
        return self.send(e.RelayJoined(relay_id=relay, epoch=self.relay(relay).epoch))

    def suspect(self, relay: str) -> list[c.Command]:
        return self.send(e.RelaySuspected(relay_id=relay, epoch=self.relay(relay).epoch))

    def recover(self, relay: str) -> list[c.Command]:
        return self.send(e.RelayRecovered(relay_id=relay, epoch=self.relay(relay).epoch))

    def stall(self, relay: str) -> list[c.Command]:
        fetch = self.fetch(relay)
        assert fetch.source is not None
        event = e.FetchStalled(
            relay_id=relay,
            epoch=self.relay(relay).epoch,
            publication_id=fetch.publication_id,
            source=fetch.source,
        )
        return self.send(event)

    def refuse(self, relay: str, reason: str) -> list[c.Command]:
        state = self.relay(relay)
        event = e.FetchFailed(
            relay_id=relay,
            epoch=state.epoch,
            publication_id=self.fetch(relay).publication_id,
            fetch_number=state.fetches,
            reason=reason,  # type: ignore[arg-type]
            error="no luck",
        )
        return self.send(event)

    def wait(self, seconds: float) -> list[c.Command]:
        self.now += seconds
        return self.send(e.TimerFired())

    @property
    def chain(self) -> Relays:
        return self.core.state.mechanisms["relays"]

    def relay(self, name: str) -> Relay:
        return self.chain.relays[name]

    def fetch(self, name: str) -> Fetch:
        fetch = self.relay(name).fetch
        assert fetch is not None, f"{name} fetches nothing"
        return fetch

    def source(self, name: str) -> str | None:
        return self.fetch(name).source
