"""An environment behind OpenEnv's protocol: a separate server, reached by WebSocket or
HTTP (package `openenv`, up to 0.10).

By WebSocket (`/ws`) each connection is a session: `{"type": "reset" | "step" | "close",
"data": …}` is answered by `{"type": "observation", "data": {"observation": {…},
"reward": …, "done": …}}`, or `{"type": "error", "data": {…}}`. By HTTP (`POST /reset`,
`POST /step`) there are no sessions: this is for servers with a single environment that
persists between requests, and one attempt at a time. OpenEnv's own server creates a new
one for every request.

A session lasts for its attempt. If a server cannot be reached or has no room for
another session, it is tried again with exponential back-off (RollArt §8). Later
failures end the attempt, since a session's state is lost with its connection.

Invariants: whatever a server sends or fails to send, `reset` and `step` return valid
values or raise EnvError; after either has raised, and after `close`, the session is
closed.
"""

import asyncio
import contextlib
import json
import math
import random
import re
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal, Never

import aiohttp
import msgspec

from rollweave.envs.base import Observation, Options, Step
from rollweave.schema.errors import ConfigError, EnvError
from rollweave.schema.work import Task

INVALID_REWARD = -0.1
TEXT = "{text}"
"""Placeholder in an action for the agent's message."""

JSON = "json"
"""Value of the option `action` with which the agent's message is the action, a JSON
object.
"""

CLOSE_S = 2.0
"""Seconds that a server has to close the connection."""

BACK_OFF_S = 0.25, 0.5, 1.0, 2.0, 4.0
"""Seconds between two tries to begin a session, each changed at random by up to a
half.
"""

BUSY = frozenset({429, 502, 503, 504})
"""HTTP statuses of a server (or of a proxy in front of it) that may have room later."""

MOST_BYTES = 16 * 2**20
"""Maximum bytes of an answer: it becomes tokens."""

SHOWN = 200
"""Maximum characters of a malformed answer that an error quotes."""

FULL = "CAPACITY_REACHED"
"""Code of the error of a server that has no room for another session."""

OURS = frozenset({"missing", "extra_forbidden"})
"""Kinds of a server's validation errors that an action's template causes, never the
message in it.
"""

_FIELD = re.compile(r"\{(\w+)\}")


class _Result(msgspec.Struct):
    """The answer to `reset` and `step`."""

    observation: dict[str, Any]
    reward: float | bool | None = None
    done: bool = False
    metadata: dict[str, Any] | None = None


class _RefusedError(Exception):
    """The server reports that the action does not fit its schema."""

    def __init__(self, errors: Any) -> None:
        super().__init__(str(errors)[:SHOWN])
        listed = errors if isinstance(errors, list) else []
        self.kinds = {str(error.get("type")) for error in listed if isinstance(error, dict)}


class _UnavailableError(Exception):
    """No session was begun, for the reason `cause`; a later try may succeed."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class OpenEnv:
    """The environment at `base_url`; each task resets it with its seed, and with the
    fields of `reset`.

    `action` is the action as an object, with "{text}" where the agent's message goes,
    or "json": then the message is the object. `observe` formats an observation, with
    its fields in braces: "{board}\\nScore {score}"; by default it is the only text
    field, or all fields as JSON. `prompt` precedes the first observation. An action
    that the server refuses costs 0.1. Whether an episode succeeded is taken from
    `success` in the metadata, and is otherwise unknown. `timeout_s` is the limit of
    each answer.
    """

    def __init__(
        self,
        *,
        base_url: str,
        action: Options | str = JSON,
        observe: str = "",
        prompt: str = "",
        reset: Options | None = None,
        transport: Literal["websocket", "http"] = "websocket",
        timeout_s: float = 60.0,
    ) -> None:
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"options.base_url must be http(s)://host[:port], got {base_url!r}")
        if transport not in ("websocket", "http"):
            raise ConfigError(f"options.transport must be websocket or http, got {transport!r}")
        if action != JSON and (not isinstance(action, Mapping) or TEXT not in json.dumps(action)):
            raise ConfigError(
                f"options.action must be {JSON!r}, or an object with {TEXT!r} in it, got {action!r}"
            )
        if not 0 < timeout_s < math.inf:
            raise ConfigError(f"options.timeout_s must be positive and finite, got {timeout_s}")
        self._url, self._timeout_s = base_url.rstrip("/"), timeout_s
        self._action, self._observe, self._prompt, self._extra = (
            action,
            observe,
            prompt,
            dict(reset or {}),
        )
        self._line: _Socket | _Requests = (_Socket if transport == "websocket" else _Requests)(
            self._url
        )

    async def reset(self, task: Task) -> Observation:
        async with self._closed_on_failure():
            try:
                result = await self._ask("reset", {"seed": task.seed % 2**31, **self._extra})
            except _RefusedError as error:
                raise EnvError(f"{self._url}: refused reset: {error}") from error
            text = self._written(result.observation)
        return Observation.of(f"{self._prompt}{text}", state_key=text)

    async def step(self, action: str) -> Step:
        async with self._closed_on_failure():
            try:
                result = await self._ask("step", self._action_of(action))
            except _RefusedError as error:
                if self._action != JSON and error.kinds & OURS:
                    raise EnvError(
                        f"{self._url}: options.action must suit the server's action, "
                        f"which says: {error}"
                    ) from error
                return Step.of(f"This action is refused: {error}", reward=INVALID_REWARD)
            text, reward = self._written(result.observation), float(result.reward or 0.0)
        if not result.done:
            return Step.of(text, reward=reward, state_key=text)
        metadata = result.metadata or result.observation.get("metadata") or {}
        success = metadata.get("success") if isinstance(metadata, dict) else None
        return Step.of(
            text, reward=reward, done=True, success=success if isinstance(success, bool) else None
        )

    async def close(self) -> None:
        """Close the session, within `CLOSE_S` seconds."""
        await self._line.close()

    def _action_of(self, message: str) -> dict[str, Any]:
        """Return the action. Raises _RefusedError for a message that is none."""
        if self._action != JSON:
            return _filled(self._action, message)  # type: ignore[no-any-return]
        try:
            fields = json.loads(message)
        except (ValueError, RecursionError) as error:
            raise _RefusedError(f"it must be a JSON object: {error}") from error
        if not isinstance(fields, dict):
            raise _RefusedError("it must be a JSON object")
        return fields

    @contextlib.asynccontextmanager
    async def _closed_on_failure(self) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            await self.close()
            raise

    async def _ask(self, what: str, data: dict[str, Any]) -> _Result:
        """Send a request and return the answer. Raises EnvError, and _RefusedError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                raw = await self._patiently(what, data)
            return msgspec.convert(raw, _Result)
        except TimeoutError as error:
            raise EnvError(
                f"{self._url}: did not answer {what} within options.timeout_s = "
                f"{self._timeout_s:g} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EnvError(
                f"{self._url}: {what} failed: {type(error).__name__}: {error}"
            ) from error
        except msgspec.ValidationError as error:
            raise EnvError(
                f"{self._url}: {what} was answered with another shape: {error}: {_short(raw)}"
            ) from error

    async def _patiently(self, what: str, data: dict[str, Any]) -> Any:
        """Send a request; if no session was begun, wait and try again."""
        for wait_s in BACK_OFF_S:
            try:
                return await self._line.ask(what, data)
            except _UnavailableError:
                await self._line.close()
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.5))
        try:
            return await self._line.ask(what, data)
        except _UnavailableError as error:
            raise error.cause from None

    def _written(self, observation: dict[str, Any]) -> str:
        fields = {name: value for name, value in observation.items() if name != "metadata"}
        if not self._observe:
            texts = [value for value in fields.values() if isinstance(value, str)]
            return (
                texts[0]
                if len(texts) == len(fields) == 1
                else json.dumps(fields, ensure_ascii=False)
            )
        unknown = [name for name in _FIELD.findall(self._observe) if name not in observation]
        if unknown:
            raise EnvError(
                f"options.observe must name fields of the observation ({', '.join(observation)}), "
                f"got {unknown[0]!r}"
            )
        return _FIELD.sub(lambda match: _text(observation[match[1]]), self._observe)


class _Socket:
    """A session over WebSocket."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def ask(self, what: str, data: dict[str, Any]) -> Any:
        if self._socket is None:
            if what != "reset":
                raise EnvError(f"{self._url}: the session is closed")
            self._http = aiohttp.ClientSession()
            limits = aiohttp.ClientWSTimeout(ws_close=CLOSE_S)
            try:
                self._socket = await self._http.ws_connect(
                    f"{self._url}/ws", timeout=limits, max_msg_size=MOST_BYTES
                )
            except aiohttp.WSServerHandshakeError as error:
                if error.status not in BUSY:
                    raise
                raise _UnavailableError(error) from error
            except (aiohttp.ClientConnectionError, OSError) as error:
                raise _UnavailableError(error) from error
        # A server that refuses a session sends the reason and closes the connection.
        with contextlib.suppress(ConnectionError):
            await self._socket.send_json({"type": what, "data": data})
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise EnvError(
                f"{self._url}: closed the session during {what} ({message.type.name}, "
                f"{message.extra or message.data})"
            )
        answer = _parsed(message.data, f"{self._url}: {what}")
        kind, body = answer.get("type"), answer.get("data")
        if kind == "error" and isinstance(body, dict):
            if body.get("code") == "VALIDATION_ERROR":
                raise _RefusedError(body.get("errors") or body.get("message"))
            refused = EnvError(
                f"{self._url}: {what}: {body.get('code')}: {_short(body.get('message'))}"
            )
            if body.get("code") == FULL and what == "reset":
                raise _UnavailableError(refused)
            raise refused
        if kind != "observation":
            raise EnvError(
                f"{self._url}: {what} must be answered with type observation, got {_short(answer)}"
            )
        return body

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        http, self._http = self._http, None
        try:
            if socket is not None and not socket.closed:
                with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
                    async with asyncio.timeout(CLOSE_S):
                        await socket.send_json({"type": "close"})
                        await socket.close()
        finally:
            if http is not None:
                await http.close()


class _Requests:
    """The server's single environment over HTTP."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._http: aiohttp.ClientSession | None = None

    async def ask(self, what: str, data: dict[str, Any]) -> Any:
        if self._http is None:
            if what != "reset":
                raise EnvError(f"{self._url}: the session is closed")
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        body = data if what == "reset" else {"action": data}
        try:
            return await self._post(self._http, what, body)
        except aiohttp.ClientConnectorError as error:  # nothing was sent
            if what != "reset":
                raise
            raise _UnavailableError(error) from error

    async def _post(self, http: aiohttp.ClientSession, what: str, body: dict[str, Any]) -> Any:
        async with http.post(f"{self._url}/{what}", json=body, allow_redirects=False) as answer:
            raw = await _bounded(answer, f"{self._url}: {what}")
            if answer.status == 422:
                raise _RefusedError(_parsed(raw, f"{self._url}: {what}").get("detail"))
            if answer.status != 200:
                failed = EnvError(
                    f"{self._url}: {what} failed with status {answer.status}: "
                    f"{_short(raw.decode(errors='replace'))}"
                )
                if answer.status in BUSY and what == "reset":
                    raise _UnavailableError(failed)
                raise failed
            return _parsed(raw, f"{self._url}: {what}")

    async def close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.close()


async def _bounded(answer: aiohttp.ClientResponse, where: str) -> bytes:
    raw = bytearray()
    async for part in answer.content.iter_chunked(2**16):
        raw += part
        if len(raw) > MOST_BYTES:
            raise EnvError(f"{where} was answered with more than {MOST_BYTES} bytes")
    return bytes(raw)


def _parsed(raw: str | bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise EnvError(
            f"{where} was answered with what is no JSON: {error}: {_short(raw)}"
        ) from error
    if not isinstance(value, dict):
        raise EnvError(f"{where} must be answered with a JSON object, got {_short(value)}")
    return value


def _no_constant(name: str) -> Never:
    raise ValueError(f"JSON has no {name}")


def _filled(template: Any, message: str) -> Any:
    """Return the template with the message in each of its texts."""
    if isinstance(template, str):
        return template.replace(TEXT, message)
    if isinstance(template, Mapping):
        return {name: _filled(value, message) for name, value in template.items()}
    return (
        [_filled(value, message) for value in template]
        if isinstance(template, list | tuple)
        else template
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
