"""Judges that score answers, in processes of their own (docs/ROLES.md): as a role of a
run, `rollweave train roles.toml`, or of this program, `python roles.py`.
"""

import sys
from collections.abc import Sequence

from rollweave import Cluster, Message, Task, Worker, WorkerError, register, role


class Judge(Worker):
    """Looks for a word in answers."""

    def __init__(self, word: str) -> None:
        self.word = word  # a model would be loaded here
        self.judged = 0

    @register(mode="execute_one", timeout_s=60)
    def score(self, answers: list[str]) -> list[float]:
        if not all(answers):
            raise ValueError("answers must not be empty")
        self.judged += len(answers)
        return [float(self.word in answer) for answer in answers]

    @register(mode="execute_all")
    def counted(self) -> tuple[int, int]:
        return self.rank, self.judged


def judged(conversation: Sequence[Message], task: Task, reward: float) -> float:
    """Reward the share of the agent's moves that the judges of the run like."""
    moves = [message.content for message in conversation if message.role == "assistant"]
    scores = role("judge").score([move or "nothing" for move in moves])
    return sum(scores) / max(1, len(moves))


def main(address: str | None) -> None:
    hosts = {"address": address, "hosts": 2} if address else None
    with Cluster(Judge, 2, arguments={"word": "blue"}, cluster=hosts) as judges:
        print(judges.score(["a blue sky", "a red one"]))
        try:
            judges.score(["blue", ""])
        except WorkerError as error:
            print(f"wrong: {error.failures[0].kind} on rank {error.failures[0].rank}")
        print(judges.counted())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
