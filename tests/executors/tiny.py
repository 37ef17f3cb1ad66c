"""Models of a few thousand random weights, in any stored type."""

import numpy as np

from paceline.models.quants import QuantType, Tensor, dequantize
from paceline.models.rope import RopeSpec
from paceline.models.spec import LayerSpec, ModelSpec, ModelWeights, tensor_shapes


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
    rope = RopeSpec(theta=10000.0, dim=head_dim, pairing=pairing)  # type: ignore[arg-type]
    return ModelSpec(
        architecture="llama",
        name="tiny",
        vocab_size=150,
        hidden_size=64,
        layers=(LayerSpec(rope),) * layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=96,
        context_length=1024,
        norm_eps=1e-5,
        attention_scale=head_dim**-0.5,
        tied_embeddings=tied,
    )


def tiny_weights(spec: ModelSpec, kind: QuantType = QuantType.F32, seed: int = 0) -> ModelWeights:
    """Where the type's blocks do not divide a row, Q8_0 stands in, as in files that llama.cpp quantizes."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(spec):
        if len(shape) == 1:
            data = (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32).view(np.uint8)
            tensors[name] = Tensor(name, shape, QuantType.F32, data.reshape(-1))
        else:
            type_ = kind if shape[1] % kind.block.elements == 0 else QuantType.Q8_0
            tensors[name] = Tensor(name, shape, type_, random_stored(rng, shape, type_))
    return ModelWeights(spec, tensors)


# Where a block keeps its float16 scale and minimum, and the minimum that puts the weights' middle near 0 where random
# codes and factors have a scale of 1.
_SCALE_AT = {
    QuantType.Q4_0: 0, QuantType.Q4_1: 0, QuantType.Q5_0: 0, QuantType.Q5_1: 0, QuantType.Q8_0: 0, QuantType.IQ4_NL: 0,
    QuantType.Q2_K: 80, QuantType.Q3_K: 108, QuantType.Q4_K: 0, QuantType.Q5_K: 0, QuantType.Q6_K: 208,
}  # fmt: skip
_MINIMUM_AT = {
    QuantType.Q4_1: (2, -7.5), QuantType.Q5_1: (2, -15.5),
    QuantType.Q2_K: (82, 1.5), QuantType.Q4_K: (2, 7.5), QuantType.Q5_K: (2, 15.5),
}  # fmt: skip


def random_stored(rng: np.random.Generator, shape: tuple[int, int], kind: QuantType) -> np.ndarray:
    """Stored bytes of random weights of about unit norm per row."""
    inputs = shape[1]
    spread = 1.5 / np.sqrt(inputs)
    if kind in (QuantType.F32, QuantType.F16, QuantType.BF16):
        values = (spread * rng.standard_normal(shape)).astype(np.float32)
        if kind == QuantType.BF16:
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
        return values.astype(np.float16 if kind == QuantType.F16 else np.float32).view(np.uint8).reshape(-1)
    blocks = rng.integers(0, 256, (shape[0] * inputs // kind.block.elements, kind.block.bytes), dtype=np.uint8)
    set_scales(blocks, kind, np.ones(len(blocks)))
    unscaled = dequantize(Tensor("w", shape, kind, blocks.reshape(-1)))
    set_scales(blocks, kind, spread / unscaled.std() * rng.uniform(0.5, 1.5, len(blocks)))
    return blocks.reshape(-1)


def set_scales(blocks: np.ndarray, kind: QuantType, scales: np.ndarray, centred: bool = True) -> None:
    """Gives each of the blocks [blocks, bytes] its scale, and a minimum of 0 or one that centres random weights."""
    at = _SCALE_AT[kind]
    blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    if kind in _MINIMUM_AT:
        at, middle = _MINIMUM_AT[kind]
        minima = (middle if centred else 0) * scales
        blocks[:, at : at + 2] = minima.astype(np.float16).view(np.uint8).reshape(-1, 2)
