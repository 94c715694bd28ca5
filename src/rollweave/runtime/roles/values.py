"""Encode the arguments and results of a method by its annotations.

Values are MessagePack, never pickles. A pickle executes code where it is read, and
frames between hosts are not signed (`docs/SECURITY.md`): whatever can write to the
network between them could run code in the controller. NumPy arrays carry large data.
Structs, dataclasses, tuples and other types that `msgspec` knows keep their type if the
method is annotated with it.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rollweave.io.wire import FRAME_BYTES
from rollweave.schema.packing import packed
from rollweave.schema.roles import Arguments

ARRAY = 1
"""Code of the MessagePack extension for an array: its type, shape and bytes."""

CALL_BYTES = FRAME_BYTES - (1 << 16)
"""Maximum size of the arguments of a call, and of its result."""

KINDS = "numbers, text, bytes, lists, dicts, arrays, structs and dataclasses"


class MethodCodec:
    """Encodes and decodes the arguments and results of one method, or of a class."""

    def __init__(self, function: Callable[..., Any], *, name: str, bound: bool) -> None:
        """If `bound`, the first parameter is the object itself."""
        self._name = name
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())[1 if bound else 0 :]
        self._signature = signature.replace(parameters=parameters)
        self._hints = _hints(
            inspect.getattr_static(function, "__init__") if isinstance(function, type) else function
        )
        self._positional = [
            parameter
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        kinds = {parameter.kind: parameter.name for parameter in parameters}
        self._others = kinds.get(inspect.Parameter.VAR_POSITIONAL, "")
        self._keywords = kinds.get(inspect.Parameter.VAR_KEYWORD, "")

    def argument(self, parameter: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the argument of a parameter, or its default. Raises TypeError."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments[parameter]

    def encode(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """Encode the arguments of a call. Raises TypeError if they do not suit the
        method, or cannot be sent.
        """
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._name}: {error}") from None
        arguments = Arguments(
            args=tuple(
                _encoded(value, f"{self._name}: argument {place}")
                for place, value in enumerate(bound.args)
            ),
            kwargs={
                name: _encoded(value, f"{self._name}: argument {name}")
                for name, value in bound.kwargs.items()
            },
        )
        size = sum(map(_size, (*arguments.args, *arguments.kwargs.values())))
        self._must_fit(size, "the arguments")
        return arguments

    def decode(self, arguments: Arguments) -> tuple[list[Any], dict[str, Any]]:
        """Decode the arguments of a call. Raises TypeError for those that are not of
        the annotated types.
        """
        args = [
            self._decoded(raw, self._at(place), f"argument {place}")
            for place, raw in enumerate(arguments.args)
        ]
        kwargs = {
            name: self._decoded(raw, name if name in self._hints else self._keywords, name)
            for name, raw in arguments.kwargs.items()
        }
        return args, kwargs

    def encode_result(self, value: Any) -> msgspec.Raw:
        """Encode a result. Raises TypeError."""
        raw = _encoded(value, f"{self._name}: the result")
        self._must_fit(_size(raw), "the result")
        return raw

    def decode_result(self, raw: msgspec.Raw) -> Any:
        """Decode a result. Raises TypeError."""
        return self._decoded(raw, "return", "the result")

    def _must_fit(self, size: int, what: str) -> None:
        if size > CALL_BYTES:
            raise TypeError(f"{self._name}: {what} must have at most {CALL_BYTES} bytes")

    def _at(self, place: int) -> str:
        if place < len(self._positional):
            return self._positional[place].name
        return self._others

    def _decoded(self, raw: msgspec.Raw, parameter: str, what: str) -> Any:
        hint = self._hints.get(parameter, Any)
        try:
            return _decoder(hint).decode(raw)
        except (msgspec.DecodeError, ValueError) as error:
            raise TypeError(f"{self._name}: {what}: {error}") from None


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations; none if they cannot be evaluated."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception:  # names that exist only for type checkers
        return {}
    return hints


@functools.lru_cache(maxsize=1024)
def _decoder(hint: Any) -> "msgspec.msgpack.Decoder[Any]":
    try:
        return msgspec.msgpack.Decoder(hint, dec_hook=_as, ext_hook=_extension)
    except TypeError:  # msgspec cannot decode values of this annotation
        return msgspec.msgpack.Decoder(dec_hook=_as, ext_hook=_extension)


def _encoded(value: Any, what: str) -> msgspec.Raw:
    try:
        try:
            return msgspec.Raw(_encoder.encode(value))
        except UnicodeEncodeError:  # half a character of UTF-16, for example
            return msgspec.Raw(packed(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"{what} must consist of {KINDS}, got {error}") from None


def _size(raw: msgspec.Raw) -> int:
    return memoryview(raw).nbytes


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
