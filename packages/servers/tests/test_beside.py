"""A run's model beside a serving engine that is another process, and what an operator
starts for that.
"""

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from packages.servers.tests.lending_executor import borrowed, lending
from packages.servers.tests.lending_processes import WAIT_S, Program, until
from rollweave.core.policy.admission import Admission, Slo
from rollweave.engine.coserving.offer import Offer
from rollweave.schema import serving as s
from rollweave.schema.weights import WeightManifest
from rollweave_servers.lending.rollweave_lending import Counts, Row, Serving, Snapshot, Step
from rollweave_servers.published_load import FIRST_STEPS, KEPT, PublishedLoad
from tests.support.lending import Borrower, asks
from tests.support.tiny_models import build, oracle_greedy, save


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    model, directory = build("llama"), tmp_path_factory.mktemp("llama")
    save(model, directory)
    return directory, model


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Program]:
    with Program("serving_engine.py", str(tmp_path / "serving")) as program:
        yield program


def test_rollouts_are_computed_beside_serving_as_they_are_alone(
    model: tuple[Path, torch.nn.Module], tmp_path: Path, engine: Program
) -> None:
    folder, network = model
    with lending(folder, tmp_path) as lender:
        borrower = Borrower(str(tmp_path / "s"), borrowed(folder))
        (ready,) = borrower.replies.wait_for(s.Ready)
        assert isinstance(ready, s.Ready)
        assert ready.lent
        for number in range(4):
            borrower.send(asks(f"r{number}", prompt=9 + number))
        assert len(engine.ask(40)) == 40
        for name, result in borrower.replies.results(4).items():
            prompt = list(asks("", prompt=9 + int(name[1])).request.tokens)
            assert list(result.tokens) == oracle_greedy(network, prompt, 8)
        stats = lender.stats()
        assert stats.lending is not None
        assert stats.lending.rollout_tokens == 32
        assert stats.lending.budget_pages == stats.lending.total_pages
        assert (stats.kv_used_tokens, stats.kv_total_tokens) == (0, 4096)
        borrower.close()
        until(lambda: not lender.executor.stats().lent, "the loan must end")
        assert lender.executor.stats().rollout_pages == 0
        lender.executor.post(asks("own"))
        (answer,) = lender.replies.results(1).values()
        assert answer.error == "the engine serves nothing itself: ask the server beside it"


def test_every_command_of_its_own_clients_is_answered_or_has_nothing_to_do(
    model: tuple[Path, torch.nn.Module], tmp_path: Path, engine: Program
) -> None:
    weights = WeightManifest(
        version=3, publication_id=4, location="", tensors=(), nbytes=0, digest=""
    )
    kv = s.KvManifest(
        id="in",
        tokens=0,
        key=b"",
        publication_id=0,
        model="",
        layout="",
        dtype="float32",
        layers=1,
        kv_heads=1,
        head_dim=1,
        block_tokens=1,
        chunk_blocks=1,
        nbytes=0,
        digests=(),
        where=s.KvHeld(parameters=""),
    )
    with lending(model[0], tmp_path) as lender:
        for command in (
            *(s.Abort(id="a"), s.Rerank(id="a", rank=1.0), s.ReleaseKv(id="a"), s.Resume()),
            s.ExportKv(id="out", tokens=(1,), over="shm"),
            s.ImportKv(id="in", tokens=(1,), manifest=kv),
            *(s.Suspend(release=True), s.Stage(manifest=weights), s.Load(manifest=weights)),
            s.LoadCheckpoint(version=5, publication_id=6, directory="", dtype="float32"),
        ):
            lender.executor.post(command)
        assert not lender.executor._mailbox
        why = "the engine serves nothing itself: ask the server beside it"
        assert lender.replies._all[1:] == [
            s.KvRefused(id="out", error=why),
            s.KvRefused(id="in", error=why),
            s.Suspended(in_flight=0),
            s.StageFailed(version=3, publication_id=4, error=why),
            s.LoadFailed(version=3, error=why),
            s.LoadFailed(version=5, error=why),
        ]


def test_a_failure_while_no_step_fits_ends_only_the_loan(
    model: tuple[Path, torch.nn.Module],
    tmp_path: Path,
    engine: Program,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with lending(model[0], tmp_path) as lender:
        borrower = Borrower(str(tmp_path / "s"), borrowed(model[0]))
        borrower.replies.wait_for(s.Ready)
        until(lambda: lender.executor.stats().lent, "the model must be measured")

        def fail(core: object) -> None:
            raise RuntimeError("no turn can be returned")

        monkeypatch.setattr(lender.executor, "_return_stalled", fail)
        engine.process.send_signal(signal.SIGSTOP)
        until(lambda: not lender.executor.stats().budget_pages, "the server must be missed")
        borrower.send(asks("r"))
        (fatal,) = borrower.replies.wait_for(s.EngineFatal)
        assert fatal == s.EngineFatal(error="RuntimeError: no turn can be returned")
        assert lender.stats().lending is not None
        borrower.close()


def test_the_profile_of_a_server_is_forgotten_when_another_one_takes_its_place(
    model: tuple[Path, torch.nn.Module], tmp_path: Path, engine: Program
) -> None:
    with lending(model[0], tmp_path) as lender:
        assumed = lender.executor._profile
        engine.ask(FIRST_STEPS)
        engine.ask(1)  # a prompt that counts
        until(lambda: lender.executor._profile.chunked != assumed.chunked, "a prompt is seen")
        engine.process.kill()
        engine.process.wait(WAIT_S)
        with Program("serving_engine.py", str(tmp_path / "serving")) as another:
            another.ask(5 * FIRST_STEPS)  # more steps than the first one, but no such prompt
            until(lambda: lender.executor._profile.chunked == assumed.chunked, "it is met")
            until(lambda: lender.executor._profile != assumed, "its steps must be seen")


@pytest.mark.parametrize("kills", [True, False])
def test_rollouts_are_returned_when_the_server_is_lost(
    model: tuple[Path, torch.nn.Module], tmp_path: Path, engine: Program, kills: bool
) -> None:
    with lending(model[0], tmp_path) as lender:
        borrower = Borrower(str(tmp_path / "s"), borrowed(model[0]))
        borrower.replies.wait_for(s.Ready)
        until(lambda: lender.executor.stats().lent, "the model must be measured")
        engine.process.send_signal(signal.SIGKILL if kills else signal.SIGSTOP)
        until(lambda: not lender.executor.stats().budget_pages, "the server must be missed")
        borrower.send(asks("r", tokens=200))
        (result,) = borrower.replies.results(1).values()
        assert result.finish is s.FinishReason.RETURNED
        offer = Offer()
        for now in range(0, 61, 10):
            offer.observe(float(now), lender.stats())
        assert offer.state().recalled
        assert not offer.state().takes
        borrower.close()


def test_the_engine_ends_when_the_server_comes_back_with_another_model(
    model: tuple[Path, torch.nn.Module], tmp_path: Path, engine: Program
) -> None:
    with lending(model[0], tmp_path) as lender:
        engine.process.kill()
        engine.process.wait(WAIT_S)
        other = Serving(str(tmp_path / "serving"), {"model": "other"}, rows=16)
        (fatal,) = lender.replies.wait_for(s.EngineFatal)
        assert isinstance(fatal, s.EngineFatal)
        assert fatal.error == (
            f"ConfigError: CHECKPOINT must be the model that the server at {tmp_path}/serving "
            "serves, other, got m"
        )
        other.close()


def test_a_share_without_room_for_the_runs_model_is_refused(
    model: tuple[Path, torch.nn.Module], tmp_path: Path, engine: Program
) -> None:
    large = tmp_path / "large"
    save(build("qwen3"), large)
    with lending(model[0], tmp_path, kv_tokens=16) as lender:
        lender.executor._shared.pages.total = 0
        borrower = Borrower(str(tmp_path / "s"), borrowed(large))
        (fatal,) = borrower.replies.wait_for(s.EngineFatal)
        assert isinstance(fatal, s.EngineFatal)
        assert fatal.error.startswith("--kv-tokens must be enough for the first ")
        borrower.close()


# The published load


def snapshot(steps: list[Step], rows: list[Row] | None = None) -> Snapshot:
    return Snapshot(1, len(steps), Counts(0, 0, 0, 8), steps[-256:], [] if rows is None else rows)


def warm(*steps: Step) -> list[Step]:
    return [Step(10**12, 64, 0, 64)] * FIRST_STEPS + list(steps)


SLO = Slo(ttft_s=0.4, tpot_s=0.1)


def admission(load: PublishedLoad) -> Admission:
    return Admission(slo=SLO, profile=load.profile, rollout=load.profile)


def test_before_any_step_serving_is_assumed_to_need_half_of_its_limits() -> None:
    load = PublishedLoad(SLO, chunk_tokens=512)
    assert load.slack(admission(load), 0.0) == pytest.approx(0.2)
    load.observe(snapshot(warm()), None)
    assert load.slack(admission(load), 0.0) == pytest.approx(0.2)


def test_the_profile_follows_the_steps_of_the_server() -> None:
    load = PublishedLoad(SLO, chunk_tokens=512)
    ms = 10**6
    steps = [Step(10 * ms, 0, 1, 0), Step(16 * ms, 0, 4, 0), Step(30 * ms, 40, 1, 40)]
    given = admission(load)
    load.observe(snapshot(warm(*steps)), given)
    assert given.profile.decode.points == ((1, 0.01), (4, 0.016))
    assert given.profile.chunked.points == ((32, pytest.approx(0.02)),)
    # prompt of 40 tokens by the curve, corrected by the ratio of the step
    longest = load.longest_s(given)
    assert 0 < longest < 0.2
    assert load.slack(given, 0.0) == pytest.approx(SLO.ttft_s - longest)
    load.begin(chunk_tokens=512)  # another server
    load.observe(snapshot(warm()), given)
    assert load.profile.decode.points == ((1, 0.05),)


def test_each_step_counts_once_and_the_first_ones_never() -> None:
    load, ms = PublishedLoad(SLO, chunk_tokens=512), 10**6
    steps = warm(Step(10 * ms, 0, 1, 0), Step(20 * ms, 0, 2, 0))
    for count in (FIRST_STEPS - 1, FIRST_STEPS, FIRST_STEPS + 1, FIRST_STEPS + 1):
        load.observe(snapshot(steps[:count]), None)
    assert load.busy_s == pytest.approx(0.010)
    assert load.profile.decode.points == ((1, 0.01),)
    load.observe(snapshot(steps)._replace(steps=steps[-3:]), None)
    assert load.busy_s == pytest.approx(0.030)
    assert load.profile.decode.points == ((1, 0.01), (2, 0.02))
    assert not load.serves


def test_the_median_of_the_latest_steps_of_a_size_counts() -> None:
    load, ms = PublishedLoad(SLO, chunk_tokens=512), 10**6
    steps = warm(*[Step(10 * ms, 0, 3, 0)] * 40)
    load.observe(snapshot(steps), None)
    steps += [Step(30 * ms, 0, 2, 0)] * (KEPT // 2)
    load.observe(snapshot(steps), None)
    assert load.profile.decode.points == ((2, pytest.approx(0.02)),)
    steps += [Step(30 * ms, 0, 3, 0)]
    load.observe(snapshot(steps), None)
    assert load.profile.decode.points == ((2, pytest.approx(0.03)),)


def test_the_slack_is_that_of_the_most_urgent_request() -> None:
    load, second = PublishedLoad(SLO, chunk_tokens=512), 10**9
    decoding = Row(arrived=0, missing=1, first=second, newest=second, tokens=1)
    late = Row(arrived=second // 2, missing=64, first=0, newest=0, tokens=0)
    given = admission(load)
    load.observe(snapshot([], [decoding]), given)
    alone = load.slack(given, 1.01)
    assert alone < SLO.tpot_s
    load.observe(snapshot([], [decoding, late]), given)
    assert load.slack(given, 1.01) < min(0.0, alone)
    load.observe(snapshot([])._replace(rows=None), given)
    assert load.slack(given, 1.01) == -float("inf")
    assert load.serves


def test_slack_never_grows_with_another_request() -> None:
    draw, load = random.Random(0), PublishedLoad(SLO, chunk_tokens=512)
    given = admission(load)
    for _ in range(200):
        rows = []
        for _ in range(draw.randrange(1, 6)):
            arrived, first = draw.randrange(10**9), draw.choice([0, 10**9])
            rows.append(Row(arrived, draw.randrange(1, 99), first, first, int(bool(first))))
        load.observe(snapshot([], rows[:-1]), given)
        before = load.slack(given, 1.0)
        load.observe(snapshot([], rows), given)
        assert load.slack(given, 1.0) <= before + 1e-9
