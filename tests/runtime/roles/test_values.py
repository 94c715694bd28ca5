"""Arguments and results of workers arrive as their methods annotate them."""

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from rollweave.runtime.roles import serving
from rollweave.runtime.roles.serving import MethodCodec
from rollweave.schema.roles import Arguments


class Point(msgspec.Struct):
    x: int


@dataclasses.dataclass
class Line:
    ends: tuple[Point, Point]


class Methods:
    def mixed(
        self, plain: Any, point: Point, *more: int, array: np.ndarray | None = None, **named: float
    ) -> tuple[Line, np.ndarray]: ...


CODEC = MethodCodec(Methods.mixed, name="mixed", bound=True)


def sent(*args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Encode and decode as between two processes."""
    payload = msgspec.msgpack.encode(CODEC.encode(args, kwargs))
    return CODEC.decode(msgspec.msgpack.decode(payload, type=Arguments))


def test_values_arrive_as_annotated() -> None:
    args, kwargs = sent(
        {"a": [1, None, b"b", "c"]}, Point(1), 2, 3, array=np.eye(3)[:, ::2], z=np.float32(0.5)
    )
    assert args == [{"a": [1, None, b"b", "c"]}, Point(1), 2, 3]
    assert kwargs["z"] == 0.5
    np.testing.assert_array_equal(kwargs["array"], np.eye(3)[:, ::2])


@pytest.mark.parametrize(
    "array",
    [
        *(np.array(2.5, dtype="float16"), np.empty((0, 3), dtype="int8")),
        *(np.arange(24, dtype=">i4").reshape(2, 3, 4).T, np.array(["one", "three"])),
        np.array([True, False]),
    ],
    ids=str,
)
def test_arrays_arrive_whole_and_writable(array: np.ndarray) -> None:
    got = sent([array], Point(0))[0][0][0]
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(got, array)
    got[...] = got


def test_results_arrive_as_annotated() -> None:
    line = Line(ends=(Point(1), Point(2)))
    result, array = CODEC.decode_result(CODEC.encode_result((line, np.zeros(2))))
    assert result == line
    assert array.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((object(), "got object"), (1 << 70, "ints"), (np.array([object()]), "got ndarray")),
        *((np.zeros(2, dtype=[("a", "i4")]), "got ndarray"), (lambda: None, "got function")),
    ],
    ids=["object", "integer", "objects", "records", "function"],
)
def test_values_that_cannot_be_sent_are_named(value: object, text: str) -> None:
    with pytest.raises(TypeError, match=f"^mixed: argument 0 must consist of .*{text}"):
        sent(value, Point(1))
    with pytest.raises(TypeError, match=f"^mixed: the result must consist of .*{text}"):
        CODEC.encode_result(value)


def test_a_structure_within_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(TypeError, match="recursion"):
        sent(endless, Point(1))


def test_values_of_other_types_are_named() -> None:
    with pytest.raises(TypeError, match=r"mixed: argument 1: Expected `object`, got `int`"):
        sent(1, 2)
    with pytest.raises(TypeError, match=r"mixed: argument 3: Expected `int`, got `str`"):
        sent(1, Point(2), 3, "four")
    with pytest.raises(TypeError, match=r"mixed: array: expected ndarray, got int"):
        sent(1, Point(2), array=5)
    with pytest.raises(TypeError, match=r"mixed: z: Expected `float`, got `str`"):
        sent(1, Point(2), z="z")
    with pytest.raises(TypeError, match="mixed: missing a required argument: 'point'"):
        sent(1)


def test_half_a_character_is_replaced() -> None:
    assert sent("a\ud800", Point(1))[0][0] == "a\ufffd"


def test_calls_beyond_the_size_of_a_frame_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "CALL_BYTES", 100)
    with pytest.raises(TypeError, match="mixed: the arguments must have at most 100 bytes"):
        sent(bytes(60), Point(0), array=np.zeros(8))
    with pytest.raises(TypeError, match="mixed: the result must have at most 100 bytes"):
        CODEC.encode_result(bytes(200))
