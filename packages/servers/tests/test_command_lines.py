"""The command lines and the environments of servers."""

import dataclasses
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from packages.servers.tests.sglang_server import parser
from rollweave.schema.base import EngineId
from rollweave.schema.serving import EngineSpec, ServerSpec
from rollweave.weights.checkpoint import read_shape
from rollweave_servers import sglang, vllm
from rollweave_servers.plugin import sglang_launcher as launcher
from rollweave_servers.process import PLUGIN, first_error, settings_of
from tests.support.engines import tiny_checkpoint, vllm_checkpoint

SECRET = "secret"


@pytest.fixture
def of_vllm(tmp_path: Path) -> EngineSpec:
    server = ServerSpec(
        kind="vllm", python="python3", args=("--seed", "4"), start_s=1.0, control_s=1.0
    )
    return EngineSpec(
        id=EngineId("e0"), model=str(vllm_checkpoint(tmp_path)), kv_tokens=1024, server=server
    )


@pytest.fixture
def of_sglang(tmp_path: Path) -> EngineSpec:
    server = ServerSpec(
        kind="sglang",
        python="python3",
        args=("--mem-fraction-static", "0.7"),
        degree=2,
        start_s=1.0,
        control_s=1.0,
    )
    model = str(tiny_checkpoint(tmp_path))
    return EngineSpec(id=EngineId("e0"), model=model, kv_tokens=1024, version=7, server=server)


@pytest.fixture(params=["of_vllm", "of_sglang"])
def spec(request: pytest.FixtureRequest) -> EngineSpec:
    """The spec of an engine of each kind."""
    found: EngineSpec = request.getfixturevalue(request.param)
    return found


def options(spec: EngineSpec) -> list[str]:
    settings, shape = settings_of(spec), read_shape(Path(spec.model))
    kind = vllm if settings.kind == "vllm" else sglang
    return kind.arguments(spec, settings, shape, port=8000)


def variables(spec: EngineSpec, folder: str = "/sockets") -> dict[str, str]:
    if settings_of(spec).kind == "vllm":
        return vllm.environment(spec, token=SECRET, folder=Path(folder))
    return sglang.environment(token=SECRET, folder=Path(folder))


def value(spec: EngineSpec, name: str) -> str:
    given = options(spec)
    return given[given.index(name) + 1]


def test_the_users_arguments_come_last(spec: EngineSpec) -> None:
    assert tuple(options(spec)[-2:]) == settings_of(spec).args


def test_a_tokenizer_is_loaded_if_there_is_one(spec: EngineSpec) -> None:
    assert "--skip-tokenizer-init" in options(spec)
    Path(spec.model, "tokenizer.json").write_text("{}")
    assert "--skip-tokenizer-init" not in options(spec)


def test_only_the_environment_has_the_token(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    env, is_vllm = variables(spec), settings_of(spec).kind == "vllm"
    assert env[vllm.TOKEN if is_vllm else sglang.TOKEN] == SECRET
    assert env.get("PYTHONPATH") == (str(PLUGIN) if is_vllm else None)
    assert env["VLLM_RPC_BASE_PATH" if is_vllm else "TMPDIR"] == "/sockets"
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert not any(SECRET in each for each in options(spec))
    assert launcher.TOKEN == sglang.TOKEN


# SGLang


def test_a_sequence_of_the_maximum_length_fits_in_sglangs_context_and_cache(
    of_sglang: EngineSpec,
) -> None:
    assert value(of_sglang, "--context-length") == str(256 + 8)
    assert value(of_sglang, "--max-total-tokens") == str(1024 + 256)
    short = msgspec.structs.replace(of_sglang, kv_tokens=128)
    assert value(short, "--context-length") == str(128 + 8)


def test_sglang_has_the_label_of_the_version_from_the_start(of_sglang: EngineSpec) -> None:
    assert value(of_sglang, "--weight-version") == "7"
    assert value(msgspec.structs.replace(of_sglang, version=-1), "--weight-version") == "0"


def test_sglang_preempts_nothing_and_is_deterministic_if_the_engine_is(
    of_sglang: EngineSpec,
) -> None:
    assert "--disable-priority-preemption" in options(of_sglang)
    assert "--enable-deterministic-inference" not in options(of_sglang)
    fixed = msgspec.structs.replace(of_sglang, deterministic=True)
    assert "--enable-deterministic-inference" in options(fixed)


@pytest.mark.parametrize(
    ("changes", "args", "in_order"),
    [
        ({}, (), False),
        ({}, ("--no-async-scheduling",), True),
        ({"routes": True}, (), True),
        ({"routes": True, "device": "cuda:0"}, (), False),
    ],
)
def test_a_scheduler_of_vllm_is_of_the_kind_of_its_steps(
    of_vllm: EngineSpec, changes: dict[str, object], args: tuple[str, ...], in_order: bool
) -> None:
    server = msgspec.structs.replace(settings_of(of_vllm), args=args)
    found = options(msgspec.structs.replace(of_vllm, server=server, **changes))
    scheduler = found[found.index("--scheduler-cls") + 1]
    assert scheduler.endswith(".SyncPreemptingScheduler") == in_order


@pytest.mark.parametrize("ends", [(), (5, 6)])
@pytest.mark.parametrize("leased", [False, True])
def test_an_engine_speaks_of_its_model(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch, ends: tuple[int, ...], leased: bool
) -> None:
    """The run's tokens that end a turn take the place of the model's; a leased server
    may have room for fewer tokens than the engine.
    """
    made = list[dict[str, object]]()
    monkeypatch.setattr(vllm, "OwnVllm", lambda **options: made.append(options))
    monkeypatch.setattr(sglang, "OwnSglang", lambda **options: made.append(options))
    settings = settings_of(spec)
    if leased:
        settings = msgspec.structs.replace(settings, addresses=("http://h:1",), context=40)
    given = msgspec.structs.replace(spec, eos_token_ids=ends, server=settings, version=3)
    shape = read_shape(Path(spec.model))
    shape = dataclasses.replace(shape, eos_token_ids=(9,)) if not shape.eos_token_ids else shape
    kind = vllm.VllmKind() if settings.kind == "vllm" else sglang.SglangKind()
    kind.speak(given, shape)
    (options,) = made
    assert options["version"] == 3
    assert options["stop_ids"] == (ends or shape.eos_token_ids) != ()
    if settings.kind == "sglang":
        room = min(shape.context, spec.kv_tokens)
        assert options["max_context"] == (40 if leased else room)
    server = SimpleNamespace(url="http://h:1", token="t")
    assert kind.mover(given, shape, server) is None  # type: ignore[arg-type]


def test_a_token_of_sglang_may_begin_with_a_hyphen(
    of_sglang: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of the tests takes all arguments that SGLang is given."""
    started: list[str] = []
    monkeypatch.setenv(sglang.TOKEN, "-x")
    monkeypatch.setattr(launcher, "end_with_parent", lambda parent: None)

    def run_module(module: str, run_name: str, alter_sys: bool) -> None:
        assert (module, run_name, alter_sys) == (launcher.SERVER, "__main__", True)
        assert "/folder" not in launcher.sys.path
        started.extend(launcher.sys.argv)

    monkeypatch.setattr(launcher.runpy, "run_module", run_module)
    monkeypatch.setattr(launcher.sys, "path", ["/folder", *launcher.sys.path])
    monkeypatch.setattr(launcher.sys, "argv", ["sglang_launcher.py", "1", *options(of_sglang)[:-2]])
    launcher.main()
    taken = parser().parse_args(started[1:])
    assert (taken.admin_api_key, taken.tp_size) == ("-x", 2)


def test_a_health_check_of_sglang_does_not_wait_for_a_paused_server(of_sglang: EngineSpec) -> None:
    """By default it generates a token, which a paused server does not."""
    assert variables(of_sglang)["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"


# vLLM


def test_the_cache_of_vllm_has_the_tokens_that_were_asked_for(of_vllm: EngineSpec) -> None:
    # keys and values of 1 layer with 1 head of 32 numbers of 4 bytes; vLLM keeps some
    # blocks
    assert int(value(of_vllm, "--kv-cache-memory-bytes")) == 2 * 1 * 1 * 32 * 4 * (1024 + 64)
    assert (value(of_vllm, "--max-model-len"), value(of_vllm, "--dtype")) == ("512", "float32")
    short = msgspec.structs.replace(of_vllm, kv_tokens=256)
    assert value(short, "--max-model-len") == "256"


def test_vllm_computes_a_prompt_in_one_piece_on_a_cpu_only(of_vllm: EngineSpec) -> None:
    """A seeded request whose prompt is computed in pieces ends vLLM on a CPU."""
    assert "--no-enable-chunked-prefill" in options(of_vllm)
    gpu = msgspec.structs.replace(of_vllm, device="cuda")
    assert not {"--no-enable-chunked-prefill", "--enforce-eager"} & set(options(gpu))


def test_the_plugin_is_found_as_an_installed_package() -> None:
    """vLLM looks for entry points in the metadata of packages on its path."""
    (info,) = PLUGIN.glob("*.dist-info")
    assert "rollweave = rollweave_vllm:register" in (info / "entry_points.txt").read_text()
    assert (info / "METADATA").read_text().startswith("Metadata-Version")
    assert {path.stem for path in PLUGIN.glob("*.py")} == {
        "rollweave_leases",
        "rollweave_sglang",
        "rollweave_vllm",
        "rollweave_vllm_constraints",
        "rollweave_vllm_leases",
        "rollweave_vllm_routes",
        "rollweave_vllm_scheduler",
        "rollweave_vllm_weights",
        "sglang_launcher",
    }


STARTER = """
import multiprocessing, os, sys
import rollweave_vllm

def late(ready, marker):
    open(ready).read()  # until the test says that the parent is gone
    rollweave_vllm.end_with_parent()
    open(marker, "w").close()

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=late, args=sys.argv[1:])
    process.start()
    print(process.pid, flush=True)
    process.join()
"""


@pytest.mark.parametrize("lost", [True, False])
def test_a_process_whose_parent_ended_before_it_had_imported_all_ends(
    lost: bool, tmp_path: Path
) -> None:
    """With a parent, the same process goes on."""
    ready, marker = tmp_path / "ready", tmp_path / "marker"
    os.mkfifo(ready)
    (tmp_path / "starter.py").write_text(STARTER)
    with subprocess.Popen(
        [sys.executable, tmp_path / "starter.py", ready, marker],
        env={**os.environ, "PYTHONPATH": str(PLUGIN)},
        stdout=subprocess.PIPE,
        text=True,
    ) as starter:
        assert starter.stdout is not None
        late = os.pidfd_open(int(starter.stdout.readline()))
        try:
            with ready.open("w"):  # the process has opened it, too
                if lost:
                    starter.kill()
                    starter.wait()
            assert select.select([late], [], [], 60.0)[0], "the process does not end"
        finally:
            os.close(late)
    assert marker.exists() == (not lost)


def test_the_reason_of_an_end_is_the_first_error_of_this_server(tmp_path: Path) -> None:
    log = tmp_path / "e0.log"
    log.write_text("OldError: of the server before\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write(
            "    raise ValueError(\n(EngineCore pid=7) ValueError: too small\nRuntimeError: x\n"
        )
    assert first_error(log, start) == "ValueError: too small"
    start = log.stat().st_size
    assert first_error(log, start) == ""
    with log.open("a") as file:
        file.write("usage: server.py\nserver.py: error: unrecognized arguments: --fast\n")
    assert first_error(log, start) == "error: unrecognized arguments: --fast"
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("[2026-11-23 16:00:00 TP0] RuntimeError: out of memory\n")
    assert first_error(log, start) == "RuntimeError: out of memory"
    assert first_error(tmp_path / "none", 0) == ""


def test_experts_are_recorded_by_the_plug_in_on_a_cpu_and_by_vllm_on_a_gpu(
    of_vllm: EngineSpec,
) -> None:
    assert "--enable-return-routed-experts" not in options(of_vllm)
    asked = msgspec.structs.replace(of_vllm, routes=True)
    gpu = msgspec.structs.replace(asked, device="cuda")
    assert {"--enable-return-routed-experts", "--no-async-scheduling"} <= set(options(asked))
    assert "--enable-return-routed-experts" in options(gpu)
    names = ("ROLLWEAVE_VLLM_ROUTES", "VLLM_USE_V2_MODEL_RUNNER")
    for one, expected in ((of_vllm, [None, None]), (asked, ["1", None]), (gpu, [None, "1"])):
        given = variables(one)
        assert [given.get(name) for name in names] == expected


def test_only_a_server_that_moves_kv_has_a_connector(of_vllm: EngineSpec) -> None:
    assert "--kv-transfer-config" not in options(of_vllm)
    assert of_vllm.server is not None
    server = msgspec.structs.replace(of_vllm.server, moves_kv=True)
    moving = msgspec.structs.replace(of_vllm, server=server)
    settings = json.loads(value(moving, "--kv-transfer-config"))
    assert (settings["kv_connector"], settings["kv_buffer_device"]) == ("NixlConnector", "cpu")
    assert settings["kv_load_failure_policy"] == "fail", "else it computes the prompt twice"
    assert int(value(moving, "--max-num-seqs")) > int(value(of_vllm, "--max-num-seqs"))
    names = ("VLLM_NIXL_SIDE_CHANNEL_HOST", "UCX_NET_DEVICES", "ROLLWEAVE_VLLM_KV")
    given = [variables(one) for one in (of_vllm, moving)]
    expected = [[None, None, None], ["127.0.0.1", "lo", "1"]]
    assert [[one.get(name) for name in names] for one in given] == expected
