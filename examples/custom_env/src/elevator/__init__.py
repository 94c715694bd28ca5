"""Take the elevator to the floor that called it: an example of a custom environment."""

import random

from rollweave import Message, Observation, Step

ACTIONS = {"<up>": 1, "<down>": -1, "<open>": 0}


class Elevator:
    """The agent reads ` at=2 call=above` and answers `<up>`, `<down>` or `<open>`.

    Opening ends it: right floor, reward 1.
    """

    def __init__(self, *, floors: int = 6):
        self.floors = floors

    def reset(self, task):
        rng = random.Random(task.seed)
        self.at, self.call = rng.randint(1, self.floors), rng.randint(1, self.floors)
        return Observation.of(self.look(), state_key=self.look())

    def step(self, action):
        move = ACTIONS.get(action.strip())
        if move == 0:
            right = self.at == self.call
            return Step.of(
                " hello" if right else " nobody", reward=float(right), done=True, success=right
            )
        if move is not None:
            self.at = min(max(self.at + move, 1), self.floors)
        return Step.of(self.look(), reward=-0.1 if move is None else 0.0, state_key=self.look())

    def look(self):
        where = "above" if self.call > self.at else "below" if self.call < self.at else "here"
        return f" at={self.at} call={where}"

    # The rest is for models that start from random weights: the words of their
    # tokenizer, and the format of a turn.

    @classmethod
    def words(cls, options):
        floors = range(1, cls(**options).floors + 1)
        calls = [f" call={where}" for where in ("above", "below", "here")]
        return [*ACTIONS, *calls, " hello", " nobody", *(f" at={floor}" for floor in floors)]

    @classmethod
    def transcript(cls, rng, options):
        """Show random actions: the format of a turn, no strategy."""
        env = cls(**options)
        env.at, env.call = rng.randint(1, env.floors), rng.randint(1, env.floors)
        messages = [Message(role="user", content=env.look())]
        for _ in range(8):
            action = rng.choice(list(ACTIONS))
            step = env.step(action)
            messages += [Message(role="assistant", content=action), *step.messages]
            if step.done:
                break
        return messages
