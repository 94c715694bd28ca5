"""The options of a command that serves over HTTP: the address, and the admitted
clients.
"""

from dataclasses import dataclass

from rollweave.io.http.guard import given_token
from rollweave.io.http.listening import check_address
from rollweave.schema.address import check_names
from rollweave.schema.errors import ConfigError

ADDRESS = "--host and --port"
"""The options of the address, as errors name them."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """The address of a server and the clients that it admits.

    `names` are further names under which clients reach it; `no_token` admits every
    program on this host.
    """

    host: str = "127.0.0.1"
    port: int = 8300
    token_env: str | None = None
    no_token: bool = False
    names: tuple[str, ...] = ()

    def check(self) -> str | None:
        """Return the token in the variable `token_env`, or None without a variable.
        Raises ConfigError for wrong options, and if no server can listen at the
        address.
        """
        token = given_token(
            self.token_env, no_token=self.no_token, host=self.host, named="--token-env"
        )
        try:
            check_names(self.names, field="--allow-host")
        except ValueError as error:
            raise ConfigError(str(error)) from error
        check_address(self.host, self.port, names=ADDRESS)
        return token


ON_LOOPBACK = Access()
"""The default: loopback, with a token that is generated and kept."""
