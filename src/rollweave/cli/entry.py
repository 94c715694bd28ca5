"""The entry point of the program `rollweave`."""

from rollweave.cli.interrupt import install_signals


def main() -> None:
    """Run the command line."""
    install_signals()  # before the imports, which take a second
    from rollweave.cli.main import app

    app()
