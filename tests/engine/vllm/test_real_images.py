"""Images in a real vLLM server, beside transformers' own model (`make test-vllm`). It
needs torchvision, which vLLM imports with most models that take images.
"""

import asyncio
import io
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.vllm_server import VARIABLE
from rollweave.engine.clients.client import EngineClient
from rollweave.engine.clients.process import in_process
from rollweave.io.child import child_of
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.schema.base import EngineId
from rollweave.schema.chat import Message
from rollweave.schema.media import Image
from rollweave.schema.serving import (
    EngineSpec,
    FinishReason,
    GenerateRequest,
    PartialOutput,
    Sampling,
)
from tests.support.engines import environment, needs_vllm, vllm_spec
from tests.support.vision_models import EXPANDED, picture, write_llava

pytestmark = list(needs_vllm)

RED, GREEN = Image.of(picture(255)), Image.of(picture(0, 255))
TOLERANCE = 1e-3
"""Maximum difference of a log-prob: both compute in float32, in another order."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = subprocess.run(
        [os.environ[VARIABLE], "-c", "import torchvision.transforms.v2.functional"],
        capture_output=True,
        check=False,
    )
    if found.returncode:
        pytest.skip("vLLM's interpreter has no torchvision that it can import")
    path = tmp_path_factory.mktemp("llava")
    write_llava(path)
    return path


def reference(directory: Path, text: str, images: list[Image], count: int) -> Any:
    """Return the greedy continuation by transformers, and its log-probs."""
    import torch
    from PIL import Image as Pictures
    from tokenizers import Tokenizer
    from transformers import AutoImageProcessor, LlavaForConditionalGeneration

    processor = AutoImageProcessor.from_pretrained(directory)
    model = LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    opened = [Pictures.open(io.BytesIO(image.data)) for image in images]
    pixels = processor(images=opened, return_tensors="pt")["pixel_values"]
    expanded = text.replace("<image>", "<image>" * EXPANDED)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = tokenizer.encode(expanded, add_special_tokens=False).ids
    tokens, logprobs = list[int](), list[float]()
    for _ in range(count):
        with torch.no_grad():
            row = model(input_ids=torch.tensor([ids]), pixel_values=pixels).logits[0, -1]
        best = int(row.argmax())
        tokens.append(best)
        logprobs.append(float(row.log_softmax(-1)[best]))
        ids.append(best)
    return len(ids) - count, tuple(tokens), logprobs


async def test_answers_depend_on_the_image_as_those_of_transformers(
    directory: Path, tmp_path: Path
) -> None:
    """One server, because each takes tens of seconds to start."""
    present: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    present.set_result(None)
    server = vllm_spec()
    spec = EngineSpec(
        id=EngineId("e0"), model=str(directory), max_slots=4, kv_tokens=2048, server=server
    )
    link = in_process(
        spec,
        spawn=child_of("rollweave.runtime.entrypoints.server_engine", env=environment()),
        log=tmp_path / "e0.log",
        model_ready=present,
    )
    engine = EngineClient("engine e0", link, start_s=server.start_s, reply_s=120.0)
    codec = ChatCodec.from_directory(directory)
    try:
        assert (await engine.ready()).takes_images
        answers = []
        for images in ([RED], [GREEN], [RED, GREEN], [GREEN, RED]):
            messages = [Message(role="user", content="what?", images=tuple(images))]
            tokens = codec.start(messages)
            request = GenerateRequest(
                id=f"r{len(answers)}",
                tokens=tokens,
                images=tuple(images),
                sampling=Sampling(temperature=0, max_tokens=6),
            )
            result = await engine.generate(request)
            answers.append(result)
            length, expected, logprobs = reference(
                directory, codec.decode(tokens), images, len(result.tokens)
            )
            assert result.tokens == expected
            assert result.logprobs == pytest.approx(logprobs, abs=TOLERANCE)
            assert result.prompt_tokens == length
        assert answers[0].logprobs != answers[1].logprobs
        assert answers[2].logprobs != answers[3].logprobs
        # resumed, the same turn
        first = answers[3]
        resumed = PartialOutput(
            tokens=first.tokens[:2],
            logprobs=first.logprobs[:2],
            versions=(type(first.versions[0])(start=0, end=2, version=0),),
        )
        again = await engine.generate(
            GenerateRequest(
                id="again",
                tokens=tokens,
                images=(GREEN, RED),
                sampling=Sampling(temperature=0, max_tokens=6),
                resumed=resumed,
            )
        )
        assert again.tokens == first.tokens
        assert again.logprobs == pytest.approx(first.logprobs, abs=TOLERANCE)
        assert again.prompt_tokens == first.prompt_tokens
        # too long with the tokens of its images only
        assert codec.image_token is not None
        long = GenerateRequest(
            id="long",
            tokens=(codec.image_token, *tokens[:1]) * 120,
            images=(RED,) * 120,
            sampling=Sampling(temperature=0, max_tokens=6),
        )
        assert (await engine.generate(long)).finish is FinishReason.CONTEXT
        # and the engine still serves
        request = GenerateRequest(
            id="last", tokens=tokens, images=(RED, GREEN), sampling=Sampling(max_tokens=2)
        )
        assert len((await engine.generate(request)).tokens) == 2
    finally:
        await engine.close()
