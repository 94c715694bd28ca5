"""The core of a run: the kernel, and the mechanisms that its configuration uses.

THEORY OF OPERATION

`Core.handle(now, event)` changes the state of the run, and returns the commands that
follow. The core decides everything and does nothing: a world (`runtime/world` with
processes, `rollweave_sim` with cost models) executes the commands and reports what came
of them as further events. The core has no clock, no randomness and no I/O. So the same
events at the same times give the same commands: in a live run, in its replay from the
journal, and in simulation. The journal has each event, with a digest of its commands,
before a command is executed; after a crash the state is rebuilt from the last snapshot
and the events behind it, and one `WorldLost` ends what was in flight.

What happens in `handle` (`core/kernel`), in this order:

 1. Time. The seconds since the last event are charged to what engines and trainer did.
 2. Handlers. A table maps the kind of the event to functions: those of mechanisms,
    then the kernel's. A handler changes the records of its own sub-machine, emits
    commands (`run.emit`), and posts facts. Late and repeated events find a record in
    another attempt, epoch or dispatch, and are ignored.
 3. Facts. The only fact is that an attempt is over (`AttemptOver`). Whatever ends an
    attempt posts the fact, and `core/lifecycle` settles one fact after the other, until
    none is left: another attempt, or a gain or loss for the owner of the group. So no
    function is re-entered, and a module calls only modules that it stands above
    (`run`, `attempts`, the sub-machines, `lifecycle`, `kernel`, the lowest first).
 4. Steps. An event may have made something possible: `kernel.STEPS` asks each
    sub-machine in a fixed order, in which one step enables the next: end, drop, update
    weights, train, evaluate, launch, start, dispatch. Mechanisms insert steps of their
    own. A step that finds nothing to do costs a few comparisons. After the most
    frequent events, about turns, only dispatching is asked.

The records, and their life:

  group       drawn → active → (comparing) → buffered → taken → trained → covered
  attempt     QUEUED → INIT → RUN_QUEUED → RUN → EVAL_QUEUED → EVAL → SCORED
              (`attempts.LEGAL`; a queue is left at once if its stage has a place)
  turn        requested → queued → on an engine → done, or held while KV moves
  engine      STARTING → STALE → LOADING → SERVING → SUSPENDING → LOADING → …
              (`engines.LEGAL`; a STALE engine has no weights that it may serve)
  trainer     STARTING → IDLE ⇄ MEASURING, TRAINING → PUBLISHING → SAVING

One step in the life of a run, with the module that acts: a group is drawn (`groups`),
its attempts are launched (`trajectories`), turns are requested (`turns`) and given to
engines (`dispatching`), rewards come (`trajectories`), the group is complete and
buffered (`groups`), the trainer takes a batch (`training`), publishes its weights, and
engines load them (`weight_updates`). How far rollouts run ahead, and when engines
update, is one `Pacing` (`core/pacing`). `examples/one_step.py` drives these by hand.
The sub-machines ask pure functions for their decisions, most of them in `core/policy`:
`modes` says what may still be trained on, `routing` which engine gets a turn. Rewards
are computed by worlds (`rollout/reward_sources`), not here.

Mechanisms (`core/mechanisms`) are optional behaviors, without which a run trains, too:
each has its state (a part of the snapshot), handlers, steps, invariants and waits in a
room of its own, and the kernel imports none. Its hooks are fields of `run.Mechanism`:
`follows` names moves of records at which it is called (an attempt's new stage, a turn
that an engine gets or has answered, an engine that has joined or failed, a step that is
trained); `pacing`, `carrier`, `choose_engine` and `choose_worker` take the place of a
decision of the kernel; `waits` and `check` are for viewers and tests. Hooks of one move
run in the order of `mechanisms.MECHANISMS`, which is the order of their commands. What
a configuration does not use is not in its run: no field, no call. `membership` and
`suspects` are in every run, and act only when engines fail, join or leave.

Readers (`core/reading`) look at the state, and change nothing; the kernel imports none.

Deadlines are checked by a timer that the core sets itself (`SetTimer`): every wait has
an owner and a limit (`core/watchdog`). `Core.check` verifies all invariants, for tests.
"""

from collections.abc import Iterable, Iterator, Mapping

from rollweave.core.kernel import Kernel
from rollweave.core.mechanisms import MECHANISMS
from rollweave.core.policy.waiting import Wait
from rollweave.core.reading.checks import check
from rollweave.core.reading.status import Account, account, status
from rollweave.core.reading.waits import waits
from rollweave.schema.status import RunStatus


class Core(Kernel):
    """The state of one run. `restore(snapshot)` returns an equal core.

    `rules` are the user's functions that choose batches from the buffer, by the names
    that the configuration has for them.
    """

    mechanisms = MECHANISMS

    def status(self, now: float, waits: Iterable[Wait] = ()) -> RunStatus:
        """Return what works at time `now`, and what waits: `waits`, and others."""
        return status(self._run, now, waits)

    def waits(
        self, received: Mapping[str, tuple[int, int]], *, start_s: float = 0.0
    ) -> Iterator[Wait]:
        """Yield the waits for components, as `reading/waits` does."""
        return waits(self._run, received, start_s=start_s)

    def account(self) -> Account:
        """The account of all training trajectories."""
        return account(self._run.state)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken.

        For tests: it walks every table.
        """
        check(self._run)
