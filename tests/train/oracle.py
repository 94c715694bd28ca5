"""transformers' forward pass, one sequence at a time, as the oracle of our models."""

from pathlib import Path

import torch

from rollweave.train.packing import Example
from tests.support.architectures import read


def oracle(
    path: Path, examples: list[Example], temperature: float
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return log-probs, entropies, and the gradient of their weighted sum, one sequence
    at a time.
    """
    model = read(path)
    chosen, entropies = [], []
    for example in examples:
        logits = model(input_ids=example.tokens[None]).logits[0] / temperature
        logprobs = logits[example.targets - 1].log_softmax(-1)
        chosen.append(logprobs.gather(1, example.tokens[example.targets][:, None]).squeeze(1))
        entropies.append(-(logprobs.exp() * logprobs).sum(-1))
    divergence, entropy = torch.cat(chosen), torch.cat(entropies)
    loss_of(divergence, entropy).backward()  # type: ignore[no-untyped-call]
    return (
        divergence.detach(),
        entropy.detach(),
        {name: p.grad for name, p in model.named_parameters()},
    )


def loss_of(chosen: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, len(chosen))
    return (chosen * weights).sum() + 0.1 * (entropy * weights.flip(0)).sum()
