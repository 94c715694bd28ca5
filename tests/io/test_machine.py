"""What Linux says of a CPU decides whether it computes in bfloat16."""

from pathlib import Path

import pytest

from rollweave.io.machine import computed_dtype, has_bfloat16

REAL = has_bfloat16


@pytest.mark.parametrize(
    ("text", "native"),
    [
        ("", False),
        ("processor : 0\nflags\t\t: fpu avx2 avx512_bf16x amx_bf\nbugs : amx_bf16\n", False),
        ("processor : 0\nflags\t\t: fpu avx512_bf16 avx2\n", True),
        ("flags\t\t: amx_bf16\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
    ],
)
def test_the_abilities_of_a_cpu_are_those_that_linux_names(
    monkeypatch: pytest.MonkeyPatch, text: str, native: bool
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: text)
    assert REAL.__wrapped__() is native
    monkeypatch.setattr("rollweave.io.machine.has_bfloat16", lambda: native)
    assert computed_dtype("bfloat16", "cpu") == ("bfloat16" if native else "float32")
    assert computed_dtype("bfloat16", "cuda") == "bfloat16"
