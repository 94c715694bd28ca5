"""A fake engine's loop, without a model: counts up from the last prompt token. Also a process of its own.

A prompt that begins with HOLD is answered only when it is aborted; with REFUSE, by an error; with CRASH the engine dies;
with DEAF it takes no further command. Weights whose digest is "bad" are refused. While suspended, answers wait. Its KV is made
of the prompts that it has answered, and has weights 0.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from rollweave.backends.parent import Parent
from rollweave.codec.wire import decoder_of, encode
from rollweave.schema.serving import (
    Abort,
    Add,
    EngineCommand,
    EngineReply,
    EngineSpec,
    EngineStats,
    ExportKv,
    Finish,
    Generated,
    GenerateRequest,
    GenerateResult,
    ImportKv,
    KvExported,
    KvImported,
    KvManifest,
    KvMemory,
    KvRefused,
    Load,
    Loaded,
    LoadFailed,
    Ready,
    ReleaseKv,
    Rerank,
    Resume,
    Sampled,
    Shutdown,
    Stats,
    Suspend,
    Suspended,
    VersionSpan,
)

HOLD, REFUSE, CRASH, DEAF = 99, 98, 97, 96


class EchoLoop:
    """`LoopLike`."""

    def __init__(self, spec: EngineSpec, reply: Callable[[EngineReply], None]) -> None:
        self._spec, self._reply = spec, reply
        self._inbox: deque[EngineCommand] = deque()
        self._wake = threading.Condition()
        self._version = spec.version
        self._suspended = False
        self._held: dict[str, GenerateRequest] = {}
        self._queued: list[GenerateRequest] = []
        self._cached: list[tuple[int, ...]] = []

    def post(self, command: EngineCommand) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def run(self) -> None:
        if self._spec.model == "broken" or (Path(self._spec.model) / "no-engine").exists():
            raise RuntimeError("the fake engine cannot start")
        self._reply(Ready(version=self._version, kv_total_tokens=1000, max_slots=self._spec.max_slots, max_context=500))
        while True:
            with self._wake:
                while not self._inbox:
                    self._wake.wait()
                command = self._inbox.popleft()
            match command:
                case Shutdown():
                    return
                case Add(request=request):
                    self._add(request)
                case Abort(id=id):
                    self._queued = [request for request in self._queued if request.id != id]
                    if self._held.pop(id, None) is not None:
                        self._answer(id, (), Finish.ABORTED)
                case Suspend():
                    self._suspended = True
                    self._reply(Suspended(in_flight=len(self._held) + len(self._queued)))
                case Resume():
                    self._suspended = False
                    queued, self._queued = self._queued, []
                    for request in queued:
                        self._add(request)
                case Load(manifest=manifest) if manifest.digest == "bad":
                    self._reply(LoadFailed(version=manifest.version, error="digest is bad"))
                case Load(manifest=manifest):
                    self._version = manifest.version
                    self._reply(Loaded(version=manifest.version, load_s=0.0, recompute_tokens=0))
                case Stats():
                    stats = EngineStats(
                        version=self._version, running=len(self._held), waiting=0, kv_used_tokens=0, kv_total_tokens=1000
                    )
                    self._reply(Sampled(stats=stats))
                case ExportKv(id=id, tokens=tokens):
                    cached = self._cached_of(tokens)
                    self._reply(
                        KvExported(id=id, manifest=kv_manifest(id, cached)) if cached else KvRefused(id=id, error="not cached")
                    )
                case ImportKv(id=id, tokens=tokens, manifest=manifest):
                    if manifest.weights_id:
                        self._reply(KvRefused(id=id, error="other weights"))
                    else:
                        self._cached.append(tokens[: manifest.tokens])
                        self._reply(KvImported(id=id, moved_tokens=manifest.tokens))
                case Rerank() | ReleaseKv():
                    pass

    def _add(self, request: GenerateRequest) -> None:
        first = request.tokens[0]
        if take_fault(self._spec.model, "kill-engine"):
            os.kill(os.getpid(), signal.SIGKILL)
        if take_fault(self._spec.model, "stick-engine"):
            threading.Event().wait()
        if first == CRASH:
            raise RuntimeError("the fake engine crashed")
        if first == DEAF:
            threading.Event().wait()
        if self._suspended:
            self._queued.append(request)
        elif first == HOLD:
            self._held[request.id] = request
        elif first == REFUSE:
            self._answer(request.id, (), Finish.ERROR)
        else:
            last = request.tokens[-1] % 40
            cached = self._cached_of(request.tokens)
            self._cached.append(request.tokens)
            self._answer(request.id, tuple(range(last + 2, last + 2 + request.sampling.max_tokens)), Finish.LENGTH, cached)

    def _cached_of(self, tokens: tuple[int, ...]) -> int:
        """Tokens of the longest prefix that is cached."""
        return max((len(known) for known in self._cached if tokens[: len(known)] == known), default=0)

    def _answer(self, id: str, tokens: tuple[int, ...], finish: Finish, cached: int = 0) -> None:
        spans = (VersionSpan(start=0, end=len(tokens), version=self._version),) if tokens else ()
        error = "refused by the fake engine" if finish is Finish.ERROR else ""
        result = GenerateResult(
            id=id,
            tokens=tokens,
            logprobs=(-1.0,) * len(tokens),
            versions=spans,
            finish=finish,
            cached_tokens=cached,
            error=error,
        )
        self._reply(Generated(result=result))


def kv_manifest(id: str, tokens: int) -> KvManifest:
    """Of KV that is nowhere."""
    return KvManifest(
        id=id, tokens=tokens, key=b"", weights_id=0, model="", layout="", dtype="", layers=1, kv_heads=1, head_dim=1,
        block_tokens=1, chunk_blocks=1, nbytes=0, digests=(), where=KvMemory(path="/nowhere"),
    )  # fmt: skip


def take_fault(model: str, name: str) -> bool:
    """True once for each fault that a test has laid into the model's directory."""
    try:
        (Path(model) / name).unlink()
    except OSError:
        return False
    return True


def sign_in(model: str) -> None:
    """Tell the test our process id, and when the kernel started us: ids are used again."""
    if Path(model).is_dir():
        _, began = process_state(os.getpid())
        with (Path(model) / "pids").open("a") as file:
            file.write(f"{os.getpid()} {began}\n")


def process_state(pid: int) -> tuple[str, int]:
    """State and start, in ticks of the kernel; "gone" where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "gone", -1
    return fields[0], int(fields[19])


def main() -> None:
    parent = Parent.from_arguments()
    spec = decoder_of(EngineSpec)(parent.receive())
    sign_in(spec.model)
    decode = decoder_of(EngineCommand)
    loop = EchoLoop(spec, lambda word: parent.send(encode(word)))
    parent.listen(lambda payload: loop.post(decode(payload)))
    loop.run()


if __name__ == "__main__":
    main()
