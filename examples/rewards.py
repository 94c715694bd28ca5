"""Rewards beside those of an environment, for rewards.toml: a function of the run, and
a server that answers like a serverless function: `python rewards.py`.
"""

import itertools
import json
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rollweave import Message, Task

PORT = 8931


def brief(conversation: Sequence[Message], task: Task, reward: float) -> float:
    """Cost a hundredth for each turn of the agent, if it has reached the goal."""
    turns = sum(message.role == "assistant" for message in conversation)
    return -turns / 100 if reward > 0 else 0.0


class Score(BaseHTTPRequestHandler):
    """Rewards the share of moves that differ from the one before."""

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        body: dict[str, Any] = json.loads(self.rfile.read(length))
        moves = [one["content"] for one in body["conversation"] if one["role"] == "assistant"]
        changes = sum(a != b for a, b in itertools.pairwise(moves))
        answer = json.dumps({"reward": changes / max(1, len(moves) - 1)}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for each request."""


if __name__ == "__main__":
    print(f"http://127.0.0.1:{PORT}/score")
    ThreadingHTTPServer(("127.0.0.1", PORT), Score).serve_forever()
