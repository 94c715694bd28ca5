"""Task families: the turns of trajectories, their lengths, and the times of
environments and rewards.

Every number is a paper's, derived from a paper's as its docstring states, or marked
"assumption". None is fitted to a result that a paper reports of its system. Where a
figure's values are missing from our copy, the number is an assumption. Failures are
those of `reset`, which RollArt counts; no paper gives a rate for `step`: such faults
are injected, not drawn here.
"""

import math

from rollweave.schema.base import Struct


class LogNormal(Struct, frozen=True, kw_only=True):
    """The exponential of a normal variable with mean `mu` and deviation `sigma`, at
    most `high`. `mu = -inf` is always 0.
    """

    mu: float
    sigma: float
    high: float


def around(median: float, *, sigma: float, high: float) -> LogNormal:
    """Return the distribution with this median."""
    return LogNormal(mu=math.log(median), sigma=sigma, high=high)


def averaging(mean: float, *, sigma: float, high: float) -> LogNormal:
    """Return the distribution with this mean before the cap."""
    return LogNormal(mu=math.log(mean) - sigma * sigma / 2, sigma=sigma, high=high)


NOTHING = LogNormal(mu=-math.inf, sigma=0.0, high=0.0)


class Family(Struct, frozen=True, kw_only=True):
    """One kind of task. Lengths are tokens; `turns` is the range of a trajectory's
    turns, drawn uniformly.

    `prompt` is drawn once per task, `init_s` and `reward_s` once per attempt, `output`,
    `observation` and `env_s` once per turn. `max_context` bounds a trajectory,
    `max_response` its part after the prompt. With `answers` the last turn is an answer,
    which calls no tool. A reset fails at `init_error_rate`, or hangs at
    `init_hang_rate` until `init_timeout_s`.
    """

    name: str
    source: str
    turns: tuple[int, int]
    prompt: LogNormal
    output: LogNormal
    observation: LogNormal
    env_s: LogNormal
    init_s: LogNormal
    reward_s: LogNormal
    max_context: int
    max_response: int
    answers: bool
    init_error_rate: float = 0.0
    init_hang_rate: float = 0.0
    init_timeout_s: float = 0.0


# Values stated by the papers.

TAIL_SIGMA = math.log(10) / 2.326
"""Spread of output lengths. Laminar §2.2: their 99th percentile is ten times the
median; 2.326 is that of a normal variable.
"""

ROLLART_CONTEXT = 32_768
"""Maximum tokens of context (RollArt §7.1)."""

HEDDLE_OUTPUT = 40_960
"""Maximum tokens of output, 40K (Heddle §7)."""

LAMINAR_PROMPT, LAMINAR_RESPONSE = 2_048, 16_384
"""Maximum tokens of input, 2K, and of output, 16K (Laminar §8)."""

LAMINAR_TOOL_CALLS = 8
"""Maximum tool calls of a trajectory (Laminar §8)."""

IO_S, IO_MAX_S = 0.02, 1.4
"""Mean and maximum seconds of a call of an environment in another cluster (RollArt
§7.5).
"""

REWARD_IO_S, REWARD_IO_MAX_S = 0.01, 2.1
"""Mean and maximum seconds of a call of a serverless reward (RollArt §7.5)."""

CODING_TOOL_S, SEARCH_TOOL_S, MATH_TOOL_S = (
    (0.46 + 0.41 + 0.45) / 3,
    (1.42 + 1.41 + 1.43) / 3,
    (0.051 + 0.046 + 0.054) / 3,
)
"""Mean seconds of a tool's execution, over three models (Heddle Table 1)."""

SHELL_ACTION_S = 0.42
"""Mean seconds of an action in a software engineering sandbox, full system (ProRL Table
3).
"""

FROZENLAKE_PREFILL = 0.77
"""Share of prefill among all tokens of FrozenLake with 8B (ROSE §2.2).

We take each token as counted once.
"""

SWE_BATCH = 128
"""Trajectories of an iteration in which resets were measured (RollArt §3.1)."""

SWE_SLOWEST_INIT_S = 0.15 * 365.7
"""Seconds of the slowest environment initialization: 15 % of an iteration of 365.7 s
without failures (RollArt Fig. 3).
"""

SWE_INIT_MAX_S = 60.0
"""Maximum seconds of an initialization: more than 99.99 % take less than one minute
(RollArt §8).
"""

INIT_ERROR_RATE = 1e-4
"""Share of failed resets. RollArt §8: more than 99.99 % succeed; we take the bound."""

SWE_INIT_HANG_RATE = 1 - (1 - 7 / 60) ** (1 / SWE_BATCH)
"""Share of resets that hang. RollArt §8: long initialization failures in 7 of 60
iterations.

Their batch is not given: that of §3.1 (assumption).
"""

# Assumptions: no paper states these, or only a figure that our copy lacks.

LONG_RESPONSE_SHARE = 0.1
"""Median of a long-reasoning response as a share of its cap. Assumption: the 99th
percentile is at the cap, so the median is a tenth of it.
"""

IO_SIGMA = 1.07
"""Spread of I/O times. Assumption: the maximum of about 10⁵ calls lies 4.5 deviations
out, so that maximum and mean are those of RollArt §7.5.
"""

TOOL_SIGMA = 1.0
"""Spread of tool times. Assumption: tools have a long tail (Heddle Fig. 2, Laminar Fig.
2, RollArt Fig. 5a; values not in text).
"""

TOOL_MAX_S = 60.0
"""Maximum seconds of a tool call. Assumption."""

EVEN_SIGMA, TEXT_SIGMA = 0.2, 0.5
"""Spread of lengths that vary little (a rendered board) and moderately (prompts, pages,
output of tools). Assumption.
"""

INIT_SIGMA = 0.5
"""Spread of initialization times, without failures. Assumption."""

SLOWEST_OF_BATCH = 2.5
"""Deviations by which the slowest of `SWE_BATCH` normal variables lies above their
median: expected value 2.6, rounded down.
"""

INIT_TIMEOUT_S = 300.0
"""Seconds after which a hanging reset is abandoned. Assumption.

RollArt §3.1 only states that the tail reaches hundreds of seconds.
"""

LIGHT_INIT_S, LIGHT_INIT_MAX_S = 0.5, 10.0
"""Mean and maximum seconds until an environment without its own container is ready.
Assumption.
"""

SWE_PROMPT, WEB_PROMPT, GAME_PROMPT, MATH_PROMPT, CODING_PROMPT, SEARCH_PROMPT = (
    3_000,
    1_000,
    500,
    256,
    800,
    300,
)
"""Median prompt tokens, instructions and tools included. Assumption.

RollArt §8: prompts in production reach 12k.
"""

PROMPT_MAX = 12_288
"""Maximum prompt tokens. RollArt §8: prompts reach 12k tokens.

Assumption: elsewhere too, where nothing else is stated.
"""

SWE_OUTPUT, WEB_OUTPUT, FROZENLAKE_OUTPUT, SEARCH_OUTPUT = 150, 120, 64, 150
"""Mean output tokens of a turn of agents that act often with short outputs. Assumption.
"""

SWE_OBSERVATION, WEB_OBSERVATION, CODING_OBSERVATION, SEARCH_OBSERVATION, MATH_OBSERVATION = (
    300,
    600,
    300,
    800,
    150,
)
"""Mean tokens of an observation. Assumption."""

FROZENLAKE_OBSERVATION = FROZENLAKE_OUTPUT * FROZENLAKE_PREFILL / (1 - FROZENLAKE_PREFILL)
"""Mean tokens of an observation, from the assumed output and the share that ROSE
states.
"""

ALFWORLD_TURNS = (10, 50)
"""Range of ALFWorld's turns. Assumption: at most 50, as in common training recipes."""

ALFWORLD_OUTPUT, ALFWORLD_OBSERVATION = 64, 100
"""Mean tokens of an output, as of FrozenLake's, and of a sentence about the objects in
sight. Assumption.
"""

TURN_MAX = 8_192
"""Maximum tokens of an observation, and of a turn of an agent that acts often.
Assumption.
"""

CODING_TURNS, SEARCH_TURNS, MATH_TURNS = (2, 16), (4, 20), (1, 9)
"""Range of turns. Assumption.

Heddle §7 describes search as shorter sequences with frequent steps, without numbers.
"""

WEB_STEP_S = 0.1
"""Mean seconds of a shop's page. Assumption.

Games and their boards take negligible time.
"""

JUDGE_S, JUDGE_MAX_S = 2.0, 30.0
"""Mean and maximum seconds of a verdict of RollArt's 7B reward model on a mathematical
answer. Assumption.
"""

TESTS_S, TESTS_MAX_S = 60.0, 300.0
"""Mean and maximum seconds of a test suite. Assumption; ProRL §3 states several minutes
at most.
"""


def _long(cap: int, turns: tuple[int, int]) -> LogNormal:
    """Return the output of a turn of agents that reason at length.

    The turns of the middle trajectory share the median of a response.
    """
    return around(cap * LONG_RESPONSE_SHARE / (sum(turns) / 2), sigma=TAIL_SIGMA, high=cap)


def _short(mean: float) -> LogNormal:
    """Return the output of a turn of agents that act often."""
    return averaging(mean, sigma=TAIL_SIGMA, high=TURN_MAX)


def _prompt(median: float, high: int = PROMPT_MAX) -> LogNormal:
    return around(median, sigma=TEXT_SIGMA, high=high)


def _seen(mean: float, sigma: float = TEXT_SIGMA) -> LogNormal:
    return averaging(mean, sigma=sigma, high=TURN_MAX)


def _tool(mean_s: float) -> LogNormal:
    return averaging(mean_s, sigma=TOOL_SIGMA, high=TOOL_MAX_S)


_IO = averaging(IO_S, sigma=IO_SIGMA, high=IO_MAX_S)
_RULE = averaging(REWARD_IO_S, sigma=IO_SIGMA, high=REWARD_IO_MAX_S)
_LIGHT_INIT = averaging(LIGHT_INIT_S, sigma=INIT_SIGMA, high=LIGHT_INIT_MAX_S)
_MATH_RANGE, _ONCE, _TOOL_RANGE = (1, 4), (1, 1), (1, LAMINAR_TOOL_CALLS + 1)

_ALL = (
    Family(
        name="swe",
        source="RollArt Table 1 (30-50 turns), §3.1, §7.5, §8; ProRL Table 3 (action time)",
        turns=(30, 50),
        prompt=_prompt(SWE_PROMPT),
        output=_short(SWE_OUTPUT),
        observation=_seen(SWE_OBSERVATION, TOOL_SIGMA),
        env_s=_tool(SHELL_ACTION_S + IO_S),
        init_s=around(
            SWE_SLOWEST_INIT_S / math.exp(INIT_SIGMA * SLOWEST_OF_BATCH),
            sigma=INIT_SIGMA,
            high=SWE_INIT_MAX_S,
        ),
        reward_s=averaging(TESTS_S, sigma=TEXT_SIGMA, high=TESTS_MAX_S),
        max_context=ROLLART_CONTEXT,
        max_response=ROLLART_CONTEXT,
        answers=False,
        init_error_rate=INIT_ERROR_RATE,
        init_hang_rate=SWE_INIT_HANG_RATE,
        init_timeout_s=INIT_TIMEOUT_S,
    ),
    Family(
        name="webshop",
        source="RollArt Table 1 (5-30 turns), §7.5",
        turns=(5, 30),
        prompt=_prompt(WEB_PROMPT),
        output=_short(WEB_OUTPUT),
        observation=_seen(WEB_OBSERVATION),
        env_s=_tool(WEB_STEP_S + IO_S),
        init_s=_LIGHT_INIT,
        reward_s=_RULE,
        max_context=ROLLART_CONTEXT,
        max_response=ROLLART_CONTEXT,
        answers=False,
        init_error_rate=INIT_ERROR_RATE,
    ),
    Family(
        name="frozenlake",
        source="RollArt Table 1 (20-100 turns), §7.5; ROSE §2.2 (share of prefill)",
        turns=(20, 100),
        prompt=around(GAME_PROMPT, sigma=EVEN_SIGMA, high=PROMPT_MAX),
        output=_short(FROZENLAKE_OUTPUT),
        observation=_seen(FROZENLAKE_OBSERVATION, EVEN_SIGMA),
        env_s=_IO,
        init_s=_LIGHT_INIT,
        reward_s=_RULE,
        max_context=ROLLART_CONTEXT,
        max_response=ROLLART_CONTEXT,
        answers=False,
        init_error_rate=INIT_ERROR_RATE,
    ),
    Family(
        name="alfworld",
        source="ROSE §6 (32K context); RollArt §7.5; turns and lengths are assumptions",
        turns=ALFWORLD_TURNS,
        prompt=around(GAME_PROMPT, sigma=EVEN_SIGMA, high=PROMPT_MAX),
        output=_short(ALFWORLD_OUTPUT),
        observation=_seen(ALFWORLD_OBSERVATION, EVEN_SIGMA),
        env_s=_IO,
        init_s=_LIGHT_INIT,
        reward_s=_RULE,
        max_context=ROLLART_CONTEXT,
        max_response=ROLLART_CONTEXT,
        answers=False,
        init_error_rate=INIT_ERROR_RATE,
    ),
    Family(
        name="gem-math",
        source="RollArt Table 1 (under 5 turns), §7.1 (a 7B model judges), §7.5; Heddle Table 1 "
        "(math tool)",
        turns=_MATH_RANGE,
        prompt=_prompt(MATH_PROMPT),
        output=_long(ROLLART_CONTEXT, _MATH_RANGE),
        observation=_seen(MATH_OBSERVATION),
        env_s=_tool(MATH_TOOL_S + IO_S),
        init_s=_LIGHT_INIT,
        reward_s=averaging(JUDGE_S + REWARD_IO_S, sigma=TEXT_SIGMA, high=JUDGE_MAX_S),
        max_context=ROLLART_CONTEXT,
        max_response=ROLLART_CONTEXT,
        answers=True,
        init_error_rate=INIT_ERROR_RATE,
    ),
    Family(
        name="gem-game",
        source="RollArt Table 1 (1 turn), §7.5",
        turns=_ONCE,
        prompt=_prompt(GAME_PROMPT),
        output=_long(ROLLART_CONTEXT, _ONCE),
        observation=NOTHING,
        env_s=_IO,
        init_s=_LIGHT_INIT,
        reward_s=_RULE,
        max_context=ROLLART_CONTEXT,
        max_response=ROLLART_CONTEXT,
        answers=False,
        init_error_rate=INIT_ERROR_RATE,
    ),
    Family(
        name="coding",
        source="Heddle §7 (CodeForces, 40K tokens, 16 samples a prompt), Table 1",
        turns=CODING_TURNS,
        prompt=_prompt(CODING_PROMPT),
        output=_long(HEDDLE_OUTPUT, CODING_TURNS),
        observation=_seen(CODING_OBSERVATION),
        env_s=_tool(CODING_TOOL_S),
        init_s=_LIGHT_INIT,
        reward_s=_tool(CODING_TOOL_S),
        max_context=PROMPT_MAX + HEDDLE_OUTPUT,
        max_response=HEDDLE_OUTPUT,
        answers=True,
    ),
    Family(
        name="search",
        source="Heddle §7 (HotpotQA, 40K tokens, 16 samples a prompt), Table 1",
        turns=SEARCH_TURNS,
        prompt=_prompt(SEARCH_PROMPT),
        output=_short(SEARCH_OUTPUT),
        observation=_seen(SEARCH_OBSERVATION),
        env_s=_tool(SEARCH_TOOL_S),
        init_s=NOTHING,
        reward_s=_RULE,
        max_context=PROMPT_MAX + HEDDLE_OUTPUT,
        max_response=HEDDLE_OUTPUT,
        answers=True,
    ),
    Family(
        name="math",
        source="Heddle §7 (DAPO-Math, 40K tokens, 16 samples a prompt), Table 1",
        turns=MATH_TURNS,
        prompt=_prompt(MATH_PROMPT),
        output=_long(HEDDLE_OUTPUT, MATH_TURNS),
        observation=_seen(MATH_OBSERVATION),
        env_s=_tool(MATH_TOOL_S),
        init_s=NOTHING,
        reward_s=_RULE,
        max_context=PROMPT_MAX + HEDDLE_OUTPUT,
        max_response=HEDDLE_OUTPUT,
        answers=True,
    ),
    Family(
        name="dapo-math",
        source="Laminar §8 (DAPO-Math-17k, 512 prompts of 16 responses, 2K in, 16K out, "
        "rule-based reward), §2.2",
        turns=_ONCE,
        prompt=_prompt(MATH_PROMPT, LAMINAR_PROMPT),
        output=_long(LAMINAR_RESPONSE, _ONCE),
        observation=NOTHING,
        env_s=NOTHING,
        init_s=NOTHING,
        reward_s=_RULE,
        max_context=LAMINAR_PROMPT + LAMINAR_RESPONSE,
        max_response=LAMINAR_RESPONSE,
        answers=True,
    ),
    Family(
        name="tool-calling",
        source="Laminar §8 (as dapo-math, up to 8 calls of a code sandbox), §2.2; Heddle Table 1 "
        "(coding tool)",
        turns=_TOOL_RANGE,
        prompt=_prompt(MATH_PROMPT, LAMINAR_PROMPT),
        output=_long(LAMINAR_RESPONSE, _TOOL_RANGE),
        observation=_seen(MATH_OBSERVATION),
        env_s=_tool(CODING_TOOL_S),
        init_s=_LIGHT_INIT,
        reward_s=_RULE,
        max_context=LAMINAR_PROMPT + LAMINAR_RESPONSE,
        max_response=LAMINAR_RESPONSE,
        answers=True,
    ),
)

FAMILIES = {family.name: family for family in _ALL}
