"""The share of a search that is done, by the training steps that its trials simulate.

Invariant: the share never falls, and is at most one.
"""


class Effort:
    """The simulated steps of a search: those that are done, those of the round under
    way, and an estimate for the rounds after it.
    """

    def __init__(self) -> None:
        self._done, self._open, self._later, self._share = 0, 0, 0, 0.0

    def round(self, steps: int, *, later: int) -> None:
        """Begin a round of trials with `steps` steps in all; the rounds after it have
        about `later`.
        """
        self._open, self._later = steps, later

    def trial(self, steps: int) -> None:
        """Count a trial of the round that ended."""
        self._done += steps
        self._open -= steps

    @property
    def share(self) -> float:
        """The share of all steps that is done, from 0 to 1."""
        everything = self._done + self._open + self._later
        self._share = max(self._share, self._done / everything if everything else 0.0)
        return self._share
