"""A pytest plug-in that puts a running `rollweave engine` in the place of the servers
that vLLM's tests start. It runs in an interpreter that has vLLM, and not this package.

`VLLM_SUITE_URL` is the engine's address. Its checkpoint, `VLLM_SUITE_MODEL`, takes the
place of every model. Outcomes are written to the file `VLLM_SUITE_REPORT`, one JSON
object a line. Tests that do not apply are skipped with a reason.
"""

import inspect
import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any, Self

import pytest

URL, MODEL = os.environ["VLLM_SUITE_URL"], os.environ["VLLM_SUITE_MODEL"]
REPORT = Path(os.environ["VLLM_SUITE_REPORT"])
RULES = [(re.compile(rule), why) for rule, why in json.loads(os.environ["VLLM_SUITE_RULES"])]
OPTIONS = json.loads(os.environ["VLLM_SUITE_OPTIONS"])
"""Options of vLLM's server that change what clients see, and that the engine lacks."""

NO_SERVER = "tests vLLM's own code, without a server"


class RemoteOpenAIServer:
    """Stands for the server that a test starts: the engine."""

    DUMMY_API_KEY = "none"

    def __init__(self, model: str, args: list[str], **_: Any) -> None:
        for option in args:
            if option.split("=")[0] in OPTIONS:
                pytest.skip(f"not applicable: starts the server with {option.split('=')[0]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join((URL, *(part.strip("/") for part in parts)))

    url_root = URL
    show_hidden_metrics = False

    def get_client(self, **more: Any) -> Any:
        import openai

        return openai.OpenAI(**self._of_openai(more))

    def get_async_client(self, **more: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(**self._of_openai(more))

    def _of_openai(self, more: dict[str, Any]) -> dict[str, Any]:
        base = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return {"timeout": 600, **base, **more}

    def get_async_client_anthropic(self, **more: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(
            base_url=URL, api_key=self.DUMMY_API_KEY, max_retries=0, timeout=600, **more
        )


class _Hub:
    """Downloads nothing: every adapter is refused, and the model is the engine's."""

    def snapshot_download(self, repo_id: str = "", **_: Any) -> str:
        return MODEL


def _stand_ins() -> None:
    """Replace what the tests import of their own helpers and of vLLM's."""
    import vllm.config
    import vllm.tokenizers
    import vllm.transformers_utils.repo_utils as repositories

    helpers: Any = types.ModuleType("tests.utils")
    helpers.RemoteOpenAIServer = RemoteOpenAIServer
    helpers.ROCM_EXTRA_ARGS, helpers.ROCM_ENV_OVERRIDES = [], {}
    helpers.VLLM_PATH = Path(os.environ["VLLM_SUITE_SOURCE"])
    helpers.multi_gpu_only = helpers.requires_fp8 = lambda *_, **__: lambda test: test
    sys.modules["tests.utils"] = helpers
    of_name, init = vllm.tokenizers.get_tokenizer, vllm.config.ModelConfig.__init__
    vllm.tokenizers.get_tokenizer = lambda *_, **__: of_name(MODEL)
    vllm.config.ModelConfig.__init__ = lambda self, *_, **more: init(
        self, **{**more, "model": MODEL}
    )
    repositories.hf_api = _Hub


_stand_ins()
pytest_plugins = ["tests.entrypoints.conftest"]


def _starts_server(item: Any) -> bool:
    """Return whether a test talks to a server, by a fixture or by itself."""
    functions = [item.function]
    for fixtures in item._fixtureinfo.name2fixturedefs.values():
        functions += [fixture.func for fixture in fixtures]
    sources = [inspect.getsource(function) for function in functions]
    return any("Remote" in source or "getfixturevalue" in source for source in sources)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        why = next((why for rule, why in RULES if rule.search(item.nodeid)), None)
        if why is None and not _starts_server(item):
            why = NO_SERVER
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=f"not applicable: {why}"))


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "teardown" or (report.when == "setup" and report.passed):
        return
    detail = str(report.longrepr[2] if report.skipped else report.longrepr or "")
    line = {"test": report.nodeid, "outcome": report.outcome, "detail": detail[-600:]}
    with REPORT.open("a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        line = {
            "test": report.nodeid,
            "outcome": "uncollected",
            "detail": str(report.longrepr)[-600:],
        }
        with REPORT.open("a") as file:
            file.write(json.dumps(line) + "\n")
