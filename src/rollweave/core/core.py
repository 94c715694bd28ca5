"""The core of a run: the kernel with the mechanisms that its configuration uses."""

from collections.abc import Mapping

from rollweave.core.kernel import Kernel
from rollweave.core.mechanisms import MECHANISMS
from rollweave.core.policy.experience import Rule
from rollweave.core.state import State
from rollweave.schema.config.root import RunConfig


class Core(Kernel):
    """The state of one run. `restore(snapshot)` returns an equal core."""

    def __init__(
        self,
        config: RunConfig,
        state: State | None = None,
        *,
        rules: Mapping[str, Rule] | None = None,
    ) -> None:
        super().__init__(config, state, rules=rules, mechanisms=MECHANISMS)
