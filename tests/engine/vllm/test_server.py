"""The command line and the environment of a vLLM server."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rollweave.engine.servers.process import PLUGIN, first_error, settings_of
from rollweave.engine.servers.vllm import TOKEN, arguments, environment
from rollweave.schema.base import EngineId
from rollweave.schema.serving import EngineSpec, ServerSpec
from rollweave.weights.checkpoint import read_shape
from tests.support.engines import vllm_checkpoint


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    server = ServerSpec(
        kind="vllm", python="python3", args=("--seed", "4"), start_s=1.0, control_s=1.0
    )
    return EngineSpec(
        id=EngineId("e0"), model=str(vllm_checkpoint(tmp_path)), kv_tokens=1024, server=server
    )


def options(spec: EngineSpec) -> list[str]:
    return arguments(spec, settings_of(spec), read_shape(Path(spec.model)), port=8000)


def value(spec: EngineSpec, name: str) -> str:
    given = options(spec)
    return given[given.index(name) + 1]


def test_the_users_arguments_come_last(spec: EngineSpec) -> None:
    assert options(spec)[-2:] == ["--seed", "4"]


def test_the_cache_has_the_tokens_that_were_asked_for(spec: EngineSpec) -> None:
    # keys and values of 1 layer with 1 head of 32 numbers of 4 bytes; vLLM keeps some
    # blocks
    assert int(value(spec, "--kv-cache-memory-bytes")) == 2 * 1 * 1 * 32 * 4 * (1024 + 64)
    assert value(spec, "--max-model-len") == "512"
    short = msgspec.structs.replace(spec, kv_tokens=256)
    assert value(short, "--max-model-len") == "256"


def test_a_prompt_is_computed_in_one_piece_on_a_cpu_only(spec: EngineSpec) -> None:
    """A seeded request whose prompt is computed in pieces ends vLLM on a CPU."""
    assert "--no-enable-chunked-prefill" in options(spec)
    gpu = msgspec.structs.replace(spec, device="cuda")
    assert not {"--no-enable-chunked-prefill", "--enforce-eager"} & set(options(gpu))


def test_the_number_format_is_never_left_to_vllm(spec: EngineSpec) -> None:
    assert value(spec, "--dtype") == "float32"


def test_a_tokenizer_is_loaded_if_there_is_one(spec: EngineSpec) -> None:
    assert "--skip-tokenizer-init" in options(spec)
    Path(spec.model, "tokenizer.json").write_text("{}")
    assert "--skip-tokenizer-init" not in options(spec)


def test_only_the_environment_has_the_token(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    env = environment(spec, token="secret", folder=Path("/sockets"))
    assert (env["PYTHONPATH"], env[TOKEN]) == (str(PLUGIN), "secret")
    assert env["VLLM_RPC_BASE_PATH"] == "/sockets"
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert not any("secret" in each for each in options(spec))


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
    spec: EngineSpec,
) -> None:
    assert "--enable-return-routed-experts" not in options(spec)
    asked = msgspec.structs.replace(spec, routes=True)
    gpu = msgspec.structs.replace(asked, device="cuda")
    assert {"--enable-return-routed-experts", "--no-async-scheduling"} <= set(options(asked))
    assert "--enable-return-routed-experts" in options(gpu)
    variables = ("ROLLWEAVE_VLLM_ROUTES", "VLLM_USE_V2_MODEL_RUNNER")
    for one, expected in ((spec, [None, None]), (asked, ["1", None]), (gpu, [None, "1"])):
        given = environment(one, token="t", folder=Path("/tmp/f"))
        assert [given.get(name) for name in variables] == expected


def test_only_a_server_that_moves_kv_has_a_connector(spec: EngineSpec) -> None:
    assert "--kv-transfer-config" not in options(spec)
    assert spec.server is not None
    server = msgspec.structs.replace(spec.server, moves_kv=True)
    moving = msgspec.structs.replace(spec, server=server)
    settings = json.loads(value(moving, "--kv-transfer-config"))
    assert (settings["kv_connector"], settings["kv_buffer_device"]) == ("NixlConnector", "cpu")
    assert settings["kv_load_failure_policy"] == "fail", "else it computes the prompt twice"
    assert int(value(moving, "--max-num-seqs")) > int(value(spec, "--max-num-seqs"))
    names = ("VLLM_NIXL_SIDE_CHANNEL_HOST", "UCX_NET_DEVICES", "ROLLWEAVE_VLLM_KV")
    given = [environment(one, token="t", folder=Path("/tmp/f")) for one in (spec, moving)]
    assert [[one.get(name) for name in names] for one in given] == [
        [None, None, None],
        ["127.0.0.1", "lo", "1"],
    ]
