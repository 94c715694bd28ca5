"""Read the user's TOML file and `--set` overrides into a `RunConfig`, and write one
back.

Invariants: all problems of a file are reported at once, one line each, naming field,
rule, value and file; a configuration that was dumped loads as itself.
"""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollweave.schema.base import DEPTH, LEAST, MOST, is_deep
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.simulation import HostsFile, ServingFile
from rollweave.schema.config.values import FORMS
from rollweave.schema.errors import ConfigError, FieldError, FieldErrors
from rollweave.schema.hosts import Resources
from rollweave.schema.text import valid

S = TypeVar("S", bound=BaseModel)

FILE_BYTES = 1 << 20
"""Maximum size of a configuration file in bytes."""

OVERRIDES = "--set"
SHOWN = 60
"""Maximum number of characters of a wrong value that an error quotes."""

RULES = {
    "bool_type": "be true or false",
    "dict_type": "be a table",
    "enum": "be {expected}",
    "finite_number": "be a finite number",
    "float_type": "be a number",
    "greater_than": "be above {gt:g}",
    "greater_than_equal": "be at least {ge:g}",
    "int_from_float": "be a whole number",
    "int_type": "be a whole number",
    "less_than": "be below {lt}",
    "less_than_equal": "be at most {le}",
    "literal_error": "be {expected}",
    "model_attributes_type": "be a section",
    "model_type": "be a section",
    "multiple_of": "be a multiple of {multiple_of:g}",
    "string_too_long": "have at most {max_length} characters",
    "string_too_short": "have at least {min_length} characters",
    "string_type": "be text",
    "too_short": "have at least {min_length} of them",
    "tuple_type": "be a list",
}
"""The wording of each kind of pydantic error; kind `rule` is our own
(`schema/config/values.matching`).
"""


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read TOML file `path`, apply `overrides` (`rollout.alpha=2`,
    `tasks.0.max_turns=8`). Raises ConfigError.
    """
    return loads(_read(Path(path)), overrides, name=str(path))


def load_hosts(path: Path) -> dict[str, Resources]:
    """Read a TOML file that describes hosts, and return their resources by name. Raises
    ConfigError.
    """
    return validated(HostsFile, _parse(_read(path), str(path)), str(path)).by_name()


def load_serving(path: Path) -> ServingFile:
    """Read a TOML file that describes serving engines. Raises ConfigError."""
    return validated(ServingFile, _parse(_read(path), str(path)), str(path))


def loads(text: str, overrides: Sequence[str] = (), *, name: str = "config") -> RunConfig:
    """Read a configuration as `load` does, from text; `name` stands for the file in
    errors.
    """
    data = _parse(text, name)
    touched = [_override(data, override) for override in overrides]
    return validated(RunConfig, data, name, touched)


def validated(
    file: type[S], data: dict[str, Any], name: str, touched: Sequence[tuple[str | int, ...]] = ()
) -> S:
    """Return the section or file that `data` holds. `name` stands for it in errors, and
    `touched` are the settings that overrides have changed.

    Raises ConfigError with a line for each problem.
    """
    try:
        return file.model_validate(data)
    except ValidationError as error:
        lines = [
            line
            for detail in _own([_as_written(detail, data) for detail in error.errors()])
            for line in _lines(detail, file, name, touched)
        ]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from error


def _read(file: Path) -> str:
    try:
        with file.open("rb") as source:  # it may be a pipe or a device
            data = source.read(FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: config must be a readable text file: {error}") from error
    if len(data) > FILE_BYTES:
        raise ConfigError(f"{file}: config must have at most {FILE_BYTES} bytes, got more")
    try:
        return data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}:{line}: config must be UTF-8: {error}") from error


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{name}: config must be valid TOML: {error}") from error
    _check_values(data, name)
    return data


def _check_values(value: Any, name: str, key: str = "") -> None:
    """Check what no type of a setting excludes, in an option of an environment, for
    example. Raises ConfigError.
    """
    problem = ""
    if not key and is_deep(value):
        problem = f"config must be at most {DEPTH} levels deep"
    elif isinstance(value, int) and not LEAST <= value <= MOST:
        problem = f"{key} must be an integer of 64 bits, got one of {value.bit_length()}"
    elif isinstance(value, str) and valid(value) != value:
        problem = f"{key} must be valid text, got {value!a:.80}"
    if problem:
        raise ConfigError(f"{name}: {problem}")
    pairs = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else pairs
    for place, inner in items:
        _check_values(inner, name, f"{key}.{place}".removeprefix("."))


def dumps(config: RunConfig) -> str:
    """Return the configuration as TOML, with defaults and without unset values."""
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def differences(former: RunConfig, now: RunConfig) -> list[str]:
    """Return the settings that differ, as `section.key: before → after`, in the order
    of the file.
    """
    changes = _differing(former.model_dump(mode="json"), now.model_dump(mode="json"))
    return [f"{key}: {_shown(before)} → {_shown(after)}" for key, before, after in changes]


def _differing(before: Any, after: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in dict.fromkeys([*before, *after]):
            yield from _differing(
                before.get(name), after.get(name), f"{key}.{name}" if key else str(name)
            )
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, pair in enumerate(zip(before, after, strict=True)):
            yield from _differing(*pair, f"{key}.{place}")
    elif before != after:
        yield key, before, after


def _shown(value: Any) -> str:
    text = "unset" if value is None else repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def _override(data: dict[str, Any], override: str) -> tuple[str | int, ...]:
    """Apply one `key=value` to `data` and return the key's path."""
    key, equals, value = override.partition("=")
    parts = key.strip().split(".")
    if not equals or "" in parts:
        raise ConfigError(f"{OVERRIDES}: must be key=value, got {override!r}")
    at: Any = data
    path: list[str | int] = []
    for place, part in enumerate(parts):
        shown = ".".join(parts[: place + 1])
        where: Any = part
        if isinstance(at, list):
            if not (part.isascii() and part.isdecimal()) or int(part) >= len(at):
                raise ConfigError(
                    f"{OVERRIDES}: {shown} must name one of several by a number "
                    f"below {len(at)}, got {part}"
                )
            where = int(part)
        elif not isinstance(at, dict):
            raise ConfigError(
                f"{OVERRIDES}: {shown} must be in a section, got one of {type(at).__name__}"
            )
        path.append(where)
        if place == len(parts) - 1:
            at[where] = _value(value.strip(), key)
        else:
            at = at[where] if isinstance(at, list) else at.setdefault(where, {})
    return tuple(path)


def _value(text: str, key: str) -> Any:
    """Parse a TOML value. A bare word is a string, so that a shell user need not quote
    twice.
    """
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = text
    _check_values({key: value}, OVERRIDES)
    return value


def _as_written(detail: ErrorDetails, data: Mapping[str, Any]) -> ErrorDetails:
    """Remove the tag of a setting's form, and the index of a single [engines] section,
    which is read as a list of one.
    """
    detail["loc"] = tuple(part for part in detail["loc"] if part not in FORMS)
    if not isinstance(data.get("engines"), dict):
        return detail
    place, context = detail["loc"], detail.get("ctx", {})
    if place[:2] == ("engines", 0):
        detail["loc"] = (place[0], *place[2:])
    if isinstance(error := context.get("error"), FieldErrors):
        fields = [one.of(one.field.replace("engines.0.", "engines.", 1)) for one in error.errors]
        context["error"] = FieldErrors(fields)
    return detail


def _own(details: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Drop the problems of a section that only repeat one inside it: a wrong task is
    not a missing task.
    """
    places = [detail["loc"] for detail in details]
    return [
        detail
        for detail in details
        if not any(
            len(place) > len(detail["loc"]) and place[: len(detail["loc"])] == detail["loc"]
            for place in places
        )
    ]


def _lines(
    detail: ErrorDetails,
    file: type[BaseModel],
    name: str,
    touched: Sequence[tuple[str | int, ...]],
) -> list[str]:
    where = tuple(part for part in detail["loc"])
    source = f"{OVERRIDES} (and {name})" if where in touched else name
    field = ".".join(map(str, where))
    if detail["type"] == "extra_forbidden":
        key = ".".join(part for part in where if isinstance(part, str))
        if file is RunConfig and key in FORMER:
            now = FORMER[key] if FORMER[key].startswith("leave it out") else f"write {FORMER[key]}"
            return [f"{source}: {field} is no longer a setting: {now}"]
        return [f"{source}: unknown key {field}{_suggestion(file, where)}{_pointer(file, where)}"]
    if detail["type"] == "missing":
        return [f"{source}: {field} must be set, got nothing"]
    message, kind = detail["msg"], detail["type"]
    if kind == "value_error":  # a rule of our own
        return [f"{source}: {error}" for error in _broken_rules(detail["ctx"]["error"], where)]
    rule = message if kind not in RULES else RULES[kind].format_map(detail.get("ctx", {}))
    return [f"{source}: {field or 'the file'} must {rule}, got {_short(detail['input'])}"]


def _broken_rules(error: Exception, where: Sequence[str | int]) -> Sequence[FieldError]:
    """Return the errors of a validator at `where`, with the keys of a file: a section
    names its own fields, and a validator of a single field names this field.
    """
    if isinstance(error, FieldErrors):
        return error.errors
    assert isinstance(error, FieldError), "validators raise no other errors"
    section = where[:-1] if where and where[-1] == error.field else where
    return [error.of(".".join(map(str, [*section, *filter(None, [error.field])])))]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _suggestion(file: type[BaseModel], where: tuple[str | int, ...]) -> str:
    """Suggest the nearest key of the same section, else one of that name anywhere, else
    all keys of the section.
    """
    (section, _), last = _section(file, where[:-1]), str(where[-1])
    keys = list(section.model_fields) if section is not None else []
    if near := difflib.get_close_matches(last, keys, n=1):
        return f" (did you mean {near[0]}?)"
    if elsewhere := [key for key in settings_of(file) if key.rpartition(".")[2] == last]:
        return f" (did you mean {elsewhere[0]}?)"
    place = ".".join(map(str, where[:-1]))
    return f" ({place or 'the file'} has {', '.join(keys)})" if keys else ""


def _pointer(file: type[BaseModel], where: tuple[str | int, ...]) -> str:
    """Point to the reference of the section, if this is a configuration."""
    if file is not RunConfig:
        return ""
    section, key = _section(file, where[:-1])
    return f"; see `rollweave config{f' {key}' if key and section is not None else ''}`"


def _section(
    file: type[BaseModel], path: Sequence[str | int]
) -> tuple[type[BaseModel] | None, str]:
    """Return the section at a place, or None, and its key in the reference, which has
    one key for all names of a table.
    """
    section: type[BaseModel] | None = file
    keys, names_follow = list[str](), False
    for part in path:
        if isinstance(part, int) or names_follow:
            names_follow = False
            continue
        field = section.model_fields.get(part) if section else None
        section = model_in(field.annotation) if field else None
        names_follow = field is not None and get_origin(field.annotation) is dict
        keys.append(part)
    return section, ".".join(keys)


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section within an annotation, also in a tuple or an optional."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in get_args(annotation) if (model := model_in(inner))), None)


def settings_of(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the keys of all settings in `model`, each after `prefix`."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        inner = model_in(field.annotation)
        keys += settings_of(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return keys


def _without_none(value: Any) -> Any:
    """Leave out None, because TOML has no null."""
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_without_none(inner) for inner in value]
    return value


FORMER = {
    "ablation.policies": "ablation.changes",
    "ablation.sharing": "sharing in the file of `rollweave simulate --serving FILE`",
    "ablation.without": "ablation.changes, with no_ before each name",
    "algorithm.clip_high": "algorithm.clip, as [low, high]",
    "algorithm.clip_low": "algorithm.clip, as [low, high]",
    "algorithm.kl_direction": "algorithm.kl, as { forward = 0.01 }",
    "allocation.degrees": "engines.degree, the least of the degrees, which are its doubles",
    "buffer.evict": "leave it out: the stalest groups leave a full buffer",
    "buffer.groups": "leave it out: a buffer has places for a batch and for what engines run at "
    "once, or for two batches",
    "buffer.max_age": "rollout.alpha",
    "cluster.join_s": "leave it out: hosts have 10 minutes to join",
    "cluster.ray": "cluster.launcher, as ray:HOST:PORT",
    "engines.borrowed": "loans.engines, the number of engines, in place of the borrowed group",
    "engines.token_env": "leave it out: the token of all servers is in ROLLWEAVE_ENGINE_TOKEN",
    "faults": "leave it out: an environment of your own may fail, or wait as "
    "rollweave.envs.frozenlake:SlowLake does",
    "rewards.judge.scale": "leave it out: a grade is from 0 to 1, which rewards.weight multiplies",
    "rewards.judge.url": "rewards.url",
    "rewards.token_env": "leave it out: the token of a reward is in ROLLWEAVE_REWARD_NAME_TOKEN, "
    "with its name in capitals, if there is one",
    "rollout.engine_batch": "rollout.max_running, of which each engine has its share, or "
    "engines.max_slots, of which it has twice as many",
    "rollout.predictor": "ablation.changes, as one of the list",
    "sandbox.cache_dir": "the environment variable XDG_CACHE_HOME of each host",
    "sandbox.cache_gb": "leave it out: images have half of the file system of the cache",
    "serve": "`rollweave serve --registered` and `--engine-host HOST`",
    "sim.pools": "leave it out: pools.NAME.resource names the GPU, and the engines the hosts",
    "sim.serving": "the file of `rollweave simulate --serving FILE`, which has these keys",
    "sim.trainer_gpus": "trainer.ranks",
    "tasks.algorithm.aggregate": "algorithm.aggregate, for all task domains",
    "tasks.algorithm.clip_high": "algorithm.clip, for all task domains",
    "tasks.algorithm.clip_low": "algorithm.clip, for all task domains",
    "tasks.algorithm.correction": "algorithm.correction, for all task domains",
    "tasks.algorithm.gamma": "algorithm.gamma, for all task domains",
    "tasks.algorithm.loss": "algorithm.loss, for all task domains",
    "tasks.algorithm.overlong": "algorithm.overlong, for all task domains",
    "tasks.algorithm.reward_weight": "algorithm.reward_weight, for all task domains",
    "tasks.pin": "leave it out: rollout.affinity learned moves every task domain",
    "teacher.dialect": "leave it out: the run asks the server whether it is SGLang",
    "teacher.timeout_s": "leave it out: an answer of the teacher may take 120 s, with all retries",
    "teacher.token_env": "leave it out: the token is in ROLLWEAVE_TEACHER_TOKEN, if there is one",
    "trainer.final_lr": "trainer.lr, as { peak = 1e-5, final = 0.2 }",
    "trainer.warmup_steps": "trainer.lr, as { peak = 1e-5, warmup = 5 }",
    "warmup.batch": "leave it out: a step has 16 transcripts of each task domain",
    "weights.dtype": "model.dtype",
    "workers.idle_s": "leave it out: a worker is kept for 60 s, or as long as a start takes",
    "workers.minimum": "workers.count, as { minimum = 0, maximum = 4 }",
}
"""Key of a setting or a section → the setting that replaces it, or what to do."""
