"""The mixture of task domains."""

from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.policy.mixture import next_domain


@given(weights=st.lists(st.floats(0.1, 5.0), min_size=1, max_size=4), count=st.integers(1, 200))
def test_each_domain_gets_its_share(weights: list[float], count: int) -> None:
    domains = [(f"d{index}", weight) for index, weight in enumerate(weights)]
    drawn: dict[str, int] = {}
    for _ in range(count):
        name = next_domain(domains, drawn)
        drawn[name] = drawn.get(name, 0) + 1
    for name, weight in domains:
        assert abs(drawn.get(name, 0) - count * weight / sum(weights)) < len(weights)


def test_a_domain_without_groups_lags_like_one_with_none() -> None:
    assert next_domain([("a", 1.0), ("b", 1.0)], {"b": 0}) == "a"
    assert next_domain([("a", 1.0), ("b", 1.0)], {"a": 1}) == "b"
    assert next_domain([("a", 1.0), ("b", 3.0)], {}) == "b"
