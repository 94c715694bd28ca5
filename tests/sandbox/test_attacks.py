"""Every attack is tried on every isolating back end, and fails."""

import asyncio

import pytest

from benchmarks.sandbox.attacks import BAIT, Outcome, attacks_here, attempt

from .sandboxes import ISOLATING, opened

AT_ONCE = 4


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ISOLATING)
async def test_no_attack_escapes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BAIT, "1")
    room = asyncio.Semaphore(AT_ONCE)
    async with opened(name) as backend:

        async def one(attack: str) -> Outcome:
            async with room:
                return await attempt(backend, attack)

        outcomes = await asyncio.gather(*(one(attack) for attack in attacks_here()))
    assert [outcome for outcome in outcomes if outcome.escaped] == []


@pytest.mark.parametrize(
    "attack", ["files of the host", "network", "environment of the host", "settings of the kernel"]
)
async def test_attacks_succeed_without_isolation(
    attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attack that fails even without isolation would prove nothing."""
    monkeypatch.setenv(BAIT, "1")
    async with opened("plain") as backend:
        assert (await attempt(backend, attack)).escaped
