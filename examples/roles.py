"""Judges that score answers, in processes of this machine or of the hosts of a cluster
(docs/ROLES.md).
"""

import sys

from rollweave import Cluster, Worker, WorkerError, register


class Judge(Worker):
    """Looks for a word in answers."""

    def __init__(self, word: str) -> None:
        self.word = word  # a model would be loaded here
        self.judged = 0

    @register(mode="execute_each", timeout_s=60)
    def score(self, answers: list[str]) -> list[float]:
        if not all(answers):
            raise ValueError("answers must not be empty")
        self.judged += len(answers)
        return [float(self.word in answer) for answer in answers]

    @register(mode="execute_all")
    def counted(self) -> tuple[int, int]:
        return self.rank, self.judged


def main(address: str | None) -> None:
    hosts = {"address": address, "hosts": 2} if address else None
    with Cluster(Judge, 2, arguments={"word": "blue"}, cluster=hosts) as judges:
        print(judges.score([["a blue sky", "a red one"], ["blue", "green"]]))
        try:
            judges.score([["blue"], [""]])
        except WorkerError as error:
            print(f"wrong: {error.failures[0].kind} on rank {error.failures[0].rank}")
        print(judges.counted())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
