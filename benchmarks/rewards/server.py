"""A slow URL of rewards: `python -m benchmarks.rewards.server PORT SECONDS FILE`.

It prints a line once it listens, and writes the key of each request to FILE before it
computes.
"""

import asyncio
import sys
from pathlib import Path

from aiohttp import web


def main() -> None:
    port, seconds = int(sys.argv[1]), float(sys.argv[2])
    keys = Path(sys.argv[3]).open("a", buffering=1)  # noqa: SIM115 (until the process is killed)

    async def score(request: web.Request) -> web.Response:
        body = await request.json()
        keys.write(f"{body['key']}\n")
        await asyncio.sleep(seconds)
        return web.json_response({"reward": 0.5})

    app = web.Application(client_max_size=8 << 20)
    app.router.add_post("/score", score)
    runner = web.AppRunner(app, access_log=None)

    async def serve() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        print("listening", flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
