"""The number format in which a CPU computes a model. Imports no torch, so that checks
before a run stay fast.
"""

import functools
from pathlib import Path

BFLOAT16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""Names that Linux gives to instructions for products of bfloat16: of x86 the first
two, of ARM the last.
"""


@functools.cache
def has_bfloat16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not BFLOAT16_FLAGS.isdisjoint(flags.split())


def computed_dtype(dtype: str, device_type: str) -> str:
    """Return the format in which a model of `dtype` is computed on a device of this
    type, "cpu" or "cuda": `dtype`, or float32 on a CPU without instructions for
    bfloat16.

    Such a CPU would convert each number before it multiplies it. Matrix products then
    take 20 to 80 times as long as in float32 (measured with torch 2.13 and AVX2).
    """
    short = device_type == "cpu" and dtype != "float32" and not has_bfloat16()
    return "float32" if short else dtype


def describe_computation(dtype: str, device_type: str) -> str:
    """Return a sentence for users about the format in which a model is computed."""
    computed = computed_dtype(dtype, device_type)
    if computed == dtype:
        return f"models of {dtype} are computed in {dtype}"
    return (
        f"models of {dtype} are computed in {computed}, with twice the memory, since this CPU has "
        f"no instructions for {dtype}"
    )
