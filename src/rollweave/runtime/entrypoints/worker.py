"""The process of one rollout worker: `python -m rollweave.runtime.entrypoints.worker`,
started by `runtime/supervisors/workers.py`.
"""

import asyncio
import os
from pathlib import Path

from rollweave.envs.roles import VARIABLE as ROLES
from rollweave.envs.tasks import TaskSource
from rollweave.io.parent import Outbox, Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.rollout.worker import RolloutWorker
from rollweave.runtime.episodes import Episodes
from rollweave.runtime.loopwatch import COMPONENT, LoopWatch
from rollweave.runtime.pump import RunClock
from rollweave.runtime.tasks import TaskDrawer, Tasks, until_set
from rollweave.sandbox.provider import Peers
from rollweave.schema.base import as_json
from rollweave.schema.config.root import RunConfig
from rollweave.schema.images import GrantImage
from rollweave.schema.rollouts import (
    BEAT_S,
    RolloutWorkerCommand,
    StopRolloutWorker,
    WorkerBeat,
    WorkerReady,
    WorkerReport,
    WorkerSpec,
    WorkerWarned,
)


async def serve(parent: Parent, spec: WorkerSpec) -> None:
    """Serve until `StopRolloutWorker`, or the end of the parent."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    config = RunConfig.checked(spec.config)
    clock = RunClock()
    decode, outbox = decoder_of(RolloutWorkerCommand), Outbox(parent)

    def report(message: WorkerReport) -> None:
        outbox.send(encode(message))

    if spec.roles is not None:
        os.environ[ROLES] = as_json(spec.roles).decode()
    source = TaskSource(config, logs=Path(spec.logs))
    episodes = Episodes(
        config,
        Path(spec.model_dir),
        source,
        clock,
        run_id=spec.run_id,
        deployed=spec.deployed,
        peers=Peers(report=report, host=spec.host, address=spec.address),
    )

    def warn(component: str, message: str) -> None:
        report(WorkerWarned(component=f"{spec.id} {component}", message=message))

    def beat() -> None:
        report(WorkerBeat(images=episodes.image_waits(), services=episodes.service_waits()))

    def execute(message: RolloutWorkerCommand) -> None:
        if isinstance(message, StopRolloutWorker):
            stopped.set()
        elif isinstance(message, GrantImage):
            episodes.on_image_granted(message)
        else:
            worker.send(message)

    def on_frame(payload: bytes) -> None:
        loop.call_soon_threadsafe(execute, decode(payload))

    source.threads.on_abandoned = lambda text: warn("environment", text)
    watch = LoopWatch(
        on_blocked=lambda culprit: warn(COMPONENT, culprit.now),
        on_over=lambda culprit, seconds: warn(COMPONENT, culprit.later(seconds)),
    )
    try:
        with watch:
            async with Tasks() as tasks:
                worker = RolloutWorker(
                    make_episode=episodes.make,
                    report=report,
                    spawn=tasks.spawn,
                    clock=clock.now,
                    waiting_limit=spec.waiting_limit,
                    draw=TaskDrawer(source.draw, tasks=tasks, post=report).draw,
                    teacher=episodes.teacher,
                    rewards_of=episodes.rewards_of,
                )
                parent.listen(on_frame)
                report(WorkerReady(now=clock.now()))
                await until_set(stopped, BEAT_S, beat)
                tasks.cancel_all()
    finally:
        await episodes.close()
        await asyncio.to_thread(outbox.close)


def main() -> None:
    """Serve as the parent specifies."""
    parent = Parent.from_arguments()
    asyncio.run(serve(parent, decoder_of(WorkerSpec)(parent.receive())))


if __name__ == "__main__":
    main()
    os._exit(0)  # nothing outlives the process
