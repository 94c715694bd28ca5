"""Compare the core with recorded journals: `python -m tests.journals.replay DIR`
replays each of them, with and without restorations from snapshots, and names the first
differing event of those that differ.
"""

import argparse
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.journals.recording import SUFFIX, Recording, differences


def first_difference(path: Path, restores: bool) -> str:
    """Return the first differing event of a journal; "" if all are equal."""
    try:
        return next(differences(Recording.read(path), restores=restores), "")
    except Exception:
        return traceback.format_exc(limit=-3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="replay one in so many journals")
    parser.add_argument("--plain", action="store_true", help="without restorations")
    options = parser.parse_args()
    paths = sorted(options.folder.glob(f"*{SUFFIX}"))[:: options.every]
    jobs = [
        (path, restores)
        for path in paths
        for restores in ((False,) if options.plain else (False, True))
    ]
    differing = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        results = pool.map(first_difference, *zip(*jobs, strict=True))
        for (path, restores), difference in zip(jobs, results, strict=True):
            if difference:
                differing += 1
                if differing <= 10:
                    print(f"{path.name}{' (restored)' if restores else ''}: {difference[:3000]}")
    print(f"{len(paths)} journals, {len(jobs)} replays, {differing} differ")
    return 1 if differing or not paths else 0


if __name__ == "__main__":
    sys.exit(main())
