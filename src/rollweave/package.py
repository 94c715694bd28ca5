"""This package: its version and its directory, for modules that must not import the
public interface.
"""

from pathlib import Path

VERSION = "0.1.0a1"
DIRECTORY = Path(__file__).parent
