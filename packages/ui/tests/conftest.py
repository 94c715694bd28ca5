"""The command line in another process, as tests of other commands use it."""

from tests.cli.conftest import shell

__all__ = ["shell"]
