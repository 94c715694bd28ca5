"""A judge for runs in other processes: a server on a thread of the test."""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

AT_ONCE = 2
"""Requests that the judge answers at once; it refuses others with status 429."""


ANSWER_S = 0.05
"""Seconds that an answer takes: the comparisons of one group arrive meanwhile."""


class Judge:
    """A judge that prefers the longer conversation, and grades others with 1."""

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        """Number of answers to each key."""
        self.refused = 0
        self.most_at_once = 0
        self.open = threading.Event()
        self.open.set()
        self.waiting = threading.Event()
        self._lock, self._at_once = threading.Lock(), 0
        judge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, text = judge.answer(self.headers["Idempotency-Key"], body)
                answer = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def answer(self, key: str, body: dict[str, Any]) -> tuple[int, str]:
        with self._lock:
            if self._at_once == AT_ONCE:
                self.refused += 1
                return 429, ""
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            self.waiting.set()
            assert self.open.wait(120)
            time.sleep(ANSWER_S)
            shown = json.loads(body["messages"][1]["content"])
            if "A" not in shown:
                return 200, "Score: 1"
            a, b = len(str(shown["A"])), len(str(shown["B"]))
            return 200, f"Verdict: {'A' if a > b else 'B' if b > a else 'tie'}"
        finally:
            with self._lock:
                self._at_once -= 1
                self.answers[key] += 1


@contextlib.contextmanager
def serving() -> Iterator[Judge]:
    """Serve a judge on a thread."""
    judge = Judge()
    thread = threading.Thread(target=judge.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        judge.open.set()
        judge.server.shutdown()
        judge.server.server_close()
        thread.join()
