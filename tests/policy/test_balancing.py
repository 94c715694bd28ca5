"""Choosing a server: against a slow obvious reference, and by what must hold whatever happens."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.policy.balancing import DOWN_AFTER, UP_AFTER, Balancer, Host, Hysteresis, spread

SERVERS = ("a", "b", "c", "d")
TASKS = tuple(f"t{number}" for number in range(6))


class Slow:
    """The rules without a heap: every server is looked at, and every load is summed up."""

    def __init__(self) -> None:
        self.servers: dict[str, dict[str, float]] = {}
        self.tasks: dict[str, tuple[str, int]] = {}
        self.given = self.joined = 0
        self.newcomer_last = False

    def add(self, server: str, capacity: float) -> None:
        newcomer = bool(self.servers)
        self.joined += 1
        seat = {"capacity": capacity, "healthy": True, "newcomer": newcomer, "last": self.given, "order": self.joined}
        self.servers[server] = seat

    def remove(self, server: str) -> None:
        self.servers.pop(server, None)
        self.tasks = {task: seat for task, seat in self.tasks.items() if seat[0] != server}

    def mark(self, server: str, healthy: bool) -> None:
        seat = self.servers.get(server)
        if seat and seat["healthy"] != healthy:
            seat.update(healthy=healthy, newcomer=True, last=self.given)

    def key(self, server: str) -> tuple[float, float, float]:
        load = sum(tokens for name, tokens in self.tasks.values() if name == server)
        seat = self.servers[server]
        return (load / seat["capacity"], seat["last"], seat["order"])

    def choose(self, task: str, tokens: int) -> str | None:
        held = self.tasks.get(task, ("", 0))[0]
        server = held if held and self.servers[held]["healthy"] else self.pick()
        self.tasks.pop(task, None)
        if server is not None:
            self.tasks[task] = (server, tokens)
        return server

    def pick(self) -> str | None:
        healthy = [name for name, seat in self.servers.items() if seat["healthy"]]
        if not healthy:
            return None
        for name in sorted((name for name in healthy if self.servers[name]["newcomer"]), key=self.key):
            settled = [self.key(other) for other in healthy if not self.servers[other]["newcomer"]]
            if not settled or self.key(name) >= min(settled):
                self.servers[name]["newcomer"] = False
            else:
                break
        old = [name for name in healthy if not self.servers[name]["newcomer"]]
        new = [name for name in healthy if self.servers[name]["newcomer"]]
        chosen = min(old if not new or self.newcomer_last else new, key=self.key)
        self.newcomer_last = chosen in new
        self.given += 1
        self.servers[chosen]["last"] = self.given
        return chosen


OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(SERVERS), st.sampled_from([1.0, 2.0])),
    st.tuples(st.just("remove"), st.sampled_from(SERVERS)),
    st.tuples(st.just("mark"), st.sampled_from(SERVERS), st.booleans()),
    st.tuples(st.just("choose"), st.sampled_from(TASKS), st.integers(0, 5)),
    st.tuples(st.just("finish"), st.sampled_from(TASKS)),
)


def apply(balancer: Balancer, slow: Slow, operation: tuple[str, ...]) -> None:
    name, *values = operation
    match name, values:
        case "add", [server, capacity]:
            if server not in slow.servers:
                balancer.add(server, capacity=capacity)
                slow.add(server, capacity)
        case "remove", [server]:
            balancer.remove(server)
            slow.remove(server)
        case "mark", [server, healthy]:
            balancer.mark(server, healthy=healthy)
            slow.mark(server, healthy)
        case "choose", [task, tokens]:
            assert balancer.choose(task, tokens) == slow.choose(task, tokens)
        case "finish", [task]:
            balancer.finish(task)
            slow.tasks.pop(task, None)
    loads = {server: sum(t for name, t in slow.tasks.values() if name == server) for server in slow.servers}
    assert balancer.loads() == loads


@settings(deadline=None, max_examples=300)
@given(st.lists(OPERATIONS, max_size=80))
def test_it_chooses_as_the_reference_does(operations: list[tuple[str, ...]]) -> None:
    balancer, slow = Balancer(), Slow()
    for operation in operations:
        apply(balancer, slow, operation)


def fleet(*servers: str) -> Balancer:
    balancer = Balancer()
    for server in servers:
        balancer.add(server)
    return balancer


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 40))
def test_equal_tasks_go_round_robin(servers: int, tasks: int) -> None:
    balancer = fleet(*(f"s{number}" for number in range(servers)))
    chosen = [balancer.choose(f"t{number}", 7) for number in range(tasks)]
    assert all(chosen[at] == chosen[at - servers] for at in range(servers, tasks))
    assert len(set(chosen)) == min(servers, tasks)


def test_tasks_without_weight_go_round_robin_too() -> None:
    balancer = fleet("a", "b")
    assert [balancer.choose(f"t{number}", 0) for number in range(4)] == ["a", "b", "a", "b"]


def test_a_task_keeps_its_server_and_its_growth_counts() -> None:
    balancer = fleet("a", "b")
    assert balancer.choose("long", 10) == "a"
    assert balancer.choose("other", 10) == "b"
    assert balancer.choose("long", 500) == "a"
    assert [balancer.choose(f"t{number}", 100) for number in range(4)] == ["b", "b", "b", "b"]
    assert balancer.loads() == {"a": 500, "b": 410}
    balancer.finish("long")
    assert balancer.choose("next", 1) == "a"


def test_more_capacity_holds_more() -> None:
    balancer = Balancer()
    balancer.add("slow")
    balancer.add("fast", capacity=3.0)
    for number in range(400):
        balancer.choose(f"t{number}", 10)
    loads = balancer.loads()
    assert abs(loads["fast"] - 3 * loads["slow"]) <= 40


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(50, 200), st.integers(1, 3))
def test_a_newcomer_catches_up_but_never_takes_two_tasks_in_a_row(old: int, before: int, new: int) -> None:
    balancer = fleet(*(f"old{number}" for number in range(old)))
    for number in range(before):
        balancer.choose(f"before{number}", 10)
    newcomers = [f"new{number}" for number in range(new)]
    for name in newcomers:
        balancer.add(name)
    level = min(load for name, load in balancer.loads().items() if name not in newcomers)
    chosen: list[str | None] = []
    while min(balancer.loads().values()) < level:
        chosen.append(balancer.choose(f"after{len(chosen)}", 10))
        assert len(chosen) <= 4 * before * new + 8, "it never catches up"
    assert not any(first in newcomers and second in newcomers for first, second in itertools.pairwise(chosen))


def test_an_ailing_server_is_passed_over_and_its_tasks_move_when_they_call() -> None:
    balancer = fleet("a", "b")
    assert balancer.choose("t0", 10) == "a"
    balancer.mark("a", healthy=False)
    assert [balancer.choose(f"u{number}", 1) for number in range(3)] == ["b", "b", "b"]
    assert balancer.choose("t0", 10) == "b"
    assert balancer.loads() == {"a": 0, "b": 13}
    balancer.mark("b", healthy=False)
    assert balancer.choose("t0", 10) is None
    balancer.mark("a", healthy=True)
    assert balancer.choose("t0", 10) == "a"
    balancer.remove("a")
    assert balancer.choose("t0", 10) is None
    balancer.finish("t0")
    balancer.finish("unknown")


def test_the_heaps_stay_small() -> None:
    balancer = fleet("a", "b")
    for number in range(5000):
        balancer.choose("t", number)
    assert sum(map(len, balancer._heaps.values())) < 100


@pytest.mark.parametrize(("server", "capacity", "rule"), [("a", 1.0, "new"), ("b", 0.0, "positive")])
def test_what_makes_no_sense_is_refused(server: str, capacity: float, rule: str) -> None:
    balancer = fleet("a")
    with pytest.raises(ValueError, match=rule):
        balancer.add(server, capacity=capacity)
    with pytest.raises(ValueError, match="tokens must be 0 or more"):
        balancer.choose("t", -1)


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=60))
def test_health_changes_only_after_checks_in_a_row(checks: list[bool]) -> None:
    health = Hysteresis()
    for at, good in enumerate(checks):
        before = health.healthy
        needed = UP_AFTER if good else DOWN_AFTER
        run = checks[max(0, at + 1 - needed) : at + 1]
        agreed = len(run) == needed and all(check is good for check in run)
        assert health.observe(good) is (good if agreed else before)


HOSTS = st.sampled_from(["h1", "h2", "h3", "h4"])


def hosts(prefix: str) -> st.SearchStrategy[list[Host]]:
    places = st.lists(HOSTS, max_size=8)
    return places.map(lambda found: [Host(server=f"{prefix}{at}", host=host) for at, host in enumerate(found)])


@settings(deadline=None)
@given(hosts("llm"), hosts("rollout"))
def test_servers_are_spread_near_first_and_nobody_is_left_out(llms: Sequence[Host], rollouts: Sequence[Host]) -> None:
    uses = spread(llms, rollouts)
    assert list(uses) == [rollout.server for rollout in rollouts]
    if not llms or not rollouts:
        assert all(not used for used in uses.values())
        return
    where = {rollout.server: rollout.host for rollout in rollouts}
    inhabited = set(where.values())
    users = {llm.server: [name for name, used in uses.items() if llm.server in used] for llm in llms}
    assert all(users.values()), "every LLM server is used"
    assert all(uses.values()), "no rollout server is idle"
    for llm in llms:
        if llm.host in inhabited:
            assert any(where[name] == llm.host for name in users[llm.server]), "near first"
    for host in inhabited:
        near = [sum(llm.host == host for llm in llms if llm.server in uses[name]) for name in uses if where[name] == host]
        own = [llm for llm in llms if llm.host == host]
        if len(own) >= len(near):
            assert max(near) - min(near) <= 1, "those of one host share evenly"
    shared = [len(names) for names in users.values()]
    assert max(shared) - min(shared) <= 1, "all are shared alike"
    alone = sum(len(used) == 1 for used in uses.values())
    assert sum(shared) - len(llms) <= alone, "only who would have none borrows, and borrows one"


def test_the_rest_is_dealt_round_robin() -> None:
    llms = [Host(server=f"far{number}", host="elsewhere") for number in range(4)] + [Host(server="near", host="h1")]
    rollouts = [Host(server="r1", host="h1"), Host(server="r2", host="h2"), Host(server="r3", host="h3")]
    assert spread(llms, rollouts) == {"r1": ("near", "far2"), "r2": ("far0", "far3"), "r3": ("far1",)}
    assert spread(llms[4:], rollouts) == {"r1": ("near",), "r2": ("near",), "r3": ("near",)}
