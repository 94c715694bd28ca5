"""Two models in one process: what serving clients and the borrower see."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rollweave.core.policy import admission
from rollweave.core.policy.admission import Admission
from rollweave.engine.batching import Batcher
from rollweave.engine.coserving import tenant
from rollweave.engine.coserving.executor import CoServing
from rollweave.engine.runner import Runner
from rollweave.schema import serving as s
from rollweave.schema.base import EngineId
from rollweave.schema.weights import WeightManifest
from tests.support.engines import manifest
from tests.support.lending import WAIT_S, Borrower, Replies, asks
from tests.support.tiny_models import build, oracle_greedy, save

Models = dict[str, tuple[Path, torch.nn.Module]]
"""The folder and the weights of each model, by its name."""

PAGE = 16_384


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    found = {}
    for kind in ("qwen3", "llama"):
        model, directory = build(kind), tmp_path_factory.mktemp(kind)
        save(model, directory)
        found[kind] = (directory, model)
    return found


class Lender:
    """An executor on a thread, and its clients' replies."""

    def __init__(self, spec: s.EngineSpec, *, end_s: float) -> None:
        self.replies = Replies()
        self.executor = CoServing(spec, self.replies.put, end_s=end_s)
        self.thread = threading.Thread(target=self.executor.run)
        self.thread.start()
        assert spec.lend is not None
        self.socket = spec.lend.socket

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, self.executor.stats()
            time.sleep(0.01)


@contextlib.contextmanager
def lending(
    model: Path,
    folder: Path,
    *,
    ttft_s: float = 2.0,
    tpot_s: float = 1.0,
    kv_tokens: int = 4096,
    end_s: float = 0.1,
    is_ready: bool = True,
) -> Iterator[Lender]:
    lend = s.LendSpec(socket=str(folder / "s"), ttft_s=ttft_s, tpot_s=tpot_s, page_bytes=PAGE)
    spec = s.EngineSpec(
        id=EngineId("s"), model=str(model), kv_tokens=kv_tokens, max_slots=16, lend=lend
    )
    lender = Lender(spec, end_s=end_s)
    try:
        if is_ready:
            lender.replies.wait_for(s.Ready)
        yield lender
    finally:
        lender.executor.post(s.Shutdown())
        lender.thread.join(WAIT_S)
        assert not lender.thread.is_alive()


def ready(borrower: Borrower) -> Borrower:
    borrower.replies.wait_for(s.Ready)
    return borrower


def borrowed(model: Path, *, kv_tokens: int = 1024) -> s.EngineSpec:
    return s.EngineSpec(id=EngineId("e1"), model=str(model), kv_tokens=kv_tokens, max_slots=4)


def test_both_models_answer_as_they_do_alone(models: Models, tmp_path: Path) -> None:
    (serving, serving_model), (rollout, rollout_model) = models["qwen3"], models["llama"]
    with lending(serving, tmp_path) as lender:
        borrower = Borrower(lender.socket, borrowed(rollout))
        (ready,) = borrower.replies.wait_for(s.Ready)
        assert isinstance(ready, s.Ready)
        assert ready.lent
        for number in range(4):
            lender.executor.post(asks(f"s{number}", prompt=9 + number))
            borrower.send(asks(f"r{number}", prompt=9 + number))
        answers = {**lender.replies.results(4), **borrower.replies.results(4)}
        for name, result in answers.items():
            prompt = list(asks("", prompt=9 + int(name[1])).request.tokens)
            model = serving_model if name.startswith("s") else rollout_model
            assert list(result.tokens) == oracle_greedy(model, prompt, 8)
        stats = lender.executor.stats()
        assert stats.lent
        assert stats.rollout_tokens == 32
        assert stats.aborted == 0
        borrower.send(s.Stats())
        (sampled,) = borrower.replies.wait_for(s.Sampled)
        assert isinstance(sampled, s.Sampled)
        assert sampled.stats.lending is not None
        assert sampled.stats.lending.lent
        assert sampled.stats.lending.rollout_tokens == 32
        borrower.close()


def test_the_borrowers_model_is_measured_between_serving_steps(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    step_s = tenant.measured_step

    def step(runner: Runner, batcher: Batcher) -> float:
        threads.append(threading.current_thread())
        return step_s(runner, batcher)

    with lending(models["qwen3"][0], tmp_path) as lender:
        monkeypatch.setattr(tenant, "measured_step", step)
        for number in range(3):
            lender.executor.post(asks(f"s{number}", tokens=60))
        borrower = Borrower(lender.socket, borrowed(models["llama"][0]))
        lender.until(lambda: lender.executor.stats().lent)
        borrower.close()
        assert set(threads) == {lender.thread}
        assert {len(one.tokens) for one in lender.replies.results(3).values()} == {60}


def test_a_borrower_that_leaves_while_its_model_is_measured_leaves_nothing(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, goes_on = threading.Event(), threading.Event()
    step_s = tenant.measured_step

    def step(runner: Runner, batcher: Batcher) -> float:
        began.set()
        assert goes_on.wait(WAIT_S)
        return step_s(runner, batcher)

    with lending(models["qwen3"][0], tmp_path) as lender:
        monkeypatch.setattr(tenant, "measured_step", step)
        borrower = Borrower(lender.socket, borrowed(models["llama"][0]))
        assert began.wait(WAIT_S)
        ended, end = threading.Event(), lender.executor.end
        monkeypatch.setattr(lender.executor, "end", lambda: (end(), ended.set()))
        borrower.close()
        assert ended.wait(WAIT_S)  # while a step computes
        goes_on.set()
        lender.until(lambda: not lender.executor.stats().rollout_pages)
        lender.until(lambda: not lender.executor.stats().lent)
        lender.executor.post(asks("s"))
        assert len(lender.replies.results(1)["s"].tokens) == 8
        borrower = Borrower(lender.socket, borrowed(models["llama"][0]))
        lender.until(lambda: lender.executor.stats().lent)
        borrower.close()


def test_a_borrower_that_dies_leaves_nothing_and_the_next_one_is_served(
    models: Models, tmp_path: Path
) -> None:
    with lending(models["qwen3"][0], tmp_path) as lender:
        for loan in (1, 2):
            borrower = ready(Borrower(lender.socket, borrowed(models["llama"][0])))
            other = Borrower(lender.socket, borrowed(models["llama"][0]))
            (refusal,) = other.replies.wait_for(s.EngineFatal)
            assert isinstance(refusal, s.EngineFatal)
            assert refusal.error.endswith("is lent to another run")
            other.close()
            borrower.send(asks("r", tokens=400))
            lender.executor.post(asks(f"s{loan}", tokens=30))
            borrower.close()
            assert len(lender.replies.results(loan)[f"s{loan}"].tokens) == 30
            lender.until(lambda: not lender.executor.stats().lent)
            assert lender.executor.stats().rollout_pages == 0


def test_a_run_that_connects_again_waits_for_the_end_of_its_former_loan(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lending(models["qwen3"][0], tmp_path, end_s=WAIT_S) as lender:
        former = ready(Borrower(lender.socket, borrowed(models["llama"][0])))
        begins, lender_end = threading.Event(), lender.executor.end
        lender_begin = lender.executor.begin

        def begin(spec: s.EngineSpec, reply: Callable[[s.EngineReply], None]) -> str:
            begins.set()
            return lender_begin(spec, reply)

        def end() -> None:
            assert begins.wait(WAIT_S)
            lender_end()

        monkeypatch.setattr(lender.executor, "begin", begin)
        monkeypatch.setattr(lender.executor, "end", end)
        former.close()
        again = ready(Borrower(lender.socket, borrowed(models["llama"][0])))
        assert lender.executor.stats().loans == 2
        again.close()


@pytest.mark.parametrize("at", ["start", "later"])
def test_an_engine_that_must_give_its_memory_back_is_not_lent(
    models: Models, tmp_path: Path, at: str
) -> None:
    with lending(models["qwen3"][0], tmp_path) as lender:
        spec = msgspec.structs.replace(borrowed(models["llama"][0]), released=at == "start")
        borrower = Borrower(lender.socket, spec)
        if at == "later":
            borrower.replies.wait_for(s.Ready)
            borrower.send(s.Suspend(release=True))
        (fatal,) = borrower.replies.wait_for(s.EngineFatal)
        assert isinstance(fatal, s.EngineFatal)
        assert fatal.error.startswith("trainer.colocated must be false with an engine that is lent")
        lender.executor.post(asks("s", tokens=3))
        assert len(lender.replies.results(1)["s"].tokens) == 3
        borrower.close()


def test_weights_are_read_while_serving_computes(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = threading.Event()

    def read(_: WeightManifest) -> dict[str, torch.Tensor]:
        assert served.wait(WAIT_S), "serving waited for the weights"
        return tensors

    rollout, model = models["llama"]
    tensors = dict(model.state_dict())
    monkeypatch.setattr("rollweave.engine.staging.read_tensors", read)
    with lending(models["qwen3"][0], tmp_path) as lender:
        borrower = ready(Borrower(lender.socket, borrowed(rollout)))
        borrower.send(s.Load(manifest=manifest(3)))
        lender.executor.post(asks("s"))
        lender.replies.results(1)
        served.set()
        (loaded,) = borrower.replies.wait_for(s.Loaded)
        assert isinstance(loaded, s.Loaded)
        assert loaded.version == 3
        borrower.send(asks("r"))
        result = borrower.replies.results(1)["r"]
        assert [span.version for span in result.versions] == [3]
        borrower.close()


def test_a_burst_of_serving_takes_the_pages_of_rollouts(models: Models, tmp_path: Path) -> None:
    with lending(models["qwen3"][0], tmp_path, kv_tokens=2048) as lender:
        borrower = ready(Borrower(lender.socket, borrowed(models["llama"][0])))
        for number in range(4):
            borrower.send(asks(f"r{number}", tokens=220, prompt=200, first=number))
        lender.until(lambda: lender.executor.stats().rollout_tokens > 20)
        for number in range(12):
            lender.executor.post(asks(f"s{number}", tokens=40, prompt=110, first=number))
        served = lender.replies.results(12)
        assert {len(result.tokens) for result in served.values()} == {40}
        stats = lender.executor.stats()
        assert stats.cuts
        assert stats.aborted
        lost = [
            result
            for result in borrower.replies.results(stats.aborted).values()
            if result.finish is s.FinishReason.RETURNED
        ]
        assert lost
        assert all(len(result.tokens) == len(result.logprobs) for result in lost)
        borrower.close()


def test_a_failure_of_the_borrowers_model_ends_the_loan_and_not_the_engine(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> bool:
        raise RuntimeError("no memory")

    with lending(models["qwen3"][0], tmp_path) as lender:
        borrower = ready(Borrower(lender.socket, borrowed(models["llama"][0])))
        tenant = lender.executor._borrowed
        assert tenant is not None
        monkeypatch.setattr(tenant.core, "step", fail)
        borrower.send(asks("r", tokens=400))
        (error,) = borrower.replies.wait_for(s.EngineFatal)
        assert isinstance(error, s.EngineFatal)
        assert error.error == "RuntimeError: no memory"
        lender.executor.post(asks("s", tokens=30))
        assert len(lender.replies.results(1)["s"].tokens) == 30
        assert lender.executor.stats().rollout_pages == 0
        borrower.close()


def test_a_rollout_without_progress_is_handed_back(models: Models, tmp_path: Path) -> None:
    with lending(models["qwen3"][0], tmp_path, kv_tokens=256) as lender:
        borrower = ready(Borrower(lender.socket, borrowed(models["llama"][0], kv_tokens=1024)))
        borrower.send(asks("r", prompt=370))  # the budget is two groups of 128 tokens
        assert borrower.replies.results(1)["r"].finish is s.FinishReason.RETURNED
        assert lender.executor.stats().stalls == 1
        borrower.close()


def test_the_time_for_which_users_wait_for_rollouts_is_told(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that arrives in a step of the run's model waits until it ends."""
    with lending(models["qwen3"][0], tmp_path) as lender:
        borrower = ready(Borrower(lender.socket, borrowed(models["llama"][0])))
        lender.until(lambda: lender.executor.stats().lent)
        assert lender.executor.stats().delay_s == 0.0
        begun, may_end = threading.Event(), threading.Event()
        computing = CoServing._step

        def slow(executor: CoServing, *args: Any) -> bool:
            begun.set()
            assert may_end.wait(WAIT_S)
            return computing(executor, *args)

        monkeypatch.setattr(CoServing, "_step", slow)
        borrower.send(asks("r", tokens=1))
        assert begun.wait(WAIT_S)
        time.sleep(0.2)  # nobody waits in this time
        asked = time.monotonic()
        lender.executor.post(asks("s", tokens=1))
        time.sleep(0.05)
        may_end.set()
        lender.replies.results(1)
        waited_s = time.monotonic() - asked
        assert 0.05 <= lender.executor.stats().delay_s <= waited_s
        borrower.replies.results(1)
        borrower.close()


def test_a_prompt_is_computed_where_a_step_that_also_decodes_would_not_fit(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lending(models["qwen3"][0], tmp_path) as lender:
        borrower = ready(Borrower(lender.socket, borrowed(models["llama"][0])))
        monkeypatch.setattr(Admission, "chunk", lambda self, slack, *, decode: 0 if decode else 16)
        for number in range(3):
            borrower.send(asks(f"r{number}", prompt=100, first=number))
        finishes = [result.finish for result in borrower.replies.results(3).values()]
        assert finishes == [s.FinishReason.LENGTH] * 3
        borrower.close()


def test_a_rollout_that_only_others_leave_waiting_is_handed_back(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "STALL_S", 0.05)
    monkeypatch.setattr(Admission, "decoding", lambda self, slack, *, most: min(1, most))
    with lending(models["qwen3"][0], tmp_path) as lender:
        borrower = ready(Borrower(lender.socket, borrowed(models["llama"][0])))
        monkeypatch.setattr(Admission, "slots", lambda self, *, longest_s, most: most)
        for name in ("first", "second"):
            borrower.send(asks(name, tokens=400))
        results = borrower.replies.results(2)
        assert results["second"].finish is s.FinishReason.RETURNED
        assert len(results["first"].tokens) > len(results["second"].tokens)
        borrower.close()


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"ttft_s": 1e-6}, r"--ttft-ms must be more than the .* ms that the engine takes alone"),
        ({"tpot_s": 1e-6}, r"--tpot-ms must be more than the .* ms that the engine takes alone"),
    ],
)
def test_a_promise_that_the_engine_breaks_alone_is_refused(
    models: Models, tmp_path: Path, limits: dict[str, Any], text: str
) -> None:
    with lending(models["qwen3"][0], tmp_path, is_ready=False, **limits) as lender:
        (fatal,) = lender.replies.wait_for(s.EngineFatal)
        assert isinstance(fatal, s.EngineFatal)
        with pytest.raises(AssertionError, match=text):
            raise AssertionError(fatal.error)


def test_a_model_that_does_not_fit_is_refused_and_serving_continues(
    models: Models, tmp_path: Path
) -> None:
    with lending(models["qwen3"][0], tmp_path, kv_tokens=64) as lender:
        borrower = Borrower(lender.socket, borrowed(models["llama"][0]))
        (fatal,) = borrower.replies.wait_for(s.EngineFatal)
        assert isinstance(fatal, s.EngineFatal)
        assert fatal.error.startswith("engines.kv_tokens must leave the serving model its headroom")
        lender.executor.post(asks("s", tokens=3))
        assert len(lender.replies.results(1)["s"].tokens) == 3
        borrower.close()
