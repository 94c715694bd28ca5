"""A service on a full disk: `python -m packages.service.tests.small_disk DIRECTORY
SPARE`, run in a namespace.

Fills the disk while rollouts are accepted. Each answer must be 202 or 507, the service
must continue or end with one error, and exactly the accepted rollouts must be done once
the disk has room.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

import aiohttp

from packages.service.tests.api import call, game, get, status_of
from packages.service.tests.rollout_service import Program, service_config
from tests.support.fake_runs import run_dir
from tests.support.small_disk import BALLAST, DISK_BYTES, fill

MAX_ROLLOUTS = 400
"""Number of rollouts of 20 kB each that are submitted: twice as many as fit the
disk.
"""


async def flood(address: str) -> tuple[set[str], set[str]]:
    """Submit rollouts until the service stops answering; return the ids that it
    accepted and those that it refused.
    """
    accepted, refused = set(), set()
    for number in range(MAX_ROLLOUTS):
        try:
            body = game(index=None, payload={"x": "x" * 20_000}, id=f"j{number}")
            status, answer, _ = await call(address, "POST", "/v1/rollouts", body)
        except aiohttp.ClientError:
            break
        assert status in (202, 507), (status, answer)
        (accepted if status == 202 else refused).add(f"j{number}")
    return accepted, refused


async def check(address: str, accepted: set[str], refused: set[str]) -> None:
    for name in sorted(accepted):
        answer = await get(address, f"/v1/rollouts/{name}?wait=60")
        assert answer["members"][0]["stop_reason"] == "finished", (name, answer)
    for name in refused:
        assert await status_of(address, "GET", f"/v1/rollouts/{name}") == 404
    answer = await get(address, "/v1/completions?limit=1000")
    done = [one["rollout"] for one in answer["completions"]]
    assert len(done) == len(set(done))
    assert accepted <= set(done)


def main(directory: Path, spare: int) -> None:
    config = service_config(directory)
    disk = run_dir(config)
    disk.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(disk)], check=True
    )
    program = Program(config)
    fill(disk, spare)
    accepted, refused = asyncio.run(flood(program.address))
    print(len(accepted), "accepted,", len(refused), "refused")
    (disk / BALLAST).unlink()
    ended = program.process.poll()
    if ended is None:
        program.kill()
    assert ended in (None, 1), ended
    subprocess.run(["mount", "-o", f"remount,size={16 * DISK_BYTES}", str(disk)], check=True)
    program = Program(config)
    asyncio.run(check(program.address, accepted, refused))
    assert program.terminate() == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
