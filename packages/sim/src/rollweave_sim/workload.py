"""The behavior of trajectories in a simulated world: the plan of every attempt, before
any scheduling.

A workload is a family of tasks (`families.py`), a JSONL trace, or a live run, whose
journal is read (`recording.py`). Invariant: a plan depends on its arguments alone,
so the order of requests for plans changes nothing. The effects of scheduling are not in
a plan: queueing, generation time, weight versions, cancellations.
"""

import difflib
import functools
import json
import math
import os
import random
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

from rollweave.io.disk import replace_file
from rollweave.io.json_lines import utf8_text
from rollweave.schema.base import Struct
from rollweave.schema.errors import ConfigError, FieldError
from rollweave.schema.work import TRAINABLE, StopReason
from rollweave_sim import recording
from rollweave_sim.families import FAMILIES, Family, LogNormal

Stage = Literal["", "init", "run", "eval"]

ENV_FAILURES = frozenset({StopReason.ENV_ERROR, StopReason.ENV_HANG})
REWARD_FAILURES = frozenset(
    {StopReason.REWARD_ERROR, StopReason.REWARD_HANG, StopReason.REWARD_UNAVAILABLE}
)


class TurnPlan(Struct, frozen=True, kw_only=True):
    """The agent generates `output_tokens`, then the environment works for `env_s`
    seconds and returns `observation_tokens`.
    """

    output_tokens: int
    observation_tokens: int
    env_s: float


class Plan(Struct, frozen=True, kw_only=True):
    """One attempt. `fails_in` is the stage in which environment or reward fail, with
    reason `stop`; "" without a failure.

    A stage that fails takes its planned seconds: `init_s`, the last turn's `env_s`, or
    `reward_s`. A plan that fails in "init" has no turns, every other one has at least
    one. One that fails in "eval" has ended its turns as "finished".
    """

    prompt_tokens: int
    init_s: float
    turns: tuple[TurnPlan, ...]
    reward_s: float
    reward: float
    success: bool
    stop: StopReason = StopReason.FINISHED
    fails_in: Stage = ""


class Workload(Protocol):
    """A source of plans."""

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        """Return the plan of attempt `attempt` of member `member` of the group of task
        `index`, in a run of seed `seed`.
        """


def workload(name_or_path: str, *, domain: str | None = None) -> Workload:
    """Return the workload of a family's name, a `.jsonl` trace, or a run directory or
    its journal.

    `domain` selects the task domain of a run. Raises ConfigError.
    """
    if name_or_path in FAMILIES:
        return Drawn(FAMILIES[name_or_path])
    path = Path(name_or_path)
    if path.suffix == ".jsonl":
        return read_trace(path)
    # False for invalid paths, for which Path.exists raises
    if name_or_path and os.path.exists(path):
        return read_run(path, domain=domain)
    near = difflib.get_close_matches(name_or_path, FAMILIES, n=1)
    raise FieldError(
        "workload",
        f"be one of {', '.join(FAMILIES)}, a .jsonl trace or a run directory",
        f"{name_or_path!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
    )


# Families.

TASK_SHARE, MEMBER_SHARE = 0.5, 0.25
"""Shares of a log length's variance. Assumption: half is the task's difficulty and a
quarter the attempt's; the rest is the turn's. Heddle §4.1 states that lengths diverge
within a group; the values of its Fig. 5 are not in our copy.
"""

SUCCESS_RATE = 0.5
"""Share of the attempts that end with reward 1; the others end with 0. Assumption."""


class Drawn:
    """Plans drawn from a family.

    All members share a task's difficulty: hard tasks are longer and fail more often.
    """

    def __init__(self, family: Family) -> None:
        self.family = family

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        family = self.family
        difficulty, prompt_z = _task(family.name, seed, index)
        rng = random.Random(f"{family.name}/{seed}/{index}/{member}/{attempt}")
        rest_z = rng.gauss(0.0, 1.0)
        prompt = max(
            1,
            round(
                min(family.prompt.high, math.exp(family.prompt.mu + family.prompt.sigma * prompt_z))
            ),
        )
        chance = rng.random()
        if chance < family.init_error_rate + family.init_hang_rate:
            hangs = chance < family.init_hang_rate
            return Plan(
                prompt_tokens=prompt,
                init_s=family.init_timeout_s if hangs else _seconds(family.init_s, rng),
                turns=(),
                reward_s=0.0,
                reward=0.0,
                success=False,
                stop=StopReason.ENV_HANG if hangs else StopReason.ENV_ERROR,
                fails_in="init",
            )
        room = min(family.max_context - prompt, family.max_response)
        init_s, reward_s = _seconds(family.init_s, rng), _seconds(family.reward_s, rng)
        level = math.sqrt(TASK_SHARE) * difficulty
        weight = math.sqrt(1 - TASK_SHARE)
        least, most = family.turns
        count = least + int(_below(level + weight * rest_z) * (most - least + 1))
        turns, cut = _turns(family, rng, count, room, level + math.sqrt(MEMBER_SHARE) * rest_z)
        success = not cut and _below(level + weight * rng.gauss(0.0, 1.0)) < SUCCESS_RATE
        return Plan(
            prompt_tokens=prompt,
            init_s=init_s,
            turns=turns,
            reward_s=reward_s,
            reward=float(success),
            success=success,
            stop=StopReason.MAX_TOKENS if cut else StopReason.FINISHED,
        )


def _turns(
    family: Family, rng: random.Random, count: int, room: int, level: float
) -> tuple[tuple[TurnPlan, ...], bool]:
    """Return at most `count` turns within `room` tokens, and whether the tokens ran
    out.

    `level` shifts the length of all outputs.
    """
    gauss, exp = rng.gauss, math.exp
    out, seen, env = family.output, family.observation, family.env_s
    out_mu, out_sigma = (
        out.mu + out.sigma * level,
        out.sigma * math.sqrt(1 - TASK_SHARE - MEMBER_SHARE),
    )
    out_high, env_mu, env_sigma, env_high = out.high, env.mu, env.sigma, env.high
    last = count - 1
    turns: list[TurnPlan] = []
    for number in range(count):
        output = int(min(out_high, exp(gauss(out_mu, out_sigma))) + 0.5) or 1
        if output >= room:
            turns.append(TurnPlan(output_tokens=room, observation_tokens=0, env_s=0.0))
            return tuple(turns), True
        room -= output
        if number == last:
            env_s = 0.0 if family.answers else min(env_high, exp(gauss(env_mu, env_sigma)))
            turns.append(TurnPlan(output_tokens=output, observation_tokens=0, env_s=env_s))
            break
        observation = min(room, int(min(seen.high, exp(gauss(seen.mu, seen.sigma))) + 0.5))
        env_s = min(env_high, exp(gauss(env_mu, env_sigma)))
        turns.append(TurnPlan(output_tokens=output, observation_tokens=observation, env_s=env_s))
        room -= observation
        if room == 0:
            return tuple(turns), True
    return tuple(turns), False


@functools.lru_cache(4096)
def _task(name: str, seed: int, index: int) -> tuple[float, float]:
    """Return a task's difficulty and prompt length, which its members share, as
    standard normal variables.
    """
    rng = random.Random(f"{name}/{seed}/{index}")
    return rng.gauss(0.0, 1.0), rng.gauss(0.0, 1.0)


def _seconds(law: LogNormal, rng: random.Random) -> float:
    return min(law.high, math.exp(rng.gauss(law.mu, law.sigma)))


def _below(z: float) -> float:
    """Return the share of a standard normal variable below `z`; less than 1."""
    return min(0.5 * (1.0 + math.erf(z / math.sqrt(2.0))), 1.0 - 1e-9)


# Recordings: traces and runs.


class Recorded:
    """Plans of recorded attempts.

    `groups[g][m]` are the attempts of a member in their order; task, member and attempt
    wrap around.
    """

    def __init__(self, groups: list[list[list[Plan]]]) -> None:
        self.groups = groups

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        del seed
        group = self.groups[index % len(self.groups)]
        attempts = group[member % len(group)]
        return attempts[attempt % len(attempts)]


class Ungrouped:
    """Recorded plans without known groups.

    Members of a task are taken far apart, so that all are used evenly.
    """

    def __init__(self, plans: list[Plan]) -> None:
        self.plans = plans
        count = len(plans)
        near = (
            step
            for step in range(max(1, round(count * (math.sqrt(5) - 1) / 2)), count + 1)
            if math.gcd(step, count) == 1
        )
        self._step = next(near, 1)  # steps of the golden section keep members apart

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        del attempt, seed
        return self.plans[(index + member * self._step) % len(self.plans)]


def read_run(path: Path, *, domain: str | None = None) -> Recorded:
    """Return the training attempts of a live run.

    Attempts that the run cut off (surplus, stale, out of active time, lost with a
    process, unfinished at the end) are left out: their continuation is unknown. Cutting
    off affects long trajectories more often than short ones. Raises ConfigError.
    """
    attempts = recording.read(path)
    domains = dict.fromkeys(attempt.domain for attempt in attempts)
    if len(domains) > 1:
        if domain not in domains:
            raise ConfigError(
                f"workload: domain must be one of {', '.join(domains)} of {path}, got {domain!r}"
            )
        attempts = [attempt for attempt in attempts if attempt.domain == domain]
    return _recorded(attempts, path)


def _recorded(attempts: list[recording.Attempt], path: Path) -> Recorded:
    """Return the attempts that ended by themselves. Raises ConfigError if none did."""
    groups: dict[str, dict[int, list[Plan]]] = {}
    for attempt in attempts:
        plan = _plan_of(attempt)
        if plan is not None:
            groups.setdefault(attempt.group, {}).setdefault(attempt.member, []).append(plan)
    if not groups:
        raise ConfigError(
            f"workload: {path} must hold training trajectories that ended by themselves, none in "
            f"{len(attempts)} attempts that began after the journal was last compacted"
        )
    return Recorded(
        [[members[member] for member in sorted(members)] for members in groups.values()]
    )


def write_trace(run: Path, file: Path) -> int:
    """Write the attempts that `read_run` returns, of a run with one task domain, as a
    trace, and return their number. Raises ConfigError.
    """
    attempts_of_run = recording.read(run)
    domains = dict.fromkeys(attempt.domain for attempt in attempts_of_run)
    if len(domains) > 1:
        raise ConfigError(
            f"--format workload: {run} must have one task domain, got {', '.join(domains)}"
        )
    groups = enumerate(_recorded(attempts_of_run, run).groups)
    lines = [
        {
            "group": group,
            "member": member,
            "prompt_tokens": max(1, plan.prompt_tokens),  # 0 if the environment did not start
            "init_s": plan.init_s,
            "turns": [
                [turn.output_tokens, turn.observation_tokens, turn.env_s] for turn in plan.turns
            ],
            "reward_s": plan.reward_s,
            "reward": plan.reward,
            "success": plan.success,
            "stop": plan.stop,
        }
        for group, members in groups
        for member, attempts in enumerate(members)
        for plan in attempts
    ]
    replace_file(file, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return len(lines)


def _plan_of(attempt: recording.Attempt) -> Plan | None:
    """Return the attempt as a plan, or None where the run cut it off."""
    stop, ended, replies = attempt.stop, attempt.ended, attempt.replies
    if (
        stop is None
        or ended is None
        or attempt.cut is not None
        or len(replies) != len(attempt.requests)
    ):
        return None
    if stop in ENV_FAILURES and attempt.ready is None:
        return Plan(
            prompt_tokens=0,
            init_s=ended - attempt.started,
            turns=(),
            reward_s=0.0,
            reward=0.0,
            success=False,
            stop=stop,
            fails_in="init",
        )
    if attempt.ready is None or not replies or stop not in TRAINABLE | ENV_FAILURES:
        return None
    fails_in: Stage = "run" if stop in ENV_FAILURES else ""
    reward_s = 0.0
    if not fails_in:
        if attempt.eval_begun is None or attempt.eval_ended is None:
            return None
        reward_s = attempt.eval_ended - attempt.eval_begun
        if attempt.reward_failed is not None:
            stop, fails_in = attempt.reward_failed, "eval"
    reward = attempt.reward or 0.0
    follows = [
        *attempt.requests,
        (ended, max(attempt.tokens, attempt.requests[-1][1] + replies[-1][1])),
    ]
    return Plan(
        prompt_tokens=attempt.requests[0][1],
        init_s=attempt.ready - attempt.started,
        turns=tuple(
            TurnPlan(
                output_tokens=output,
                observation_tokens=max(0, length - context - output),
                env_s=max(0.0, at - answered),
            )
            for ((_, context), (at, length)), (answered, output) in zip(
                pairwise(follows), replies, strict=True
            )
        ),
        reward_s=reward_s,
        reward=reward,
        success=attempt.success if attempt.success is not None else reward > 0,
        stop=stop,
        fails_in=fails_in,
    )


Rule = tuple[Callable[[Any], bool], str]
"""A predicate of valid values, and the requirement as text."""


def _integer(least: int) -> Rule:
    return (
        lambda value: type(value) is int and least <= value <= 10**9,
        f"must be a whole number from {least} to 10^9",
    )


def _number(value: Any) -> bool:
    # neither NaN nor an integer beyond the range of floats
    return type(value) in (int, float) and -1e300 <= value <= 1e300


SECONDS: Rule = (
    lambda value: _number(value) and value >= 0,
    "must be a number of seconds, at least 0",
)
STOPS = (
    StopReason.FINISHED,
    StopReason.MAX_TURNS,
    StopReason.MAX_TOKENS,
    *sorted(ENV_FAILURES),
    *sorted(REWARD_FAILURES),
)
FIELDS: Mapping[str, Rule] = {
    "prompt_tokens": _integer(1),
    "init_s": SECONDS,
    "turns": (
        lambda value: isinstance(value, list),
        "must be a list of [output tokens, observation tokens, seconds]",
    ),
    "reward_s": SECONDS,
    "reward": (_number, "must be a finite number"),
    "success": (lambda value: isinstance(value, bool), "must be true or false"),
    "stop": (lambda value: value in STOPS, f"must be one of {', '.join(STOPS)}"),
    "group": (lambda value: type(value) in (int, str), "must be a text or a whole number"),
    "member": _integer(0),
}
OPTIONAL = ("success", "stop", "group", "member")
TURN: Mapping[str, Rule] = {
    "output tokens": _integer(1),
    "observation tokens": _integer(0),
    "seconds": SECONDS,
}


def read_trace(path: Path) -> Workload:
    """Return the plans of a trace: one JSON object per line with the fields of
    `FIELDS`; those of `OPTIONAL` may be missing.

    Lines with one `group` are the members of a group, those with one `member` of it its
    attempts. `success` defaults to whether the reward is positive, `stop` to
    "finished". With the stop reason of an environment's failure the last turn fails, or
    without turns the start; with a reward's failure the reward fails. Raises
    ConfigError.
    """
    text = utf8_text(str(path), "workload")
    loose: list[Plan] = []
    groups: dict[str | int, dict[str, list[Plan]]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        record = _fields(line, where)
        plan, group = _plan_from(record, where), record.get("group")
        if "member" in record and group is None:
            raise ConfigError(
                f"{where}: group must be given where member is, got member {record['member']}"
            )
        if loose if group is not None else groups:
            raise ConfigError(
                f"{where}: group must be given in every line or in none, got {group!r}"
            )
        if group is None:
            loose.append(plan)
        else:
            members = groups.setdefault(group, {})
            members.setdefault(
                str(record["member"]) if "member" in record else f"line {number}", []
            ).append(plan)
    if not loose and not groups:
        raise ConfigError(f"workload: {path} must have a line for each trajectory, has none")
    return (
        Ungrouped(loose)
        if loose
        else Recorded([list(members.values()) for members in groups.values()])
    )


def _fields(line: str, where: str) -> dict[str, Any]:
    """Return the fields of one line, each checked by its rule."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: line must be a JSON object: {error}: {line:.60}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: line must be a JSON object, got {line:.60}")
    for name, value in record.items():
        if name not in FIELDS:
            raise ConfigError(
                f"{where}: {name} is not a field, it must be one of {', '.join(FIELDS)}; got "
                f"{value!r:.60}"
            )
        _obey(FIELDS[name], value, f"{where}: {name}")
    for name in FIELDS:
        if name not in record and name not in OPTIONAL:
            raise ConfigError(f"{where}: {name} {FIELDS[name][1]}, got nothing")
    for number, turn in enumerate(record["turns"]):
        name = f"{where}: turns[{number}]"
        if not isinstance(turn, list) or len(turn) != len(TURN):
            raise ConfigError(f"{name} must be [{', '.join(TURN)}], got {turn!r:.60}")
        for (part, rule), value in zip(TURN.items(), turn, strict=True):
            _obey(rule, value, f"{name}, {part},")
    return record


def _obey(rule: Rule, value: Any, name: str) -> None:
    right, must = rule
    if not right(value):
        raise ConfigError(f"{name} {must}, got {value!r:.60}")


def _plan_from(record: Mapping[str, Any], where: str) -> Plan:
    stop = StopReason(record.get("stop", StopReason.FINISHED))
    fails_in: Stage = ""
    if stop in ENV_FAILURES:
        fails_in = "run" if record["turns"] else "init"
    elif stop in REWARD_FAILURES:
        fails_in = "eval"
    if not record["turns"] and fails_in != "init":
        raise ConfigError(
            f"{where}: turns must have at least one turn unless the environment "
            "fails to start, got []"
        )
    reward = float(record["reward"])
    return Plan(
        prompt_tokens=record["prompt_tokens"],
        init_s=float(record["init_s"]),
        turns=tuple(
            TurnPlan(output_tokens=output, observation_tokens=observation, env_s=float(env_s))
            for output, observation, env_s in record["turns"]
        ),
        reward_s=float(record["reward_s"]),
        reward=reward,
        success=record.get("success", reward > 0),
        stop=stop,
        fails_in=fails_in,
    )
