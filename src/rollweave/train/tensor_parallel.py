"""Tensor parallelism of transformers' models: the ranks of a tensor group divide the
layers by the model's own plan (`tp_plan`), and compute the same rows together.

The plan names a style for modules and parameters. The styles are implemented here on
plain tensors: a rank has its part of a divided parameter as a parameter with a smaller
shape, which FSDP2 shards like any other, and modules exchange activations before and
after their forward pass. transformers' own implementation makes distributed tensors of
the divided parameters only, and on another mesh than the other parameters, a mixture
that neither the norm of the gradients nor a fused optimizer accepts. It also sums the
gradients of `PARTIAL` parameters once per micro-batch, so that the gradients of earlier
micro-batches count several times.

Invariants: the ranks of a tensor group have the same activations between layers, the
same log-probs, and bitwise the same undivided parameters; a model whose plan leaves a
gradient incomplete is refused before it is trained (`check_gradients`).
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from rollweave.schema.errors import FieldError
from rollweave.train.distributed import ALONE, RankGroup, Split, full_shape, local_tensor
from rollweave.train.lora import AdaptedLinear
from rollweave.weights.adapters import A, B, layer_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel

REPLICATED = frozenset({"embedding_rowwise", "replicate"})
"""Styles of modules that stay undivided: FSDP2 shards them over the data group."""

PARTIAL = "replicated_with_grad_allreduce"
"""Style of undivided parameters that each rank applies to its own heads, so that its
gradient is a part of the sum.
"""

ROWS = frozenset({"colwise", "colwise_gather_output", "colwise_rep"})
"""Styles of linear layers whose outputs, the rows of their weights, are divided."""

COLUMNS = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
"""Styles of linear layers whose inputs, the columns of their weights, are divided."""

EXPERTS = "moe_tp_experts"
"""Style of the experts of a layer, whose parameters have styles of their own."""

STACKED = {"packed_colwise": Split(dim=1, blocks=2), "colwise": Split(1), "rowwise": Split(2)}
"""Divisions of the experts' parameters, [experts, outputs, inputs], by style."""

HEADS = re.compile(r"(^|\.)(q_proj|k_proj|v_proj|qkv_proj|query_key_value)$")
"""Layers whose outputs are whole heads."""

GRADIENT_TOLERANCE = 1e-2
"""Maximum difference of an undivided parameter's gradient between the ranks of a tensor
group, relative to its largest element. Rounding is below 1e-4.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Division:
    """The parameters of a model that a tensor group divides, by name, and the
    parameters that have partial gradients.
    """

    ranks: RankGroup = ALONE
    splits: Mapping[str, Split] = dataclasses.field(default_factory=dict)
    partial: frozenset[str] = frozenset()

    def shape(self, name: str, parameter: torch.Tensor) -> torch.Size:
        """Return the full shape of a parameter."""
        return full_shape(parameter.shape, self.splits.get(name), self.ranks)


def division_of(model: nn.Module) -> Division:
    """Return the division of a model: an empty one unless `divide` was applied."""
    return cast(Division, getattr(model, "division", None) or Division())


def styles_of(causal: "PreTrainedModel", size: int) -> dict[str, str]:
    """Return the styles of a model's modules and parameters by name, for tensor groups
    of this size.

    Raises FieldError for a model that cannot be divided.
    """
    if size == 1:
        return {}
    field, kind = "trainer.tensor_parallel", type(causal).__name__
    plan = {
        name: style for name, style in (causal.tp_plan or {}).items() if style not in REPLICATED
    }
    modules = dict(causal.named_modules())
    tied = _tied_modules(causal)
    styles: dict[str, str] = {}
    for name in (*modules, *(name for name, _ in causal.named_parameters())):
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        # a tied head is computed with the undivided weights of the embedding
        if style is None or name in tied:
            continue
        known = (
            _is_known(modules[name], style)
            if name in modules
            else style in STACKED and styles.get(name.rpartition(".")[0]) == EXPERTS
        )
        if not known:
            raise FieldError(field, f"be 1 for {kind}, whose tp_plan has {name} as {style}", size)
        styles[name] = style
    if not any(name != _head_name(causal) for name in styles):
        raise FieldError(field, f"be 1 for {kind}, whose layers have no tp_plan", size)
    text = causal.config.get_text_config()
    if any(style == "colwise" and HEADS.search(name) for name, style in styles.items()):
        for heads in ("num_attention_heads", "num_key_value_heads"):
            count = getattr(text, heads, None)
            if isinstance(count, int) and count % size:
                raise FieldError(field, f"divide {heads} of {kind} ({count})", size)
    for name, split in _splits(causal, styles).items():
        width = causal.get_parameter(name).shape[split.dim]
        if width % (size * split.blocks):
            if name.startswith(f"{_head_name(causal)}."):
                styles.pop(_head_name(causal), None)  # the head stays undivided
                continue
            raise FieldError(
                field, f"divide dimension {split.dim} of {name} ({width // split.blocks})", size
            )
    return styles


def divide(causal: "PreTrainedModel", ranks: RankGroup) -> Division:
    """Divide a model on the meta device among the ranks of a tensor group.

    Raises ConfigError for a model that cannot be divided.
    """
    styles = styles_of(causal, ranks.tensor_size)
    if not styles:
        return Division()
    splits = _splits(causal, styles)
    for name, split in splits.items():
        owner, _, attribute = name.rpartition(".")
        module = causal.get_submodule(owner)
        parameter = causal.get_parameter(name)
        part = split.take(parameter.detach(), ranks).contiguous()
        setattr(module, attribute, nn.Parameter(part, requires_grad=parameter.requires_grad))
    modules = dict(causal.named_modules())
    partial = set[str]()
    for name, style in styles.items():
        if name not in modules:
            continue
        if style == PARTIAL:
            partial |= {f"{name}.{each}" for each, _ in modules[name].named_parameters()}
        else:
            if isinstance(modules[name], AdaptedLinear):
                # the part of the adapter that each rank applies to its own columns, or
                # from which it computes its own rows
                partial.add(name + (A if style in ROWS else B))
            _exchange(modules[name], style, ranks.tensor_group)
    return Division(ranks, splits, frozenset(partial))


def _tied_modules(causal: "PreTrainedModel") -> set[str]:
    """Return the modules that share a parameter with another."""
    owners: dict[int, list[str]] = {}
    for name, parameter in causal.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return {name for names in owners.values() if len(names) > 1 for name in names}


def _head_name(causal: "PreTrainedModel") -> str:
    head = causal.get_output_embeddings()
    names: Iterator[str] = (name for name, module in causal.named_modules() if module is head)
    return next(names)


def _is_known(module: nn.Module, style: str) -> bool:
    """Return whether this style of the module is implemented."""
    if style == PARTIAL:
        return True
    if style == EXPERTS:
        parameters = dict(module.named_parameters(recurse=False))
        return bool(parameters) and all(value.dim() == 3 for value in parameters.values())
    return style in ROWS | COLUMNS and isinstance(module, nn.Linear)


def _splits(causal: "PreTrainedModel", styles: Mapping[str, str]) -> dict[str, Split]:
    """Return the divided parameters. An adapter's divided parameter is the matrix at
    the side at which its layer is divided.
    """
    splits = {}
    for name, _ in causal.named_parameters():
        owner = name.rpartition(".")[0]
        if (adapted := layer_of(name)) is not None:
            style = styles.get(adapted)
            if style in ROWS and name.endswith(B):
                splits[name] = Split(0)
            elif style in COLUMNS and name.endswith(A):
                splits[name] = Split(1)
            continue
        if (style := styles.get(name)) is not None:
            splits[name] = STACKED[style]
        elif styles.get(owner) in ROWS:
            splits[name] = Split(0)
        elif styles.get(owner) in COLUMNS and not name.endswith(".bias"):
            splits[name] = Split(1)
    return splits


# Exchanging activations


def _exchange(module: nn.Module, style: str, group: "ProcessGroup") -> None:
    """Give a module with divided parameters its exchanges."""
    own: Callable[..., Any] = module.forward

    def through(exchange: type[torch.autograd.Function], x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, exchange.apply(x, group))  # type: ignore[no-untyped-call]

    if style in ROWS:

        def by_rows(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = own(through(_Given, x))
            return out if style == "colwise" else through(_Gathered, out)

        exchanging: Callable[..., torch.Tensor] = by_rows
    elif style in COLUMNS:
        assert isinstance(module, nn.Linear), "the style was checked"

        def by_columns(x: torch.Tensor) -> torch.Tensor:
            part = x if style == "rowwise" else through(_OwnPart, x)
            own_part = functional.linear(part, module.weight)
            if isinstance(module, AdaptedLinear):
                own_part = own_part + module.adapter(part)
            out = through(_Summed, own_part)
            return out if module.bias is None else out + module.bias.to(out.dtype)

        exchanging = by_columns
    else:

        def experts(x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return through(_Summed, own(through(_Given, x), indices, through(_Given, weights)))

        exchanging = experts
    module.forward = exchanging


class _Given(torch.autograd.Function):
    """The same input on all ranks. Each rank gives a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: "ProcessGroup") -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    """The sum of the parts of an output that the ranks have computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: "ProcessGroup") -> torch.Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Gathered(torch.autograd.Function):
    """The full output. Each rank has computed a part of the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: "ProcessGroup") -> torch.Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _own_part(grad, ctx.group), None


class _OwnPart(torch.autograd.Function):
    """This rank's part of the last dimension of a full input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: "ProcessGroup") -> torch.Tensor:
        ctx.group = group
        return _own_part(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(grad, ctx.group), None


def _sum(x: torch.Tensor, group: "ProcessGroup") -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(x: torch.Tensor, group: "ProcessGroup") -> torch.Tensor:
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, -1)


def _own_part(x: torch.Tensor, group: "ProcessGroup") -> torch.Tensor:
    each = x.shape[-1] // group.size()
    return x.narrow(-1, each * group.rank(), each).contiguous()


# Gradients


def sync_tensor_group(model: nn.Module) -> None:
    """Complete the gradients of undivided parameters after the backward pass of a
    minibatch: sum partial gradients over the tensor group, and average all others,
    which rounding on GPUs could otherwise make different.
    """
    division = division_of(model)
    for name, gradient in _undivided_gradients(model):
        dist.all_reduce(gradient, group=division.ranks.tensor_group)
        if name not in division.partial:
            gradient /= division.ranks.tensor_size


def total_norm(model: nn.Module) -> torch.Tensor:
    """Return the norm of the gradients of a divided model, over all ranks. An undivided
    parameter counts once.
    """
    division = division_of(model)
    squares = [
        local_tensor(parameter.grad).float().square().sum()
        / (1 if name in division.splits else division.ranks.tensor_size)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    ]
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    return total.sqrt()


def check_gradients(model: nn.Module) -> None:
    """Raise `TrainerError` if the ranks of a tensor group have different gradients of
    an undivided parameter: then the plan lacks a part of the exchange.
    """
    division = division_of(model)
    ranks = division.ranks
    gaps: dict[str, tuple[float, float]] = {}
    for name, gradient in _undivided_gradients(model):
        if name in division.partial or not gradient.numel():
            continue
        mean = gradient.clone()
        dist.all_reduce(mean, group=ranks.tensor_group)
        mean /= ranks.tensor_size
        gaps[name] = (float((gradient - mean).abs().max()), float(mean.abs().max()))
    largest = max((scale for _, scale in gaps.values()), default=0.0)
    wrong = [
        name
        for name, (gap, scale) in gaps.items()
        # a gradient of 0 consists of rounding alone
        if not gap <= GRADIENT_TOLERANCE * max(scale, GRADIENT_TOLERANCE * largest)
    ]
    ranks.raise_together(
        f"trainer.tensor_parallel must be 1 for this model, whose tp_plan leaves the gradient of "
        f"{wrong[0]} incomplete, got {ranks.tensor_size}"
        if wrong
        else ""
    )


def _undivided_gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    division = division_of(model)
    if division.ranks.tensor_size > 1:
        for name, parameter in model.named_parameters():
            if name not in division.splits and parameter.grad is not None:
                yield name, local_tensor(parameter.grad)
