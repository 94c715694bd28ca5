"""A serving model and a rollout model on one device, over one pool of its pages."""

import threading
from pathlib import Path

import torch

from rollweave.engine.coserving.executor import CoServing
from rollweave.engine.pages import PAGE_BYTES, PagePool, driver_of
from rollweave.schema.base import EngineId
from rollweave.schema.serving import EngineSpec, LendSpec, Ready, Shutdown
from tests.support.lending import WAIT_S, Borrower, Replies, asks
from tests.support.tiny_models import build, oracle_greedy, save


def test_a_page_moves_from_one_range_to_another_and_is_zeroed(device: str) -> None:
    pool = PagePool(driver_of(torch.device(device), PAGE_BYTES), 2)
    one, other = pool.reserve(1), pool.reserve(2)
    one.map(0)
    one.tensor().fill_(7)
    assert int(one.tensor().max()) == 7
    one.unmap(0)
    other.map(0)
    other.map(1)
    assert int(other.tensor().max()) == 0
    pool.check()
    pool.close()


def test_both_models_answer_as_they_do_alone(device: str, tmp_path: Path) -> None:
    serving, rollout = build("qwen3"), build("llama")
    lend = LendSpec(socket=str(tmp_path / "s"), ttft_s=30.0, tpot_s=30.0, page_bytes=16_384)
    spec = EngineSpec(
        id=EngineId("s"),
        model=save(serving, tmp_path / "serving"),
        device=device,
        kv_tokens=4096 if device == "cpu" else 1 << 20,  # pages of a GPU are larger
        max_slots=16,
        lend=lend,
    )
    replies = Replies()
    executor = CoServing(spec, replies.put)
    thread = threading.Thread(target=executor.run)
    thread.start()
    try:
        replies.wait_for(Ready)
        model = save(rollout, tmp_path / "rollout")
        borrower = Borrower(
            lend.socket, EngineSpec(id=EngineId("e1"), model=model, kv_tokens=1024, max_slots=4)
        )
        borrower.replies.wait_for(Ready)
        for number in range(4):
            executor.post(asks(f"s{number}", prompt=9 + number))
            borrower.send(asks(f"r{number}", prompt=9 + number))
        answers = {**replies.results(4), **borrower.replies.results(4)}
        for name, result in answers.items():
            prompt = list(asks("", prompt=9 + int(name[1])).request.tokens)
            alone = serving if name.startswith("s") else rollout
            assert list(result.tokens) == oracle_greedy(alone, prompt, 8)
        borrower.close()
    finally:
        executor.post(Shutdown())
        thread.join(WAIT_S)
        assert not thread.is_alive()
