"""Where the program `rollweave` begins."""

from rollweave.cli.interrupt import enter


def main() -> None:
    """Run the command line."""
    enter()  # before the imports, which take a second
    from rollweave.cli.main import app

    app()
