"""`python -m rollweave_servers.lending` prints the folder that a serving engine which
lends needs in PYTHONPATH.
"""

from pathlib import Path

print(Path(__file__).parent)
