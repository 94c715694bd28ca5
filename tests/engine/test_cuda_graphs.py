"""An engine with the attention and the recorded steps of a GPU samples what
transformers' full forward pass gives. Recorded steps repeat operations between the same
addresses, like CUDA graphs.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from rollweave.engine import paged_attention, runner
from rollweave.engine.paged_attention import Kernel, PagedAttention, padded_rows
from rollweave.engine.runner import Runner
from rollweave.runtime.launch import train
from rollweave.schema.serving import EngineSpec, Load, Loaded, Resume, Stage, Staged, Suspend
from rollweave.weights.publication import Publisher
from tests.support.real_runs import lake, lines
from tests.support.tiny_models import (
    build,
    drive,
    logprob_error,
    oracle_state,
    request,
    save,
    spec,
)

from .kernels import Recorder, dense

torch.set_num_threads(1)

TOLERANCE = 1e-4
PROMPTS = [[(7 * at + 3 * number) % 90 for at in range(3 + 19 * number)] for number in range(5)]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build("qwen3")


@pytest.fixture(scope="module")
def path(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(model, tmp_path_factory.mktemp("model"))


class Gpu:
    """A stand-in for a GPU: the kernel, and the recorders of one engine."""

    def __init__(self) -> None:
        self.kernel: Kernel = dense
        self.recorders: list[Recorder] = []
        self.runners: list[Runner] = []
        self.recorder: Callable[[], Any] = Recorder

    def record(self, device: torch.device) -> Any:
        self.recorders.append(self.recorder())
        return self.recorders[-1]

    @property
    def recorded(self) -> list[int]:
        return [one.recorded for one in self.recorders]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    begin = Runner.__init__

    def remember(self: Runner, spec: EngineSpec, *options: Any) -> None:
        made.runners.append(self)
        begin(self, spec, *options)

    monkeypatch.setattr(Runner, "__init__", remember)
    monkeypatch.setattr(Runner, "on_gpu", True)
    monkeypatch.setattr(runner, "obstacle", lambda shape, pool: "")
    monkeypatch.setattr(paged_attention, "compiled_kernel", lambda: made.kernel)
    monkeypatch.setattr(runner, "CudaRecorder", made.record)
    return made


def requests(count: int = 12) -> list[Any]:
    return [
        request(f"r{number}", prompt, max_tokens=count, temperature=1.0, seed=number)
        for number, prompt in enumerate(PROMPTS)
    ]


def check(model: torch.nn.Module, of: EngineSpec, count: int = 12) -> None:
    results = drive(of, requests(count)).results
    for number, prompt in enumerate(PROMPTS):
        result = results[f"r{number}"]
        assert len(result.tokens) == count
        assert logprob_error(model, prompt, result) <= TOLERANCE


@pytest.mark.variants
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_log_probs_are_those_of_a_full_forward_pass(gpu: Gpu, kind: str, tmp_path: Path) -> None:
    """Less KV than all requests need: they are evicted and recomputed, and prefilled in
    chunks while others decode.
    """
    own = build(kind)
    of = spec(save(own, tmp_path), max_slots=3, kv_tokens=144, prefill_chunk_tokens=24)
    check(own, of)
    (only,) = gpu.runners
    assert isinstance(only.attention, PagedAttention)
    assert sum(gpu.recorded) == len({1, 2, 4}), "each number of rows is recorded once"
    assert gpu.recorders[0].replayed > 10


def test_without_graphs_each_step_is_computed(gpu: Gpu, model: torch.nn.Module, path: str) -> None:
    check(model, spec(path, cuda_graphs=False))
    assert isinstance(gpu.runners[0].attention, PagedAttention)
    assert gpu.runners[0].graphs is None


def test_recorded_steps_give_states(gpu: Gpu, model: torch.nn.Module, path: str) -> None:
    """Turns end in recorded steps of several numbers of rows, and in a computed one."""
    asked = [replace(one, sampling=replace(one.sampling, max_tokens=1 + 3 * number))
             for number, one in enumerate(requests())]  # fmt: skip
    results = drive(spec(path, states=True), asked).results
    for number, prompt in enumerate(PROMPTS):
        result = results[f"r{number}"]
        expected = oracle_state(model, prompt, result)
        assert list(result.state) == pytest.approx(expected, rel=2e-3, abs=2e-3)
    assert gpu.recorders[0].replayed > 5


@pytest.mark.parametrize("changes", [{"deterministic": True}, {"paged_attention": False}])
def test_the_former_attention_is_used_where_it_must_be(
    gpu: Gpu, model: torch.nn.Module, path: str, changes: dict[str, bool]
) -> None:
    check(model, spec(path, **changes))
    assert not isinstance(gpu.runners[0].attention, PagedAttention)
    assert gpu.runners[0].graphs is None


def test_shared_prefixes_are_read_where_they_lie(
    gpu: Gpu, model: torch.nn.Module, path: str
) -> None:
    prompt = PROMPTS[4]
    results = drive(
        spec(path, prefill_chunk_tokens=40),
        [request(f"r{n}", prompt, max_tokens=9, temperature=1.0, seed=n) for n in range(3)],
    )
    assert results.stats[-1].cached_tokens > 0
    for result in results.results.values():
        assert logprob_error(model, prompt, result) <= TOLERANCE


@pytest.mark.variants
@pytest.mark.parametrize("staged", [False, True])
def test_graphs_stay_valid_across_new_weights(
    gpu: Gpu, path: str, tmp_path: Path, staged: bool
) -> None:
    """New weights are copied to the place of the former ones."""
    new = build("qwen3", seed=1)
    publisher = Publisher(keep=2)
    manifest = publisher.publish(new.state_dict(), version=1, publication_id=1)
    load = (Suspend(), Load(manifest=manifest), Resume())
    outcome = drive(
        spec(path),
        requests(30),
        at={8: (Stage(manifest=manifest),) if staged else load},
        on={Staged: load} if staged else {},
    )
    publisher.close()
    assert len(outcome.of(Loaded)) == 1
    for number, prompt in enumerate(PROMPTS):
        result = outcome.results[f"r{number}"]
        assert [span.version for span in result.versions] == [-1, 1]
        at = result.versions[1].start
        later = type(result)(
            id="", tokens=result.tokens[at:], logprobs=result.logprobs[at:], versions=(),
            finish=result.finish,
        )  # fmt: skip
        assert logprob_error(new, [*prompt, *result.tokens[:at]], later) <= TOLERANCE
    assert len(gpu.recorders) == 1, "nothing was recorded again"


def test_graphs_are_dropped_with_the_memory(gpu: Gpu, path: str, tmp_path: Path) -> None:
    """An engine that began without memory, and gives it back once."""
    new = build("qwen3", seed=1)
    publisher = Publisher(keep=2)
    manifest = publisher.publish(new.state_dict(), version=1, publication_id=1)
    outcome = drive(
        spec(path, released=True),
        requests(30),
        at={
            0: (Load(manifest=manifest),),
            12: (Suspend(release=True),),
            14: (Load(manifest=manifest), Resume()),
        },
    )
    publisher.close()
    for number, prompt in enumerate(PROMPTS):
        assert logprob_error(new, prompt, outcome.results[f"r{number}"]) <= TOLERANCE
    assert len(gpu.recorders) == 2
    assert all(gpu.recorded), "each time"


def test_a_kernel_that_fails_or_errs_is_not_used(
    gpu: Gpu, model: torch.nn.Module, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no compiler")

    for kernel, reason in [
        (failing, "RuntimeError: no compiler"),
        (lambda *args, **rest: dense(*args, **rest) + 1, "its values differ by"),
    ]:
        gpu.kernel = kernel
        with caplog.at_level(logging.WARNING):
            check(model, spec(path))
        assert f"FlexAttention is not used: {reason}" in caplog.text
        assert not isinstance(gpu.runners[-1].attention, PagedAttention)
        caplog.clear()


class Stale(Recorder):
    """A recorder whose replays compute nothing, as of a graph with other addresses."""

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return lambda: None


def test_steps_that_cannot_be_recorded_are_computed(
    gpu: Gpu, model: torch.nn.Module, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.recorder = Stale
    with caplog.at_level(logging.WARNING):
        check(model, spec(path))
    assert "CUDA graphs are not used" in caplog.text
    assert "computes other logits" in caplog.text
    assert gpu.runners[0].graphs is None


def test_measured_step_times_record_the_steps_that_follow(gpu: Gpu, path: str) -> None:
    of = spec(path, profile=True, max_slots=4)
    drive(of, [request("r", PROMPTS[0], max_tokens=6)])
    assert gpu.recorded == [len({padded_rows(count) for count in (1, 2, 4)})]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "graphs"),
    [
        ({"rollout": {"mode": "bounded"}}, True),
        ({"rollout": {"mode": "sync"}, "trainer": {"colocated": True}}, True),
        ({"ablation": {"changes": ["no_cuda_graphs"]}}, False),
    ],
    ids=["staged", "colocated", "without"],
)
def test_a_run_trains_on_what_such_an_engine_samples(
    gpu: Gpu, tmp_path: Path, sections: dict[str, Any], graphs: bool
) -> None:
    # without an entropy bonus, groups of equal rewards would train nothing
    config = lake(tmp_path, algorithm={"entropy": 0.1}, **sections)
    summary = train(config, inproc=True)
    assert (summary.error, summary.steps) == ("", 2)
    gaps = [line["trainer"].get("logprob_gap_max") for line in lines(config, "step")]
    assert any(gaps)
    assert max(gap for gap in gaps if gap is not None) <= TOLERANCE
    assert [isinstance(one.attention, PagedAttention) for one in gpu.runners] == [True]
    assert [one.graphs is not None for one in gpu.runners] == [graphs]
    assert any(gpu.recorded) == graphs
