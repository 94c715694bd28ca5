"""Statements of the papers about workloads, each as a named constraint on a quantity of
a family of tasks, and their form in a file.

Invariants: a constraint bounds one quantity, which is a linear form of statistics of
trajectories, or the quotient of two such forms with a positive divisor. So all
constraints of a family together are a linear program (`constraint_solver.py`).
"""

import difflib
import functools
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from rollweave.schema.base import Struct
from rollweave.schema.errors import ConfigError
from rollweave_sim.cost import EngineCost
from rollweave_sim.families import FAMILIES
from rollweave_sim.hardware import gpu, model

STATED = Path(__file__).with_name("constraints.toml")
"""The statements of the five papers."""

USERS = {"users-7b": "qwen2.5-7b", "users-32b": "qwen2.5-32b", "users-8b": "qwen3-8b"}
"""Users of a serving cluster, whose rate of requests is their only free number, and
their model.
"""

CONTEXT = 4096
"""Tokens of each context in a decoding step of a batch. Our choice."""

Form = Mapping[str, float]
"""A linear form: coefficients by statistics. The statistic "1" is the constant."""

ONE: Form = MappingProxyType({"1": 1.0})


class Quantity(Struct, frozen=True, kw_only=True):
    """`above` over `per`. With `of`, statistics whose names end with `@` are those of a
    batch of so many trajectories, and with `speed`, `above` is multiplied with the
    seconds of a decoding step.
    """

    above: Form
    per: Form = ONE
    unit: str = ""
    of: bool = False
    speed: bool = False


def _plain(unit: str, *names: str, of: bool = False) -> dict[str, Quantity]:
    return {
        name: Quantity(above={f"{name}@" if of else name: 1.0}, unit=unit, of=of) for name in names
    }


_PREFILLED: Form = {"prompt.mean": 1.0, "observed.mean": 1.0}
_ALL_TOKENS: Form = {**_PREFILLED, "sampled.mean": 1.0}
_LONGEST: Form = {"response.longest@": 1.0}

QUANTITIES: dict[str, Quantity] = {
    **_plain("turns", "turns.least", "turns.mean", "turns.most"),
    **_plain("tokens", "prompt.mean", "prompt.cap", "sampled.mean", "observed.mean"),
    **_plain("tokens", "response.mean", "response.p50", "response.p75", "response.p99"),
    **_plain("tokens", "response.cap", "context.cap"),
    **_plain("tokens", "response.longest", "sampled.longest", of=True),
    **_plain("turns", "turns.longest", of=True),
    **_plain("s", "env_s.mean", "env_s.p50", "env_s.cap", "reward_s.mean", "reward_s.cap"),
    **_plain("s", "init_s.mean", "init_s.cap", "hang_s", "judge_s.mean"),
    **_plain("s", "init_s.slowest", of=True),
    **_plain("", "init.fails", "init.hangs", "init.late", "groups.varied"),
    **_plain("1/s", "requests.rate"),
    **_plain("s", "ttft_s.p99"),
    **_plain("", "serving.share"),
    "context.mean": Quantity(above=_ALL_TOKENS, unit="tokens"),
    "output.mean": Quantity(above={"sampled.mean": 1.0}, per={"turns.mean": 1.0}, unit="tokens"),
    "observation.mean": Quantity(
        above={"observed.mean": 1.0}, per={"turns.mean": 1.0}, unit="tokens"
    ),
    "prefill.share": Quantity(above=_PREFILLED, per=_ALL_TOKENS),
    "response.spread": Quantity(above={"response.p99": 1.0}, per={"response.p50": 1.0}),
    "response.longest_over_mean": Quantity(above=_LONGEST, per={"response.mean": 1.0}, of=True),
    "response.mean_over_longest": Quantity(above={"response.mean": 1.0}, per=_LONGEST, of=True),
    "response.p75_over_longest": Quantity(above={"response.p75": 1.0}, per=_LONGEST, of=True),
    "turns.longest_over_mean": Quantity(
        above={"turns.longest@": 1.0}, per={"turns.mean": 1.0}, of=True
    ),
    "decode_s.longest": Quantity(above={"sampled.longest@": 1.0}, unit="s", of=True, speed=True),
    "turn_decode_s.mean": Quantity(
        above={"sampled.mean": 1.0}, per={"turns.mean": 1.0}, unit="s", speed=True
    ),
}
"""Quantities by name. Lengths are those of trajectories that end, after all caps:
`sampled` and `observed` are the tokens of all turns of one, `response` both, `context`
these and the prompt, and `output` and `observation` those of a turn. `.cap` is a limit,
`.longest` and `.slowest` the mean over batches of the longest or slowest of a batch.
`response.spread` is the 99th percentile over the median. `init.late` is the share of
resets of more than a minute, `hang_s` the seconds of one that hangs, `judge_s` those of
a model's verdict, and `groups.varied` the share of groups with both rewards.
`decode_s.longest` are the seconds of decoding the longest of a batch, and
`turn_decode_s` those of a turn, at the speed of a stated model and batch.
"""

RATES = ("requests.rate", "ttft_s.p99", "serving.share")
"""Quantities of users; all others are those of families of tasks."""


class Constraint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A statement of a paper: `quantity` of each of `families` is at least and at most
    so much, in units of that of the family `than` if it is given.

    `of` is the number of trajectories of a batch; `model`, `gpu`, `tp` and `batch` fix
    the speed of decoding. `reading` says what we assume where the sentence leaves it
    open.
    """

    name: str
    paper: str
    families: tuple[str, ...]
    quantity: str
    says: str
    at_least: float | None = None
    at_most: float | None = None
    of: int = 0
    than: str = ""
    model: str = ""
    gpu: str = "h800"
    tp: int = 1
    batch: int = 1
    reading: str = ""

    @property
    def above(self) -> Form:
        """Return the dividend of the quantity."""
        quantity = QUANTITIES[self.quantity]
        factor = (
            step_s(self.model, self.gpu, tp=self.tp, batch=self.batch) if quantity.speed else 1.0
        )
        return _sized({name: factor * one for name, one in quantity.above.items()}, self.of)

    @property
    def per(self) -> Form:
        """Return the divisor of the quantity."""
        return _sized(QUANTITIES[self.quantity].per, self.of)


class StatedFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of constraints. `free` are the quantities of families that no paper fixes,
    and that our families assume.
    """

    constraints: tuple[Constraint, ...] = ()
    free: Mapping[str, tuple[str, ...]] = {}


def _sized(form: Form, of: int) -> Form:
    return {f"{name}{of}" if name.endswith("@") else name: one for name, one in form.items()}


@functools.cache
def step_s(name: str, device: str, *, tp: int, batch: int) -> float:
    """Return the seconds of a decoding step: of a batch of one, without a context,
    which is the fastest; otherwise with contexts of `CONTEXT` tokens.
    """
    cost = EngineCost(gpu=gpu(device), model=model(name), tp=tp)
    return cost.decode_s(decode=batch, decode_context=0 if batch == 1 else batch * CONTEXT, steps=1)


def read(path: Path) -> StatedFile:
    """Return the constraints of a file. Raises ConfigError, in one line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"FILE must be a readable TOML file, got {path}: {error}") from error
    try:
        stated = msgspec.convert(tomllib.loads(text), StatedFile)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"{path} must be a TOML file of [[constraints]]: {line}") from error
    if not stated.constraints:
        raise ConfigError(f"{path} must have at least one of [[constraints]], got none")
    seen: set[str] = set()
    for constraint in stated.constraints:
        where = f"{path}: {constraint.name}"
        if constraint.name in seen:
            raise ConfigError(f"{where}: name must be given once, got it twice")
        seen.add(constraint.name)
        _check(where, constraint)
    for family, names in stated.free.items():
        _known(f"{path}: free", "a family", family, [*FAMILIES, *USERS])
        free = [name for name, one in QUANTITIES.items() if not one.of and not one.speed]
        for name in names:
            _known(f"{path}: free.{family}", "a quantity without a batch or speed", name, free)
    return stated


def _check(where: str, one: Constraint) -> None:
    """Raise ConfigError if the constraint cannot be evaluated."""
    _known(f"{where}: quantity", "a quantity", one.quantity, QUANTITIES)
    quantity = QUANTITIES[one.quantity]
    if not one.families:
        raise ConfigError(f"{where}: families must name at least one family, got none")
    for name in (*one.families, *filter(None, [one.than])):
        group = USERS if one.quantity in RATES else FAMILIES
        _known(f"{where}: families", f"a family with {one.quantity}", name, group)
    if one.at_least is None and one.at_most is None:
        raise ConfigError(f"{where}: at_least or at_most must be given, got neither")
    for field, value in (("at_least", one.at_least), ("at_most", one.at_most)):
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{where}: {field} must be a number of at least 0, got {value:g}")
    if one.at_least is not None and one.at_most is not None and one.at_least > one.at_most:
        raise ConfigError(
            f"{where}: at_least must not exceed at_most, got {one.at_least:g} and {one.at_most:g}"
        )
    if quantity.of != (one.of > 0):
        rule = "be at least 1, the trajectories of a batch," if quantity.of else "be left out"
        raise ConfigError(f"{where}: of must {rule} with {one.quantity}, got {one.of}")
    if quantity.speed != bool(one.model):
        rule = "name a model" if quantity.speed else "be left out"
        raise ConfigError(f"{where}: model must {rule} with {one.quantity}, got {one.model!r}")
    if quantity.speed:
        if one.batch < 1:
            raise ConfigError(f"{where}: batch must be at least 1, got {one.batch}")
        try:
            step_s(one.model, one.gpu, tp=one.tp, batch=one.batch)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    else:
        for of_speed in msgspec.structs.fields(Constraint):
            given = getattr(one, of_speed.name)
            if of_speed.name in ("gpu", "tp", "batch") and given != of_speed.default:
                raise ConfigError(
                    f"{where}: {of_speed.name} must be left out with {one.quantity}, got {given!r}"
                )


def _known(where: str, what: str, name: str, names: Iterable[str]) -> None:
    """Raise ConfigError unless the name is one of the names; say the nearest one."""
    names = list(names)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else f": one of {', '.join(names)}"
        raise ConfigError(f"{where} must be {what}, got {name!r}{hint}")


def of_family(constraints: Sequence[Constraint], family: str) -> list[Constraint]:
    """Return the constraints that speak of this family, in their order."""
    return [one for one in constraints if family in one.families]


def bounds_text(one: Constraint, shown: str = "") -> str:
    """Return what a constraint states as text, such as `at most 0.3`."""
    unit = QUANTITIES[one.quantity].unit
    unit = f" {unit}" if unit else ""
    unit = f" × {one.than}" if one.than else unit
    low, high = one.at_least, one.at_most
    if low is None:
        return f"at most {number(high)}{unit}"
    if high is None:
        return f"at least {number(low)}{unit}"
    return f"{number(low)}{unit}" if low == high else f"{number(low)} to {number(high)}{unit}"


def number(value: float | None) -> str:
    """Return a number with three figures, in full above 100."""
    if value is None:
        return "none"
    if math.isinf(value):
        return "any"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
