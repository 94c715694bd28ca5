"""Measured costs of an engine's steps: a profile, and the few prices fitted to it.

Invariant: a step with more work never costs less, however noisy the samples are.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from rollweave.schema.base import Struct
from rollweave.schema.errors import ConfigError
from rollweave_sim.cost import capped_slots, sum_of_line

Array = npt.NDArray[np.float64]


class Sample(Struct, frozen=True, kw_only=True):
    """One measured engine step, in the terms of `EngineCosts.step_s`."""

    prefill_tokens: int
    prefill_context: int
    decode: int
    decode_context: int
    seconds: float


class Profile(Struct, frozen=True, kw_only=True):
    """A measured engine: the file that `ProfileCost.from_json` reads.

    `subject` describes the measured engine for readers.
    """

    kv_tokens: int
    samples: tuple[Sample, ...]
    subject: str = ""


class ProfileCost:
    """Step times fitted to measured ones: a constant and a price for each of the four
    amounts, none negative.

    So a step with more work never costs less. The fit minimizes relative errors,
    because most of a run's steps are short. Raises ConfigError for samples that cannot
    be fitted.
    """

    kv_tokens: int

    def __init__(self, *, samples: Sequence[Sample], kv_tokens: int) -> None:
        if kv_tokens < 1:
            raise ConfigError(f"kv_tokens must be at least 1, got {kv_tokens}")
        for index, sample in enumerate(samples):
            _check(sample, index)
        for amount in ("prefill_tokens", "decode"):
            values = {getattr(sample, amount) for sample in samples}
            if len(values) < 2:
                raise ConfigError(
                    f"samples must have at least two different values of {amount}, "
                    f"got {sorted(values)}"
                )
        rows = [
            (1, s.prefill_tokens, s.prefill_context, s.decode, s.decode_context) for s in samples
        ]
        self.kv_tokens = kv_tokens
        self._fixed, *prices = _fit(rows, [s.seconds for s in samples])
        self._prefill_token, self._prefill_pair, self._decode_token, self._decode_pair = prices

    @classmethod
    def from_json(cls, path: str | Path) -> "ProfileCost":
        """Read a `Profile`. Raises ConfigError naming the file."""
        try:
            profile = msgspec.json.decode(Path(path).read_bytes(), type=Profile)
            return cls(samples=profile.samples, kv_tokens=profile.kv_tokens)
        except OSError as error:
            raise ConfigError(f"{path}: profile must be a readable file: {error}") from error
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{path}: profile must be JSON with kv_tokens and samples: {error}"
            ) from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def step_s(
        self, *, prefill_tokens: int, prefill_context: int, decode: int, decode_context: int
    ) -> float:
        """See `EngineCosts`."""
        prefill = prefill_tokens * self._prefill_token + prefill_context * self._prefill_pair
        return (
            self._fixed + prefill + decode * self._decode_token + decode_context * self._decode_pair
        )

    def move_s(self, tokens: int) -> float:
        """See `EngineCosts`.

        No profile has it; assumed is its useful maximum: the seconds of computing the
        tokens again.
        """
        return tokens * self._prefill_token

    def slots(self, *, context: int) -> int:
        """Return how many turns the engine should run at once, at contexts of so many
        tokens, as far as their KV fits (`core/policy/admission`).
        """
        return capped_slots(self, context=context, room=self.kv_tokens)

    def decode_s(self, *, decode: int, decode_context: int, steps: int) -> float:
        """See `EngineCosts`."""
        first = self._fixed + decode * self._decode_token + decode_context * self._decode_pair
        return sum_of_line((first, decode * self._decode_pair), 0, steps)


def _check(sample: Sample, index: int) -> None:
    for field in ("prefill_tokens", "prefill_context", "decode", "decode_context"):
        if getattr(sample, field) < 0:
            raise ConfigError(
                f"samples[{index}].{field} must be at least 0, got {getattr(sample, field)}"
            )
    if not (sample.seconds > 0 and math.isfinite(sample.seconds)):
        raise ConfigError(
            f"samples[{index}].seconds must be positive and finite, got {sample.seconds}"
        )


FIT_ROUNDS = 8
"""Rounds of weighting errors by the previous round's fit: the weights converge within a
few.
"""


def _fit(rows: Sequence[tuple[int, ...]], seconds: Sequence[float]) -> list[float]:
    """Return the nonnegative prices that minimize the errors of `rows @ prices` against
    `seconds`, relative to the fitted seconds.

    Errors relative to the measured seconds would weight a sample by chance, so that
    noisy samples would be fitted below their mean. Only the first round uses them.
    """
    amounts, measured = np.array(rows, dtype=np.float64), np.array(seconds)
    prices = _weighted_fit(amounts, measured, measured)
    for _ in range(FIT_ROUNDS):
        prices = _weighted_fit(amounts, measured, np.maximum(amounts @ prices, 1e-3 * measured))
    return [float(price) for price in prices]


def _weighted_fit(amounts: Array, measured: Array, scale: Array) -> Array:
    """Return the nonnegative prices with the least squared errors, each divided by its
    `scale`.

    The best fit is the plain least-squares fit of the columns that it uses, so with
    five columns all 32 choices are tried.
    """
    columns, relative = amounts / scale[:, None], measured / scale
    # comparable columns keep the least-squares fit exact
    widths = columns.max(axis=0) + (columns.max(axis=0) == 0)
    columns /= widths
    best, least = np.zeros(len(widths)), math.inf
    for used in itertools.product((False, True), repeat=len(widths)):
        prices = np.zeros(len(widths))
        prices[list(used)] = np.linalg.lstsq(columns[:, used], relative, rcond=None)[0]
        error = float(np.square(columns @ prices - relative).sum())
        if error < least and (prices >= 0).all():
            best, least = prices / widths, error
    return best
