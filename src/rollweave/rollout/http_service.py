"""Calls of a service behind HTTP that attempts depend on: the teacher, the URL of a
reward, or a judge.

Invariants: a call ends within `timeout_s`, with its retries, once it is one of the
`SERVICE_CALLS` under way, so that its wait for the others is no failure of the service;
while the service has answered no call yet, it may be starting, and calls are repeated
for `start_s`; `wait` counts all of them; a request and an answer have limits of size;
what cannot be read is asked for again and then an error, never a value. A request may
be sent again after a connection broke, so the service must answer a repeated one like
the first.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TypeVar

import aiohttp

from rollweave.engine.clients.responses import ResponseError
from rollweave.engine.clients.transport import (
    ANSWER_BYTES,
    TooLongError,
    read_bounded,
    retry_after_s,
)
from rollweave.schema.base import as_json
from rollweave.schema.errors import RollweaveError
from rollweave.schema.rollouts import IDEMPOTENCY_KEY, SERVICE_CALLS, ServiceWait

T = TypeVar("T")

FIRST_RETRY_S, MAX_RETRY_S = 0.5, 8.0
"""Seconds before the first retry, doubled each time, up to the maximum. Each pause is
multiplied by a random factor of `JITTER`.
"""

JITTER = 0.5, 1.5
"""Range of that factor, so that calls that failed together are not repeated
together.
"""

STARTING = (502, 503, 504)
"""Statuses of a service that is not there yet, or of a proxy before it."""

UNAUTHORIZED = (401, 403)
"""Statuses of a service that wants a token, or another one."""

MAX_UNREADABLE = 3
"""Maximum number of answers to one call that cannot be read. One may be a fault of a
proxy or of a server that restarts; the trajectory would be sampled again for it.
"""

ERROR_CHARS = 300
"""Maximum number of characters of a server's message in an error."""


TRAJECTORIES = ("trajectory waits", "trajectories wait")
"""One caller of a service, and several."""


class ServiceError(RollweaveError):
    """The service gave no usable answer."""


class RetryableError(Exception):
    """The service could not be reached, or was too busy. `after_s` is the pause that it
    asks for, if it names one. It may be `starting`, if it has not answered before.
    """

    def __init__(self, text: str, after_s: float | None = None, *, starting: bool = False) -> None:
        super().__init__(text)
        self.after_s, self.starting = after_s, starting


class RefusedError(ResponseError):
    """The service refuses the request, and would do so again."""


class HttpService:
    """The service `name` at `url`, which is asked for `answer`: "the teacher", for
    "log-probs". `token` is its bearer token, or "", and `variable` the environment
    variable in which the user has it. `clock` gives the times of `wait`.

    A request has at most `payload_bytes` bytes. `callers` is who waits for an answer,
    as one and as several. Waits and errors name the URL unless it is `secret`.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        answer: str,
        token: str,
        variable: str = "",
        timeout_s: float,
        start_s: float = 0.0,
        clock: Callable[[], float],
        payload_bytes: int | None = None,
        callers: tuple[str, str] = TRAJECTORIES,
        secret: bool = False,
    ) -> None:
        self._start_s, self._has_answered = max(start_s, timeout_s), False
        self._callers, self._variable = callers, variable
        self._name = name if secret else f"{name} {url}"
        self._url, self._answer, self._token = url, answer, token
        self._timeout_s, self._clock, self._payload_bytes = timeout_s, clock, payload_bytes
        self._slots = asyncio.Semaphore(SERVICE_CALLS)
        self._session: aiohttp.ClientSession | None = None
        self._since: dict[object, float] = {}
        self._trouble = ""

    def wait(self) -> ServiceWait | None:
        """Return the wait of the calls under way, since the oldest began."""
        if not self._since:
            return None
        count = len(self._since)
        what = f"{count} {self._callers[count > 1]}"
        if self._limit_s > self._timeout_s:
            what += f"; it has not answered yet, and may be starting for {self._start_s:g} s"
        return ServiceWait(
            service=self._name,
            what=f"{what}; {self._trouble}" if self._trouble else what,
            since=min(self._since.values()),
        )

    async def ask(self, path: str, body: object, *, key: str, read: Callable[[bytes], T]) -> T:
        """Return what `read` finds in the answer to a request, which is repeated with
        the same key. Raises ServiceError.
        """
        headers = {IDEMPOTENCY_KEY: key}

        async def once() -> T:
            return read(await self.exchange("POST", path, body, headers=headers))

        return await self.call(once)

    async def call(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return what `ask` returns, which makes one or several exchanges. It is
        repeated while it raises RetryableError, and a few times if it raises
        ResponseError.

        Raises ServiceError.
        """
        with self._waiting():
            async with self._slots:  # each call before this one ends within its timeout
                return await self._call(ask)

    async def _call(self, ask: Callable[[], Awaitable[T]]) -> T:
        clock = asyncio.get_running_loop().time
        pause_s, unreadable, trouble, began = FIRST_RETRY_S, 0, "", clock()
        while True:
            after_s, left_s = 0.0, began + self._limit_s - clock()
            try:
                async with asyncio.timeout(min(self._timeout_s, left_s)):
                    answer = await ask()
                self._has_answered = True
                return answer
            except RetryableError as error:
                trouble, after_s = str(error), error.after_s or 0.0
                self._has_answered |= not error.starting
            except ResponseError as error:
                self._has_answered, trouble = True, str(error)
                unreadable += 1
                if isinstance(error, RefusedError) or unreadable == MAX_UNREADABLE:
                    raise ServiceError(f"{self._name}: {error}") from error
            except TimeoutError:
                pass
            self._trouble = trouble
            pause = max(min(after_s, MAX_RETRY_S), pause_s * random.uniform(*JITTER))
            left_s = began + self._limit_s - clock()
            await asyncio.sleep(max(0.0, min(pause, left_s)))
            if pause >= left_s:
                reason = f": {trouble}" if trouble else ""
                raise ServiceError(
                    f"{self._name} gave no {self._answer} within {self._limit_s:g} s{reason}"
                )
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    @property
    def _limit_s(self) -> float:
        """The maximum seconds of a call."""
        return self._timeout_s if self._has_answered else self._start_s

    async def exchange(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Send one request to `path`, which follows the URL, and return the body of the
        answer. `body` is sent as it is if it is bytes, and as JSON unless it is None.

        Raises RetryableError, or ResponseError if another request would not help.
        """
        data = body if body is None or isinstance(body, bytes) else as_json(body)
        size, limit = len(data or b""), self._payload_bytes
        if limit is not None and size > limit:
            raise RefusedError(f"a request must have at most {limit} bytes, got {size}")
        typed = {} if body is data else {"Content-Type": "application/json"}
        try:
            async with self._open_session().request(
                method,
                self._url + path,
                data=data,
                headers={**typed, **(headers or {})},
                allow_redirects=False,
            ) as response:
                answer = await read_bounded(response, ANSWER_BYTES)
        except TooLongError as error:
            raise ResponseError(f"{_shown(path)}gave {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise RetryableError(text, starting=True) from error
        if response.status == 200:
            return answer
        detail = answer[: 4 * ERROR_CHARS].decode(errors="replace")[:ERROR_CHARS]
        where = f" of {path}" if path else ""
        text = f"status {response.status}{where}: {detail}"
        if response.status in UNAUTHORIZED and self._variable:
            got = "another one" if self._token else "none"
            text += f" ({self._variable} must hold its token, got {got})"
        if response.status in (409, 429) or response.status >= 500:
            after_s = retry_after_s(response.headers.get("Retry-After"))
            raise RetryableError(text, after_s, starting=response.status in STARTING)
        raise RefusedError(text)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        call = object()
        self._since[call] = self._clock()
        try:
            yield
        finally:
            del self._since[call]
            if not self._since:
                self._trouble = ""

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=SERVICE_CALLS),
                timeout=aiohttp.ClientTimeout(total=None),
                headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
            )
        return self._session


def _shown(path: str) -> str:
    return f"{path} " if path else ""
