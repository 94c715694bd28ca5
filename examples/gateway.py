"""Run an agent program behind the gateway, and see what was recorded.

    python examples/gateway.py path/to/checkpoint -- python my_agent.py

The program finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment, as OpenAI's
clients look for them. Each sequence is printed as a line of JSON: tokens, segments,
log-probs, turns.
"""

import argparse
import asyncio
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollweave.engine.embedded import start_engine
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.gateway.server import Gateway, SessionRecording, serve_gateway
from rollweave.rollout.gateway.sessions import SessionLimits
from rollweave.schema.serving import GenerateRequest, GenerateResult, Sampling, TokenDelta


async def record(checkpoint: Path, command: list[str], device: str) -> tuple[int, SessionRecording]:
    """Return the program's exit status and the recorded sequences."""
    engine, ids = start_engine(checkpoint, device=device), itertools.count()
    context = (await engine.ready()).max_context

    async def generate(
        session: str,
        tokens: tuple[int, ...],
        sampling: Sampling,
        on_tokens: Callable[[TokenDelta], None] | None,
    ) -> GenerateResult:
        request = GenerateRequest(id=f"{session}-{next(ids)}", tokens=tokens, sampling=sampling)
        result = await engine.generate(request, on_tokens)
        # The engine serves its checkpoint, which training calls version 0.
        versions = tuple(msgspec.structs.replace(span, version=0) for span in result.versions)
        return msgspec.structs.replace(result, versions=versions)

    gateway = Gateway(ChatCodec.from_directory(checkpoint), generate, model=checkpoint.name)
    access = gateway.open("main", limits=SessionLimits(context=context))
    try:
        async with serve_gateway(gateway) as url:
            env = {
                **os.environ,
                "OPENAI_BASE_URL": url + access.path,
                "OPENAI_API_KEY": access.token,
                "ANTHROPIC_BASE_URL": url + access.path.removesuffix("/v1"),
                "ANTHROPIC_API_KEY": access.token,
            }
            program = await asyncio.create_subprocess_exec(*command, env=env, stdout=sys.stderr)
            status = await program.wait()
            return status, gateway.close("main")
    finally:
        await engine.close()


def main() -> int:
    """Run the command line, and exit with the program's status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("command", nargs="+", metavar="command", help="after --")
    given = parser.parse_args()
    status, recorded = asyncio.run(record(given.checkpoint, given.command, given.device))
    for sequence in recorded.sequences:
        print(msgspec.json.encode(sequence).decode())
    return status


if __name__ == "__main__":
    sys.exit(main())
