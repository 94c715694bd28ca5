"""Prometheus' text format."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from rollweave.schema.text import valid

Kind = Literal["counter", "gauge", "histogram"]


class Sample(NamedTuple):
    """A value of the metric `rollweave_{name}`, by its labels. The names of a
    histogram's samples end in `_bucket`, `_sum` and `_count`.
    """

    kind: Kind
    name: str
    value: float
    labels: dict[str, str] = {}  # noqa: RUF012 (it is never changed)


def exposition(samples: Iterable[Sample]) -> str:
    """Return the samples as text. The samples of one metric stand together; metrics are
    in the order of their first samples.
    """
    families: dict[str, list[str]] = {}
    for sample in samples:
        name = f"rollweave_{sample.name}"
        family = name.rpartition("_")[0] if sample.kind == "histogram" else name
        lines = families.setdefault(family, [f"# TYPE {family} {sample.kind}"])
        labels = ",".join(f'{key}="{_escaped(text)}"' for key, text in sample.labels.items())
        number = repr(float(sample.value)).removesuffix(".0")
        lines.append(f"{name}{{{labels}}} {number}" if labels else f"{name} {number}")
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _escaped(text: str) -> str:
    return valid(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
