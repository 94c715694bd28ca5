"""A server with the routes, requests and answers of vLLM 0.32, as far as
`rollweave_servers` uses them, behind the plug-in of a server that a user has started
(`LeasedGuard`). It computes with the embedded engine.

As a program, it serves until it is killed; `start_vllm_server` starts that.
"""

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from packages.servers.tests.asgi import relayed
from rollweave.engine.clients.client import EngineClient
from rollweave.schema import serving as s
from rollweave.schema.base import EngineId
from rollweave.schema.errors import EngineError
from rollweave_servers.process import PLUGIN
from rollweave_servers.vllm import TOKEN
from rollweave_servers.vllm_control import ABORT, ATTACHED_ROUTES, GENERATE, ROUTES
from tests.support.engines import ROOT, engine_in_thread, environment
from tests.support.forking import Forked

SECRET = "open sesame"
PREFIX = "generate-tokens-"
"""Beginning of the ids that vLLM gives to requests."""

START_S = 120.0
"""Maximum seconds until the server is ready on a busy machine."""

STALL_TOKENS = 64
"""Tokens after which a stream of a server with `--stall` stops."""

REASONS = {
    s.FinishReason.STOP: "stop",
    s.FinishReason.LENGTH: "length",
    s.FinishReason.ABORTED: "abort",
}

Answer = tuple[int, dict[str, Any]]


@dataclass(eq=False)
class VllmApp:
    """The application behind the guard."""

    engine: EngineClient
    arguments: argparse.Namespace
    folder: Path
    paused: bool = False
    updating: bool = False
    checked: dict[str, Any] | None = None
    loads: int = 0
    labels: dict[int, str] = field(default_factory=lambda: {-1: "default"})
    live: set[str] = field(default_factory=set)

    @property
    def routes(self) -> list[SimpleNamespace]:
        paths = (*ROUTES, *ATTACHED_ROUTES, GENERATE, ABORT, "/health", "/metrics")
        return [SimpleNamespace(path=path) for path in paths if path != self.arguments.without]

    @property
    def state(self) -> SimpleNamespace:
        """The application's state, with vLLM's configuration as the plug-in reads
        it.
        """
        model = json.loads((Path(self.arguments.model) / "config.json").read_text())
        return SimpleNamespace(
            vllm_config=SimpleNamespace(
                model_config=SimpleNamespace(
                    model=self.arguments.model,
                    hf_config=SimpleNamespace(architectures=model["architectures"]),
                    hf_text_config=SimpleNamespace(to_dict=lambda: model),
                    dtype=f"torch.{self.arguments.dtype}",
                    max_model_len=512,
                    logprobs_mode=self.arguments.logprobs_mode,
                ),
                cache_config=SimpleNamespace(
                    num_gpu_blocks=self.arguments.kv_tokens // 16,
                    block_size=16,
                    enable_prefix_caching=True,
                ),
                scheduler_config=SimpleNamespace(
                    max_num_seqs=self.arguments.slots,
                    policy="priority",
                    enable_chunked_prefill=False,
                ),
                device_config=SimpleNamespace(device_type="cpu"),
                weight_transfer_config=SimpleNamespace(backend="rollweave"),
                structured_outputs_config=SimpleNamespace(
                    backend="guidance", enable_in_reasoning=True
                ),
            )
        )

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer one request that the guard has admitted."""
        body, path = (await receive())["body"], scope["path"]
        fields = json.loads(body or b"{}")
        if path == GENERATE and fields["stream"]:
            await self._stream(fields, send)
            return
        try:
            status, answer = await self._answer(path, fields)
        except (EngineError, AssertionError, OSError) as error:
            status, answer = 500, {"error": str(error)}
        text = await self._metrics() if path == "/metrics" else json.dumps(answer)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": text.encode()})

    async def _metrics(self) -> str:
        stats = await self.engine.stats()
        share = stats.kv_used_tokens / self.arguments.kv_tokens
        return (
            f'vllm:num_requests_running{{engine="0"}} {stats.running}\n'
            f'vllm:num_requests_waiting{{engine="0"}} {stats.waiting}\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {share}\n'
        )

    async def _answer(self, path: str, body: dict[str, Any]) -> Answer:
        match path:
            case "/health" | "/metrics" | "/init_weight_transfer_engine":
                pass
            case "/pause":
                await self.engine.suspend()
                self.paused = True
            case "/resume":
                self.engine.resume()
                self.paused = False
            case "/is_paused":
                return 200, {"is_paused": self.paused}
            case "/start_weight_update":
                assert self.paused, "an update without a pause ends vLLM"
                assert not self.updating, "an update is active"
                self.updating = True
            case "/update_weights":
                await self._update(body["update_info"])
            case "/finish_weight_update":
                assert self.updating, "no update is active"
                self.updating, self.checked = False, None
                self.labels[self.loads if self.loads else -1] = body["weight_version"]
            case "/weight_info":
                return 200, {"weight_version": self.labels[self.loads if self.loads else -1]}
            case "/abort_requests":
                for request_id in self.live:
                    self.engine.abort(request_id)
            case _ if path == ABORT:
                for request_id in body["request_ids"]:
                    self.engine.abort(request_id.removeprefix(PREFIX))
            case _ if path == GENERATE:
                return await self._generate(body)
            case _:
                return 404, {}
        return 200, {}

    async def _update(self, info: dict[str, Any]) -> None:
        from rollweave.weights.publication import publish

        assert self.updating, "no update is active"
        if info["part"] == "check":
            os.close(os.open(info["location"], os.O_RDONLY))
            self.checked = info
            return
        assert self.checked is not None, "nothing was checked"
        tensors = mapped(self.checked)
        self.loads += 1
        with publish(tensors, version=self.loads, publication_id=self.loads) as publication:
            await self.engine.load(publication.manifest)

    async def _generate(self, body: dict[str, Any]) -> Answer:
        request = generate_request(body)
        self.live.add(request.id)
        try:
            result = await self.engine.generate(request)
        finally:
            self.live.discard(request.id)
        finish = REASONS[result.finish]
        choice = self._choice(result.tokens, result.logprobs, result.versions, finish)
        return 200, {"choices": [choice]}

    async def _stream(self, body: dict[str, Any], send: Any) -> None:
        """Send the tokens as they are sampled, each part with the versions of all
        tokens so far, as with the plug-in.
        """
        assert body["stream_options"] == {"include_usage": True}
        request, parts = generate_request(body), asyncio.Queue[s.TokenDelta | None]()
        every = body["sampling_params"]["stream_interval"]
        self.live.add(request.id)
        answer = self.engine.generate(request, parts.put_nowait, report_s=0.0)
        answer.add_done_callback(lambda _: parts.put_nowait(None))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        sent, end, versions = 0, 0, tuple[s.VersionSpan, ...]()
        tokens, logprobs = tuple[int, ...](), tuple[float, ...]()
        try:
            while (delta := await parts.get()) is not None:
                assert delta.start == end
                end = delta.start + len(delta.tokens)
                versions = s.spans_between((*versions, *delta.versions), 0, end)
                tokens, logprobs = tokens + delta.tokens, logprobs + delta.logprobs
                if sent and end - sent < every:
                    continue  # the first token and each `every` tokens, as in vLLM
                choice = self._choice(tokens[sent:], logprobs[sent:], versions, None)
                await send(event({"choices": [choice]}))
                sent = end
                if self.arguments.stall and sent >= STALL_TOKENS:
                    self.arguments.stall.write_text(str(sent))
                    await asyncio.Event().wait()
            result = answer.result()
            rest = result.tokens[sent:], result.logprobs[sent:]
            choice = self._choice(*rest, result.versions, REASONS[result.finish])
            await send(event({"choices": [choice]}))
            details = {"cached_tokens": result.cached_tokens}
            await send(event({"choices": [], "usage": {"prompt_tokens_details": details}}))
        except EngineError as error:
            await send(event({"error": {"message": str(error)}}))
        finally:
            answer.cancel()
            self.live.discard(request.id)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _choice(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[s.VersionSpan],
        finish: str | None,
    ) -> dict[str, Any]:
        content = [
            {"token_id": token, "logprob": logprob}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        spans = [
            {"version": self.labels[span.version], "start": span.start, "end": span.end}
            for span in versions
        ]
        return {
            "finish_reason": finish,
            "token_ids": tokens,
            "logprobs": {"content": content},
            "weight_versions": spans,
        }


def event(value: object) -> dict[str, Any]:
    """Return the message with one part of a streamed answer."""
    body = b"data: " + json.dumps(value).encode() + b"\n\n"
    return {"type": "http.response.body", "body": body, "more_body": True}


def generate_request(body: dict[str, Any]) -> s.GenerateRequest:
    params = body["sampling_params"]
    return s.GenerateRequest(
        id=body["request_id"],
        tokens=tuple(body["token_ids"]),
        sampling=s.Sampling(
            temperature=params["temperature"],
            top_p=params["top_p"],
            top_k=params["top_k"],
            max_tokens=params["max_tokens"],
            stop_token_ids=tuple(params["stop_token_ids"]),
            seed=params["seed"],
            allowed=tuple(params["allowed_token_ids"] or ()),
        ),
        rank=-float(body["priority"]),
    )


def mapped(info: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of an update."""
    import torch

    buffer = bytearray(Path(info["location"]).read_bytes())
    assert len(buffer) == info["nbytes"]
    return {
        name: torch.frombuffer(
            buffer, dtype=getattr(torch, kind), count=torch.Size(shape).numel(), offset=offset
        ).view(shape)
        for name, kind, shape, offset in info["tensors"]
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--kv-tokens", type=int, default=16384)
    parser.add_argument("--stall", type=Path, help="the file to write when a stream stops")
    parser.add_argument("--without", default="", help="a route that is missing")
    return parser


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until the process is killed."""
    # the plug-in imports vLLM for its version only
    sys.modules["vllm"] = SimpleNamespace(__version__="0.32.0")  # type: ignore[assignment]
    sys.path.append(str(PLUGIN))
    guard_of = importlib.import_module("rollweave_vllm_leases").LeasedGuard
    spec = s.EngineSpec(
        id=EngineId("e0"),
        model=arguments.model,
        max_slots=arguments.slots,
        kv_tokens=arguments.kv_tokens,
    )
    engine = engine_in_thread(spec, start_s=START_S, reply_s=120.0)
    with tempfile.TemporaryDirectory() as folder:
        app = VllmApp(engine, arguments, Path(folder))
        guard = guard_of(app)

        async def handle(request: web.Request) -> web.StreamResponse:
            return await relayed(guard, request, app)

        await engine.ready()
        web_app = web.Application(client_max_size=1 << 26)
        web_app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(web_app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", arguments.port).start()
        await engine.lost


def attached_spec(
    *ports: int,
    kind: s.ServerName = "vllm",
    token: str = SECRET,
    run: str = "h:/run",
    start_s: float = START_S,
    context: int = 0,
) -> s.ServerSpec:
    """Return the server of an engine: one of those that already run at these ports."""
    return s.ServerSpec(
        kind=kind,
        start_s=start_s,
        control_s=60.0,
        addresses=tuple(f"http://127.0.0.1:{port}" for port in ports),
        token=token,
        holder=run,
        context=context,
    )


@contextlib.contextmanager
def start_vllm_server(
    model: Path, port: int, *args: str, token: str = SECRET
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a server, and yield it once it is healthy; kill it at the end."""
    command = [sys.executable, "-m", "packages.servers.tests.vllm_server", "--model", str(model)]
    variables = {**os.environ, **environment(), TOKEN: token}
    command += ["--port", str(port), *args]
    with running(command, variables, port, token, START_S) as process:
        yield process


@contextlib.contextmanager
def running(
    command: Sequence[str], variables: Mapping[str, str], port: int, token: str, start_s: float
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a server that has `token`, and yield it once it is healthy; kill it at the
    end.
    """
    process = Forked(command, env=variables, cwd=ROOT)
    try:
        wait_healthy(port, process, token, start_s)
        yield process
    finally:
        process.kill()
        process.wait()


def wait_healthy(port: int, process: "subprocess.Popen[bytes]", token: str, start_s: float) -> None:
    """Wait until the server answers."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/health", headers={"Authorization": f"Bearer {token}"}
    )
    deadline = time.monotonic() + start_s
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5):
            return
        time.sleep(0.1)
    raise AssertionError(f"the server is not ready (its status is {process.poll()})")


if __name__ == "__main__":
    asyncio.run(serve(parser().parse_args()))
