"""Any causal language model of transformers for training, with the interface of
`train/model.Model`: packed inputs in, scores of the labels out.

The model's own code computes everything but attention (`train/attention`) and, with
routing replay, the choice of experts: routers choose the experts that the engine chose
(R3, rollout routing replay: Ma et al., "Stabilizing MoE Reinforcement Learning by
Aligning Training and Inference Routers", arXiv 2510.11370; GSPO, arXiv 2507.18071,
§5.3, replays the choices of the former policy). Only the choice is replayed: a router's
scores, and so the weights of the chosen experts and the router's gradient, are computed
with the trained weights.

Invariants: parameters have the names of transformers' module, and are published and
exported under the names and shapes of the checkpoint (`weights/views`); tokens without
a recorded choice are routed freely. `train/loading` loads and verifies a model.
"""

import contextlib
import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rollweave.schema.errors import TrainerError
from rollweave.train.attention import IMPLEMENTATION, packed_rows
from rollweave.train.model import Reference, Scores, scores_in_parts, scores_of
from rollweave.train.needs import MAX_LOGITS
from rollweave.train.packing import FREE, Example, Packed
from rollweave.train.tensor_parallel import Division
from rollweave.weights.views import StoredTensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""The number of a layer in the name of a module."""

REFERENCE_IMPLEMENTATION = "eager"
"""transformers' plain attention, with which packed log-probs are compared."""


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


class TransformersModel(nn.Module):
    """A model of transformers, `causal`, whose forward pass returns log-probs of the
    labels.

    Its modules are also modules of this object, so that parameters have the same names.
    """

    _causal: "PreTrainedModel"

    def __init__(
        self, causal: "PreTrainedModel", stored: StoredTensors, compute_dtype: torch.dtype
    ) -> None:
        super().__init__()
        for name, child in self.parts_of(causal):
            self.add_module(name, child)
        # not a submodule, which would add a prefix to each name
        object.__setattr__(self, "_causal", causal)
        self.compute_dtype = compute_dtype
        self.max_logits = MAX_LOGITS
        self.stored = stored
        self.architecture = type(causal).__name__
        self.vocab = int(causal.get_output_embeddings().weight.shape[0])
        self._replay = Replay(causal)
        self.division = Division()

    def parts_of(self, causal: "PreTrainedModel") -> Iterable[tuple[str, nn.Module]]:
        """Yield the modules that this model has, by name."""
        return causal.named_children()

    def forward(
        self, packed: Packed, temperature: float, reference: Reference | None = None
    ) -> Scores:
        """Return log-probs of `packed.labels` at `temperature`, and the policy's
        entropy and distance from `reference` there.
        """
        with self._computing():
            return scores_in_parts(
                self._head,
                self._hidden(packed),
                packed.labels,
                temperature,
                reference,
                rows=max(1, self.max_logits // self.vocab),
            )

    def hidden(self, packed: Packed) -> torch.Tensor:
        """Return the last hidden states at the labels, [M, H]."""
        with self._computing():
            return self._hidden(packed)

    def constants(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the checkpoint that training does not change."""
        buffers = dict(self.named_buffers())
        return {name: buffers[buffer] for name, buffer in self.stored.constants.items()}

    def output_weights(self) -> torch.Tensor:
        """Return the head's weights, [V, H]. Raises `TrainerError` for a head that also
        has a bias.
        """
        head = self._causal.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise TrainerError(
                f"algorithm.kl must not be forward for {type(self._causal).__name__}, "
                "whose head has a bias, got forward"
            )
        return cast(torch.Tensor, head.weight)

    def recompute_activations(self, enabled: bool) -> None:
        """Set whether the backward pass computes the layers' activations again.

        Raises `TrainerError` for a model that cannot.
        """
        if not enabled:
            return
        from transformers.modeling_layers import GradientCheckpointingLayer

        try:
            self._causal.activation_checkpointing_enable(
                {"use_reentrant": False, "preserve_rng_state": False}
            )
        except ValueError as error:
            raise TrainerError(
                f"trainer.save_memory must be without activations for "
                f"{type(self._causal).__name__}: {error}"
            ) from error
        for module in self.modules():
            if isinstance(module, GradientCheckpointingLayer):
                # transformers recomputes layers in training only; no layer has a
                # dropout
                module.training = True

    @contextlib.contextmanager
    def own_attention(self) -> Iterator[None]:
        """Compute with transformers' own attention in this context, one sequence at a
        time.
        """
        self._causal.set_attn_implementation(REFERENCE_IMPLEMENTATION)
        try:
            yield
        finally:
            self._causal.set_attn_implementation(IMPLEMENTATION)

    def _computing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a pass. Weights are float32; products are computed in
        `compute_dtype`.
        """
        if self.compute_dtype == torch.float32:
            return contextlib.nullcontext()
        device = next(self.parameters()).device.type
        return torch.autocast(device, dtype=self.compute_dtype)

    def _hidden(self, packed: Packed) -> torch.Tensor:
        grid = packed.keys
        positions = grid.positions.flatten()[grid.flat]
        base = getattr(self._causal, self._causal.base_model_prefix)
        self._replay.set(packed.routes)
        with packed_rows(packed):
            states = base(
                input_ids=packed.tokens[None],
                position_ids=positions[None],
                # all tokens: without it, transformers searches for sequences in the row
                attention_mask=torch.ones_like(packed.tokens)[None],
                use_cache=False,
            ).last_hidden_state
        return cast(torch.Tensor, states[0].index_select(0, packed.predicting))

    def _head(
        self, x: torch.Tensor, labels: torch.Tensor, temperature: float, reference: Reference | None
    ) -> Scores:
        other = None
        if reference is not None:
            other = self._logits(reference.hidden, weights=reference.head)
        return scores_of(self._logits(x), labels, temperature, other)

    def _logits(self, x: torch.Tensor, *, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits [M, V] of hidden states, as the model's own forward pass
        computes them, which may scale or bound them; with other `weights` of the head.
        """
        head = copy.copy(self._causal)
        # the modules of the copy are its own
        head.__dict__["_modules"] = dict(self._causal._modules)
        head._modules[self._causal.base_model_prefix] = _Given(x)
        if weights is None:
            logits = head(inputs_embeds=x[None], use_cache=False).logits
        else:
            own = self._causal.get_output_embeddings()
            name = next(name for name, module in head.named_modules() if module is own)
            logits = torch.func.functional_call(
                head,
                {f"{name}.weight": weights},
                kwargs={"inputs_embeds": x[None], "use_cache": False},
            ).logits
        return cast(torch.Tensor, logits[0])


class _Given(nn.Module):
    """Stands for a model's layers, with known hidden states as their output."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self._states = states

    @property
    def decoder(self) -> "_Given":
        """The layers, where a model calls them as a part of its base model."""
        return self

    def forward(self, *_: Any, **__: Any) -> "_GivenOutput":
        return _GivenOutput(self._states[None])


@dataclasses.dataclass(frozen=True)
class _GivenOutput:
    """The output of `_Given`. Whatever else a model's output may have is None."""

    last_hidden_state: torch.Tensor

    def __getitem__(self, index: int) -> torch.Tensor:
        assert index == 0, "hidden states are the first output"
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
