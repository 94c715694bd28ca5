"""`rollweave rescore`: rewards that failed in a run come later, and are written to its
records.
"""

import os
from pathlib import Path

import msgspec
import pytest

from rollweave import role
from rollweave.record.store import Ended, Scored, TrajectoryReader, TrajectoryStore
from rollweave.schema import work
from rollweave.schema.base import GroupId, TaskId, TrajectoryId
from rollweave.schema.chat import Message
from rollweave.schema.config.loading import dumps
from rollweave.schema.config.root import RunConfig
from tests.support.commands import invoke
from tests.support.judge_thread import serving

FUNCTION = "tests.cli.test_rescore:judged"


def judged(conversation: tuple[Message, ...], task: work.Task, reward: float) -> float:
    """Return a reward for all but one conversation."""
    if conversation[-1].content == os.environ.get("ASKS", ""):
        role("judge").score([])
    if conversation[-1].content == "lost":
        raise ValueError("still broken")
    return float(os.environ.get("JUDGED", "2"))


def ended(id: str, attempt: int, stop: work.StopReason = work.StopReason.MAX_TURNS) -> Ended:
    segment = work.Segment(start=0, end=1, kind=work.SegmentKind.OUTPUT, version=0)
    trajectory = work.Trajectory(
        id=TrajectoryId(id),
        group_id=GroupId(id.partition(".")[0]),
        task=work.Task(id=TaskId("t"), env="frozenlake", seed=0, tag="frozenlake"),
        attempt=attempt,
        initiated_version=0,
        sequences=(work.TokenSequence(tokens=(1,), segments=(segment,), logprobs=(-0.5,)),),
        reward=None,
        stop_reason=stop,
        blame=work.BLAME_OF[stop],
    )
    return Ended(at=1.0, purpose=work.Purpose.TRAIN, member=0, trajectory=trajectory)


def failed(id: str, attempt: int, last: str) -> Scored:
    unscored = work.Unscored(
        missing=("judged",),
        conversation=(Message(role="user", content="?"), Message(role="assistant", content=last)),
        reward=1.0,
        success=True,
        stop_reason=work.StopReason.MAX_TURNS,
    )
    return Scored(
        at=2.0,
        trajectory_id=TrajectoryId(id),
        attempt=attempt,
        reward=None,
        success=None,
        stop_reason=work.StopReason.REWARD_UNAVAILABLE,
        blame=work.BLAME_OF[work.StopReason.REWARD_UNAVAILABLE],
        eval_s=1.0,
        error="gone",
        rewards={"env": 1.0, "other": 4.0},
        unscored=unscored,
    )


def scored(id: str, attempt: int) -> Scored:
    return Scored(
        at=2.0,
        trajectory_id=TrajectoryId(id),
        attempt=attempt,
        reward=7.0,
        success=None,
        stop_reason=work.StopReason.MAX_TURNS,
        blame=work.BLAME_OF[work.StopReason.MAX_TURNS],
        eval_s=1.0,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run in which a reward of g0.0 and g1.0 failed for good, and one of g2.0 in an
    attempt that another one followed.
    """
    config = RunConfig.model_validate(
        {
            "run": {"name": "r", "dir": "elsewhere"},
            "model": {"scratch": {}},
            "tasks": [{"env": "frozenlake"}],
            "rewards": [
                {"name": "judged", "weight": 0.5, "function": FUNCTION},
                # it is known, and not asked again
                {"name": "other", "url": "http://127.0.0.1:9", "timeout_s": 0.05},
            ],
        }
    )
    directory = tmp_path / "r"
    directory.mkdir()
    (directory / "config.toml").write_text(dumps(config))
    with TrajectoryStore(directory / "trajectories", segment_bytes=1) as store:
        for id, attempt, score in (
            ("g0.0", 0, failed("g0.0", 0, "first")),
            ("g0.0", 1, failed("g0.0", 1, "second")),
            ("g1.0", 0, failed("g1.0", 0, "lost")),
            ("g2.0", 0, failed("g2.0", 0, "first")),
            ("g2.0", 1, scored("g2.0", 1)),
        ):
            store.append(ended(id, attempt))
            store.score(score)
            store.forget([TrajectoryId(id)])
    return directory


def rewards(run: Path) -> dict[str, float | None]:
    reader = TrajectoryReader(run / "trajectories")
    assert reader.damaged == []
    return {
        f"{entry.trajectory_id}/{entry.attempt}": reader.load(entry).reward
        for entry in reader.entries
    }


def test_missing_rewards_are_asked_for_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, errors = invoke("rescore", str(run))
    assert (code, text.strip()) == (1, "1 of 2 missing rewards were computed and written")
    assert len(errors) == 1
    assert f"function {FUNCTION} raised ValueError: still broken" in errors[0]
    before = {"g0.0/0": None, "g1.0/0": None, "g2.0/0": None, "g2.0/1": 7.0}
    assert rewards(run) == before | {"g0.0/1": 1.0 + 0.5 * 2 + 4}
    reader = TrajectoryReader(run / "trajectories")
    (entry,) = [one for one in reader.entries if (one.trajectory_id, one.attempt) == ("g0.0", 1)]
    stored = reader.load(entry)
    assert stored.rewards == {"env": 1.0, "other": 4.0, "judged": 2.0}
    assert stored.stop_reason == work.StopReason.MAX_TURNS
    assert stored.success is True
    assert stored.error == ""
    # a second time, only what is still missing
    monkeypatch.setenv("JUDGED", "5")
    code, text, _ = invoke("rescore", str(run))
    assert (code, text.strip()) == (1, "0 of 1 missing rewards were computed and written")
    assert rewards(run)["g0.0/1"] == 6.0


def test_a_reward_that_calls_a_role_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASKS", "lost")
    code, _, errors = invoke("rescore", str(run))
    assert code == 2
    assert "must have rewards that call no role, since rescore starts no roles" in errors[-1]


def test_a_member_is_compared_again_with_those_that_it_has_met(tmp_path: Path) -> None:
    with serving() as judge:
        asked = {"model": "m", "rubric": "Be fair.", "pairwise": True}
        config = RunConfig.model_validate(
            {
                "run": {"name": "r", "dir": "elsewhere"},
                "model": {"scratch": {}},
                "tasks": [{"env": "frozenlake"}],
                "rewards": [{"name": "duel", "weight": 2.0, "url": judge.url, "judge": asked}],
            }
        )
        directory = tmp_path / "r"
        directory.mkdir()
        (directory / "config.toml").write_text(dumps(config))
        score = failed("g0.0", 0, "a longer answer")
        assert score.unscored is not None
        comparisons = tuple(
            work.Comparison(
                reward="duel",
                opponent=TrajectoryId(name),
                attempt=0,
                conversation=(Message(role="user", content="?"),),
                points=points,
            )
            for name, points in (("g0.1", None), ("g0.2", None), ("g0.3", 0.0))
        )
        unscored = msgspec.structs.replace(
            score.unscored, missing=("duel",), comparisons=comparisons
        )
        score = msgspec.structs.replace(score, rewards={"env": 1.0}, unscored=unscored)
        with TrajectoryStore(directory / "trajectories") as store:
            store.append(ended("g0.0", 0))
            store.score(score)
        code, text, _ = invoke("rescore", str(directory))
        assert (code, text.strip()) == (0, "1 of 1 missing rewards were computed and written")
        assert rewards(directory) == {"g0.0/0": pytest.approx(1.0 + 2.0 * 2 / 3)}
        assert len(judge.answers) == 4, "in both orders, and not where the points are known"


def test_a_member_that_was_never_compared_gets_no_reward_without_its_share(run: Path) -> None:
    duel = """
[[rewards]]
name = "duel"
url = "http://127.0.0.1:9/v1"
judge = { model = "m", rubric = "x", pairwise = true }
"""
    (run / "config.toml").write_text((run / "config.toml").read_text() + duel)
    code, text, errors = invoke("rescore", str(run))
    assert (code, text.strip()) == (1, "0 of 2 missing rewards were computed and written")
    assert "reward duel: the attempt was never compared with its group" in " ".join(errors)
    assert rewards(run)["g0.0/1"] is None


def test_a_run_without_rewards_is_refused(run: Path) -> None:
    config = (run / "config.toml").read_text().partition("[[rewards]]")[0]
    (run / "config.toml").write_text(config)
    code, _, errors = invoke("rescore", str(run))
    assert code == 2
    assert "must have [[rewards]] to rescore, got none" in " ".join(errors)
