"""What a model is, as data: every choice an architecture makes is a field, so that executors hold no model names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.models.quants import Tensor


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al., RoFormer, https://arxiv.org/abs/2104.09864)."""

    theta: float
    """Base of the inverse frequencies theta^(-2i/dim)."""
    dim: int
    """Leading dimensions of each head that are rotated; even."""
    pairing: Literal["interleaved", "half"]
    """Which dimensions rotate together: (2i, 2i+1), or (i, i + dim/2)."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and choices of a decoder-only transformer with RMSNorm, SwiGLU and grouped-query attention."""

    architecture: str
    """GGUF's ``general.architecture``, such as ``llama``."""
    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    context_length: int
    """Longest sequence the model was trained for, in tokens."""
    norm_eps: float
    rope: RopeSpec
    tied_embeddings: bool
    """The output head shares the embedding matrix."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A spec and the tensors that go with it, under GGUF's names (``blk.0.attn_q.weight``), still as stored."""

    spec: ModelSpec
    tensors: Mapping[str, Tensor]
