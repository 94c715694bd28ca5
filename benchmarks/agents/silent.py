"""Find fields of requests that have no effect and are not recorded as ignored.

Each field of each request is left out or changed in turn, and the request is read
again: if that changes nothing, the field had no effect. It must then be a field that by
its nature has none, have a value that asks for nothing, or be among those that the
server named.
"""

import copy
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from benchmarks.agents.scripted import chat_codec
from rollweave.io.http.messages import ECHOED
from rollweave.rollout.gateway.answering import COUNTS, apis
from rollweave.rollout.gateway.fields import NEUTRAL, WITHOUT_EFFECT, RequestError
from rollweave.rollout.gateway.requests import ChatRequest
from rollweave.rollout.gateway.responses import Api

if TYPE_CHECKING:
    from benchmarks.agents.standing import Seen

DEPTH: Final = 6
"""Levels of a request whose fields are left out; deeper ones belong to schemas, which
are shown as they are.
"""

NOTHING: Final[tuple[Any, ...]] = (
    None,
    "",
    [],
    {},
    False,
    "auto",
    "medium",
    "message",
    "all",
    "adaptive",
)
"""Values that ask for nothing, or name the default."""

CARRIERS: Final = frozenset(("encrypted_content", "signature", "summary"))
"""Fields that have the same thoughts as another field of their item."""

SHOWN: Final = ("parameters", "input_schema", "input", "function", "schema")
"""Fields all of whose contents the agent is shown."""

Place = tuple[str | int, ...]


def silent_fields(seen: "Seen") -> list[str]:
    """Return the fields of all requests that were ignored in silence."""
    served = apis(chat_codec())
    by_end = {**served, **{path: served[of] for path, of in COUNTS.items()}}
    tried: set[str] = set()
    found: dict[str, None] = {}
    for path, body, status, _ in seen.requests:
        end = path.rpartition("/v1")[2]
        if end not in by_end or not body or status >= 400:
            continue
        asked = json.loads(body)
        whole = _read(by_end[end], asked)
        for place, value in _places(asked, ()):
            name = _name(place)
            if name in tried or _passes(asked, place, value, seen.ignored):
                continue
            tried.add(name)
            variants = [_changed(asked, place, None)]
            if isinstance(value, bool | str):
                variants.append(_changed(asked, place, _other(value)))
            if all(_read(by_end[end], variant) == whole for variant in variants):
                found[f"{end}: {name} = {value!r:.60}"] = None
    return list(found)


def _other(value: bool | str) -> bool | str:
    return not value if isinstance(value, bool) else value + "x"


def _passes(asked: Any, place: Place, value: Any, ignored: set[str]) -> bool:
    """Return whether a field may have no effect."""
    if value in NOTHING or not CARRIERS.isdisjoint(place) or not ECHOED.isdisjoint(place):
        return True
    if len(place) == 1 and (place[0] in WITHOUT_EFFECT or value in NEUTRAL.get(str(place[0]), ())):
        return True
    if '"keep": "all"' in json.dumps(_at(asked, place[: 3 if len(place) > 3 else 1])):
        return True  # an edit of the context that keeps it
    names = {_name(place[:length]) for length in range(1, len(place) + 1)}
    names.add(_name((*place[:-1], "type")))
    return not names.isdisjoint(ignored)


def _at(asked: Any, place: Place) -> Any:
    for part in place:
        asked = asked[part]
    return asked


def _read(api: Api, asked: Any) -> ChatRequest | str:
    """Return what a request means, or why it is refused."""
    try:
        chat = api.parse(json.dumps(asked).encode(), counts=True)
    except RequestError as error:
        return str(error)
    return msgspec.structs.replace(chat, unread=())


def _places(value: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    """Yield the place of each field, and its value; of a list's members, only the first
    of each type count.
    """
    if len(place) > DEPTH:
        return
    if isinstance(value, dict):
        for name, inner in value.items():
            if len(place) == 1 and place[0] in WITHOUT_EFFECT:
                return
            yield (*place, name), inner
            if name not in SHOWN or not place:
                yield from _places(inner, (*place, name))
    elif isinstance(value, list):
        kinds: set[Any] = set()
        for number, inner in enumerate(value):
            kind = (inner.get("type"), inner.get("role")) if isinstance(inner, dict) else None
            if kind not in kinds:
                kinds.add(kind)
                yield from _places(inner, (*place, number))


def _changed(asked: Any, place: Place, value: Any) -> Any:
    """Return a request with another value of a field, or without it for None."""
    changed = copy.deepcopy(asked)
    inner = _at(changed, place[:-1])
    if value is None:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return changed


def _name(place: Place) -> str:
    """Return the name under which servers name an ignored field."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", ".".join(map(str, place)))
