"""Methods of workers that a platform executes at a URL."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from rollweave import Cluster, ConfigError, Worker, WorkerError
from rollweave.runtime.roles import url_methods
from rollweave.runtime.roles.serving import method_codec
from rollweave.runtime.roles.url_methods import UrlMethod
from rollweave.runtime.roles.worker import (
    GRACE_S,
    URL_S,
    Declaration,
    declarations,
    hw_mapping,
    register_serverless,
)
from rollweave.schema.rollouts import IDEMPOTENCY_KEY
from tests.runtime.roles.judges import Elsewhere


class Platform(ThreadingHTTPServer):
    """Gives the `answers` one after the other, and keeps the requests."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.answers: list[tuple[int, object]] = []


class Handler(BaseHTTPRequestHandler):
    server: Platform

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((dict(self.headers), body))
        status, answer = self.server.answers.pop(0)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for each request."""


def serving(platform: Platform) -> Iterator[Platform]:
    thread = Thread(target=platform.serve_forever)
    thread.start()
    yield platform
    platform.shutdown()
    thread.join()
    platform.server_close()


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    monkeypatch.setattr("rollweave.rollout.http_service.FIRST_RETRY_S", 0.01)
    monkeypatch.setenv("ELSEWHERE_TOKEN", "sesame")
    yield from serving(Platform())


CODEC = method_codec(Elsewhere, "score")


def url_method(declaration: Declaration) -> UrlMethod:
    return UrlMethod(CODEC.name, declaration, CODEC.encode_foreign)


@pytest.fixture
def method(platform: Platform) -> Iterator[UrlMethod]:
    url = f"http://127.0.0.1:{platform.server_port}"
    declaration = Declaration(url=url, token_env="ELSEWHERE_TOKEN", timeout_s=5.0)
    made = url_method(declaration)
    yield made
    made.close()


def result(method: UrlMethod, *args: Any, **kwargs: Any) -> Any:
    answer = method.execute(CODEC.named(CODEC.encode(args, kwargs)))
    return CODEC.decode_result(answer)


def test_a_named_token_must_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELSEWHERE_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="ELSEWHERE_TOKEN must be set in the environment"):
        url_method(Declaration(url="http://127.0.0.1:1", token_env="ELSEWHERE_TOKEN"))


def test_a_call_is_posted_with_a_key_and_a_token(method: UrlMethod, platform: Platform) -> None:
    platform.answers = [(503, "busy"), (200, {"result": [1, 0.5], "more": 1})]
    assert result(method, ["a", "b"], word="red") == (1.0, 0.5)
    (headers, first), (_, again) = platform.requests
    assert first == again, "a repeated request has the same key"
    assert headers["Authorization"] == "Bearer sesame"
    assert first["key"] == headers[IDEMPOTENCY_KEY]
    assert first["method"] == "Elsewhere.score"
    assert first["arguments"] == {"answers": ["a", "b"], "word": "red"}


@pytest.mark.parametrize(
    ("status", "answer", "text"),
    [
        (401, "no", r"status 401: \"no\" \(ELSEWHERE_TOKEN must hold its token, got another one\)"),
        (422, "no such word", 'status 422: "no such word"'),
        (200, {"result": ["x"]}, r'its answer must be {"result": VALUE}: .*Expected `float`'),
        (200, {"reward": 1.0}, "its answer cannot be read: .*missing required field `result`"),
    ],
)
def test_an_answer_that_is_no_result_is_a_failure(
    method: UrlMethod, platform: Platform, status: int, answer: object, text: str
) -> None:
    platform.answers = [(status, answer)] * 3
    with pytest.raises(url_methods.ServiceError, match=text):
        result(method, ["a"])


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (np.arange(2), r"Encoding objects of type numpy\.ndarray"),
        ([b"red"], "Object of type bytes is not JSON serializable"),
        ([0.5, float("nan")], "Out of range float values"),
    ],
)
def test_arguments_that_json_does_not_have_are_not_sent(
    method: UrlMethod, platform: Platform, value: object, error: str
) -> None:
    with pytest.raises(TypeError, match=rf"Elsewhere\.score: the arguments must be JSON: {error}"):
        method.execute({"answers": value})
    assert platform.requests == []


def test_a_silent_platform_is_a_failure_in_time() -> None:
    declaration = Declaration(url="http://127.0.0.1:9", timeout_s=0.1)
    method = url_method(declaration)
    with pytest.raises(url_methods.ServiceError, match=r"gave no result within 0\.1 s"):
        result(method, ["a"])
    method.close()


def test_workers_pass_calls_on(
    platform: Platform, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ELSEWHERE", f"http://127.0.0.1:{platform.server_port}/score")
    platform.answers = [(200, {"result": [1.0]}), (400, "wrong")]
    with Cluster(Elsewhere, 2, directory=tmp_path) as judges:
        assert judges.score(("blue",)) == (1.0,)
        with pytest.raises(WorkerError, match="status 400") as raised:
            judges.score(("red",))
        assert raised.value.failures[0].kind == "ServiceError"
        assert judges.ranks() == [0, 1], "the workers live on"
    sent = [body["arguments"]["answers"] for _, body in platform.requests]
    assert sent == [["blue"], ["red"]]


class Both(Worker):
    """Declares too much."""

    @hw_mapping({"default": "H20"})
    @register_serverless(url="https://a/b")
    def score(self, tag_name: str) -> float:
        return 0.0


def test_wrong_declarations_are_refused() -> None:
    with pytest.raises(ConfigError, match="must not have register_serverless and another"):
        Cluster(Both)
    with pytest.raises(ConfigError, match="url must be http://host:port or https://host:port"):
        register_serverless(url="fc://score")
    with pytest.raises(ValueError, match="token_env must be left out without url"):
        register_serverless(token_env="ELSEWHERE_TOKEN")


def test_the_worker_gives_up_a_call_before_it_counts_as_lost() -> None:
    assert declarations(Elsewhere)["score"].limit_s == 20 + GRACE_S
    assert Declaration(url="https://a/b").limit_s == URL_S + GRACE_S
    assert Declaration().limit_s is None
