"""The back ends by name."""

from collections.abc import Callable

from rollweave.sandbox.apptainer import Apptainer
from rollweave.sandbox.base import Backend
from rollweave.sandbox.bubblewrap import INSTALL, Bubblewrap
from rollweave.sandbox.plain import Plain
from rollweave.sandbox.zygote import Zygote
from rollweave.schema.errors import ConfigError, SandboxError

BACKENDS: dict[str, Callable[[], Backend]] = {
    "bubblewrap": Bubblewrap,
    "zygote": Zygote,
    "apptainer": Apptainer,
    "plain": Plain,
}
"""Name → class of each back end.

The first is the default. `plain` isolates nothing, and is used only if it is named.
"""


def backend(name: str | None = None) -> Backend:
    """Return the back end called `name`, or the default back end.

    Raises ConfigError for an unknown name, and SandboxError, which says what to
    install, if the back end is not installed.
    """
    if name is None:
        try:
            return Bubblewrap()
        except SandboxError as error:
            raise SandboxError(
                f"no sandbox: {error}. To run without any isolation, name the back end: plain, "
                "for trusted code only"
            ) from error
    if name not in BACKENDS:
        raise ConfigError(
            f"sandbox back end must be one of {', '.join(BACKENDS)}, got {name!r}; "
            f"the default: {INSTALL}"
        )
    return BACKENDS[name]()
