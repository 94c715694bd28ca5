"""Tasks from a data set as people have it: of the Hugging Face hub, or a file of
Parquet, JSON or CSV.

Its rows become records in a file of JSON Lines, of which `rollweave.envs.jsonl` makes
the tasks; so splits, order, epochs, resumption and overlong prompts are those of
`jsonl`.

Invariant: equal options and equal rows give equal tasks on every host: a task names its
record by the digest of what determines it.
"""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollweave.envs.base import Episode, Observation, Options, Split, new_task, payload_of
from rollweave.envs.jsonl import Jsonl, record_at
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Task
from rollweave_envs.dataset_records import Selection, folder_of_records, written

SELECTS = Selection.__struct_fields__
"""The options that determine the records."""

UNSCORED = "none"
"""The reward for data sets of which `[[rewards]]` alone decide the reward."""


class Dataset(Jsonl):
    """One turn: the agent answers the prompt of a row, and its answer is scored.

    `path` is `owner/name` or `owner/name@revision` on the hub, or a file, folder or
    pattern of files. `subset` and `split` are the hub's. `held_out` is another split,
    or other files; without it, the split `test` or `validation` is held out if there is
    one, else two eighths of the rows. `prompt` and `answer` name columns, with a dot
    for a field within one; the columns of GSM8K, verl, verifiers and prime-rl are found
    without them. A record has all columns, or with `columns` only those that it maps to
    names. `filter` maps columns to the values that rows must have. The other options
    are those of `jsonl`.
    """

    def __init__(
        self,
        *,
        path: str,
        reward: str,
        subset: str = "",
        split: str = "train",
        held_out: str = "",
        prompt: str = "",
        answer: str = "",
        columns: dict[str, str] | None = None,
        filter: dict[str, Any] | None = None,
        system: str = "",
        overlong: Literal["refuse", "drop"] = "refuse",
        left_out: Sequence[str] = (),
    ) -> None:
        selection = Selection(
            path=path,
            subset=subset,
            split=split,
            held_out=held_out,
            prompt=prompt,
            answer=answer,
            columns=columns or {},
            filter=filter or {},
        )
        train, held = _files(selection)
        super().__init__(path=train, held_out=held, reward=reward, system=system, overlong=overlong)

    def reset(self, task: Task) -> Observation:
        return super().reset(_located(task))

    @classmethod
    def prepare(cls, options: Options) -> Options:
        """Download the data set, and return the options with its commit, so that a run
        that is resumed reads the same rows. Raises ConfigError.
        """
        return {**options, **written(_selection(options)).pins}

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Return the next record of the split. If the reward is `none`, the task has
        the answer, which a judge may be shown.

        Raises ConfigError for invalid options, and for an empty split.
        """
        records = _as_jsonl(options)
        task = super().make_task(index=index, seed=seed, split=split, options=records)
        payload = payload_of(task)
        file, row = payload["file"], payload["row"]
        name = str(Path(file).relative_to(folder_of_records()))
        if options["reward"] != UNSCORED:
            return new_task(file=name, row=row)
        return new_task(file=name, row=row, answer=record_at(file, "prompt", row).get("answer"))

    @classmethod
    def prompts(cls, options: Options) -> Iterator[tuple[str, tuple[Message, ...]]]:
        """Yield the location of each prompt in the file of records, with the messages
        with which an episode begins. Raises ConfigError.
        """
        return super().prompts(_as_jsonl(options))

    @classmethod
    def score(cls, episode: Episode, options: Options) -> Any:
        """Return the reward function's result for the agent's answer."""
        located = msgspec.structs.replace(episode, task=_located(episode.task))
        return super().score(located, _as_jsonl(options))


def _located(task: Task) -> Task:
    """Return the task with the place of its file on this machine."""
    payload = payload_of(task)
    payload["file"] = str(folder_of_records() / payload["file"])
    return msgspec.structs.replace(task, payload=new_task(**payload).payload)


def _as_jsonl(options: Options) -> dict[str, Any]:
    """Return the options with which `jsonl` reads the records. Raises ConfigError."""
    train, held_out = _files(_selection(options))
    others = {name: value for name, value in options.items() if name not in SELECTS}
    return {**others, "path": train, "held_out": held_out}


def _selection(options: Options) -> Selection:
    given = {name: options[name] for name in SELECTS if options.get(name) is not None}
    try:
        return msgspec.convert(given, Selection)
    except msgspec.ValidationError as error:
        raise ConfigError(f"options of environment 'dataset': {error}") from error


def _files(selection: Selection) -> tuple[str, str]:
    return _files_of(msgspec.json.encode(selection, order="deterministic"))


@functools.lru_cache(64)
def _files_of(selection: bytes) -> tuple[str, str]:
    """Return the files of records, "" for none that is held out; once in each process,
    since files that change during a run would change its tasks.
    """
    records = written(msgspec.json.decode(selection, type=Selection))
    return records.train, records.held_out
