"""Hypothesis profiles: how many examples check a property, and from which seed.

``dev`` is the profile of ``make test``: a fifth of the examples, and the same ones in
every run. ``thorough`` is the profile of ``make test-slow``: all examples, drawn again
in each run.
"""

from hypothesis import settings

THOROUGH = 100
"""Examples of a property that states no number."""


def register_profiles() -> None:
    """Register both profiles and load ``dev``; ``--hypothesis-profile`` loads
    another.
    """
    settings.register_profile("dev", max_examples=THOROUGH // 5, derandomize=True, deadline=None)
    settings.register_profile("thorough", max_examples=THOROUGH, deadline=None)
    settings.load_profile("dev")


FAST_EVENTS = 10
"""Events of a random run from one check of all invariants to the next in the fast
suite. With a check after every third event, the checks take half of the time.
"""


def checked_every() -> int:
    """Return after how many events the loaded profile checks the invariants of a random
    run: every event if it is ``thorough``. Only ``dev`` derandomizes.
    """
    return FAST_EVENTS if settings.default.derandomize else 1


def examples(thorough: int) -> int:
    """Scale a number of examples, stated for ``thorough``, to the loaded profile."""
    return max(1, thorough * settings.default.max_examples // THOROUGH)
