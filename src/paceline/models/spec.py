"""What a model is, as data: every choice an architecture makes is a field, so that executors hold no model names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.models.quants import Tensor
from paceline.models.rope import RopeSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer."""

    rope: RopeSpec | None
    """None: no rotation."""
    window: int | None = None
    """How many tokens a query sees, itself included; None: all before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer with grouped-query attention. With ``@`` a matrix product, every layer computes

        h = pre_norm(x);   q, k, v = h@Wq + bq, …;   q, k = rope(qk_norm(q)), rope(qk_norm(k))
        a = post_norm(softmax(softcap(q·k · attention_scale)) v @ Wo + bo)
        m = post_norm(feed_forward(pre_norm(x + residual_scale · a)))
        x = x + residual_scale · a + residual_scale · m

    where the feed-forward network is ``(activation(h@Wg + bg) * (h@Wu + bu)) @ Wd + bd``, or without a gate
    ``activation(h@Wu + bu) @ Wd + bd``. Steps that a model does not have are left out.
    """

    architecture: str
    """GGUF's ``general.architecture``, such as ``llama``."""
    name: str
    vocab_size: int
    context_length: int
    """Longest sequence the model was trained for, in tokens."""
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    attention_scale: float
    """Factor of the scores, usually head_dim^-0.5."""
    norm_eps: float
    tied_embeddings: bool
    """The output head shares the embedding matrix."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm (https://arxiv.org/abs/1910.07467), or LayerNorm with a bias (https://arxiv.org/abs/1607.06450)."""
    pre_norms: bool = True
    """Attention and feed-forward network read the residual stream through a norm."""
    post_norms: bool = False
    """What they add to it passes a norm."""
    parallel_residual: bool = False
    """The feed-forward network reads what attention reads, through the same norm, instead of attention's result."""
    qk_norm: Literal["head", "whole"] | None = None
    """Queries and keys pass an RMSNorm, head by head or over all heads at once."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """x·sigmoid(x), or GELU in its tanh form (https://arxiv.org/abs/1606.08415)."""
    gated: bool = True
    """The feed-forward network has a gate (https://arxiv.org/abs/2002.05202)."""
    biases: frozenset[str] = frozenset()
    """Linear layers with a bias, by GGUF's names: ``attn_q``, ``ffn_down``, ``output``, …"""
    learned_positions: bool = False
    """A row of ``position_embd`` is added to each token's embedding."""
    embedding_scale: float = 1.0
    """Factor of the token embeddings."""
    residual_scale: float = 1.0
    attention_softcap: float | None = None
    """Scores s become cap·tanh(s / cap)."""
    logits_softcap: float | None = None
    logits_scale: float = 1.0
    """Factor of the logits, before the soft cap."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A spec and exactly the tensors of ``tensor_shapes``, still as stored."""

    spec: ModelSpec
    tensors: Mapping[str, Tensor]


def tensor_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors of a model, under GGUF's names (``blk.0.attn_q.weight``).

    Linear layers are (outputs, inputs). Fused matrices are already apart: ``attn_q``, ``attn_k`` and ``attn_v``.
    """
    hidden = spec.hidden_size
    yield "token_embd.weight", (spec.vocab_size, hidden)
    if spec.learned_positions:
        yield "position_embd.weight", (spec.context_length, hidden)
    yield from _norm(spec, "output_norm")
    if not spec.tied_embeddings:
        yield "output.weight", (spec.vocab_size, hidden)
    if "output" in spec.biases:
        yield "output.bias", (spec.vocab_size,)
    for layer in range(spec.num_layers):
        for name, shape in _layer_shapes(spec):
            yield f"blk.{layer}.{name}", shape


def _layer_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, query, key = spec.hidden_size, spec.intermediate_size, spec.query_size, spec.kv_size
    if spec.pre_norms:
        yield from _norm(spec, "attn_norm")
        if not spec.parallel_residual:
            yield from _norm(spec, "ffn_norm")
    if spec.post_norms:
        yield from _norm(spec, "post_attention_norm")
        yield from _norm(spec, "post_ffw_norm")
    if spec.qk_norm is not None:
        whole = spec.qk_norm == "whole"
        yield "attn_q_norm.weight", (query if whole else spec.head_dim,)
        yield "attn_k_norm.weight", (key if whole else spec.head_dim,)
    matrices = {
        "attn_q": (query, hidden),
        "attn_k": (key, hidden),
        "attn_v": (key, hidden),
        "attn_output": (hidden, query),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    if not spec.gated:
        del matrices["ffn_gate"]
    for name, (outputs, inputs) in matrices.items():
        yield f"{name}.weight", (outputs, inputs)
        if name in spec.biases:
            yield f"{name}.bias", (outputs,)


def _norm(spec: ModelSpec, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (spec.hidden_size,)
    if spec.norm == "layer":
        yield f"{name}.bias", (spec.hidden_size,)
