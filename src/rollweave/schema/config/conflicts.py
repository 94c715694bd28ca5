"""The settings that exclude each other, and those without effect: two tables, which one
loop checks.

A setting that cannot be beside another one, or whose effect a user would wait for, must
be left out (`CONFLICTS`). A setting that only has no effect beside another one is
accepted, and the dry run and the start of a run say so (`WITHOUT_EFFECT`).

Invariant: only a value that differs from the default counts, so that a configuration
that was dumped loads as itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel

from rollweave.schema.config.run import (
    MIGRATIONS,
    PARTITIONS,
    PLACEMENTS,
    POLICIES,
    PREDICTORS,
)
from rollweave.schema.config.sections import Sections
from rollweave.schema.config.training import (
    OF_CRITIC,
    OF_TURNS,
    CriticConfig,
    Estimator,
    TaskAlgorithmConfig,
)
from rollweave.schema.errors import FieldError

SERVERS = ("vllm", "sglang")
"""Kinds of engines that are inference servers."""

LISTS = ("engines", "tasks", "rewards", "pools", "roles")
"""Sections of which a file has several: each key of a setting in one stands for all."""


@dataclass(frozen=True, slots=True)
class Place:
    """A setting of a configuration, and where the settings beside it are."""

    config: Sections
    key: str
    """The key without a number, as in `engines.kind`."""
    field: str
    """The key with the number of the section, as in `engines.0.kind`."""
    item: Any
    """The section, if a file has several such sections; else the configuration."""

    def values(self, key: str) -> list[Any]:
        """Return the values of a setting: that in the same section, else those in all
        sections of the list; each value of a tuple by itself.
        """
        head, _, rest = key.partition(".")
        if head == self.key.partition(".")[0] and self.item is not self.config:
            found = [self.item]
        else:
            found, rest = [self.config], key
        for name in rest.split("."):
            found = [getattr(section, name) for section in found if section is not None]
            found = [one for value in found for one in (value if _is_list(value) else [value])]
        return found

    @property
    def estimators(self) -> set[Estimator]:
        """The estimator of this task domain, else those of all."""
        tasks = self.config.tasks if self.item is self.config else [self.item]
        return {self.config.algorithm_of(task.name).advantage for task in tasks}


class Clause(NamedTuple):
    """A condition of the settings beside a setting, in words, and as a test.

    `said` are the words for one configuration, if they differ.
    """

    text: str
    applies: Callable[[Place], object]
    said: Callable[[Place], str] | None = None
    why: str = ""

    def rule(self, place: Place) -> str:
        """Return the words for one configuration, with the reason."""
        said = self.text if self.said is None else self.said(place)
        return f"{said}, {self.why}" if self.why else said


class Conflict(NamedTuple):
    """Settings that must be left out, or have no effect, where a clause applies.

    `settings` are keys with spaces between them. A key with a value
    (`ablation.changes=no_repack`) stands for this value alone.
    """

    settings: str
    clause: Clause

    @property
    def choices(self) -> dict[str, list[str]]:
        """The keys, each with the values for which it stands; none stand for all."""
        choices: dict[str, list[str]] = {}
        for setting in self.settings.split():
            key, _, value = setting.partition("=")
            choices.setdefault(key, []).extend([value] if value else [])
        return choices


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple | list)


def _named(key: str) -> str:
    return f"[{key}]" if "." not in key or key == "model.scratch" else key


def _or(values: Iterable[str]) -> str:
    *first, last = dict.fromkeys(map(str, values))
    return f"{', '.join(first)} or {last}" if first else last


def _unless(key: str, *values: str, why: str = "") -> Clause:
    """Return the clause that a setting has another value than these, in any section."""
    text = f"unless {key} is {_or(values)}"

    def others(place: Place) -> list[Any]:
        return [value or "unset" for value in place.values(key) if value not in values]

    return Clause(text, others, lambda place: f"{text} (it is {_or(others(place))})", why)


def _beside(key: str, *values: str, why: str = "") -> Clause:
    """Return the clause that a setting is given, or has one of these values."""
    text = f"with {_named(key)}"
    if not values:
        return Clause(text, lambda place: any(place.values(key)), None, why)

    def among(place: Place) -> list[Any]:
        return [value for value in place.values(key) if value in values]

    whole = f"{text} {_or(values)}"
    return Clause(whole, among, lambda place: f"{text} {_or(among(place))}", why)


def _either(*clauses: Clause) -> Clause:
    """Return the clause that one of these applies; the first that does is said."""
    return Clause(
        ", or ".join(", ".join(filter(None, (one.text, one.why))) for one in clauses),
        lambda place: any(clause.applies(place) for clause in clauses),
        lambda place: next(clause.rule(place) for clause in clauses if clause.applies(place)),
    )


def _without(*keys: str, why: str = "") -> Clause:
    """Return the clause that none of the settings is given, or that all are 0."""
    return Clause(
        f"without {_or(map(_named, keys))}",
        lambda place: not any(value for key in keys for value in place.values(key)),
        None,
        why,
    )


def _unless_estimator(*names: Estimator) -> Clause:
    """Return the clause that no task domain has one of these estimators."""
    text = f"unless algorithm.advantage is {_or(sorted(names))}"
    return Clause(
        text,
        lambda place: not place.estimators & set(names),
        lambda place: f"{text} (it is {_or(sorted(place.estimators))})",
    )


def _beside_estimator(*names: Estimator, why: str) -> Clause:
    """Return the clause that a task domain has one of these estimators."""
    text = "with algorithm.advantage"
    return Clause(
        f"{text} {_or(sorted(names))}",
        lambda place: place.estimators & set(names),
        lambda place: f"{text} {_or(sorted(place.estimators & set(names)))}",
        why,
    )


def _predicts(config: Sections) -> bool:
    priority = config.ablation.priority or POLICIES[config.rollout.scheduling][0]
    return priority == "longest_first" or config.placement in PARTITIONS


def _lacks_pools(place: Place) -> bool:
    pools = {group.pool for group in place.config.engines}
    return len(pools) < 2 or None in pools


def _all(section: str, model: type[BaseModel]) -> str:
    return " ".join(f"{section}.{name}" for name in model.model_fields)


_OF_ENGINES = [name for name in (*PLACEMENTS, *MIGRATIONS) if name not in ("pinned", "never")]
"""Policies by which a trajectory runs on several engines."""


def _is_overridden(place: Place) -> bool:
    section, name = place.key.split(".")
    return all(
        getattr(task if section == "rollout" else task.algorithm, name) is not None
        for task in place.config.tasks
    )


CONFLICTS = (
    # Modes, and where rollouts run.
    Conflict(
        "tasks.pool rollout.affinity allocation loans engines.phase=either "
        + " ".join(f"ablation.changes={name}" for name in _OF_ENGINES)
        + " ablation.changes=no_free_stepping ablation.changes=no_reward_overlap",
        _beside(
            "rollout.mode",
            "decoupled",
            why="in which each engine launches trajectories of all domains, and keeps them",
        ),
    ),
    Conflict("rollout.alpha", _unless("rollout.mode", "partial", "bounded", "decoupled")),
    Conflict(
        "rollout.spare_groups", _unless("rollout.mode", "sync", "one_step", "stream", "bounded")
    ),
    Conflict("rollout.spare_groups=learned", _without("rollout.dynamic_sampling")),
    Conflict(
        "rollout.affinity",
        Clause("unless each group of engines is in one of several pools", _lacks_pools),
    ),
    Conflict("pools", _without("cluster", "sim")),
    Conflict(
        "weights.relays",
        _either(
            Clause(
                "with [cluster] or [pools]",
                lambda place: place.config.cluster is not None or place.config.pools,
                why="whose hosts have one each",
            ),
            _beside("weights.transport", "collective", why="which has none"),
        ),
    ),
    Conflict(
        "loans",
        _either(
            _without("cluster", "sim", why="whose hosts lend engines"),
            _beside("allocation", why="which decides the degrees of all engines"),
            _beside("weights.transport", "collective", why="whose engines are all the run's"),
        ),
    ),
    Conflict(
        "trainer.colocated",
        _unless("rollout.mode", "sync", why="the only one that does not train while it rolls out"),
    ),
    Conflict(
        "loans allocation ablation.changes=no_staging engines.max_slots=profiled",
        _beside("trainer.colocated"),
    ),
    Conflict(
        "weights.transport=collective",
        _either(
            _beside("trainer.colocated"),
            _beside("engines.kind", "sglang"),
            Clause(
                "with engines.kind vllm unless model.device is cuda, or with [lora], "
                "engines.address or rollout.mode decoupled",
                lambda place: (
                    "vllm" in place.values("engines.kind")
                    and (
                        place.config.model.device != "cuda"
                        or place.config.lora is not None
                        or place.config.rollout.mode == "decoupled"
                        or any(place.values("engines.address"))
                    )
                ),
                why="since a group carries versions of the trainer alone, between GPUs",
            ),
        ),
    ),
    Conflict(
        "cluster pools loans allocation weights.relays weights.transport=collective "
        "rollout.mode=decoupled trainer.colocated trainer.tensor_parallel engines.phase "
        "engines.degree engines.address",
        Clause(
            "with trainer.ranks as { minimum, maximum }",
            lambda place: place.config.trainer.elastic,
            why="which gives the places of equal engines on one machine to ranks",
        ),
    ),
    Conflict(
        "loans trainer.colocated",
        _beside("engines.kind", *SERVERS, why="whose servers keep their memory"),
    ),
    # Algorithms and models.
    Conflict("algorithm.gamma", _unless_estimator(*OF_TURNS)),
    Conflict("algorithm.reward_weight teacher", _unless_estimator("distill")),
    Conflict(
        "lora trainer.tensor_parallel",
        _beside_estimator(*OF_CRITIC, why="whose critic is trained in full, and not divided"),
    ),
    Conflict(
        "rollout.temperature rollout.dynamic_sampling",
        _beside_estimator(
            "distill",
            why="which learns from groups of equal rewards too, and whose teacher gives log-probs "
            "at temperature 1",
        ),
    ),
    Conflict(
        "tasks.env_weight",
        _either(
            _beside_estimator(*OF_TURNS, why="which takes each turn's reward from the environment"),
            Clause(
                "without [[rewards]] for the domain",
                lambda place: not place.config.rewards_of(place.item.name),
            ),
        ),
    ),
    Conflict(
        "algorithm.kl",
        Clause(
            "as { forward = … } with several trainer.ranks",
            lambda place: place.config.algorithm.kl_forward and place.config.trainer.most_ranks > 1,
        ),
    ),
    Conflict(
        "trainer.tensor_parallel",
        _unless("model.implementation", "transformers", why="whose models have the plan"),
    ),
    Conflict(
        "algorithm.routing_replay",
        _unless("engines.kind", "vllm", why="which returns the experts that it chooses"),
    ),
    Conflict(
        "algorithm.routing_replay engines.phase",
        Clause(
            "without the prefix cache (ablation.changes)",
            lambda place: "prefix_cache" in place.config.ablation.without,
            why="which keeps the KV to move and the chosen experts",
        ),
    ),
    Conflict(
        "algorithm.routing_replay lora.path engines.address",
        _beside(
            "model.scratch",
            why="which has random weights and no experts, and which no running server has loaded",
        ),
    ),
    Conflict("eval.stop_at", _without("eval.every", why="since periodic evaluations reach it")),
    # Kinds of engines.
    Conflict("engines.python engines.args engines.address", _unless("engines.kind", *SERVERS)),
    Conflict(
        "engines.python engines.args engines.degree allocation algorithm.routing_replay",
        _beside("engines.address", why="whose servers already run"),
    ),
    Conflict(
        "engines.phase",
        Clause(
            "with address or kind sglang",
            lambda place: not place.item.moves_kv,
            why="whose engines cannot move KV",
        ),
    ),
    Conflict("engines.deterministic", _beside("engines.kind", "vllm")),
    Conflict(
        "engines.prefill_chunk_tokens engines.max_slots=profiled",
        _beside(
            "engines.kind",
            *SERVERS,
            why="which sizes its own steps, and whose args have --max-num-batched-tokens or "
            "--chunked-prefill-size",
        ),
    ),
    Conflict(
        "rollout.top_p",
        Clause(
            "with engines.kind vllm unless all temperatures are 0 or 1",
            lambda place: "vllm" in place.values("engines.kind") and place.config.scales_logprobs,
        ),
    ),
)
"""The settings that must be left out, when, and why."""

WITHOUT_EFFECT = (
    # Modes, and where rollouts run.
    Conflict(
        "buffer.sample",
        Clause(
            "unless rollout.mode is decoupled, or partial or bounded with a rollout.alpha of at "
            "least 2, without trainer.colocated",
            lambda place: not place.config.chooses_groups,
        ),
    ),
    Conflict(
        "ablation.changes=no_repack ablation.changes=no_buffer_places "
        "ablation.changes=no_mixed_groups",
        _unless("rollout.mode", "decoupled"),
    ),
    Conflict("ablation.changes=no_early_updates", _unless("rollout.mode", "bounded")),
    Conflict(
        " ".join(f"ablation.changes={name}" for name in PREDICTORS),
        Clause("where no policy predicts lengths", lambda place: not _predicts(place.config)),
    ),
    Conflict(
        "ablation.changes=policy",
        Clause(
            "where all engines are servers or simulated",
            lambda place: (
                place.config.sim is not None
                or all(group.server is not None for group in place.config.engines)
            ),
            why="whose turns have no states, so that it predicts as ridge does",
        ),
    ),
    Conflict(
        "ablation.changes=rank ablation.changes=gain",
        Clause(
            f"unless the placement is {_or(PARTITIONS)}",
            lambda place: place.config.placement not in PARTITIONS,
        ),
    ),
    Conflict(
        "weights.transport ablation.changes=no_deltas",
        Clause(
            "without weights.relays or [cluster]",
            lambda place: (
                not (
                    place.config.weights.relays
                    or place.config.cluster is not None
                    or place.config.weights.collective
                )
            ),
        ),
    ),
    Conflict("pools.site", _without("cluster")),
    Conflict(
        "ablation.changes=no_deltas pools.site",
        _beside("weights.transport", "collective", why="which has no relays"),
    ),
    Conflict("workers.pool", _without("workers.count")),
    # Algorithms, task domains, rewards and evaluations.
    Conflict(_all("critic", CriticConfig), _unless_estimator(*OF_CRITIC)),
    Conflict(
        "tasks.weight",
        Clause("with one task domain", lambda place: len(place.config.tasks) == 1),
    ),
    Conflict(
        "rollout.group_size " + _all("algorithm", TaskAlgorithmConfig),
        Clause("where each task domain has its own", _is_overridden),
    ),
    Conflict(
        "eval.episodes",
        Clause(
            "without eval.every",
            lambda place: not place.config.eval.every and place.config.eval.final_episodes,
            why="since the last evaluation has eval.final_episodes",
        ),
    ),
    Conflict(
        "eval.temperature",
        _without("eval.every", "eval.final_episodes", why="except on `rollweave eval`"),
    ),
    # Kinds of engines, devices and sandboxes.
    Conflict(
        "ablation.changes=no_cuda_graphs trainer.save_memory=optimizer",
        _beside("model.device", "cpu"),
    ),
    Conflict(
        "ablation.changes=no_cuda_graphs",
        Clause(
            "where all engines are servers or deterministic",
            lambda place: all(
                group.server is not None or group.deterministic for group in place.config.engines
            ),
        ),
    ),
    Conflict(
        "sandbox.mirror",
        _beside("sandbox.backend", "zygote", "plain", why="with the host's image only"),
    ),
)
"""The settings that have no effect, when, and why."""


def conflicts(config: Sections) -> list[FieldError]:
    """Return an error for each setting that must be left out."""
    errors: dict[str, FieldError] = {}
    for place, value, chosen, rule in _found(config, CONFLICTS):
        choice = chosen[0] if chosen else ""
        errors.setdefault(place.field, _error(place.field, rule, value, choice))
    return list(errors.values())


def without_effect(config: Sections) -> dict[str, str]:
    """Return the settings that have no effect, each with a sentence that says why: a
    setting by its key, and a value of a list as `NAME in KEY`.
    """
    sentences: dict[str, str] = {}
    for place, value, chosen, rule in _found(config, WITHOUT_EFFECT):
        if chosen:
            for name in chosen:
                what = f"{name} in {place.field}"
                sentences.setdefault(what, f"{what} has no effect {rule}")
        else:
            text = f"{place.field} has no effect {rule}, got {_shown(value)}"
            sentences.setdefault(place.field, text)
    return sentences


def _found(
    config: Sections, table: Sequence[Conflict]
) -> Iterator[tuple[Place, Any, list[str], str]]:
    """Yield each changed setting to which a row of the table applies: its place, its
    value, the values that the row names, and the words of the clause.
    """
    for row in table:
        for key, values in row.choices.items():
            for place, value in _changed(config, key):
                given = value if _is_list(value) else (value,)
                chosen = [choice for choice in values if choice in given]
                if (chosen or not values) and row.clause.applies(place):
                    yield place, value, chosen, row.clause.rule(place)


def _changed(config: Sections, key: str) -> Iterator[tuple[Place, Any]]:
    """Yield each place of a setting whose value differs from the default, and this
    value.
    """
    head, _, rest = key.partition(".")
    found: list[tuple[str, Any, str]] = [(key, config, key)]
    if head in LISTS and rest:
        items = getattr(config, head)
        numbered = items.items() if isinstance(items, Mapping) else enumerate(items)
        found = [(f"{head}.{number}.{rest}", item, rest) for number, item in numbered]
    for field, item, path in found:
        section, (*sections, name) = item, path.split(".")
        for part in sections:
            section = None if section is None else getattr(section, part)
        if section is None:
            continue
        default = type(section).model_fields[name].get_default(call_default_factory=True)
        if (value := getattr(section, name)) != default:
            yield Place(config=config, key=key, field=field, item=item), value


def _error(field: str, rule: str, value: Any, choice: str) -> FieldError:
    if choice:
        verb = "have" if _is_list(value) else "be"
        return FieldError(field, f"not {verb} {choice} {rule}", choice)
    be = "be false" if isinstance(value, bool) else "be left out"
    return FieldError(field, f"{be} {rule}", _shown(value))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if _is_list(value):
        return ", ".join(map(_shown, value))
    if isinstance(value, BaseModel) or _has_sections(value):
        return "a section"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {one}' for key, one in value.items())} }}"
    return str(value)


def _has_sections(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(one, BaseModel) for one in value.values())
