"""What the plug-in's guards admit, answer and report, and how it starts servers: here
without a server, in this process.
"""

import asyncio
import hashlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rollweave_servers.process import PLUGIN

NAMES = ("rollweave_leases", "rollweave_vllm", "rollweave_vllm_leases", "rollweave_sglang")


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules of the plug-in by their names without `rollweave_`."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    vars(sys.modules["vllm"])["__version__"] = "0.32.0"
    modules = {name.removeprefix("rollweave_"): importlib.import_module(name) for name in NAMES}
    for variable in ("TOKEN", "MAIN", "ROUTES", "KV"):
        monkeypatch.delenv(getattr(modules["vllm"], variable), raising=False)
    monkeypatch.setenv(modules["vllm"].TOKEN, "secret")
    yield SimpleNamespace(**modules)
    for name in NAMES:
        sys.modules.pop(name)


async def ask(
    guard: Any, path: str, token: str, *parts: bytes, kind: str = "http", app: Any = None
) -> tuple[int, Any]:
    """Return the status and the body of a guard's answer to a request whose body comes
    in these parts; (0, None) if it answers nothing.
    """
    sent, left = list[dict[str, Any]](), list(parts)

    async def receive() -> dict[str, Any]:
        body = left.pop(0) if left else b""
        return {"body": body, "more_body": bool(left)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {token}".encode())] if token else []
    await guard({"type": kind, "path": path, "headers": headers, "app": app}, receive, send)
    if not sent:
        return 0, None
    head, body = sent
    assert (head["type"], body["type"]) == ("http.response.start", "http.response.body")
    return head["status"], json.loads(body["body"] or b"null")


def application(calls: list[str]) -> Any:
    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        calls.append(f"{scope['type']} {scope['path']}")
        if scope["type"] == "http":
            body = (await receive())["body"]
            await send({"type": "http.response.start", "status": 299, "headers": []})
            await send({"type": "http.response.body", "body": body})

    return app


def core_of(ranks: list[Any]) -> Any:
    """Return an application whose core notes the ranks that it is given, and has no
    request "gone".
    """

    async def call(*arguments: Any) -> int:
        ranks.append(arguments)
        return int(arguments[1] != "gone")

    core = SimpleNamespace(call_utility_async=call)
    return SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(engine_core=core)))


async def test_a_started_server_admits_its_engine_alone(plugin: SimpleNamespace) -> None:
    calls, ranks = list[str](), list[Any]()
    guard = plugin.vllm.Guard(application(calls))
    for token in ("", "wrong", "secret2"):
        for path in ("/pause", plugin.leases.RERANK):
            assert await ask(guard, path, token) == (401, {"detail": "no token"})
    assert calls == []
    assert await ask(guard, "/pause", "secret", b'"body"') == (299, "body")
    assert await ask(guard, "", "", kind="lifespan") == (0, None)
    assert calls == ["http /pause", "lifespan "]
    for id, found in (("a", True), ("gone", False)):
        body = json.dumps({"id": id, "priority": "7"}).encode()
        answer = await ask(guard, plugin.leases.RERANK, "secret", body, app=core_of(ranks))
        assert answer == (200, {"found": found})
    assert ranks == [("rollweave_rerank", "a", 7), ("rollweave_rerank", "gone", 7)]


async def test_a_lease_admits_one_engine_to_everything(
    plugin: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, ranks, leases = list[str](), list[Any](), plugin.leases
    guard = plugin.vllm_leases.LeasedGuard(application(calls))
    no_token = (401, {"detail": "no token of this server or of its lease"})
    for path in ("/pause", leases.ABOUT, leases.LEASE, leases.RELEASE, leases.OPEN, leases.RERANK):
        for token in ("", "wrong"):
            assert await ask(guard, path, token, b'{"holder": "x"}') == no_token
    for path in ("/pause", leases.RELEASE, leases.RERANK):
        detail = f"{path} needs a lease, see {leases.LEASE}"
        assert await ask(guard, path, "secret", b"{}") == (403, {"detail": detail})
    assert await ask(guard, leases.OPEN, "secret", b"1") == (299, 1)
    assert await ask(guard, "/any", "", kind="lifespan") == (0, None)
    for body in (b"", b"[]", b"no json", b'{"holder": ""}'):
        assert await ask(guard, leases.LEASE, "secret", body) == (409, {"holder": ""})
    status, first = await ask(guard, leases.LEASE, "secret", b'{"hol', b'der": "one"}')
    assert status == 200
    other = await ask(guard, leases.LEASE, "secret", b'{"holder": "two"}')
    assert other == (409, {"holder": "one"})
    token = first["token"]
    assert await ask(guard, "/pause", token, b"2") == (299, 2)
    body = b'{"id": "a", "priority": -3}'
    answer = await ask(guard, leases.RERANK, token, body, app=core_of(ranks))
    assert (answer, ranks) == ((200, {"found": True}), [("rollweave_rerank", "a", -3)])
    assert await ask(guard, leases.RELEASE, token) == (200, {})
    assert await ask(guard, "/pause", token) == no_token
    assert (await ask(guard, leases.LEASE, "secret", b'{"holder": "two"}'))[0] == 200
    assert calls == ["http /health", "lifespan /any", "http /pause"]


async def test_a_guard_without_ranks_has_no_request(plugin: SimpleNamespace) -> None:
    class Plain(plugin.leases.LeasedGuard):  # type: ignore[misc,name-defined]
        variable = plugin.vllm.TOKEN

    guard = Plain(application([]))
    (_, leased) = await ask(guard, plugin.leases.LEASE, "secret", b'{"holder": "one"}')
    answer = await ask(guard, plugin.leases.RERANK, leased["token"], b"{}")
    assert answer == (200, {"found": False})
    with pytest.raises(NotImplementedError):
        guard.about(None)


@pytest.mark.parametrize("over", [False, True])
async def test_a_body_is_read_up_to_its_limit(plugin: SimpleNamespace, over: bool) -> None:
    limit = plugin.leases.BODY_BYTES
    text = json.dumps({"a": 1}).encode()
    whole = text + b" " * (limit - len(text) + over)
    parts = [whole[at : at + limit // 2] for at in range(0, len(whole), limit // 2)]
    parts += [b"never read"] * over
    taken = 0

    async def receive() -> dict[str, Any]:
        nonlocal taken
        taken += 1
        return {"body": parts[taken - 1], "more_body": taken < len(parts)}

    assert await plugin.leases.read_body(receive) == {"a": 1}
    assert taken == len(parts) - over


async def test_a_server_says_what_it_is_and_whether_it_reads_its_engines_memory(
    plugin: SimpleNamespace, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 8, "tie": True, "name": "x", "rope": 1.5}
    model = SimpleNamespace(
        model=Path("/m"),
        hf_text_config=SimpleNamespace(to_dict=lambda: sizes),
        hf_config=SimpleNamespace(architectures=None),
        dtype="torch.bfloat16",
        max_model_len=99,
        logprobs_mode="raw",
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(num_gpu_blocks=7, block_size=16, enable_prefix_caching=1),
        scheduler_config=SimpleNamespace(
            max_num_seqs=5,
            policy="priority",
            scheduler_cls="rollweave_vllm_scheduler.PreemptingScheduler",
            enable_chunked_prefill=None,
        ),
        weight_transfer_config=None,
        structured_outputs_config=SimpleNamespace(backend="b", enable_in_reasoning=False),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    routes = [SimpleNamespace(path="/pause"), SimpleNamespace()]
    app = SimpleNamespace(state=SimpleNamespace(vllm_config=config), routes=routes)
    guard = plugin.vllm_leases.LeasedGuard(application([]))
    (status, said) = await ask(guard, plugin.leases.ABOUT, "secret", app=app)
    expected = {
        "protocol": 1,
        "version": "0.32.0",
        "model": "/m",
        "architectures": [],
        "sizes": {"hidden_size": 8},
        "dtype": "bfloat16",
        "context": 99,
        "logprobs": "raw",
        "slots": 5,
        "policy": "priority",
        "preempts": True,
        "chunked_prefill": False,
        "kv_tokens": 112,
        "prefix_cache": True,
        "device": "cpu",
        "transfer": "",
        "grammars": "b",
        "constrains_reasoning": False,
        "routes": ["/pause", ""],
        "holder": "",
        "unreadable": "",
    }
    assert (status, said) == (200, expected)
    config.cache_config.num_gpu_blocks = None
    config.weight_transfer_config = SimpleNamespace(backend="rollweave")
    del config.scheduler_config.scheduler_cls
    await ask(guard, plugin.leases.LEASE, "secret", b'{"holder": "one"}')
    place = tmp_path / "sample"
    place.write_bytes(b"x" * (plugin.leases.SAMPLE_BYTES + 1))
    first = hashlib.sha256(b"x" * plugin.leases.SAMPLE_BYTES).hexdigest()
    for sample, unreadable in (
        ({"location": str(place), "sha256": first}, ""),
        ({"location": str(place), "sha256": "no"}, "it has other content there"),
        ({"location": str(tmp_path / "gone")}, "FileNotFoundError: "),
        ({"other": 1}, "KeyError: 'location'"),
        ({"location": None}, "TypeError: "),
    ):
        body = json.dumps(sample).encode()
        (_, said) = await ask(guard, plugin.leases.ABOUT, "secret", body, app=app)
        assert said["unreadable"].startswith(unreadable)
        assert bool(said["unreadable"]) == bool(unreadable)
    found = said["holder"], said["kv_tokens"], said["transfer"], said["preempts"]
    assert found == ("one", 0, "rollweave", False)


@pytest.mark.parametrize("plugins", [None, "other"])
@pytest.mark.parametrize("path", [None, "/x"])
def test_a_users_server_gets_what_an_engine_needs(
    plugin: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, plugins: str | None, path: str | None
) -> None:
    """The user's own arguments come last, and take precedence."""
    ran = list[Any]()
    for name, value in (("VLLM_PLUGINS", plugins), ("PYTHONPATH", path)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setenv(plugin.vllm.MAIN, "0")  # so that it is restored
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    run = lambda module, run_name, alter_sys: ran.append((module, run_name, alter_sys))  # noqa: E731
    monkeypatch.setattr(plugin.leases.runpy, "run_module", run)
    monkeypatch.setattr(sys, "argv", ["program", "--model", "m"])
    plugin.vllm_leases.serve_alone()
    assert ran == [(plugin.vllm.SERVER, "__main__", True)]
    assert sys.argv == [plugin.vllm.SERVER, *plugin.vllm_leases.OPTIONS, "--model", "m"]
    assert os.environ["PYTHONPATH"] == ":".join([str(PLUGIN), *([path] if path else [])])
    assert os.environ.get("VLLM_PLUGINS") == (plugins and f"{plugins},rollweave")
    assert os.environ[plugin.vllm.MAIN] == str(os.getpid())
    assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"


@pytest.mark.parametrize("orphaned", [False, True])
def test_a_started_server_runs_only_beside_its_engine(
    plugin: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, orphaned: bool
) -> None:
    ran, bound = list[str](), list[bool]()

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(plugin.vllm, "end_with_parent", lambda: bound.append(True))
    monkeypatch.setattr(plugin.leases.runpy, "run_module", lambda name, **_: ran.append(name))
    monkeypatch.setattr(plugin.vllm.os, "_exit", leave)
    parent = os.getppid() + orphaned
    monkeypatch.setattr(sys, "argv", ["program", str(parent), "--model", "m"])
    if orphaned:
        with pytest.raises(SystemExit) as ended:
            plugin.vllm.serve()
        assert (ended.value.code, ran) == (plugin.vllm.ORPHANED, [])
    else:
        plugin.vllm.serve()
        assert ran == [plugin.vllm.SERVER]
        assert sys.argv == [plugin.vllm.SERVER, "--model", "m"]
    assert bound


@pytest.mark.parametrize("alive", [None, True, False])
def test_a_process_whose_parent_has_ended_ends(
    plugin: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, alive: bool | None
) -> None:
    set_up, left = list[Any](), list[int]()
    library = SimpleNamespace(prctl=lambda *arguments: set_up.append(arguments))
    monkeypatch.setattr(plugin.vllm.ctypes, "CDLL", lambda name, use_errno: library)
    monkeypatch.setattr(plugin.vllm.os, "_exit", left.append)
    parent = None if alive is None else SimpleNamespace(is_alive=lambda: alive)
    monkeypatch.setattr(plugin.vllm.multiprocessing, "parent_process", lambda: parent)
    plugin.vllm.end_with_parent()
    assert set_up == [(1, 9)]  # PR_SET_PDEATHSIG, SIGKILL
    assert left == ([plugin.vllm.ORPHANED] if alive is False else [])


def test_vllm_gets_the_transfer_once_and_the_routes_where_they_are_wanted(
    plugin: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered, calls = dict[str, Any](), list[str]()
    factory = SimpleNamespace(
        _registry=registered,
        register_engine=lambda name, *where: registered.setdefault(name, []).append(where),
    )
    path = "vllm.distributed.weight_transfer.factory"
    for end in (2, 3, 4):
        name = ".".join(path.split(".")[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules[path])["WeightTransferEngineFactory"] = factory
    routes = SimpleNamespace(register=lambda: calls.append("routes"))
    monkeypatch.setitem(sys.modules, "rollweave_vllm_routes", routes)
    constraints = SimpleNamespace(register=lambda: calls.append("constraints"))
    monkeypatch.setattr(plugin.vllm, "rollweave_vllm_constraints", constraints)
    monkeypatch.setattr(plugin.vllm, "end_with_parent", lambda: calls.append("bound"))
    monkeypatch.setattr(plugin.vllm, "register_kv", lambda: calls.append("kv"))
    monkeypatch.setenv(plugin.vllm.MAIN, str(os.getpid()))
    plugin.vllm.register()
    monkeypatch.setenv(plugin.vllm.ROUTES, "")
    monkeypatch.delenv(plugin.vllm.MAIN)
    plugin.vllm.register()
    assert registered == {"rollweave": [("rollweave_vllm_weights", "RollweaveTransfer")]}
    assert calls == ["kv", "constraints", "bound", "kv", "constraints", "routes"]


async def test_a_reranking_body_must_have_both_fields(plugin: SimpleNamespace) -> None:
    with pytest.raises(KeyError, match="priority"):
        await plugin.vllm.rerank(core_of([]), {"id": "a"})
    assert await asyncio.wait_for(plugin.vllm.rerank(core_of([]), {"id": 3, "priority": 4}), 10)
