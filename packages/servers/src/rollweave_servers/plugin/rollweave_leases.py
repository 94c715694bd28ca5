"""The leases of an inference server that its user has started, and that one engine of
one run uses at a time.

Like `rollweave_vllm`, this module imports nothing of Rollweave, and runs in one process
of the server. Invariants: every request needs the server's token or the token of the
current lease; requests that compute or change something need that of the lease, so that
two runs cannot use the server at a time. A lease that nothing has used for `LEASE_S`
can be taken over, and its former holder is then refused.
"""

import hashlib
import hmac
import json
import os
import runpy
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]

PROTOCOL = 1
"""Version of the routes and fields of this module, which the engine compares."""

LEASE_S = 30.0
"""Maximum seconds between two requests of the holder, which renews its lease every
5 s.
"""

OPEN = "/health"
ABOUT, LEASE, RELEASE = "/rollweave/about", "/rollweave/lease", "/rollweave/release"
RERANK = "/rollweave/rerank"
"""The route that changes the priority of a request."""

BODY_BYTES = 1 << 16
"""Maximum number of bytes in the body of a request to these routes."""

SAMPLE_BYTES = 1 << 20
"""Maximum number of bytes of the caller's memory that the server reads."""


def require_token(variable: str) -> None:
    """Exit unless an environment variable has the token that requests must present."""
    if not os.environ.get(variable):
        sys.exit(f"{variable} must be set to the token that requests must present, got nothing")


def run_server(module: str, arguments: Sequence[str]) -> None:
    """Run a server's module with these arguments, as `python -m` does."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def about_model(path: object, model: Any, *, context: int) -> dict[str, Any]:
    """Return what a server reports of its model: a configuration of vLLM or SGLang, of
    which `path` is where it was loaded from and `context` the maximum number of tokens.
    """
    sizes = model.hf_text_config.to_dict()
    return {
        "model": str(path),
        "architectures": list(model.hf_config.architectures or ()),
        "sizes": {name: value for name, value in sizes.items() if type(value) is int},
        "dtype": str(model.dtype).removeprefix("torch."),
        "context": context,
    }


class Leases:
    """The current lease: its holder, and the token of the holder's requests."""

    def __init__(self) -> None:
        self._holder, self._token, self._used = "", "", 0.0

    @property
    def holder(self) -> str:
        """The holder; "" if there is none, or if it has been silent for too long."""
        return self._holder if time.monotonic() - self._used <= LEASE_S else ""

    def take(self, holder: str) -> str | None:
        """Return the token of a new lease; None if the server has another holder."""
        if self.holder not in ("", holder):
            return None
        self._holder, self._token = holder, secrets.token_urlsafe(32)
        self._used = time.monotonic()
        return self._token

    def admits(self, token: str) -> bool:
        """Return whether a request with this token is the holder's, and renew its
        lease.
        """
        if not self._token or not hmac.compare_digest(token.encode(), self._token.encode()):
            return False
        self._used = time.monotonic()
        return True

    def release(self) -> None:
        """End the lease."""
        self._holder = self._token = ""
        self._used = 0.0


class LeasedGuard:
    """Middleware of the server, an ASGI application. `variable` is the environment
    variable with the server's token.
    """

    variable: str

    def __init__(self, app: Application) -> None:
        self._app, self._token, self._leases = app, os.environ[self.variable], Leases()

    def about(self, app: Any) -> dict[str, Any]:
        """Return what the server with this application is."""
        raise NotImplementedError

    async def rerank(self, app: Any, body: dict[str, Any]) -> bool:
        """Change the priority of a request, where the server can; False if it has no
        such request.
        """
        return False

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        token = given.removeprefix("Bearer ")
        holds = self._leases.admits(token)
        if not (holds or hmac.compare_digest(token.encode(), self._token.encode())):
            await answer(send, 401, {"detail": "no token of this server or of its lease"})
        elif path == ABOUT:
            await self._describe(scope, receive, send)
        elif path == LEASE:
            await self._lease(await read_body(receive), send)
        elif holds and path == RELEASE:
            self._leases.release()
            await answer(send, 200, {})
        elif holds and path == RERANK:
            found = await self.rerank(scope["app"], await read_body(receive))
            await answer(send, 200, {"found": found})
        elif holds or path == OPEN:
            await self._app(scope, receive, send)
        else:
            await answer(send, 403, {"detail": f"{path} needs a lease, see {LEASE}"})

    async def _describe(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer what the server is, and whether it can read the caller's memory."""
        sample = await read_body(receive)
        await answer(
            send,
            200,
            {
                "protocol": PROTOCOL,
                **self.about(scope["app"]),
                "routes": [getattr(route, "path", "") for route in scope["app"].routes],
                "holder": self._leases.holder,
                "unreadable": unreadable(sample) if sample else "",
            },
        )

    async def _lease(self, body: dict[str, Any], send: Send) -> None:
        holder = str(body.get("holder", ""))
        token = self._leases.take(holder) if holder else None
        if token is None:
            await answer(send, 409, {"holder": self._leases.holder})
        else:
            await answer(send, 200, {"token": token})


def unreadable(sample: dict[str, Any]) -> str:
    """Return why this process cannot read the memory of which `sample` has the location
    and the digest; "" if it can.
    """
    try:
        with open(sample["location"], "rb") as file:
            digest = hashlib.sha256(file.read(SAMPLE_BYTES)).hexdigest()
    except (OSError, KeyError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if digest == sample.get("sha256") else "it has other content there"


async def read_body(receive: Receive) -> dict[str, Any]:
    """Return the JSON object in the body of a request; an empty one if there is
    none.
    """
    body, more = b"", True
    while more and len(body) <= BODY_BYTES:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    try:
        fields = json.loads(body[:BODY_BYTES] or b"{}")
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


async def answer(send: Send, status: int, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
