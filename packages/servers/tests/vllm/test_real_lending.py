"""A real vLLM that lends (`make test-vllm`)."""

import os
import signal
from pathlib import Path

from benchmarks.engine.vllm_server import VARIABLE
from packages.servers.benchmarks.lending.server import LendingVllm
from packages.servers.tests.lending_executor import borrowed, lending
from packages.servers.tests.lending_processes import until
from rollweave.schema import serving as s
from rollweave.schema.config.training import VLLM_HEAD_DIM, ScratchModel
from rollweave.train.scratch import build_checkpoint
from tests.support.engines import needs_vllm
from tests.support.lending import Borrower, asks

pytestmark = [*needs_vllm]

PROMPT, TOKENS = list(range(1, 40)), 40


def test_a_real_server_lends_and_is_lost(tmp_path: Path) -> None:
    model = tmp_path / "model"
    build_checkpoint(
        model,
        scratch=ScratchModel(hidden=64, layers=2),
        context=1024,
        words=[],
        seed=0,
        head_dim=VLLM_HEAD_DIM,
    )
    with LendingVllm(os.environ[VARIABLE], model, tmp_path) as server:
        server.socket.rename(tmp_path / "serving")
        with lending(model, tmp_path) as lender:
            server.complete(PROMPT, TOKENS)
            borrower = Borrower(str(tmp_path / "s"), borrowed(model))
            borrower.replies.wait_for(s.Ready)
            for number in range(4):
                borrower.send(asks(f"r{number}", tokens=100))
            for _ in range(3):  # meanwhile
                server.complete(PROMPT, TOKENS)
            results = borrower.replies.results(4)
            assert {len(result.tokens) for result in results.values()} == {100}
            stats = lender.stats()
            assert stats.lending is not None
            assert stats.lending.rollout_tokens == 400
            assert stats.kv_total_tokens > 1000

            server.signal(signal.SIGSTOP)
            until(lambda: not lender.executor.stats().budget_pages, "the server is missed")
            borrower.send(asks("stopped", tokens=100))
            assert borrower.replies.results(5)["stopped"].finish is s.FinishReason.RETURNED
            server.signal(signal.SIGCONT)
            until(lambda: lender.executor.stats().budget_pages, "the server is back")
            server.complete(PROMPT, TOKENS)
            borrower.send(asks("again", tokens=100))
            assert len(borrower.replies.results(6)["again"].tokens) == 100

            server.kill()
            until(lambda: not lender.executor.stats().budget_pages, "the server is missed")
            borrower.send(asks("killed", tokens=100))
            assert borrower.replies.results(7)["killed"].finish is s.FinishReason.RETURNED
            borrower.close()
