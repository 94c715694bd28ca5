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


def examples(thorough: int) -> int:
    """Scale a number of examples, stated for ``thorough``, to the loaded profile."""
    return max(1, thorough * settings.default.max_examples // THOROUGH)
