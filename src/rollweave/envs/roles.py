"""Calls of the roles of a run (RollArt §5.1) from the user's code: rewards,
environments and handlers, in the controller, in rollout workers, and in the processes
that they start. The controller receives the calls (`runtime/supervisors/roles.py`).

Also the encoding of the values of calls. They are MessagePack, never pickles: a pickle
executes code where it is read. NumPy arrays carry large data.

Invariant: a call returns or raises within the limit that the controller has announced,
also if the controller is lost.
"""

import asyncio
import functools
import json
import os
import re
import typing
import urllib.parse
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rollweave.io.wire import decoder_of, encode
from rollweave.schema.base import packed
from rollweave.schema.errors import ConfigError
from rollweave.schema.roles import (
    ROLE_NAME,
    Arguments,
    CallFailed,
    CallRefused,
    Returned,
    RoleAnswer,
    RolesAddress,
    WorkerError,
    WorkerLostError,
)

VARIABLE = "ROLLWEAVE_ROLES"
"""Environment variable with the `RolesAddress` of the run, as JSON; `WITHIN` in the
workers of its roles, which must not call roles.
"""

WITHIN = "within"

CALL_BYTES = 64 << 20
"""Maximum number of bytes of the arguments of a call."""

MESSAGEPACK = "application/msgpack"
"""Type of the body of a call, and of its answer."""

ARRAY = 1
"""Code of the MessagePack extension for an array: its type, shape and bytes."""

KINDS = "numbers, text, bytes, lists, dicts, arrays, structs and dataclasses"

OUTSIDE = "must be called in a run with"
"""Rule that a call outside of a run breaks."""

_decode_answer = decoder_of(RoleAnswer)


class RunRole:
    """A role of this run: each of its registered methods is a method of this object."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("__"):  # which copies and pickles ask for
            raise AttributeError(method)

        def call(*args: Any, **kwargs: Any) -> Any:
            answer = _called(self._name, method, args, kwargs)
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return _awaited(answer)
            return answer

        return call


def role(name: str) -> RunRole:
    """Return the role `[roles.NAME]` of this run: `role("judge").score(answers)` calls
    the method `score` of its workers, in the mode with which it is registered.

    A call returns what `Cluster` returns, or, in async code, what must be awaited:
    `await role("judge").score(answers)`. Types without a counterpart in MessagePack
    arrive as the method annotates them; results are plain values and arrays. A call
    raises `WorkerError` if the method raised, `WorkerLostError` if a worker is lost or
    does not answer in time, TypeError for arguments that cannot be sent, and
    ConfigError for a role or a method that the run does not have, and in the workers of
    roles.
    """
    if re.fullmatch(ROLE_NAME, name) is None:
        raise ConfigError(f"name of a role must consist of letters, digits, _ and -, got {name!r}")
    return RunRole(name)


def _awaited(answer: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on this thread, whose own event loop, if it has one that is not
    running, is left alone.
    """
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(answer)
    finally:
        loop.close()


async def _called(name: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    import aiohttp

    given = os.environ.get(VARIABLE)
    if given is None:
        raise ConfigError(
            f"role({name!r}) {OUTSIDE} [roles.{name}], got a program that belongs to no run"
        )
    if given == WITHIN:
        raise ConfigError(f"role({name!r}) must not be called from a worker of a role")
    at = msgspec.json.decode(given, type=RolesAddress)
    what = f"{name}.{method}"
    body = encode(encoded_arguments(args, kwargs, what))
    if len(body) > CALL_BYTES:
        rule = f"the arguments must have at most {CALL_BYTES} bytes in a role of a run"
        raise TypeError(f"{what}: {rule}, got {len(body)}")
    timeout = aiohttp.ClientTimeout(total=at.limit_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(
                f"{at.url}/{name}/{urllib.parse.quote(method)}",
                data=body,
                headers={"Content-Type": MESSAGEPACK},
            ) as response,
        ):
            body = await response.read()
            if response.status != 200:
                raise WorkerLostError(f"{what}() got status {response.status}: {_said(body)}")
            answer = _decode_answer(body)
    except TimeoutError:
        raise WorkerLostError(f"{what}() got no answer within {at.limit_s:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        text = f"{type(error).__name__}: {error}"
        raise WorkerLostError(f"{what}() cannot reach the controller: {text}") from error
    match answer:
        case Returned(value=value):
            return decoder(Any).decode(value)
        case CallFailed(failures=failures):
            raise WorkerError(what, failures)
        case CallRefused():
            raise ConfigError(answer.error)
        case _:
            raise WorkerLostError(answer.error)


def _said(body: bytes) -> str:
    """Return the message in the body of an error."""
    try:
        return str(json.loads(body)["detail"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]


# The encoding of values.


def encoded_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], what: str) -> Arguments:
    """Encode the arguments of a call. Raises TypeError for a value that cannot be
    sent.
    """
    return Arguments(
        args=tuple(encoded(value, f"{what}: argument {place}") for place, value in enumerate(args)),
        kwargs={name: encoded(value, f"{what}: argument {name}") for name, value in kwargs.items()},
    )


@functools.lru_cache(maxsize=1024)
def decoder(hint: Any) -> "msgspec.msgpack.Decoder[Any]":
    """Return the decoder of values with this annotation."""
    try:
        return msgspec.msgpack.Decoder(hint, dec_hook=_as, ext_hook=_extension)
    except TypeError:  # msgspec cannot decode values of this annotation
        return msgspec.msgpack.Decoder(dec_hook=_as, ext_hook=_extension)


def encoded(value: Any, what: str) -> msgspec.Raw:
    """Encode a value. Raises TypeError."""
    try:
        try:
            return msgspec.Raw(_encoder.encode(value))
        except UnicodeEncodeError:  # half a character of UTF-16, for example
            return msgspec.Raw(packed(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"{what} must consist of {KINDS}, got {error}") from None


def _plain(value: Any) -> Any:
    """Return the encoding of a value that MessagePack does not support."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and not (value.dtype.hasobject or value.dtype.fields):
        shape = value.shape  # `ascontiguousarray` makes a scalar one-dimensional
        data = np.ascontiguousarray(value).data.cast("B") if value.size else b""
        return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode((value.dtype.str, shape, data)))
    raise TypeError(f"{type(value).__name__}")


def _extension(code: int, data: memoryview) -> Any:
    if code != ARRAY:
        raise ValueError(f"extension must have code {ARRAY}, got {code}")
    dtype, shape, content = _decode_array(data)
    # a copy, because the caller may write to its array
    return np.frombuffer(content, np.dtype(dtype)).reshape(shape).copy()


def _as(kind: type, value: Any) -> Any:
    """Accept an object of a class that MessagePack does not support."""
    if isinstance(value, typing.get_origin(kind) or kind):
        return value
    raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decode_array = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], bytes]).decode
