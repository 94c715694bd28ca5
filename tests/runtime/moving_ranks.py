"""`rollweave` for runs that move all places that may move after each step."""

from rollweave.cli.main import app
from tests.support.core import alternating

if __name__ == "__main__":
    with alternating():
        app()
