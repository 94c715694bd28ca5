"""The engines that each rollout server uses."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rollweave_service.spreading import Host, spread

HOSTS = st.sampled_from(["h1", "h2", "h3", "h4"])


def hosts(prefix: str) -> st.SearchStrategy[list[Host]]:
    places = st.lists(HOSTS, max_size=8)
    return places.map(
        lambda names: [Host(server=f"{prefix}{at}", host=host) for at, host in enumerate(names)]
    )


@given(hosts("llm"), hosts("rollout"))
def test_servers_are_distributed_near_first_and_to_every_client(
    llms: Sequence[Host], rollouts: Sequence[Host]
) -> None:
    uses = spread(llms, rollouts)
    assert list(uses) == [rollout.server for rollout in rollouts]
    if not llms or not rollouts:
        assert all(not used for used in uses.values())
        return
    where = {rollout.server: rollout.host for rollout in rollouts}
    inhabited = set(where.values())
    users = {
        llm.server: [name for name, used in uses.items() if llm.server in used] for llm in llms
    }
    assert all(users.values()), "every LLM server is used"
    assert all(uses.values()), "no rollout server is idle"
    for llm in llms:
        if llm.host in inhabited:
            assert any(where[name] == llm.host for name in users[llm.server]), "near first"
    for host in inhabited:
        near = [
            sum(llm.host == host for llm in llms if llm.server in uses[name])
            for name in uses
            if where[name] == host
        ]
        own = [llm for llm in llms if llm.host == host]
        if len(own) >= len(near):
            assert max(near) - min(near) <= 1, "those of one host share evenly"
    shared = [len(names) for names in users.values()]
    assert max(shared) - min(shared) <= 1, "all are shared alike"
    exclusive = sum(len(used) == 1 for used in uses.values())
    assert sum(shared) - len(llms) <= exclusive, (
        "only a client without a server of its own borrows, and borrows one"
    )


def test_the_rest_is_dealt_round_robin() -> None:
    llms = [Host(server=f"far{number}", host="elsewhere") for number in range(4)] + [
        Host(server="near", host="h1")
    ]
    rollouts = [
        Host(server="r1", host="h1"),
        Host(server="r2", host="h2"),
        Host(server="r3", host="h3"),
    ]
    expected = {"r1": ("near", "far2"), "r2": ("far0", "far3"), "r3": ("far1",)}
    assert spread(llms, rollouts) == expected
    assert spread(llms[4:], rollouts) == {"r1": ("near",), "r2": ("near",), "r3": ("near",)}
