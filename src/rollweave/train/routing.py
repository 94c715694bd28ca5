"""Routing replay: the routers of a model of transformers choose the experts that the
engine chose (R3, rollout routing replay: Ma et al., "Stabilizing MoE Reinforcement
Learning by Aligning Training and Inference Routers", arXiv 2510.11370; GSPO, arXiv
2507.18071, §5.3, replays the choices of the former policy).

Only the choice is replayed. A router's scores, and so the weights of the chosen experts
and the router's gradient, are computed with the trained weights. Invariant: tokens
without a recorded choice are routed freely.
"""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rollweave.schema.errors import TrainerError
from rollweave.train.packing import FREE, Example

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""The number of a layer in the name of a module."""


def routed_fraction(examples: Sequence[Example]) -> float:
    """Return the share of the tokens whose routes are known. The last token of a
    sequence, which predicts nothing, does not count.
    """
    known = sum(int((e.routes[:-1, 0, 0] != FREE).sum()) for e in examples if e.routes is not None)
    return known / max(1, sum(len(e.tokens) - 1 for e in examples))


def routers_of(causal: "PreTrainedModel") -> dict[int, nn.Module]:
    """Return the routers of a model by layer, as transformers marks them; empty without
    experts.
    """
    recorders: list[Any] = [
        (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for module in causal.modules()
    ]
    kinds = tuple(each.target_class for each in recorders if hasattr(each, "target_class"))
    return {
        int(layer.group(1)): module
        for name, module in causal.named_modules()
        if isinstance(module, kinds) and (layer := LAYER.search(name)) is not None
    }


def experts_of(router: nn.Module) -> int | None:
    """Return the number of experts that a router scores, if that is known."""
    weight = getattr(router, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None


class Replay:
    """The routers of a model, whose choices `set` replaces from one forward pass to the
    next one, so that a backward pass that computes layers again makes the same choices.
    """

    def __init__(self, causal: "PreTrainedModel") -> None:
        self._name = type(causal).__name__
        self._layers = int(causal.config.get_text_config().num_hidden_layers)
        self._routes: torch.Tensor | None = None
        self._experts: int | None = None
        self.routers = routers_of(causal)
        for layer, router in self.routers.items():
            self._experts = experts_of(router)
            router.forward = self._replayed(layer, router.forward)

    def set(self, routes: torch.Tensor | None) -> None:
        """Replay routes [N, layers, top_k] of a packed row; without routes, route
        freely.

        Raises `TrainerError` for routes of another model.
        """
        if routes is not None:
            most = int(routes.max())
            if self._experts is None or routes.shape[1] != self._layers or most >= self._experts:
                raise TrainerError(
                    f"routes must be those of {self._name}, with {self._experts or 0} experts and "
                    f"{self._layers} layers, got expert {most} and {routes.shape[1]} layers"
                )
        self._routes = routes

    def _replayed(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def route(*args: Any, **kwargs: Any) -> Any:
            if self._routes is None or self._experts is None:
                return forward(*args, **kwargs)
            with _Choice(self._routes[:, layer].long(), self._experts) as choice:
                output = forward(*args, **kwargs)
            if choice.made != 1:
                raise TrainerError(
                    f"algorithm.routing_replay must be false for {self._name}, whose routers do "
                    f"not choose {choice.chosen.shape[1]} of {self._experts} experts by their "
                    "scores, got true"
                )
            return output

        return route


class _Choice(TorchFunctionMode):
    """Replaces the choice of the `chosen` experts [N, top_k] by scores [N, experts]."""

    def __init__(self, chosen: torch.Tensor, experts: int) -> None:
        super().__init__()
        self.chosen, self._experts, self.made = chosen, experts, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.shape[1:] != (self._experts,) or result[1].shape != self.chosen.shape:
            return result
        self.made += 1
        indices = torch.where(self.chosen == FREE, result[1], self.chosen)
        return type(result)((scores.gather(1, indices), indices))
