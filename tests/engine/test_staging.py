"""An engine generates while it receives new weights, and stops for the swap only."""

import gc
import threading
from collections.abc import Callable

import msgspec
import pytest
import torch

from rollweave.engine import staging
from rollweave.engine.model import DecoderWeights
from rollweave.schema import serving as s
from rollweave.schema.weights import WeightManifest
from rollweave.weights.publication import Publisher, read_tensors
from tests.support import tiny_models

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_models.build("llama")


@pytest.fixture(scope="module")
def other() -> torch.nn.Module:
    return tiny_models.build("llama", seed=1)


@pytest.fixture(scope="module")
def path(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save(model, tmp_path_factory.mktemp("staged") / "model")


class Gate:
    """Holds the reading of published weights until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        monkeypatch.setattr(staging, "read_tensors", self._read)

    def _read(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        assert self._open.wait(30.0)
        return read_tensors(manifest)

    def open(self) -> s.EngineCommand:
        """Open the gate, as a command that changes nothing."""
        self._open.set()
        return s.Rerank(id="unknown", rank=0.0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def run(
    path: str,
    *,
    at: dict[int, list[s.EngineCommand | Callable[[], s.EngineCommand]]],
    on: dict[type, list[s.EngineCommand]] | None = None,
) -> tiny_models.Outcome:
    requests = [
        tiny_models.request(str(i), p, seed=i, max_tokens=60)
        for i, p in enumerate(tiny_models.PROMPTS)
    ]
    return tiny_models.drive(
        tiny_models.spec(path, prefill_chunk_tokens=32), requests, at=at, on=on
    )


def copies() -> int:
    gc.collect()
    return sum(isinstance(each, DecoderWeights) for each in gc.get_objects())


def order(outcome: tiny_models.Outcome) -> list[type]:
    kinds = (s.Staged, s.StageFailed, s.Suspended, s.Loaded, s.LoadFailed)
    return [type(reply) for reply in outcome.replies if isinstance(reply, kinds)]


def test_tokens_before_the_swap_are_of_the_old_weights(
    model: torch.nn.Module, other: torch.nn.Module, path: str, publisher: Publisher, gate: Gate
) -> None:
    manifest = tiny_models.publish(publisher, other, version=3)
    before = copies()
    outcome = run(
        path,
        at={4: [s.Stage(manifest=manifest)], 20: [gate.open]},
        on={s.Staged: [s.Suspend(), s.Load(manifest=manifest), s.Resume()]},
    )
    assert order(outcome) == [s.Staged, s.Suspended, s.Loaded]
    assert outcome.of(s.Ready)[0].stages
    for i, prompt in enumerate(tiny_models.PROMPTS):
        result = outcome.results[str(i)]
        assert result.versions[0].version == -1
        assert len(result.versions) == 1 or result.versions[1].start >= 15, "it did not wait"
        tiny_models.check_versions(prompt, result, {-1: model, 3: other})
    assert outcome.stats[-1].version == 3
    assert copies() <= before, "the memory is given back"


def test_a_load_waits_for_what_is_being_received(
    model: torch.nn.Module, other: torch.nn.Module, path: str, publisher: Publisher, gate: Gate
) -> None:
    manifest = tiny_models.publish(publisher, other, version=3)
    held: dict[int, list[s.EngineCommand | Callable[[], s.EngineCommand]]] = {
        4: [s.Stage(manifest=manifest), s.Suspend(), s.Load(manifest=manifest)],
        9: [gate.open],
    }
    outcome = run(path, at=held, on={s.Loaded: [s.Resume()]})
    assert order(outcome) == [s.Suspended, s.Staged, s.Loaded]
    for i, prompt in enumerate(tiny_models.PROMPTS):
        tiny_models.check_versions(prompt, outcome.results[str(i)], {-1: model, 3: other})


@pytest.mark.parametrize("damage", ["digest", "shape", "room", "gone"])
def test_what_cannot_be_staged_changes_nothing(
    model: torch.nn.Module,
    other: torch.nn.Module,
    path: str,
    publisher: Publisher,
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = tiny_models.publish(publisher, other, version=3)
    bad = good
    if damage == "digest":
        bad = msgspec.structs.replace(good, digest="0" * 32)
    elif damage == "shape":
        name = "model.layers.1.self_attn.q_proj.weight"
        state = dict(other.state_dict())
        state[name] = state[name][:4].contiguous()
        bad = publisher.publish(state, version=3, publication_id=4)
    elif damage == "gone":
        bad = msgspec.structs.replace(good, location="/proc/self/fd/999")
    else:
        monkeypatch.setattr(staging, "available_bytes", lambda: 0)
    outcome = run(
        path,
        at={4: [s.Stage(manifest=bad)]},
        on={s.StageFailed: [s.Load(manifest=bad)]},
    )
    loads = damage == "room"  # over the weights in use
    assert order(outcome) == [s.StageFailed, s.Loaded if loads else s.LoadFailed]
    assert outcome.of(s.Ready)[0].stages is not loads
    for i, prompt in enumerate(tiny_models.PROMPTS):
        tiny_models.check_versions(prompt, outcome.results[str(i)], {-1: model, 3: other})
    assert outcome.stats[-1].version == (3 if loads else -1)


def test_a_newer_version_takes_the_place_of_one_that_is_received(
    model: torch.nn.Module, other: torch.nn.Module, path: str, publisher: Publisher, gate: Gate
) -> None:
    first = tiny_models.publish(publisher, model, version=1)
    second = tiny_models.publish(publisher, other, version=2)
    outcome = run(
        path,
        at={4: [s.Stage(manifest=first)], 5: [s.Stage(manifest=second)], 8: [gate.open]},
        on={s.Staged: [s.Load(manifest=second)]},
    )
    assert order(outcome) == [s.StageFailed, s.Staged, s.Loaded]
    assert (outcome.of(s.StageFailed)[0].version, outcome.of(s.Staged)[0].version) == (1, 2)


@pytest.mark.extended
def test_an_older_staged_version_is_dropped_by_a_newer_load(
    other: torch.nn.Module, path: str, publisher: Publisher
) -> None:
    first = tiny_models.publish(publisher, other, version=1)
    second = tiny_models.publish(publisher, other, version=2)
    before = copies()
    outcome = run(
        path,
        at={4: [s.Stage(manifest=first)]},
        on={s.Staged: [s.Load(manifest=second)]},
    )
    assert order(outcome) == [s.Staged, s.Loaded]
    assert copies() <= before
