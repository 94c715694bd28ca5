"""One training step, driven by hand: `python examples/one_step.py`.

The core decides, a world acts. Here the world is `answer`: it does what each command
says in no time at all, and reports it with an event. A real world does the same with
engines, environments and a trainer (`rollweave/runtime/world.py`).
"""

from rollweave.core.core import Core
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, TaskId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import StopReason, Task

CONFIG = {
    "run": {"name": "one-step", "steps": 1},
    "model": {"scratch": {}},
    "tasks": [{"env": "frozenlake"}],
    "rollout": {"mode": "sync", "groups_per_step": 1, "group_size": 2, "max_running": 2},
    "engines": [{"count": 1}],
    "eval": {"final_episodes": 0},
}

ENGINE = EngineId("e0")
BEGINNING: list[e.Event] = [  # an engine and the trainer have started
    e.RunStarted(engines=(e.EngineSlot(id=ENGINE),)),
    e.EngineJoined(engine_id=ENGINE, epoch=0, max_slots=2, kv_total_tokens=1000),
    e.TrainerReady(epoch=0, step=0),
]


def answer(command: c.Command) -> list[e.Event]:
    """Return what a world reports once it has executed the command."""
    match command:
        case c.DrawTask():  # a group is drawn: attempts at the same task
            task = Task(id=TaskId("lake-7"), env=command.name, seed=7)
            return [e.GroupSubmitted(group_id=command.group_id, task=task)]
        case c.StartInit(trajectory_id=name, attempt=attempt):  # its environment starts
            return [e.EnvReady(trajectory_id=name, attempt=attempt, prompt_tokens=20)]
        case c.StartRun(trajectory_id=name, attempt=attempt):  # the agent wants a turn
            request = {"trajectory_id": name, "attempt": attempt, "turn": 0}
            return [e.TurnRequested(**request, context_tokens=20)]
        case c.StartTurn(trajectory_id=name, attempt=attempt):  # the engine samples it
            turn = {"trajectory_id": name, "attempt": attempt, "turn": 0}
            tokens = {"output_tokens": 5, "cached_tokens": 0, "version": 0}
            ended = {"stop_reason": StopReason.FINISHED, "turns": 1, "tokens": 25}
            return [
                e.TurnDone(**turn, dispatch=command.dispatch, **tokens),
                e.TrajectoryEnded(trajectory_id=name, attempt=attempt, **ended),
            ]
        case c.StartEval(trajectory_id=name, attempt=attempt):  # its reward is computed
            return [e.RewardReady(trajectory_id=name, attempt=attempt, reward=float(name[-1]))]
        case c.TrainStep():  # the group is complete, and the trainer has its batch
            return [e.StepTrained(epoch=0, step=command.step, part=command.part)]
        case c.PublishWeights(version=version, publication_id=number):
            return [e.WeightsPublished(epoch=0, version=version, publication_id=number)]
        case c.SuspendEngine():
            return [e.EngineSuspended(engine_id=command.engine_id, epoch=0)]
        case c.LoadWeights(engine_id=engine, version=version, publication_id=number):
            loaded = {"engine_id": engine, "publication_id": number, "version": version}
            return [e.WeightsLoaded(epoch=0, **loaded)]
        case c.SaveCheckpoint():
            return [e.CheckpointSaved(epoch=0, step=command.step)]
        case _:
            return []  # a timer that never fires, what is evicted, the end


def main() -> None:
    core = Core(RunConfig.model_validate(CONFIG))
    inbox = list(BEGINNING)
    for event in inbox:  # which grows
        commands = core.handle(0.0, event)
        print(f"{type(event).__name__:17} → {', '.join(type(one).__name__ for one in commands)}")
        inbox.extend(reply for command in commands for reply in answer(command))
    print(core.account())


if __name__ == "__main__":
    main()
