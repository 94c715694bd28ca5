"""Run vLLM's tests of its OpenAI-compatible server against `rollweave engine`.

    .venv/bin/python -m benchmarks.vllm_suite.bench VLLM_SOURCE CHECKPOINT \
        --python .venv-vllm/bin/python

`VLLM_SOURCE` is the source distribution of the same version of vLLM as that of the
interpreter, unpacked, which has pytest, pytest-asyncio, pytest-timeout and anthropic,
too. The checkpoint is served with the chat template beside this file, in ChatML, which
shows tools. Prints a line for each file: the tests that passed, failed and do not
apply.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.vllm_suite.rules import FILES, OPTIONS, RULES

START_S: Final = 300.0
TEST_S: Final = 300
"""Maximum seconds until the engine serves, and of one test."""


def _with_tools(checkpoint: Path, folder: Path) -> Path:
    """Make a folder with a checkpoint's files, and the template that shows tools."""
    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.name not in ("tokenizer_config.json", "chat_template.jinja"):
            (folder / file.name).symlink_to(file.absolute())
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    settings["chat_template"] = Path(__file__).with_name("tools.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@contextmanager
def _engine(checkpoint: Path, port: int) -> Iterator[str]:
    """Serve the checkpoint; yield the address."""
    program = str(Path(sys.executable).with_name("rollweave"))
    command = [program, "engine", str(checkpoint), "--no-token"]
    command += ["--port", str(port), "--slots", "128", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            url, ends = f"http://127.0.0.1:{port}", time.monotonic() + START_S
            while True:
                try:
                    urllib.request.urlopen(url + "/health", timeout=5).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > ends:
                        raise RuntimeError("the engine did not start") from None
                    time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            process.wait()


def _outcomes(report: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the outcome of each test by file."""
    by_file = dict[str, dict[str, dict[str, Any]]]()
    for line in report.read_text().splitlines():
        outcome = json.loads(line)
        file = outcome["test"].partition("::")[0].removeprefix("tests/entrypoints/")
        by_file.setdefault(file, {})[outcome["test"]] = outcome
    return by_file


def main() -> None:
    """Run the tests, and print the counts and every failure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--python", default=".venv-vllm/bin/python")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    here = Path(__file__).resolve().parent
    python = Path(asked.python).absolute()  # not resolved: a link names the environment
    with tempfile.TemporaryDirectory() as scratch:
        report = (asked.report or Path(scratch) / "report.jsonl").absolute()
        report.touch()
        # Only the tests of the source: vLLM itself is that of the interpreter.
        (Path(scratch) / "tests").symlink_to(asked.source.absolute() / "tests")
        checkpoint = _with_tools(asked.checkpoint, Path(scratch) / "checkpoint")
        with _engine(checkpoint, asked.port) as url:
            files = [f"tests/entrypoints/{file}" for file in FILES if re.search(asked.only, file)]
            command = [str(python), "-m", "pytest", *files, "-q", "--noconftest"]
            command += [
                "-p",
                "vllm_suite_plugin",
                "-p",
                "tests.entrypoints.openai.responses.conftest",
            ]
            command += ["-p", "no:cacheprovider", "--timeout", str(TEST_S), "--rootdir", "."]
            command += ["--continue-on-collection-errors"]
            subprocess.run(
                command,
                cwd=scratch,
                stdout=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{here}:{scratch}",
                    "VLLM_SUITE_SOURCE": str(asked.source.absolute()),
                    "VLLM_SUITE_URL": url,
                    "VLLM_SUITE_MODEL": str(checkpoint),
                    "VLLM_SUITE_REPORT": str(report),
                    "VLLM_SUITE_RULES": json.dumps(RULES),
                    "VLLM_SUITE_OPTIONS": json.dumps(OPTIONS),
                },
            )
        _print(_outcomes(report))


def _print(by_file: dict[str, dict[str, dict[str, Any]]]) -> None:
    total = Counter[str]()
    print("| file | passed | failed | not applicable |\n|---|--:|--:|--:|")
    for file, outcomes in by_file.items():
        counts = Counter(outcome["outcome"] for outcome in outcomes.values())
        total += counts
        failed = counts["failed"] + counts["uncollected"]
        print(f"| {file} | {counts['passed']} | {failed} | {counts['skipped']} |")
    failed = total["failed"] + total["uncollected"]
    print(f"| all | {total['passed']} | {failed} | {total['skipped']} |")
    for outcomes in by_file.values():
        for outcome in outcomes.values():
            if outcome["outcome"] != "passed":
                detail = " ".join(outcome["detail"].split())[-240:]
                print(f"{outcome['outcome']}: {outcome['test']}: {detail}")


if __name__ == "__main__":
    main()
