"""An environment lives as a handler through init, run and eval, and lets go of everything when it fails."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from rollweave.envs.base import Score
from rollweave.envs.handler import AgentHandler, EnvHandler, Stage
from rollweave.schema.chat import Message
from rollweave.schema.errors import EnvError

from .worlds import HERE, draw, episode, source


class Script:
    """An agent that says what it is told, and remembers what it heard."""

    def __init__(self, *words: str) -> None:
        self.words, self.heard, self.rewards = list(words), list[str](), list[float]()

    async def act(self, messages: Sequence[Message], *, state_key: str = "") -> str:
        self.heard += [message.content for message in messages]
        return self.words.pop(0)

    def reward(self, value: float) -> None:
        self.rewards.append(value)


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_an_environment_is_a_handler(tmp_path: Path, isolation: str) -> None:
    of = source(tmp_path, {"env": f"{HERE}Scored", "tag": "t", "isolation": isolation})
    task, agent = draw(of, "t"), Script("a", "end")
    handler: AgentHandler = EnvHandler(of.worlds("t"), seed=0)
    await handler.init(task)
    assert await handler.run(agent) is True
    assert agent.heard == [f"hello {task.seed}", "you said a"]
    assert agent.rewards == [0.25, 0.25]
    assert await handler.eval(episode(task, "x", success=True)) == Score(reward=0.75, success=True)
    assert handler.final_result() == {"steps": 2, "success": True}
    await of.close()


async def test_after_a_failure_nothing_is_held(tmp_path: Path) -> None:
    of = source(tmp_path, {"env": f"{HERE}Echo", "tag": "t", "isolation": "process"})
    handler = EnvHandler(of.worlds("t"), seed=0)
    await handler.init(draw(of, "t"))
    with pytest.raises(EnvError, match="lost key") as caught:
        await handler.run(Script("raise"))
    (worker,) = of.workers._alive
    await handler.on_error(Stage.RUN, caught.value)
    assert worker.lost
    await worker.gone()
    assert len(of.workers) == 0
    await handler.on_error(Stage.RUN, caught.value)
    await of.close()
