"""The kinds of inference servers are found by their entry points."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollweave.engine.server_kinds import DISTRIBUTION, GROUP, kind_of
from rollweave.io.extras import USER_CODE_REFUSED, USER_CODE_VARIABLE
from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of
from rollweave.runtime.entrypoints import server_engine
from rollweave.schema.base import EngineId
from rollweave.schema.errors import ConfigError
from rollweave.schema.serving import EngineFatal, EngineReply, EngineSpec, ServerName, ServerSpec
from tests.support.commands import CONFIG, invoke

MISSING = (
    r"engines\.kind vllm needs the package rollweave-servers, which is not installed \(pip install"
)
OTHER = object()

Announce = Callable[..., None]


@pytest.fixture
def announce(monkeypatch: pytest.MonkeyPatch) -> Iterator[Announce]:
    """Let only these distributions announce kinds, and each of them all kinds."""

    def announced(*distributions: str) -> None:
        def entry_points(group: str, name: str) -> list[Any]:
            assert (group, name) == (GROUP, "vllm")
            return [
                SimpleNamespace(dist=SimpleNamespace(name=distribution), load=lambda: OTHER)
                for distribution in distributions
            ]

        monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
        kind_of.cache_clear()

    yield announced
    kind_of.cache_clear()


@pytest.mark.parametrize(("kind", "name"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_the_distribution_announces_all_kinds(kind: ServerName, name: str) -> None:
    assert kind_of(kind).name == name


def test_two_packages_must_not_announce_the_same_kind(announce: Announce) -> None:
    announce(DISTRIBUTION, "another")
    rule = "engines.kind vllm must be announced by one package, got another and rollweave-servers"
    with pytest.raises(ConfigError, match=rule):
        kind_of("vllm")


def test_a_host_without_user_code_takes_no_kind_of_another_package(
    announce: Announce, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce("another")
    assert kind_of("vllm") is OTHER
    kind_of.cache_clear()
    monkeypatch.setenv(USER_CODE_VARIABLE, USER_CODE_REFUSED)
    with pytest.raises(ConfigError, match=r"engines\.kind must be built in .* got 'vllm'"):
        kind_of("vllm")


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=["train", "dry run"])
@pytest.mark.parametrize(
    "setting", ['python = "/no/python"', 'address = "http://10.0.0.1:1"'], ids=["ours", "attached"]
)
def test_a_run_with_servers_is_refused_in_one_line(
    announce: Announce,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    options: tuple[str, ...],
) -> None:
    announce()
    monkeypatch.chdir(tmp_path)
    scratch, engines = "[model.scratch]\nhidden = 32\nlayers = 1\n", "[engines]\n"
    assert scratch in CONFIG
    Path("servers.toml").write_text(
        CONFIG.replace(scratch, '[model]\npath = "nowhere"\n').replace(
            engines, f'[engines]\nkind = "vllm"\n{setting}\n'
        )
    )
    exit_code, output, (line,) = invoke("train", "servers.toml", *options)
    assert (exit_code, output) == (2, "")
    assert re.search(MISSING, line)
    assert not Path("runs").exists()


class Pipe:
    """The parent of an engine's process, as a list of what the engine sends."""

    def __init__(self) -> None:
        self.sent: list[EngineReply] = []

    def listen(self, receive: Callable[[bytes], None]) -> None:
        """Never receive anything."""

    def send_all(self, payloads: list[bytes]) -> None:
        self.sent += map(decoder_of(EngineReply), payloads)


async def test_an_engine_on_a_host_without_the_package_ends_with_the_reason(
    announce: Announce,
) -> None:
    announce()
    pipe, server = Pipe(), ServerSpec(kind="vllm", python="python", start_s=9.0, control_s=9.0)
    spec = EngineSpec(id=EngineId("e0"), model="nowhere", max_slots=1, kv_tokens=64, server=server)
    await server_engine._serve(cast(Parent, pipe), spec)
    (reply,) = pipe.sent
    assert isinstance(reply, EngineFatal)
    assert re.match(MISSING, reply.error)
