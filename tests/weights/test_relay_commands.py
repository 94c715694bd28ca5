"""For any sequence of commands, every FetchVersion is answered once, and every stored
version equals the published one.
"""

import asyncio

import hypothesis.strategies as st
from hypothesis import given, settings

from rollweave.schema.weights import RelayAddress, VersionFetched
from rollweave.weights.tcp import Tcp
from tests.support.properties import examples
from tests.support.weight_host import KIB, Host, hosts, tensors_of, versions

HOSTS, VERSIONS = 3, 4
NOWHERE = RelayAddress(host="127.0.0.1", port=1, secret=b"")
SHAPES = tensors_of(30_000, 600_000)

COMMANDS = st.lists(
    st.tuples(
        st.integers(0, HOSTS - 1),
        st.integers(1, VERSIONS),
        st.sampled_from([None, *range(HOSTS), "nowhere"]),
        st.none() | st.integers(1, VERSIONS),
        st.sets(st.integers(1, VERSIONS)),
        st.sampled_from([0, 0, 1, 5, 30]),  # iterations of the event loop until the next command
    ),
    max_size=25,
)


@settings(max_examples=examples(25))
@given(COMMANDS)
def test_any_commands_in_any_order_are_answered_once(
    commands: list[tuple[int, int, object, int | None, set[int], int]],
) -> None:
    asyncio.run(_execute(commands))


async def _execute(commands: list[tuple[int, int, object, int | None, set[int], int]]) -> None:
    # A short linger time ends fetches that cannot finish, for example two relays that
    # wait for each other.
    with versions(VERSIONS, tensors=SHAPES) as memories:
        async with hosts(HOSTS, Tcp(idle_timeout_s=5.0), linger_s=0.05) as hosts_:
            commands_sent = [0] * HOSTS
            for number, publication_id, source, base_id, keep, turns in commands:
                address = hosts_[source] if isinstance(source, int) else NOWHERE
                hosts_[number].start_fetch(
                    memories[publication_id - 1].manifest,
                    address if source is not None else None,
                    base_id=base_id,
                    keep=tuple(keep),
                    chunk_bytes=100 * KIB,
                )
                commands_sent[number] += 1
                for _ in range(turns):
                    await asyncio.sleep(0)
            # A relay that waits for a source that never starts is freed by a
            # FetchVersion of that version from memory.
            for host in hosts_:
                for memory in memories:
                    everything = tuple(range(1, VERSIONS + 1))
                    host.start_fetch(memory.manifest, keep=everything, chunk_bytes=100 * KIB)
            for number, host in enumerate(hosts_):
                answers = [await host.answer() for _ in range(commands_sent[number] + VERSIONS)]
                assert sum(isinstance(answer, VersionFetched) for answer in answers) >= VERSIONS
                _check(host, [memory.payload for memory in memories])
            for host in hosts_:
                assert host.answers.empty()
                assert host.relay._pending == {}


def _check(host: Host, payloads: list[bytes]) -> None:
    for publication_id, payload in enumerate(payloads, start=1):
        assert host.payload(publication_id) == payload
