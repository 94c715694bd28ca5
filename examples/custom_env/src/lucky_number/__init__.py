"""Find the number with as few questions as you can: an environment of one's own."""

import random

from rollweave.envs.base import Message, Observation, Step


class LuckyNumber:
    """The agent says `<5>` and is told ` higher` or ` lower`, until it says the number."""

    def __init__(self, *, largest: int = 9):
        self.largest = largest

    def reset(self, task):
        self.number = random.Random(task.seed).randint(1, self.largest)
        return Observation.of(" guess")

    def step(self, action):
        guess = action.strip().strip("<>")
        if not (guess.isascii() and guess.isdigit()):
            return Step.of(" what?", reward=-0.1)
        if int(guess) == self.number:
            return Step.of(" yes", reward=1.0, done=True, success=True)
        return Step.of(" higher" if int(guess) < self.number else " lower")

    # The rest serves a model that starts from random weights: the words of its tokenizer, and how a turn looks.

    @classmethod
    def words(cls, options):
        numbers = range(1, options.get("largest", 9) + 1)
        return [" guess", " what?", " yes", " higher", " lower", *(f"<{number}>" for number in numbers)]

    @classmethod
    def transcript(cls, rng, options):
        """Random guesses: the format of a turn, no strategy."""
        secret = rng.randint(1, options.get("largest", 9))
        said = [Message(role="user", content=" guess")]
        for _ in range(4):
            guess = rng.randint(1, options.get("largest", 9))
            answer = " yes" if guess == secret else " higher" if guess < secret else " lower"
            said += [Message(role="assistant", content=f"<{guess}>"), Message(role="user", content=answer)]
            if guess == secret:
                break
        return said
