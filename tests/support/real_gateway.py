"""A tiny real model behind a gateway: checkpoint, engine, and training that memorizes a
conversation.
"""

import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM

from rollweave.engine.clients.base import OnTokens
from rollweave.engine.clients.client import EngineClient
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.gateway.server import Access, Gateway, serve_gateway
from rollweave.schema.base import EngineId
from rollweave.schema.serving import EngineSpec, GenerateRequest, GenerateResult, Sampling
from rollweave.schema.work import TokenSequence
from tests.support.chats import SPECIAL_MAP, TOOLS, bpe
from tests.support.engines import engine_in_thread
from tests.support.tiny_models import build, oracle_logprobs, save

CONTEXT = 2048


def checkpoint(directory: Path, **changes: Any) -> Path:
    """Write random weights, a byte-level tokenizer and a chat template with tools;
    `changes` apply to the model's configuration.
    """
    vocab = -(-bpe().get_vocab_size() // 8) * 8
    model = build(
        "qwen3",
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        max_position_embeddings=CONTEXT,
        **changes,
    )
    save(model, directory)
    bpe().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({**SPECIAL_MAP, "chat_template": TOOLS})
    )
    return directory


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def teach(directory: Path, sequences: Sequence[TokenSequence]) -> float:
    """Train on the sequences' outputs until each is memorized; return the last loss."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = load(directory).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    loss = torch.tensor(float("inf"))
    for _ in range(400):
        losses = []
        for sequence in sequences:
            ids = torch.tensor([sequence.tokens])
            mask = torch.tensor(sequence.output_mask())[1:]
            logits = model(ids[:, :-1]).logits[0][mask]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:][mask]))
        loss = torch.stack(losses).mean()
        if loss.item() < 0.01:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save(model.eval(), directory)
    return loss.item()


@contextlib.asynccontextmanager
async def engine(directory: Path) -> AsyncIterator[EngineClient]:
    spec = EngineSpec(id=EngineId("e0"), model=str(directory), max_slots=8, kv_tokens=8 * CONTEXT)
    client = engine_in_thread(spec)
    try:
        await client.ready()
        yield client
    finally:
        await client.close()


class Turns:
    """`generate` of a gateway that sends every turn to one engine. The first `fails`
    turns raise.
    """

    def __init__(self, client: EngineClient, *, fails: Sequence[Exception] = ()) -> None:
        self._client, self._fails = client, list(fails)
        self._ids = itertools.count()
        self.answered = 0

    async def __call__(
        self,
        session: str,
        tokens: tuple[int, ...],
        sampling: Sampling,
        on_tokens: OnTokens | None,
    ) -> GenerateResult:
        if self._fails:
            raise self._fails.pop(0)
        request = GenerateRequest(
            id=f"{session}-{next(self._ids)}", tokens=tokens, sampling=sampling
        )
        result = await self._client.generate(request, on_tokens)
        # The engine serves its checkpoint, which is what it would have been given as
        # version 0.
        self.answered += 1
        versions = tuple(msgspec.structs.replace(span, version=0) for span in result.versions)
        return msgspec.structs.replace(result, versions=versions)


@contextlib.asynccontextmanager
async def served(
    generate: Any, directory: Path, *sessions: str
) -> AsyncIterator[tuple[Gateway, str, dict[str, Access]]]:
    server = Gateway(ChatCodec.from_directory(directory), generate, model="tiny")
    access = {id: server.open(id) for id in sessions}
    async with serve_gateway(server) as url:
        yield server, url, access


def logprob_error(directory: Path, sequence: TokenSequence) -> float:
    """Return the largest difference between the recorded log-probs and those of a
    forward pass over the complete sequence.
    """
    rows = oracle_logprobs(load(directory).eval(), sequence.tokens)
    places = [place for place, output in enumerate(sequence.output_mask()) if output]
    return max(
        abs(rows[place - 1, sequence.tokens[place]].item() - sequence.logprobs[place])
        for place in places
    )
