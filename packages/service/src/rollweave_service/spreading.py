"""The engines that each of several rollout servers uses (ProRL, RL trainers)."""

from collections.abc import Mapping, Sequence

from rollweave.schema.base import Struct


class Host(Struct, frozen=True, kw_only=True):
    """A server's address and the host that it runs on."""

    server: str
    host: str


def spread(llms: Sequence[Host], rollouts: Sequence[Host]) -> Mapping[str, tuple[str, ...]]:
    """Assign LLM servers to rollout servers: first the LLM servers of its own host,
    then the rest round-robin (ProRL, RL trainers).

    Every LLM server is used by one rollout server. A rollout server that would get none
    shares the least shared LLM server, so that no rollout server is idle while there is
    any LLM server.
    """
    uses: dict[str, list[str]] = {rollout.server: [] for rollout in rollouts}
    if not uses or not llms:
        return dict.fromkeys(uses, ())
    remote = []
    for llm in llms:
        near = [rollout.server for rollout in rollouts if rollout.host == llm.host]
        if near:
            uses[min(near, key=lambda server: len(uses[server]))].append(llm.server)
        else:
            remote.append(llm.server)
    for server in remote:
        uses[min(uses, key=lambda rollout: len(uses[rollout]))].append(server)
    shared = {llm.server: 1 for llm in llms}
    for own in uses.values():
        if not own:
            least = min(shared, key=lambda server: shared[server])
            shared[least] += 1
            own.append(least)
    return {server: tuple(own) for server, own in uses.items()}
