"""A tiny model for every choice that a ``ModelSpec`` can express."""

from dataclasses import replace

from paceline.models.rope import LinearScaling, RopeSpec, YarnScaling
from paceline.models.spec import LayerSpec, ModelSpec
from tests.executors.tiny import tiny_spec

LINEAR_LAYERS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output")
ROPE = RopeSpec(theta=10000.0, dim=32, pairing="half")


def roped(*ropes: RopeSpec | None, windows: tuple[int | None, ...] = (None, None)) -> ModelSpec:
    layers = tuple(LayerSpec(rope, window) for rope, window in zip(ropes, windows, strict=True))
    return replace(tiny_spec(), layers=layers)


BASE = tiny_spec()
TINY_SPECS = {
    "grouped": BASE,
    "half-paired": tiny_spec(pairing="half"),
    "untied": tiny_spec(tied=False),
    "multi-head": tiny_spec(heads=4, kv_heads=4, head_dim=64),
    "multi-query": tiny_spec(heads=8, kv_heads=1, head_dim=32),
    "seven-heads": tiny_spec(heads=7, kv_heads=1, head_dim=96),
    "wide-heads": tiny_spec(heads=2, kv_heads=1, head_dim=256),
    "layer-norm": replace(BASE, norm="layer"),
    "post-norms": replace(BASE, post_norms=True),
    "post-norms-only": replace(BASE, pre_norms=False, post_norms=True),
    "no-norms": replace(BASE, pre_norms=False),
    "parallel-residual": replace(BASE, parallel_residual=True),
    "parallel-residual-post-norms": replace(BASE, parallel_residual=True, post_norms=True, residual_scale=0.6),
    "qk-norm-by-head": replace(BASE, qk_norm="head"),
    "qk-norm-whole": replace(tiny_spec(pairing="half"), qk_norm="whole"),
    "gelu": replace(BASE, activation="gelu_tanh"),
    "ungated": replace(BASE, gated=False, activation="gelu_tanh"),
    "biases": replace(tiny_spec(tied=False), biases=frozenset(LINEAR_LAYERS)),
    "learned-positions": replace(roped(None, None), learned_positions=True),
    "scales": replace(BASE, embedding_scale=3.0, residual_scale=0.4, logits_scale=0.3, attention_scale=0.1),
    "soft-caps": replace(BASE, attention_softcap=1.5, logits_softcap=2.0, logits_scale=1.5),
    "window": roped(ROPE, ROPE, windows=(50, 50)),
    "window-of-one": roped(ROPE, ROPE, windows=(1, None)),
    "alternating-windows": roped(replace(ROPE, theta=500.0), ROPE, windows=(33, None)),
    "one-layer-without-rope": roped(ROPE, None),
    "partial-rotary": roped(replace(ROPE, dim=16), replace(ROPE, dim=16, pairing="interleaved")),
    "linear-scaling": roped(*2 * [replace(ROPE, scaling=LinearScaling(8.0))]),
    "yarn": roped(*2 * [replace(ROPE, scaling=YarnScaling(4.0, original_context=64, magnitude=1.14))]),
    "frequency-divisors": roped(*2 * [replace(ROPE, frequency_divisors=(1.0, 1.0, 2.5, 8.0) * 4)]),
}
