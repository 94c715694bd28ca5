"""The requests of ProRL's clients to a rollout service (`service/prorl.py`), as JSON.

Unknown fields are ignored.
"""

from typing import Any

import msgspec


class Process(msgspec.Struct, frozen=True):
    """The body of /process."""

    instance: dict[str, Any]
    sampling_params: dict[str, Any] = {}
    job_id: str | int | None = None


class Address(msgspec.Struct, frozen=True):
    """The body of /add_llm_server.

    `token` is the server's bearer token, if it requires one; ProRL's clients send none.
    """

    address: str
    token: str = ""


class JobId(msgspec.Struct, frozen=True):
    """The body of /cancel."""

    job_id: str | int
