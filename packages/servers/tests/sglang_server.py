"""A server with the arguments, routes, requests and answers of SGLang 0.5.23, as far as
`rollweave_servers` uses them, written from SGLang's source. It computes with the
embedded engine.

What SGLang's own components do is told apart, because it shows in the order of calls:
its front holds new requests while it is paused and does not wait for the scheduler to
pause; the scheduler takes calls in their order; aborts reach only requests that the
scheduler has; a label is one of the front, the versions of tokens are the scheduler's.
"""

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from packages.servers.tests.asgi import guarded
from rollweave.engine.clients.client import EngineClient
from rollweave.schema import serving as s
from rollweave.schema.base import EngineId
from rollweave.schema.errors import EngineError
from tests.support.engines import engine_in_thread

OPEN = ("/health", "/ready", "/metrics")
"""Beginnings of the paths that need no key."""

BLOCK_TOKENS = 16
VERSION = "0.5.23"


class App:
    """The application, as a program that starts the server may extend it."""

    def __init__(self) -> None:
        self.middleware: list[Any] = []
        self.server_args: argparse.Namespace | None = None
        self.routes: list[SimpleNamespace] = []

    def add_middleware(self, middleware: Any) -> None:
        self.middleware.append(middleware)


app = App()
state = SimpleNamespace()
"""The parts of the server, once it runs."""


def parser() -> argparse.ArgumentParser:
    """Return a parser of the arguments of `sglang.launch_server` that are used here."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("model-path", "dtype", "device"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("api-key", "admin-api-key", "log-level"):  # a leased server has no keys
        parser.add_argument(f"--{name}", required=not app.middleware)
    for name in ("port", "context-length", "max-running-requests", "max-total-tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--default-priority-value", type=int)
    parser.add_argument("--weight-version", default="default")
    for name in (
        "enable-priority-scheduling",
        "disable-priority-preemption",
        "disable-radix-cache",
        "enable-deterministic-inference",
        "skip-tokenizer-init",
        "skip-server-warmup",
        "incremental-streaming-output",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    # not SGLang's: each part of a stream has all tokens, and what goes wrong here
    parser.add_argument("--stream-all", action="store_true")
    parser.add_argument("--fault", choices=("refused", "unlabeled", "split", "small"), default="")
    return parser


@dataclass
class Request:
    """A request that the front has."""

    sent: bool = False
    abort_sent: bool = False


@dataclass
class Server:
    """The front and the scheduler."""

    arguments: argparse.Namespace
    engine: EngineClient
    stop_ids: tuple[int, ...]
    label: str
    folder: Path
    starting: bool = True
    paused: bool = False
    mode: str = ""
    requests: dict[str, Request] = field(default_factory=dict)
    scheduler: asyncio.Lock = field(default_factory=asyncio.Lock)
    resumed: asyncio.Condition = field(default_factory=asyncio.Condition)
    background: set[asyncio.Task[None]] = field(default_factory=set)
    updates: int = 0

    def application(self) -> web.Application:
        guard = self.leased(app.middleware[0]) if app.middleware else self.guard
        application = web.Application(middlewares=[guard], client_max_size=1 << 26)
        normal: dict[str, tuple[str, Any]] = {
            "/health": ("GET", self.health),
            "/ready": ("GET", self.ready),
            "/model_info": ("GET", self.model_info),
            "/server_info": ("GET", self.server_info),
            "/v1/loads": ("GET", self.loads),
            "/generate": ("POST", self.generate),
        }
        self.admin: dict[str, tuple[str, Any]] = {
            "/abort_request": ("POST", self.abort_request),
            "/pause_generation": ("POST", self.pause_generation),
            "/continue_generation": ("POST", self.continue_generation),
            "/update_weights_from_disk": ("POST", self.update_weights_from_disk),
            "/weights_checker": ("POST", self.weights_checker),
        }
        for path, (method, handler) in {**normal, **self.admin}.items():
            application.router.add_route(method, path, handler)
            app.routes.append(SimpleNamespace(path=path))
        return application

    def leased(self, guard_of: Callable[[Any], Any]) -> Any:
        """Return a middleware of aiohttp that is this ASGI middleware."""

        async def inner(scope: dict[str, Any], receive: Any, send: Any) -> None:
            scope["response"] = await scope["handler"](scope["request"])

        guard = guard_of(inner)

        @web.middleware
        async def middleware(
            request: web.Request,
            handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
        ) -> web.StreamResponse:
            answer, scope = await guarded(guard, request, app, request=request, handler=handler)
            response: web.StreamResponse | None = scope.get("response", answer)
            assert response is not None, "neither guard nor handler answered"
            return response

        return middleware

    @web.middleware
    async def guard(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        key = self.arguments.api_key
        if request.path in self.admin:
            key = self.arguments.admin_api_key
        given = request.headers.get("Authorization")
        if not request.path.startswith(OPEN) and given != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    # The front

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.starting else 200)

    async def ready(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.starting or self.paused else 200)

    async def model_info(self, _: web.Request) -> web.Response:
        label = "default" if self.arguments.fault == "unlabeled" else self.label
        return web.json_response({"weight_version": label, "is_generation": True})

    async def server_info(self, _: web.Request) -> web.Response:
        async with self.scheduler:
            tokens = self.arguments.max_total_tokens
            return web.json_response(
                {
                    "max_total_num_tokens": 16 if self.arguments.fault == "small" else tokens,
                    "tp_size": self.arguments.tp_size,
                    "internal_states": [{}],
                    "version": VERSION,
                }
            )

    async def loads(self, _: web.Request) -> web.Response:
        stats = await self.engine.stats()
        load = {
            "dp_rank": 0,
            "num_running_reqs": stats.running,
            "num_waiting_reqs": stats.waiting,
            "num_used_tokens": stats.kv_used_tokens,
            "token_usage": stats.kv_used_tokens / self.arguments.max_total_tokens,
        }
        return web.json_response({"version": VERSION, "loads": [load]})

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.abort(body["rid"])
        return web.Response()

    def abort(self, rid: str) -> None:
        known = self.requests.get(rid)
        if known is None or known.abort_sent:
            return
        known.abort_sent = True
        for each, state in self.requests.items():
            if each.startswith(rid) and state.sent:
                self.engine.abort(each)

    async def pause_generation(self, request: web.Request) -> web.Response:
        mode = (await request.json()).get("mode", "abort")
        self.paused, self.mode = True, mode
        if mode == "abort":
            while any(request.sent for request in self.requests.values()):
                for rid in list(self.requests):
                    self.engine.abort(rid)
                await asyncio.sleep(0.05)
        else:
            self.later(self.pause_scheduler())
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, _: web.Request) -> web.Response:
        async with self.resumed:
            self.paused = False
            self.later(self.resume_scheduler())
            self.resumed.notify_all()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        rid, tokens, params = body["rid"], body["input_ids"], body["sampling_params"]
        context = self.arguments.context_length
        assert body["return_logprob"] is True
        assert self.arguments.incremental_streaming_output
        if rid in self.requests:
            return bad(f"Duplicate request ID detected: {rid}")
        if len(tokens) >= context or len(tokens) + params["max_new_tokens"] > context:
            return bad("Requested token count exceeds the model's maximum context length")
        if len(tokens) >= context - 1 - 5:
            return bad("Input length exceeds the maximum allowed length")
        state = self.requests[rid] = Request()
        try:
            async with self.resumed:
                await self.resumed.wait_for(lambda: not self.paused)
            state.sent = True
            return await self.answer(request, body)
        except EngineError as error:
            return bad(str(error))
        finally:
            del self.requests[rid]

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        tokens, params = tuple(body["input_ids"]), body["sampling_params"]
        room = self.arguments.context_length - 1 - len(tokens) - 1
        stops = {*params["stop_token_ids"], *self.stop_ids}
        seeded = self.arguments.enable_deterministic_inference
        sampling = s.Sampling(
            temperature=params["temperature"],
            top_p=params["top_p"],
            top_k=max(0, params["top_k"]),
            max_tokens=min(params["max_new_tokens"], room),
            stop_token_ids=tuple(sorted(stops)),
            seed=params["sampling_seed"] if seeded else random.getrandbits(62),
        )
        priority = body.get("priority") or 0
        turn = s.GenerateRequest(
            id=body["rid"], tokens=tokens, sampling=sampling, rank=float(priority)
        )
        if body["stream"]:
            return await self.stream(request, turn, params["stream_interval"])
        answer = self.engine.generate(turn)
        while not answer.done():
            await asyncio.wait({answer}, timeout=0.2)
            if request.transport is None:  # the client has disconnected
                self.engine.abort(turn.id)
        return web.json_response(self.last_part(turn, answer.result(), 0))

    async def stream(
        self, request: web.Request, turn: s.GenerateRequest, every: int
    ) -> web.StreamResponse:
        """Send the tokens as they are sampled, at least `every` in each part but the
        first and the last one, which has the versions.
        """
        response, parts = web.StreamResponse(), asyncio.Queue[s.TokenDelta | None]()
        answer = self.engine.generate(turn, parts.put_nowait, report_s=0.0)
        answer.add_done_callback(lambda _: parts.put_nowait(None))
        await response.prepare(request)
        tokens, logprobs = tuple[int, ...](), tuple[float, ...]()
        first = 0
        try:
            while (delta := await parts.get()) is not None:
                tokens, logprobs = tokens + delta.tokens, logprobs + delta.logprobs
                if first and len(tokens) - first < every:
                    continue
                part = self.part(turn, tokens, logprobs, first)
                await response.write(b"data: " + json.dumps(part).encode() + b"\n\n")
                if not self.arguments.stream_all:
                    first = len(tokens)
            part = self.last_part(turn, answer.result(), first)
            await response.write(b"data: " + json.dumps(part).encode() + b"\n\n")
        except EngineError as error:
            part = {"error": {"message": str(error)}}
            await response.write(b"data: " + json.dumps(part).encode() + b"\n\n")
        except ConnectionError:
            self.engine.abort(turn.id)
        await response.write(b"data: [DONE]\n\n")
        return response

    def part(
        self,
        turn: s.GenerateRequest,
        tokens: tuple[int, ...],
        logprobs: tuple[float, ...],
        first: int,
    ) -> dict[str, Any]:
        """Return an answer with the tokens from `first` on."""
        pairs = zip(logprobs[first:], tokens[first:], strict=True)
        return {
            "text": "",
            "output_ids": tokens[first:],
            "meta_info": {
                "id": turn.id,
                "finish_reason": None,
                "prompt_tokens": len(turn.tokens),
                "completion_tokens": len(tokens),
                "cached_tokens": 0,
                "weight_version": self.label,
                "output_token_logprobs": [(logprob, token, None) for logprob, token in pairs],
            },
        }

    def last_part(
        self, turn: s.GenerateRequest, result: s.GenerateResult, first: int
    ) -> dict[str, Any]:
        reason: dict[str, object] = {"type": result.finish.value}
        if result.finish is s.FinishReason.ABORTED:
            reason = {"type": "abort", "message": "Aborted", "status_code": None}
        elif result.finish is s.FinishReason.STOP:
            reason["matched"] = result.tokens[-1]
        elif result.finish is s.FinishReason.LENGTH:
            reason["length"] = turn.sampling.max_tokens
        spans = [
            {"version": str(max(0, span.version)), "start": span.start, "end": span.end}
            for span in result.versions
        ]
        part = self.part(turn, result.tokens, result.logprobs, first)
        part["meta_info"] |= {
            "finish_reason": reason,
            "cached_tokens": result.cached_tokens,
            "weight_versions": spans,
        }
        return part

    # The scheduler

    async def pause_scheduler(self) -> None:
        async with self.scheduler:
            await self.engine.suspend()

    async def resume_scheduler(self) -> None:
        async with self.scheduler:
            self.engine.resume()

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert self.paused, "an update waits for all requests to end"
        async with self.scheduler:
            running = any(state.sent for state in self.requests.values())
            if body.get("flush_cache", True) and self.mode == "in_place" and running:
                return failed("Weights were updated, but the cache was not flushed")
            if self.arguments.fault == "refused":
                return failed("Failed to update weights: no.\nRolling back to original weights.")
            label = body.get("weight_version")
            try:
                await self.load(Path(body["model_path"]), label or self.label)
            except Exception as error:
                return failed(f"Failed to get weights iterator: {error}.")
            self.updates += 1
            self.label = label or self.label
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def load(self, directory: Path, label: str) -> None:
        """Load the safetensors of a checkpoint."""
        from rollweave.weights.publication import publish

        tensors = await asyncio.to_thread(tensors_of, directory)
        version = int(label)
        with publish(tensors, version=version, publication_id=version) as publication:
            await self.engine.load(publication.manifest)

    async def weights_checker(self, request: web.Request) -> web.Response:
        assert (await request.json())["action"] == "checksum"
        split = self.arguments.fault == "split"
        ranks = [
            {"per_gpu_checksum": f"{rank} {0 if split and rank else self.updates}"}
            for rank in range(self.arguments.tp_size)
        ]
        return web.json_response({"success": True, "message": "Success.", "ranks": ranks})

    def later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)


def tensors_of(directory: Path) -> dict[str, Any]:
    """Return the tensors of a checkpoint."""
    from safetensors.torch import load_file

    (file,) = directory.glob("*.safetensors")
    assert (directory / "config.json").exists()
    tensors: dict[str, Any] = load_file(file)
    return tensors


def bad(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=400)


def failed(message: str) -> web.Response:
    return web.json_response({"success": False, "message": message}, status=400)


async def serve(arguments: argparse.Namespace) -> None:
    """Start the engine and serve until the process is killed."""
    from rollweave.weights.checkpoint import read_shape

    shape = read_shape(Path(arguments.model_path))
    label = arguments.weight_version
    spec = s.EngineSpec(
        id=EngineId("e0"),
        model=arguments.model_path,
        dtype=arguments.dtype,
        max_slots=arguments.max_running_requests,
        kv_tokens=arguments.max_total_tokens // BLOCK_TOKENS * BLOCK_TOKENS,
        prefix_cache=not arguments.disable_radix_cache,
        deterministic=arguments.enable_deterministic_inference,
        version=int(label) if label.isdecimal() else -1,
    )
    config = json.loads((Path(arguments.model_path) / "config.json").read_text())
    app.server_args = arguments
    state.scheduler_info = {"max_total_num_tokens": arguments.max_total_tokens}
    state.tokenizer_manager = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(architectures=config["architectures"]),
            hf_text_config=SimpleNamespace(to_dict=lambda: config),
            dtype=f"torch.{arguments.dtype}",
            context_len=arguments.context_length,
        )
    )
    engine = engine_in_thread(spec, start_s=300.0, reply_s=120.0)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(arguments, engine, shape.eos_token_ids, label, Path(folder))
        runner = web.AppRunner(server.application())
        await runner.setup()
        await web.TCPSite(runner, arguments.host, arguments.port).start()
        await engine.ready()
        server.starting = False
        await engine.lost


def main() -> None:
    """Serve with the arguments of the command line."""
    arguments = parser().parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments))
