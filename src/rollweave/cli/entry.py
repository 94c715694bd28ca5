"""Where the program `rollweave` begins."""

from rollweave.cli.interrupt import quiet


def main() -> None:
    """Run the command line."""
    quiet()  # before the imports, which take a second
    from rollweave.cli.main import app

    app()
