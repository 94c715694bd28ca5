"""A fake engine's loop without a model: it counts up from the last prompt token. It
also runs as a process.

A prompt that begins with HOLD is answered only when it is aborted; so is one with
PROGRESS, the first `PROGRESS_TOKENS` tokens of which are reported before; one with
REFUSE is answered by an error; with CRASH the engine dies; with DEAF it takes no
further command. Weights whose digest is "bad" are refused. While suspended, answers
wait. Its KV consists of the prompts that it has answered, and has weights 0.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.schema import serving as s
from tests.support.processes import process_state

HOLD, REFUSE, CRASH, DEAF, PROGRESS = 99, 98, 97, 96, 95
PROGRESS_TOKENS = 3


class EchoLoop:
    """A `LoopLike` without a model."""

    def __init__(self, spec: s.EngineSpec, reply: Callable[[s.EngineReply], None]) -> None:
        self._spec, self._reply = spec, reply
        self._inbox: deque[s.EngineCommand] = deque()
        self._wake = threading.Condition()
        self._version = spec.version
        self._suspended = False
        self._held_results: dict[str, s.GenerateResult] = {}
        self._queued: list[s.Add] = []
        self._cached: list[tuple[int, ...]] = []

    def post(self, command: s.EngineCommand) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def run(self) -> None:
        if self._spec.model == "broken" or (Path(self._spec.model) / "no-engine").exists():
            raise RuntimeError("the fake engine cannot start")
        self._reply(
            s.Ready(
                version=self._version,
                kv_total_tokens=1000,
                max_slots=self._spec.max_slots,
                max_context=500,
            )
        )
        while True:
            with self._wake:
                while not self._inbox:
                    self._wake.wait()
                command = self._inbox.popleft()
            match command:
                case s.Shutdown():
                    return
                case s.Add():
                    self._add(command)
                case s.Abort(id=id):
                    self._queued = [add for add in self._queued if add.request.id != id]
                    if id in self._held_results:
                        self._reply(s.Generated(result=self._held_results.pop(id)))
                case s.Suspend():
                    self._suspended = True
                    self._reply(s.Suspended(in_flight=len(self._held_results) + len(self._queued)))
                case s.Resume():
                    self._suspended = False
                    queued, self._queued = self._queued, []
                    for add in queued:
                        self._add(add)
                case s.Stage(manifest=manifest):
                    key = {"version": manifest.version, "publication_id": manifest.publication_id}
                    bad = manifest.digest == "bad"
                    self._reply(s.StageFailed(**key, error="bad") if bad else s.Staged(**key))
                case s.Load(manifest=manifest) if manifest.digest == "bad":
                    self._reply(s.LoadFailed(version=manifest.version, error="digest is bad"))
                case s.Load(manifest=manifest):
                    self._version = manifest.version
                    self._reply(s.Loaded(version=manifest.version, load_s=0.0, recompute_tokens=0))
                case s.LoadCheckpoint(version=version):
                    self._version = version
                    self._reply(s.Loaded(version=version, load_s=0.0, recompute_tokens=0))
                case s.Beat():
                    self._reply(s.Beating())
                case s.Stats():
                    stats = s.EngineStats(
                        version=self._version,
                        running=len(self._held_results),
                        waiting=0,
                        kv_used_tokens=0,
                        kv_total_tokens=1000,
                    )
                    self._reply(s.Sampled(stats=stats))
                case s.ExportKv(id=id, tokens=tokens):
                    cached = self._cached_of(tokens)
                    self._reply(
                        s.KvExported(id=id, manifest=kv_manifest(id, cached))
                        if cached
                        else s.KvRefused(id=id, error="not cached")
                    )
                case s.ImportKv(id=id, tokens=tokens, manifest=manifest):
                    if manifest.publication_id:
                        self._reply(s.KvRefused(id=id, error="publication_id of the KV must be 0"))
                    else:
                        self._cached.append(tokens[: manifest.tokens])
                        self._reply(s.KvImported(id=id, moved_tokens=manifest.tokens))
                case s.Rerank() | s.ReleaseKv():
                    pass

    def _add(self, add: s.Add) -> None:
        request = add.request
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
            self._queued.append(add)
        elif first == HOLD:
            self._held_results[request.id] = self._result_of(
                request, s.FinishReason.ABORTED, more=0
            )
        elif first == PROGRESS:
            self._report_progress(add)
        elif first == REFUSE:
            error = "refused by the fake engine"
            refused = s.GenerateResult(
                id=request.id,
                tokens=(),
                logprobs=(),
                versions=(),
                finish=s.FinishReason.ERROR,
                error=error,
            )
            self._reply(s.Generated(result=refused))
        else:
            cached = self._cached_of(request.tokens)
            self._cached.append(request.tokens)
            result = self._result_of(
                request, s.FinishReason.LENGTH, more=request.sampling.max_tokens
            )
            self._reply(s.Generated(result=msgspec.structs.replace(result, cached_tokens=cached)))

    def _report_progress(self, add: s.Add) -> None:
        result = self._held_results[add.request.id] = self._result_of(
            add.request, s.FinishReason.ABORTED, more=PROGRESS_TOKENS
        )
        new = result.resumed_tokens
        if add.report_s is not None:
            spans = (s.VersionSpan(start=new, end=len(result.tokens), version=self._version),)
            piece = s.TokenDelta(
                id=result.id,
                start=new,
                tokens=result.tokens[new:],
                logprobs=result.logprobs[new:],
                versions=spans,
                generate_s=1.0,
            )
            self._reply(s.Progress(pieces=(piece,)))

    def _result_of(
        self, request: s.GenerateRequest, finish: s.FinishReason, *, more: int
    ) -> s.GenerateResult:
        """Return the resumed tokens and `more` tokens, within the limits."""
        resumed_tokens = request.resumed.tokens if request.resumed is not None else ()
        first, end = (
            request.tokens[-1] % 40 + 2,
            min(len(resumed_tokens) + more, request.sampling.max_tokens),
        )
        tokens = resumed_tokens + tuple(range(first + len(resumed_tokens), first + end))
        spans = (s.VersionSpan(start=0, end=end, version=self._version),) if end else ()
        return s.GenerateResult(
            id=request.id,
            tokens=tokens,
            logprobs=(-1.0,) * len(tokens),
            versions=spans,
            finish=finish,
            resumed_tokens=len(resumed_tokens),
        )

    def _cached_of(self, tokens: tuple[int, ...]) -> int:
        """Return the number of tokens of the longest cached prefix."""
        return max(
            (len(cached) for cached in self._cached if tokens[: len(cached)] == cached), default=0
        )


def kv_manifest(id: str, tokens: int) -> s.KvManifest:
    """Return a manifest of KV that does not exist."""
    return s.KvManifest(
        id=id,
        tokens=tokens,
        key=b"",
        publication_id=0,
        model="",
        layout="",
        dtype="",
        layers=1,
        kv_heads=1,
        head_dim=1,
        block_tokens=1,
        chunk_blocks=1,
        nbytes=0,
        digests=(),
        where=s.KvMemory(path="/nowhere"),
    )


def take_fault(model: str, name: str) -> bool:
    """Return True once for each fault that a test has placed in the model's
    directory.
    """
    try:
        (Path(model) / name).unlink()
    except OSError:
        return False
    return True


def sign_in(model: str) -> None:
    """Report the process id to the test, with the kernel's start time, since ids are
    reused.
    """
    if Path(model).is_dir():
        _, began = process_state(os.getpid())
        with (Path(model) / "pids").open("a") as file:
            file.write(f"{os.getpid()} {began}\n")


def main() -> None:
    parent = Parent.from_arguments()
    spec = decoder_of(s.EngineSpec)(parent.receive())
    sign_in(spec.model)
    decode = decoder_of(s.EngineCommand)
    loop = EchoLoop(spec, lambda word: parent.send(encode(word)))
    parent.listen(lambda payload: loop.post(decode(payload)))
    loop.run()


if __name__ == "__main__":
    main()
