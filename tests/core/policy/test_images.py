"""The choice of the worker that gets an image from outside, and of those that serve it
to others.
"""

import random

import pytest

from rollweave.core.policy.images import ROUNDS, Grants, ImageDirectory, pause_s
from rollweave.schema.images import AskImage, GrantImage, HoldImage, ImagePeer, MissImage

KEY, DIGEST = "k", "d"


def peer(name: str) -> ImagePeer:
    return ImagePeer(host=name, url=f"http://{name}", token=name)


def held(directory: ImageDirectory, name: str) -> Grants:
    return directory.on_held(name, HoldImage(key=KEY, digest=DIGEST, peer=peer(name)))


def sent(grants: Grants) -> dict[str, list[str] | str]:
    """Return the hosts to which each worker is sent, "outside" for an origin."""
    return {
        worker: "outside" if grant.origin else [one.host for one in grant.peers]
        for worker, grant in grants
    }


def test_pauses_double_up_to_a_maximum_and_end() -> None:
    assert [pause_s(failures, 0.5) for failures in range(1, ROUNDS)] == [1.0, 2.0, 4.0, 8.0]
    assert (pause_s(1, 0.0), pause_s(1, 1.0)) == (0.5, 1.5)
    assert pause_s(ROUNDS, 0.5) is None
    with pytest.raises(ValueError, match="failures must be at least 1, got 0"):
        pause_s(0, 0.5)


def test_one_worker_goes_outside_and_the_others_to_those_that_have_it() -> None:
    directory = ImageDirectory()
    assert sent(directory.on_asked("a", AskImage(key=KEY))) == {"a": "outside"}
    assert sent(directory.on_asked("b", AskImage(key=KEY))) == {}
    assert sent(directory.on_asked("c", AskImage(key=KEY))) == {}
    assert sent(held(directory, "a")) == {"b": ["a"], "c": ["a"]}
    assert sent(held(directory, "b")) == {}
    # b has served no other yet
    (answer,) = directory.on_asked("d", AskImage(key=KEY))
    peers = (peer("b"), peer("a"))
    assert answer == ("d", GrantImage(key=KEY, digest=DIGEST, peers=peers))


def test_the_next_one_goes_outside_after_a_failure_or_a_loss() -> None:
    directory = ImageDirectory()
    assert directory.on_missed("a", MissImage(key=KEY)) == []  # nobody has asked for it
    for name in "abc":
        directory.on_asked(name, AskImage(key=KEY))
    assert sent(directory.on_missed("b", MissImage(key=KEY))) == {}  # it was not its turn
    assert sent(directory.on_missed("a", MissImage(key=KEY))) == {"b": "outside"}
    assert sent(directory.on_lost("b")) == {"c": "outside"}
    held(directory, "c")
    assert sent(directory.on_lost("c")) == {}
    assert sent(directory.on_asked("a", AskImage(key=KEY))) == {"a": "outside"}


def test_a_worker_that_cannot_reach_the_holders_goes_outside_itself() -> None:
    directory = ImageDirectory()
    held(directory, "a")
    assert sent(directory.on_asked("b", AskImage(key=KEY))) == {"b": ["a"]}
    assert sent(directory.on_asked("b", AskImage(key=KEY, alone=True))) == {"b": "outside"}
    assert sent(directory.on_asked("c", AskImage(key=KEY, alone=True))) == {"c": ["a"]}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_fails_each_is_answered_in_the_end(seed: int) -> None:
    """At most one is outside at a time, and no worker is forgotten."""
    chance, directory = random.Random(seed), ImageDirectory()
    state = dict.fromkeys("abcde", "idle")

    def apply(grants: Grants) -> None:
        for worker, grant in grants:
            assert state[worker] == "asks"
            state[worker] = "outside" if grant.origin else "fetches"

    for _ in range(300):
        name = chance.choice("abcde")
        match state[name]:
            case "idle":
                state[name] = "asks"
                apply(directory.on_asked(name, AskImage(key=KEY, alone=chance.random() < 0.3)))
            case "asks":
                if chance.random() < 0.1:
                    state[name] = "idle"
                    apply(directory.on_lost(name))
            case "outside" | "fetches" if chance.random() < 0.5:
                state[name] = "has"
                apply(held(directory, name))
            case "outside" | "fetches":
                state[name] = "idle"
                apply(directory.on_missed(name, MissImage(key=KEY)))
            case "has":
                state[name] = "idle"
                apply(directory.on_lost(name))
        assert list(state.values()).count("outside") <= 1
        if "asks" in state.values():
            assert "outside" in state.values()
            assert "has" not in state.values()
