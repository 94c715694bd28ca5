"""Stands in for vLLM's server: the same command line and the same three paths;
`FAKE_VLLM` says how it behaves.

It and a child of its own hold a lock each in the working directory, so that a test sees
when they are gone.
"""

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BEHAVIOR = os.environ.get("FAKE_VLLM", "")
CHILD = """
import fcntl, signal
lock = open("child.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
signal.pause()
"""


class Server(ThreadingHTTPServer):
    request_queue_size = (
        64  # more than the concurrent connections: a connection beyond the backlog may be reset
    )


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/version":
            self.answer(200, {"version": "0.0-fake"})
        else:
            self.answer(503 if BEHAVIOR == "never_ready" else 200, {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        wanted = asked["sampling_params"]["max_tokens"]
        if BEHAVIOR == "dies":
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(9)
        if BEHAVIOR == "hangs":
            Path("asked").open("w").close()
            signal.pause()
        if BEHAVIOR == "refuses":
            self.answer(400, {"error": "no such thing"})
        else:
            assert asked["sampling_params"]["ignore_eos"]
            tokens = asked["token_ids"][:1] * (wanted - (BEHAVIOR == "short"))
            self.answer(200, {"choices": [{"token_ids": tokens}]})

    def answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    if BEHAVIOR == "crashes":
        sys.exit("no kernel for heads of 16")
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    known, _ = parser.parse_known_args()
    assert Path(known.model).is_dir()
    with (
        open("server.lock", "w") as lock,
        subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as child,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert child.stdout is not None
        child.stdout.readline()
        Server((known.host, known.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
