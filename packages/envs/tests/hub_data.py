"""Data sets for tests: files in the common forms, and the libraries of the hub pointed
at a server of the test.

`huggingface_hub` and `datasets` read HF_HOME and HF_ENDPOINT when they are imported,
and a test process imports them once. So a test replaces the constants that were read;
the tests of whole commands set the variables of a process of their own.
"""

import io
import json
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pandas
import pytest
from huggingface_hub import constants

from rollweave_envs import dataset as environment
from tests.support.hub_server import HubServer

GSM8K = [
    {"question": f"What is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(40)
]

CARD = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
"""


def parquet(rows: list[dict[str, Any]]) -> bytes:
    """Return a file of Parquet."""
    file = io.BytesIO()
    pandas.DataFrame(rows).to_parquet(file)
    return file.getvalue()


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write a file of JSON Lines, and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def gsm8k() -> dict[str, bytes]:
    """Return the files of a data set in the form of openai/gsm8k."""
    return {
        "README.md": CARD,
        "main/train-0.parquet": parquet(GSM8K),
        "main/test-0.parquet": parquet(GSM8K[:5]),
        "socratic/train-0.parquet": parquet(GSM8K[:3]),
    }


def use_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the libraries a new and empty cache."""
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(home / "datasets"))
    monkeypatch.setattr(
        datasets.config, "DOWNLOADED_DATASETS_PATH", str(home / "datasets" / "downloads")
    )
    environment._files_of.cache_clear()


def use_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the libraries at a server."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    huggingface_hub.close_session()
