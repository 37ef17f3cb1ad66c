"""Models of a few thousand random weights, in any stored type."""

from collections.abc import Iterator

import numpy as np

from paceline.models.quants import QuantType, Tensor
from paceline.models.spec import ModelSpec, ModelWeights, RopeSpec


def tiny_spec(
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 32,
    layers: int = 2,
    pairing: str = "interleaved",
    tied: bool = True,
) -> ModelSpec:
    """A vocabulary of 150 is no multiple of 16, so that a padded panel is always there."""
    return ModelSpec(
        architecture="llama",
        name="tiny",
        vocab_size=150,
        hidden_size=64,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=96,
        context_length=1024,
        norm_eps=1e-5,
        rope=RopeSpec(theta=10000.0, dim=head_dim, pairing=pairing),  # type: ignore[arg-type]
        tied_embeddings=tied,
    )


def tiny_weights(spec: ModelSpec, kind: QuantType = QuantType.F32, seed: int = 0) -> ModelWeights:
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in _shapes(spec):
        if len(shape) == 1:
            data = (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32).view(np.uint8)
            tensors[name] = Tensor(name, shape, QuantType.F32, data.reshape(-1))
        else:
            tensors[name] = Tensor(name, shape, kind, random_stored(rng, shape, kind))
    return ModelWeights(spec, tensors)


def random_stored(rng: np.random.Generator, shape: tuple[int, int], kind: QuantType) -> np.ndarray:
    """Stored bytes of random weights of about unit norm per row."""
    outputs, inputs = shape
    spread = 1.5 / np.sqrt(inputs)
    if kind in (QuantType.F32, QuantType.F16, QuantType.BF16):
        values = (spread * rng.standard_normal(shape)).astype(np.float32)
        if kind == QuantType.BF16:
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
        return values.astype(np.float16 if kind == QuantType.F16 else np.float32).view(np.uint8).reshape(-1)
    blocks = rng.integers(0, 256, (outputs * inputs // 32, kind.block.bytes), dtype=np.uint8)
    # What random codes stand for, so that scales keep the weights small: the spread of the codes, and their middle.
    code_spread, middle = {
        QuantType.Q4_0: (4.6, 0),
        QuantType.Q4_1: (4.6, 7.5),
        QuantType.Q5_0: (9.2, 0),
        QuantType.Q5_1: (9.2, 15.5),
        QuantType.Q8_0: (74, 0),
    }[kind]
    scales = (spread / code_spread * rng.uniform(0.5, 1.5, len(blocks))).astype(np.float16)
    blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    if middle:
        blocks[:, 2:4] = (-middle * scales).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def _shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield "token_embd.weight", (spec.vocab_size, hidden)
    yield "output_norm.weight", (hidden,)
    if not spec.tied_embeddings:
        yield "output.weight", (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        for name, shape in {
            "attn_norm": (hidden,),
            "attn_q": (query, hidden),
            "attn_k": (key, hidden),
            "attn_v": (key, hidden),
            "attn_output": (hidden, query),
            "ffn_norm": (hidden,),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }.items():
            yield f"blk.{layer}.{name}.weight", shape
