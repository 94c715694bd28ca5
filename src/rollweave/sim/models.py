"""Model shapes: parameters and bytes, from the `config.json` that Qwen publishes with
its weights.

Weights and KV are bf16. Norms, biases and the query and key norms of Qwen3 are left
out: under 0.1 % of any model here.
"""

from rollweave.schema.base import Struct
from rollweave.sim.hardware import named

BF16 = 2
"""Bytes of a bf16 number."""


class ModelShape(Struct, frozen=True, kw_only=True):
    """A decoder with grouped-query attention and gated MLPs.

    With `experts`, all MLPs are mixtures and `ffn` is unused. With `tied`, the output
    head is the embedding table.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    experts: int = 0
    experts_active: int = 0
    expert_ffn: int = 0

    @property
    def parameters(self) -> int:
        """Return the number of all parameters."""
        return (
            self.dense_parameters
            + self.expert_parameters
            + (1 if self.tied else 2) * self.head_parameters
        )

    @property
    def layer_parameters(self) -> int:
        """Return the layer parameters that one token is multiplied with; an embedding
        look-up multiplies none.
        """
        return self.dense_parameters + self.layers * self.experts_active * self._expert

    @property
    def head_parameters(self) -> int:
        """Return the output head's parameters, used only where a token is sampled; an
        embedding table has as many.
        """
        return self.vocab * self.hidden

    @property
    def dense_parameters(self) -> int:
        """Return the layer parameters that every token uses: attention, and the MLP or
        the router.
        """
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        mlp = self.hidden * self.experts if self.experts else 3 * self.hidden * self.ffn
        return self.layers * (attention + mlp)

    @property
    def expert_parameters(self) -> int:
        """Return the parameters of all experts; 0 for a dense model."""
        return self.layers * self.experts * self._expert

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights in bf16."""
        return BF16 * self.parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of one token's keys and values in all layers, in bf16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BF16

    @property
    def attention_flops(self) -> int:
        """Return the FLOPs of one query attending to one position in all layers: a
        product with the key and one with the value.
        """
        return 4 * self.layers * self.heads * self.head_dim

    @property
    def _expert(self) -> int:
        return 3 * self.hidden * self.expert_ffn


def _qwen25(
    name: str, *, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int
) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=152064,
        tied=False,
    )


def _qwen3(
    name: str, *, layers: int, hidden: int, heads: int, kv_heads: int = 8, ffn: int, **experts: int
) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        ffn=ffn,
        vocab=151936,
        tied=False,
        **experts,
    )


MODELS = {
    shape.name: shape
    for shape in (
        _qwen25("qwen2.5-7b", layers=28, hidden=3584, heads=28, kv_heads=4, ffn=18944),
        _qwen25("qwen2.5-32b", layers=64, hidden=5120, heads=40, kv_heads=8, ffn=27648),
        _qwen25("qwen2.5-72b", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=29568),
        _qwen3("qwen3-8b", layers=36, hidden=4096, heads=32, ffn=12288),
        _qwen3("qwen3-14b", layers=40, hidden=5120, heads=40, ffn=17408),
        _qwen3("qwen3-32b", layers=64, hidden=5120, heads=64, ffn=25600),
        _qwen3(
            "qwen3-30b-a3b",
            layers=48,
            hidden=2048,
            heads=32,
            kv_heads=4,
            ffn=6144,
            experts=128,
            experts_active=8,
            expert_ffn=768,
        ),
    )
}


def model(name: str) -> ModelShape:
    """Return the model of that name, ignoring case. Raises FieldError."""
    return named("model", name, MODELS)
