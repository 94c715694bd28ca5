"""Addresses and tokens of engines: normal form, no secrets, admitted hosts."""

import asyncio
import contextlib
import socket
import sqlite3
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.service.tests.api import call, status_of
from packages.service.tests.rollout_service import service_config, serving
from rollweave.engine.clients.transport import Transport
from rollweave.schema.address import Hosts, parse_address
from rollweave.schema.errors import ConfigError, EngineError
from rollweave_service import engines
from rollweave_service.client import RolloutClient
from rollweave_service.engines import PRIVATE_NETWORKS, check_engine_host
from rollweave_service.messages import EngineRequest

SECRET = "hunter2secret"


@pytest.mark.parametrize(
    "text",
    [
        *(f"http://user:{SECRET}@gpu:8000", f"http://{SECRET}@gpu:8000"),
        *(f"http://gpu:8000/{SECRET}", f"http://gpu:8000/?key={SECRET}"),
        *(f"http://gpu:8000?{SECRET}", f"http://gpu:8000#{SECRET}", f"user:{SECRET}@gpu:8000"),
        *(f"ftp://user:{SECRET}@gpu", f"http://user:{SECRET}@gpu:port"),
        *(f"http:\\\\user:{SECRET}@gpu", "http://2130706433:1", "http://0x7f.1:1"),
        *("http://127.1:1", "http://[::1%25lo]:1", "http://[::1%lo]:1", "http://", "http://[::1"),
        *("http://host:port", "http://127.0.0.1:1/\n"),
    ],
)
def test_refuses_urls_with_more_than_an_address_without_repeating_them(text: str) -> None:
    for refuse in (
        parse_address,
        RolloutClient,
        lambda address: EngineRequest(address=address, dialect="vllm"),
    ):
        with pytest.raises(ValueError, match="must be http://host:port") as error:
            refuse(text if refuse is not RolloutClient or "://" in text else f"http://{text}")
        assert SECRET not in str(error.value)


@given(st.text(max_size=40) | st.from_regex(r"https?://[a-z0-9:@/?#\[\].%-]{0,30}", fullmatch=True))
def test_accepted_addresses_have_only_scheme_host_and_port(text: str) -> None:
    with contextlib.suppress(ValueError):
        address = parse_address(text)
        assert parse_address(address) == address
        assert not set(address.partition("://")[2]) & set("@/?#% ")


METADATA = [
    "169.254.169.254",
    "[fd00:ec2::254]",
    "[fd00:ec2::23]",
    "[fd20:ce::254]",
    "100.100.100.200",
    "168.63.129.16",
]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.1.2.3", "192.168.0.9", "[::1]", "[::ffff:127.0.0.1]", "localhost"]
)
async def test_admits_this_host_and_private_networks_by_default(host: str) -> None:
    await check_engine_host(PRIVATE_NETWORKS, parse_address(f"http://{host}:8000"))


@pytest.mark.parametrize(
    "host",
    ["169.254.169.254", "8.8.8.8", "[::ffff:169.254.169.254]", "[fe80::1]", "0.0.0.0", *METADATA],
)
async def test_refuses_metadata_services_and_the_internet_by_default(host: str) -> None:
    with pytest.raises(ConfigError, match="--engine-host of the service admits"):
        await check_engine_host(PRIVATE_NETWORKS, parse_address(f"http://{host}:8000"))


@pytest.mark.parametrize("host", METADATA)
async def test_admits_a_metadata_address_only_as_an_entry(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = host.strip("[]")
    everything = Hosts.parse(
        ("0.0.0.0/0", "::/0", "fd00:ec2::/32", "169.254.0.0/16", "127.0.0.1"), field="x"
    )
    with pytest.raises(ConfigError, match="--engine-host of the service admits"):
        await check_engine_host(everything, f"http://{host}:1")
    await check_engine_host(Hosts.parse((bare,), field="x"), f"http://{host}:1")
    await check_engine_host(everything, "http://10.0.0.1:1")
    with pytest.raises(EngineError, match="not among the hosts"):
        Transport("x", f"http://{host}:1", hosts=everything, reply_s=2.0)

    async def points_there(*_: object, **__: object) -> list[object]:
        where = (socket.AF_INET6, (bare, 1, 0, 0)) if ":" in bare else (socket.AF_INET, (bare, 1))
        return [(where[0], socket.SOCK_STREAM, 6, "", where[1])]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", points_there)
    with pytest.raises(ConfigError, match="metadata"):
        await check_engine_host(everything, "http://metadata:1")
    wire = Transport("x", "http://metadata:1", hosts=everything, reply_s=2.0)
    with pytest.raises(EngineError):
        await asyncio.wait_for(wire.get("/"), 30)
    assert "not among the hosts" in wire.trouble
    await wire.wait_closed()


async def test_checks_the_resolved_addresses_of_a_name_on_connection() -> None:
    host = "localhost"
    hosts = Hosts.parse(("10.0.0.0/8",), field="x")
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1"):
        await check_engine_host(hosts, f"http://{host}:1")
    wire = Transport("x", f"http://{host}:1", hosts=hosts, reply_s=2.0)
    with pytest.raises(EngineError):
        await asyncio.wait_for(wire.get("/"), 30)
    assert "not among the hosts" in wire.trouble
    await wire.wait_closed()
    # the name itself is admitted
    await check_engine_host(Hosts.parse((host,), field="x"), f"http://{host}:1")


async def test_checks_a_numeric_address_on_connection() -> None:
    """A stored registration may have been accepted under other settings."""
    with pytest.raises(EngineError, match="not among the hosts"):
        Transport("x", "http://169.254.169.254", hosts=PRIVATE_NETWORKS, reply_s=2.0)


async def test_refuses_a_body_with_a_lone_surrogate(tmp_path: Path) -> None:
    with serving(service_config(tmp_path)) as service:
        for path, body in (
            ("/v1/rollouts", {"id": "\ud800x"}),
            ("/v1/engines", {"address": "\ud800xxxxxxxxxxx"}),
        ):
            status, answer, _ = await call(service, "POST", path, body)
            assert status == 400
            assert "text must be valid UTF-8" in str(answer)


def holders_of(secret: str, directory: Path) -> list[Path]:
    """Return the files that hold a secret."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return [file for file in files if secret.encode() in file.read_bytes()]


async def test_engine_tokens_are_readable_by_the_owner_only_and_never_returned(
    tmp_path: Path,
) -> None:
    config = service_config(tmp_path)
    directory = tmp_path / "service"
    engine = {"address": "http://127.0.0.1:9", "dialect": "vllm", "token": SECRET}
    with serving(config) as service:
        status, body, _ = await call(service, "POST", "/v1/engines", engine)
        assert status == 202
        assert SECRET not in str((body, await call(service, "GET", "/v1/engines")))
        token_file = directory / "engine-tokens.json"
        assert msgspec.json.decode(token_file.read_bytes()) == {body["id"]: SECRET}
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    with serving(config) as service:
        assert [one.token for one in [service.service.engines.request_of(body["id"])] if one] == [
            SECRET
        ]
        assert await status_of(service, "DELETE", f"/v1/engines/{body['id']}") == 202
        assert SECRET not in token_file.read_text()
    assert holders_of(SECRET, directory) == []


async def test_bounds_registrations_and_refuses_foreign_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "MAX_ENGINES", 3)
    with serving(service_config(tmp_path)) as service:
        answers = [
            await status_of(
                service,
                "POST",
                "/v1/engines",
                {"address": f"http://127.0.0.1:{port}", "dialect": "vllm"},
            )
            for port in range(1, 6)
        ]
        assert answers == [202, 202, 202, 429, 429]
        for path, more in (("/v1/engines", {"dialect": "vllm"}), ("/add_llm_server", {})):
            status, body, _ = await call(
                service, "POST", path, {"address": "http://169.254.169.254", **more}
            )
            assert status == 400
            assert "--engine-host" in str(body)


async def test_discards_registrations_that_break_the_present_rules(tmp_path: Path) -> None:
    config, database = service_config(tmp_path), tmp_path / "service" / "jobs.sqlite"
    with serving(config):
        pass
    row = {"address": f"http://user:{SECRET}@127.0.0.1:9/path", "dialect": "vllm"}
    with contextlib.closing(sqlite3.connect(database)) as db, db:
        db.execute(
            "INSERT INTO engines (id, request) VALUES (?, ?)", ("x0", msgspec.json.encode(row))
        )
    with serving(config) as service:
        (warning,) = [one for one in service.observer.warnings if one.component == "x0"]
        assert "its registration is discarded" in warning.message
        assert "127.0.0.1:9" in warning.message
        assert SECRET not in warning.message
    assert holders_of(SECRET, tmp_path / "service") == []


def test_tokens_are_known_as_soon_as_they_are_written(tmp_path: Path) -> None:
    tokens = engines.EngineTokens(tmp_path / "tokens")
    for name, token in (("x0", "a"), ("x1", "b"), ("x0", "")):
        tokens.put(name, token)
        assert tokens.get(name) == token
    assert engines.EngineTokens(tmp_path / "tokens")._tokens == {"x1": "b"}
