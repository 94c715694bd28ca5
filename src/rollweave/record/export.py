"""Export a run's trajectories: as JSON lines or Parquet for data sets, and as an
evaluation log of inspect_ai.

Invariants: an export has every attempt that the run has stored, in the order in which
they ended; the file is written under another name and renamed once it is complete; at
most `BATCH` attempts are in memory at the same time.
"""

import importlib
import itertools
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rollweave.io.disk import NEW_SUFFIX, writing
from rollweave.io.extras import from_extra
from rollweave.record.rundir import RunDir
from rollweave.record.store import StoredAttempt, TrajectoryReader
from rollweave.record.transcript import (
    TokenDecoder,
    arguments_of,
    attempt_line,
    spans,
    template_arguments,
    tokenizer_of,
)
from rollweave.schema.base import as_json
from rollweave.schema.work import SegmentKind, TokenSequence, Trajectory

BATCH = 256
"""Maximum number of attempts in memory, and in a row group of a Parquet file."""

SUFFIXES = {"jsonl": ".jsonl", "parquet": ".parquet", "inspect": ".eval"}
"""Suffix of the file by format."""

Attempts = Iterator[tuple[StoredAttempt, Trajectory]]


class Export:
    """The trajectories of `run`, to be written in a format of `SUFFIXES`.

    `damaged` has a line about each segment that is left out in part.
    """

    def __init__(self, run: RunDir) -> None:
        """Raises ConfigError for a damaged tokenizer or configuration."""
        self._run, self._arguments = run, template_arguments(run)
        self._reader = TrajectoryReader(run.trajectories)
        self._decoder = TokenDecoder(tokenizer_of(run))
        self.damaged = self._reader.damaged
        self.attempts = len(self._reader.entries)

    def write(self, path: Path, format_: str) -> None:
        """Write all attempts to `path`, whole or not at all.

        Raises DiskError, and MissingExtraError if the format needs a package that is
        not installed.
        """
        writers: dict[str, Callable[[Path], None]] = {
            "jsonl": self._write_jsonl,
            "parquet": self._write_parquet,
            "inspect": self._write_inspect,
        }
        new = path.with_name(path.name + NEW_SUFFIX)
        with writing(path):
            try:
                writers[format_](new)
                new.replace(path)
            except BaseException:
                new.unlink(missing_ok=True)
                raise

    def _loaded(self) -> Attempts:
        return ((entry, self._reader.load(entry)) for entry in self._reader.entries)

    def _rows(self) -> Iterator[dict[str, Any]]:
        return (
            row(entry, trajectory, self._decoder, self._arguments)
            for entry, trajectory in self._loaded()
        )

    def _write_jsonl(self, path: Path) -> None:
        with path.open("wb") as file:
            for line in self._rows():
                file.write(as_json(line) + b"\n")

    def _write_parquet(self, path: Path) -> None:
        with from_extra("parquet"):
            pyarrow = importlib.import_module("pyarrow")
            parquet = importlib.import_module("pyarrow.parquet")
        schema = _schema(pyarrow)
        with parquet.ParquetWriter(str(path), schema, compression="zstd") as writer:
            rows = self._rows()
            while batch := list(itertools.islice(rows, BATCH)):
                writer.write_table(pyarrow.Table.from_pylist(batch, schema=schema))

    def _write_inspect(self, path: Path) -> None:
        """Write a log of inspect_ai: a ZIP archive of JSON files, in version 2 of the
        log's format.
        """
        header = _header(self._run, self.attempts)
        summaries: list[dict[str, Any]] = []
        rewards: list[float] = []
        with zipfile.ZipFile(path, "w", compression=zipfile.ZIP_DEFLATED) as archive:

            def add(name: str, value: Any) -> None:
                archive.writestr(name, as_json(value))

            start = {name: header[name] for name in ("version", "eval", "plan")}
            add("_journal/start.json", start)
            for entry, trajectory in self._loaded():
                sample = _sample(entry, trajectory, self._decoder)
                sample["metadata"]["template_arguments"] = [
                    arguments_of(sequence, self._arguments) for sequence in trajectory.sequences
                ]
                add(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", sample)
                summaries.append(_summary_of(sample))
                if trajectory.reward is not None:
                    rewards.append(trajectory.reward)
            add("_journal/summaries/1.json", summaries)
            add("summaries.json", summaries)
            add("header.json", {**header, "results": _results(rewards, self.attempts)})


def row(
    entry: StoredAttempt,
    trajectory: Trajectory,
    decoder: TokenDecoder,
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Return an attempt as a row with the columns of `_schema`. `arguments` are the
    arguments of the run's chat template.

    `payload` and `result` are JSON, or text that is not JSON. Each of `sequences` has
    lists with one entry per token: the token's id, its log-prob (0 if it was not
    sampled), whether it was sampled (the loss mask), and the version that sampled it,
    or -1. It also has the arguments of its chat template, as JSON.
    """
    line = attempt_line(entry, trajectory)
    task, timing = line.pop("task"), line.pop("timing")
    sampled = line.pop("sampled_versions")
    return {
        **line,
        "task_id": task["id"],
        "env": task["env"],
        "domain": task["domain"],
        "seed": task["seed"],
        "payload": trajectory.task.payload,
        "result": trajectory.result,
        "first_version": sampled[0] if sampled else -1,
        "last_version": sampled[-1] if sampled else -1,
        "rewards": [{"name": name, "value": value} for name, value in line["rewards"].items()],
        **timing,
        "sequences": [_columns(sequence, decoder, arguments) for sequence in trajectory.sequences],
    }


def _columns(
    sequence: TokenSequence, decoder: TokenDecoder, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    versions = [
        segment.version for segment in sequence.segments for _ in range(segment.end - segment.start)
    ]
    return {
        "text": decoder.text(sequence.tokens) if decoder.available else "",
        "tokens": list(sequence.tokens),
        "logprobs": list(sequence.logprobs),
        "sampled": sequence.output_mask(),
        "versions": versions,
        "template_arguments": json.dumps(arguments_of(sequence, arguments), sort_keys=True),
    }


def _schema(pyarrow: Any) -> Any:
    """Return the types of a row's columns."""
    text, real, whole, flag = (
        pyarrow.string(),
        pyarrow.float64(),
        pyarrow.int64(),
        pyarrow.bool_(),
    )
    sequence = pyarrow.struct(
        [
            ("text", text),
            ("tokens", pyarrow.list_(pyarrow.int32())),
            ("logprobs", pyarrow.list_(pyarrow.float32())),
            ("sampled", pyarrow.list_(flag)),
            ("versions", pyarrow.list_(pyarrow.int32())),
            ("template_arguments", text),
        ]
    )
    reward = pyarrow.struct([("name", text), ("value", real)])
    ignored = pyarrow.struct(
        [("field", text), ("value", text), ("requests", whole), ("action", text), ("text", text)]
    )
    types = {
        text: "id group purpose engine stop_reason blame error task_id env domain payload result",
        whole: "attempt member initiated_version turns tokens cut_turns first_version "
        "last_version seed",
        real: "ended_s reward init_s run_s eval_s queue_s generate_s env_s",
        flag: "success",
        pyarrow.list_(reward): "rewards",
        pyarrow.list_(ignored): "ignored",
        pyarrow.list_(sequence): "sequences",
    }
    return pyarrow.schema([(name, kind) for kind, names in types.items() for name in names.split()])


# The parts of a log of inspect_ai.


def _header(run: RunDir, count: int) -> dict[str, Any]:
    created = run.metrics if run.metrics.exists() else run.path
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": run.path.name,
            "run_id": run.path.name,
            "created": datetime.fromtimestamp(created.stat().st_mtime, UTC).isoformat(),
            "task": run.path.name,
            "task_id": run.path.name,
            "dataset": {"name": run.path.name, "samples": count},
            "model": "rollweave",
            "config": {},
        },
        "plan": {"name": "plan", "steps": [], "config": {}},
        "stats": {"started_at": "", "completed_at": ""},
    }


def _results(rewards: list[float], count: int) -> dict[str, Any]:
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    return {
        "total_samples": count,
        "completed_samples": count,
        "scores": [
            {
                "name": "reward",
                "scorer": "reward",
                "scored_samples": len(rewards),
                "unscored_samples": count - len(rewards),
                "metrics": {"mean": {"name": "mean", "value": mean}},
            }
        ],
    }


def _sample(entry: StoredAttempt, trajectory: Trajectory, decoder: TokenDecoder) -> dict[str, Any]:
    """Return an attempt as a sample: its prompt is the input, its observations are the
    user's messages and its turns the assistant's.
    """
    line = attempt_line(entry, trajectory)
    messages = [
        message
        for number, sequence in enumerate(trajectory.sequences)
        for message in _messages(sequence, decoder, f"{trajectory.id}.{number}")
    ]
    last = next((message for message in reversed(messages) if message["role"] == "assistant"), None)
    scores: dict[str, Any] = {}
    if trajectory.reward is not None:
        scores["reward"] = {"value": trajectory.reward, "metadata": line["rewards"]}
    if trajectory.success is not None:
        scores["success"] = {"value": trajectory.success}
    prompt = next((message["content"] for message in messages if message["role"] == "user"), "")
    choice = {"message": last, "stop_reason": "stop"} if last is not None else None
    sample = {
        "id": f"{trajectory.id}",
        "epoch": trajectory.attempt + 1,
        "input": prompt,
        "target": "",
        "messages": messages,
        "output": {
            "model": "rollweave",
            "choices": [choice] if choice is not None else [],
            "completion": last["content"] if last is not None else "",
        },
        "scores": scores,
        "metadata": {name: value for name, value in line.items() if name != "error"},
        "total_time": sum(line["timing"][name] for name in ("init_s", "run_s", "eval_s")),
    }
    if trajectory.error:
        trace = {"message": trajectory.error, "traceback": "", "traceback_ansi": ""}
        sample["error"] = trace
    return sample


def _messages(
    sequence: TokenSequence, decoder: TokenDecoder, name: str
) -> Iterator[dict[str, Any]]:
    for span in spans(sequence):
        tokens = sequence.tokens[span.start : span.end]
        text = decoder.text(tokens) if decoder.available else " ".join(map(str, tokens))
        sampled = span.kind is SegmentKind.OUTPUT
        message = {
            "id": f"{name}.{span.start}",
            "role": "assistant" if sampled else "user",
            "content": text,
        }
        if sampled:
            message |= {"source": "generate", "model": "rollweave"}
        yield message


def _summary_of(sample: dict[str, Any]) -> dict[str, Any]:
    summary = {name: sample[name] for name in ("id", "epoch", "target", "scores")}
    metadata = {
        name: sample["metadata"][name]
        for name in ("purpose", "initiated_version", "stop_reason", "turns", "tokens")
    }
    summary |= {
        "input": sample["input"][:1000],
        "metadata": metadata,
        "completed": True,
        "message_count": len(sample["messages"]),
        "total_time": sample["total_time"],
    }
    if "error" in sample:
        summary["error"] = sample["error"]["message"]
    return summary
