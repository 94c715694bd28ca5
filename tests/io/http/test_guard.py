"""The guard refuses requests of web pages, of unauthorized and of careless clients, at
every listener of the package.
"""

import asyncio
import contextlib
import logging
import re
import stat
import string
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rollweave.io.http.bodies import body_of
from rollweave.io.http.guard import (
    JSON,
    Guard,
    given_token,
    kept_token,
    networks_of,
    optional_token,
    read_token,
    server_token,
)
from rollweave.io.http.listening import Access, listening
from rollweave.schema.errors import ConfigError
from tests.support.http import ATTACKS

TOKEN = "a-token-of-more-than-16-characters"
Place = tuple[str, int]
LOCAL = ("127.0.0.1", 8300)
HERE = {"Host": ["localhost:8300"]}
EMPTY: dict[str, list[str]] = {
    name: [] for name in ("Host", "Origin", "Sec-Fetch-Site", "Authorization", "Content-Type")
}


def verdict(
    guard: Guard,
    path: str = "/v1/x",
    *,
    local: Place = LOCAL,
    body: bool = False,
    **headers: list[str],
) -> int:
    headers_given = {
        **EMPTY,
        **HERE,
        **{name.replace("_", "-"): values for name, values in headers.items()},
    }
    refused = guard.objection(path, headers_given, local=local, has_body=body)
    return refused[0] if refused is not None else 200


@pytest.mark.parametrize(
    "host", ["localhost:8300", "127.0.0.1:8300", "127.8.8.8:8300", "[::1]:8300", "LOCALHOST:8300"]
)
def test_accepts_names_of_this_host(host: str) -> None:
    assert verdict(Guard(token=None), Host=[host]) == 200


@pytest.mark.parametrize(
    "hosts",
    [
        *([], [""], ["evil.com"], ["evil.com:8300"], ["localhost"], ["localhost:80"]),
        *(["localhost:8300", "evil.com"], ["localhost.evil.com:8300"], ["evil@localhost:8300"]),
        *(["10.0.0.1:8300"], ["2130706433:8300"], ["localhost:８３００"], ["[[[127.0.0.1]]]:8300"]),
        *(["[127.0.0.1]:8300"], ["127.0.0.1]:8300"], ["[localhost]:8300"], ["::1:8300"]),
        *(["[::1%eth0]:8300"], ["[::1%25lo]:8300"], ["[::1]8300"], ["localhost:8300:8300"]),
    ],
)
def test_refuses_other_names_on_the_loopback(hosts: list[str]) -> None:
    assert verdict(Guard(token=None), Host=hosts) == 421


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("10.0.0.5:8300", 200), ("10.0.0.5", 200), ("gpu-7:8300", 200), ("other:8300", 200)),
        ("evil.com:8300", 421),
    ],
)
def test_accepts_ip_addresses_and_configured_names_on_a_network(host: str, status: int) -> None:
    assert (
        verdict(
            Guard(token=None, hosts=["gpu-7", "other:8300"]), local=("10.0.0.5", 8300), Host=[host]
        )
        == status
    )


@pytest.mark.parametrize(
    "origin",
    ["http://evil.com", "null", "", "http://localhost:3000", "https://localhost", "file://"],
)
def test_refuses_pages_of_other_origins_with_and_without_the_token(origin: str) -> None:
    for guard in (Guard(token=None), Guard(token=TOKEN)):
        assert verdict(guard, Origin=[origin], Authorization=[f"Bearer {TOKEN}"]) == 403
        assert verdict(guard, "/health", Origin=[origin]) == 403


def test_accepts_our_own_origin_and_other_clients() -> None:
    assert (
        verdict(Guard(token=None), Origin=["http://localhost:8300"], Sec_Fetch_Site=["same-origin"])
        == 200
    )
    assert verdict(Guard(token=None), Sec_Fetch_Site=["none"]) == 200
    for site in ("cross-site", "same-site"):  # an image or a script, which have no Origin
        assert verdict(Guard(token=None), Sec_Fetch_Site=[site]) == 403


@pytest.mark.parametrize(
    "kind",
    [
        *([], ["text/plain"], ["application/x-www-form-urlencoded"], ["text/json"], [JSON, JSON]),
        [f"{JSON}x"],
    ],
)
def test_a_body_must_be_json(kind: list[str]) -> None:
    assert verdict(Guard(token=None), body=True, Content_Type=kind) == 415
    assert verdict(Guard(token=None), body=False, Content_Type=kind) == 200
    assert verdict(Guard(token=None), body=True, Content_Type=[f"{JSON}; charset=utf-8"]) == 200


@given(st.text(string.printable, min_size=1, max_size=40).map(str.strip).filter(bool), st.data())
def test_compares_whole_tokens(token: str, data: st.DataObject) -> None:
    guard = Guard(token=token)
    assert verdict(guard, Authorization=[f"Bearer {token}"]) == 200
    place = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(
        st.sampled_from(string.ascii_letters).filter(lambda letter: letter != token[place])
    )
    for wrong in (token[:place] + other + token[place + 1 :], token[:place], token + other):
        assert verdict(guard, Authorization=[f"Bearer {wrong}"]) == 401
    for headers in ([], [token], [f"Basic {token}"], [f"Bearer {token}"] * 2):
        assert verdict(guard, Authorization=headers) == 401
    assert verdict(guard, "/health") == 200


@given(st.text(string.ascii_letters + string.digits, min_size=1, max_size=40), st.data())
def test_tokens_are_case_sensitive(token: str, data: st.DataObject) -> None:
    other = "".join(data.draw(st.sampled_from((letter, letter.swapcase()))) for letter in token)
    for expected, sent in (
        (token, other),
        (token.lower(), token.upper()),
        (token.upper(), token.lower()),
    ):
        assert verdict(Guard(token=expected), Authorization=[f"Bearer {sent}"]) == (
            200 if sent == expected else 401
        )


@given(
    st.sampled_from(["localhost:8300", "127.0.0.1:8300", "[::1]:8300"]),
    st.text(string.ascii_letters + string.digits + ".-@:/#?_", max_size=20),
    st.text(string.ascii_letters + string.digits + ".-@:/#?_", max_size=20),
)
def test_refuses_origins_that_only_contain_our_host(host: str, before: str, after: str) -> None:
    for scheme in ("http", "https"):
        status = 200 if not before + after else 403
        assert (
            verdict(Guard(token=None), Host=[host], Origin=[f"{scheme}://{before}{host}{after}"])
            == status
        )
        assert (
            verdict(Guard(token=None), Host=[host], Origin=[f"{scheme}://x{before}{host}"]) == 403
        )


@pytest.mark.parametrize(
    ("target", "status"),
    [
        *(("http://localhost:8300/v1/x", 200), ("HTTP://LOCALHOST:8300", 200)),
        *(("http://localhost:8300?a=b", 200), ("*", 200), ("http://evil.com/v1/x", 421)),
        *(("http://evil.com@localhost:8300/", 421), ("http://localhost:8300@evil.com/", 421)),
        *(("http://localhost:83000/", 421), ("http://127.0.0.1:8300/", 421)),
        *(("evil.com:443", 421), ("http:evil.com", 421)),
    ],
)
def test_an_absolute_target_must_have_our_host(target: str, status: int) -> None:
    refused = Guard(token=None).objection(
        "/v1/x", {**EMPTY, **HERE}, local=LOCAL, has_body=False, target=target
    )
    assert (refused[0] if refused else 200) == status


def test_an_entry_for_an_ip_address_may_have_a_port() -> None:
    guard = Guard(token=None, hosts=["[fd00::1]:8300", "fd00::2"])
    for host, status in (
        ("[fd00::1]:8300", 200),
        ("[fd00::1]:8301", 421),
        ("[fd00::2]:1", 200),
        ("[fd00::3]:8300", 421),
    ):
        assert verdict(guard, Host=[host]) == status


# Tokens that are kept.


def test_a_token_is_created_once_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "token"
    token = kept_token(path)
    assert len(token) >= 40
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert kept_token(path) == read_token(path) == token
    assert [entry.name for entry in path.parent.iterdir()] == ["token"]


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [("x" * 40, 0o644, "chmod 600"), ("short", 0o600, "16"), ("", 0o600, "16")],
)
def test_refuses_tokens_that_others_may_read_or_guess(
    tmp_path: Path, content: str, mode: int, words: str
) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        kept_token(path)


def test_no_token_is_allowed_on_the_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ITS_TOKEN", "secret")
    assert given_token("ITS_TOKEN", no_token=False, host="0.0.0.0", named="x") == "secret"
    assert given_token(None, no_token=True, host="127.0.0.1", named="x") is None
    for variable, host in (
        ("ITS_TOKEN", "127.0.0.1"),
        (None, "0.0.0.0"),
        (None, "10.0.0.1"),
        (None, "::"),
    ):
        with pytest.raises(ConfigError, match="--no-token"):
            given_token(variable, no_token=True, host=host, named="x")


def test_the_token_of_another_server_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SESAME", "open\n")
    assert server_token("SESAME") == optional_token("SESAME") == "open"
    assert optional_token("UNSET_SESAME") == ""
    with pytest.raises(ConfigError, match="UNSET_SESAME must be set in the environment"):
        server_token("UNSET_SESAME")


# Networks without a token.


@pytest.mark.parametrize(
    ("client", "status"),
    [
        *[(near, 200) for near in ("10.1.2.3", "::ffff:10.1.2.3", "192.168.7.7", "fd00::1")],
        *[(far, 401) for far in ("11.1.2.3", "192.168.7.8", "fd01::1", "127.0.0.1", "", "x")],
    ],
)
def test_clients_of_the_allowed_networks_need_no_token(client: str, status: int) -> None:
    networks = networks_of(["10.0.0.0/8", "192.168.7.7", "fd00::/32"], named="--allow")
    guard = Guard(token=TOKEN, networks=networks)
    place = {"local": LOCAL, "has_body": False, "client": client}
    refused = guard.objection("/v1/x", {**EMPTY, **HERE}, **place)  # type: ignore[arg-type]
    assert (refused[0] if refused is not None else 200) == status
    foreign = guard.objection("/v1/x", {**EMPTY, "Host": ["evil.example"]}, **place)  # type: ignore[arg-type]
    assert foreign is not None, "a page in such a network stays outside"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0.0.0.0/0", "at least 8 bits, since its clients need no token, got 0.0.0.0/0"),
        ("8.0.0.0/7", "at least 8 bits"),
        ("::/0", "at least 32 bits"),
        ("10.0.0.1/8", "an address or a network: 10.0.0.1/8 has host bits set"),
        ("gpu-7", "an address or a network: 'gpu-7' does not"),
    ],
)
def test_the_whole_internet_is_no_network(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^--allow must be .*{words}"):
        Access(networks=("10.0.0.0/8", text), port=0).check()


# As it is served.


async def _echo(request: web.Request) -> web.Response:
    return web.Response(body=await body_of(request, most=1 << 20))


@contextlib.asynccontextmanager
async def served(token: str | None = None) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.get("/get", _echo), web.route("*", "/v1/{path:.*}", _echo)])
    async with listening(app, "127.0.0.1", 0, guard=Guard(token=token), shutdown_s=0.1) as url:
        yield url


@pytest.mark.parametrize(("method", "headers", "status"), ATTACKS)
async def test_a_page_reaches_no_handler_and_gets_no_cors_headers(
    method: str, headers: dict[str, str], status: int
) -> None:
    async with served() as url, aiohttp.ClientSession() as session:
        data = b'{"handler": "game"}' if method == "POST" else None
        async with session.request(
            method, url + "/v1/rollouts", data=data, headers=headers
        ) as response:
            assert response.status == status
            assert not [
                name for name in response.headers if name.lower().startswith("access-control")
            ]


async def test_a_body_without_the_token_is_not_read() -> None:
    async with served(TOKEN) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST /v1/x HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: {JSON}\r\n"
            "Content-Length: 1000000\r\n\r\n"
        )
        writer.write(head.encode())
        assert b" 401 " in await reader.readline()
        writer.close()


async def _exchange(url: str, request: bytes, body: bytes = b"") -> list[int]:
    """Send a request, and the body once the server requests it.

    Return all statuses that came.
    """
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request.replace(b"HERE", f"{host}:{port}".encode()))
    statuses = []
    async with asyncio.timeout(30):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            statuses.append(int(head.split()[1]))
            if statuses[-1] != 100:
                break
            writer.write(body)
    writer.close()
    return statuses


@pytest.mark.parametrize("path", ["/v1/x", "/none/at/all"])
@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"Host: evil.com\r\nExpect: \xe9\r\n", 421),
        (b"Host: HERE\r\nExpect: \xe9\r\n", 401),
        (b"Host: HERE\r\nExpect: 100-continue\r\n", 401),
        (b"Host: HERE\r\nExpect: \xe9\r\nAuthorization: Bearer TOKEN\r\n", 417),
        (b"Host: HERE\r\nExpect: 200-ok\r\nAuthorization: Bearer TOKEN\r\n", 417),
        (
            b"Host: HERE\r\nExpect: 100-continue\r\nExpect: x\r\nAuthorization: Bearer TOKEN\r\n",
            417,
        ),
    ],
)
async def test_the_guard_precedes_expectations(
    path: str, lines: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    head = (
        lines.replace(b"TOKEN", TOKEN.encode())
        + b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n"
    )
    async with served(TOKEN) as url:
        assert await _exchange(url, b"POST %s HTTP/1.1\r\n" % path.encode() + head) == [status]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_sends_100_continue_once_the_request_is_admitted() -> None:
    lines = f"Host: HERE\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: {JSON}\r\n".encode()
    async with served(TOKEN) as url:
        for expected in (b"100-continue", b"100-Continue"):
            head = lines + b"Expect: %s\r\nContent-Length: 2\r\n\r\n" % expected
            assert await _exchange(url, b"POST /v1/x HTTP/1.1\r\n" + head, b"{}") == [100, 200]
            assert await _exchange(url, b"POST /get HTTP/1.1\r\n" + head, b"{}") == [405]
        assert await _exchange(
            url, b"GET /v1/x HTTP/1.1\r\n" + lines + b"Expect: 100-continue\r\n\r\n"
        ) == [200]
        old = lines + b"Expect: \xe9\r\n\r\n"  # in HTTP/1.0 the header has no meaning
        assert await _exchange(url, b"GET /v1/x HTTP/1.0\r\n" + old) == [200]


async def test_invalid_http_is_answered() -> None:
    async with served() as url:
        assert await _exchange(
            url, b"GET /\xff HTTP/1.1\r\nHost: HERE\r\nExpect: \xe9\r\n\r\n"
        ) == [400]


async def test_a_server_refuses_targets_of_other_hosts() -> None:
    async with served() as url:
        for target, status in (
            (b"http://evil.com/v1/x", 421),
            (b"http://HERE/v1/x", 200),
            (b"/v1/x", 200),
        ):
            assert await _exchange(url, b"GET %s HTTP/1.1\r\nHost: HERE\r\n\r\n" % target) == [
                status
            ]


def test_no_module_bypasses_the_listener() -> None:
    """Every server that acts goes through `listening`, whose `guard` must be given.
    (That of `rollweave_sandbox` gives blobs by digest.)
    """
    source = Path(__file__).parents[3] / "src" / "rollweave"
    own = re.compile(
        r"\b(run_app|TCPSite|UnixSite|AppRunner|ServerRunner|web\.Server)\(|HTTPServer\b"
    )
    modules = [path for path in source.rglob("*.py") if own.search(path.read_text())]
    expected = {"io/http/listening.py"}
    assert {path.relative_to(source).as_posix() for path in modules} == expected
