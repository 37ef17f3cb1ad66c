"""The forward pass as the papers write it: numpy, float64, one sequence, no cache. An oracle; slow on purpose."""

from typing import Any

import numpy as np

from paceline.models.quants import dequantize
from paceline.models.rope import RopeSpec
from paceline.models.spec import LayerSpec, ModelSpec, ModelWeights

Float64 = np.ndarray[Any, np.dtype[np.float64]]
Block = dict[str, Float64]
"""The tensors of one layer, by their names without ``blk.<layer>.``."""


def reference_logits(weights: ModelWeights, token_ids: list[int]) -> Float64:
    """Logits [T, vocab_size] of every position of a sequence."""
    spec = weights.spec
    w = {name: dequantize(tensor).astype(np.float64) for name, tensor in weights.tensors.items()}
    x = w["token_embd.weight"][token_ids] * spec.embedding_scale
    if spec.learned_positions:
        x = x + w["position_embd.weight"][: len(x)]
    for number, layer in enumerate(spec.layers):
        prefix = f"blk.{number}."
        x = x + increment(spec, layer, {k.removeprefix(prefix): v for k, v in w.items() if k.startswith(prefix)}, x)
    head = w["token_embd.weight"] if spec.tied_embeddings else w["output.weight"]
    logits = norm(spec, w, "output_norm", x) @ head.T
    if "output" in spec.biases:
        logits = logits + w["output.bias"]
    return softcapped(logits * spec.logits_scale, spec.logits_softcap)


def increment(spec: ModelSpec, layer: LayerSpec, block: Block, x: Float64) -> Float64:
    """What a layer adds to the residual stream x, [T, hidden]."""
    h = norm(spec, block, "attn_norm", x) if spec.pre_norms else x
    attended = attention(spec, layer, block, h)
    if spec.post_norms:
        attended = norm(spec, block, "post_attention_norm", attended)
    attended = spec.residual_scale * attended
    if not spec.parallel_residual:
        h = norm(spec, block, "ffn_norm", x + attended) if spec.pre_norms else x + attended
    fed = feed_forward(spec, block, h)
    if spec.post_norms:
        fed = norm(spec, block, "post_ffw_norm", fed)
    return attended + spec.residual_scale * fed


def norm(spec: ModelSpec, tensors: Block, name: str, x: Float64) -> Float64:
    if spec.norm == "layer":
        return layer_norm(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"], spec.norm_eps)
    return rms_norm(x, tensors[f"{name}.weight"], spec.norm_eps)


def rms_norm(x: Float64, weight: Float64, eps: float) -> Float64:
    """https://arxiv.org/abs/1910.07467"""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def layer_norm(x: Float64, weight: Float64, bias: Float64, eps: float) -> Float64:
    """https://arxiv.org/abs/1607.06450"""
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * weight + bias


def linear(spec: ModelSpec, block: Block, name: str, x: Float64) -> Float64:
    out = x @ block[f"{name}.weight"].T
    return out + block[f"{name}.bias"] if name in spec.biases else out


def feed_forward(spec: ModelSpec, block: Block, h: Float64) -> Float64:
    """Plain, or with a gate (https://arxiv.org/abs/2002.05202)."""
    activation = {"silu": silu, "gelu_tanh": gelu_tanh}[spec.activation]
    up = linear(spec, block, "ffn_up", h)
    inner = activation(linear(spec, block, "ffn_gate", h)) * up if spec.gated else activation(up)
    return linear(spec, block, "ffn_down", inner)


def silu(x: Float64) -> Float64:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: Float64) -> Float64:
    """https://arxiv.org/abs/1606.08415"""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softcapped(x: Float64, cap: float | None) -> Float64:
    return x if cap is None else cap * np.tanh(x / cap)


def attention(spec: ModelSpec, layer: LayerSpec, block: Block, h: Float64) -> Float64:
    """Causal grouped-query attention (https://arxiv.org/abs/2305.13245) with rotary positions."""
    tokens = len(h)
    q, k = linear(spec, block, "attn_q", h), linear(spec, block, "attn_k", h)
    if spec.qk_norm == "whole":
        q, k = qk_norms(spec, block, q, k)
    q, k = q.reshape(tokens, spec.num_heads, spec.head_dim), k.reshape(tokens, spec.num_kv_heads, spec.head_dim)
    if spec.qk_norm == "head":
        q, k = qk_norms(spec, block, q, k)
    if layer.rope is not None:
        q, k = rotate(layer.rope, q), rotate(layer.rope, k)
    v = linear(spec, block, "attn_v", h).reshape(tokens, spec.num_kv_heads, spec.head_dim)
    group = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    scores = softcapped(np.einsum("qhd,khd->hqk", q, k) * spec.attention_scale, spec.attention_softcap)
    scores = np.where(visible(tokens, layer.window), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return linear(spec, block, "attn_output", np.einsum("hqk,khd->qhd", p, v).reshape(tokens, -1))


def qk_norms(spec: ModelSpec, block: Block, q: Float64, k: Float64) -> tuple[Float64, Float64]:
    """https://arxiv.org/abs/2010.04245, with RMSNorm"""
    weights = block["attn_q_norm.weight"], block["attn_k_norm.weight"]
    return rms_norm(q, weights[0], spec.norm_eps), rms_norm(k, weights[1], spec.norm_eps)


def visible(tokens: int, window: int | None) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """[query, key]: a query sees itself and the tokens before it, no more than the window in all."""
    causal = np.tri(tokens, dtype=bool)
    return causal if window is None else causal & ~np.tri(tokens, k=-window, dtype=bool)


def rotate(rope: RopeSpec, x: Float64) -> Float64:
    """https://arxiv.org/abs/2104.09864, eq. 34, in the file's own pairing: no permutation here. x is [T, H, dim]."""
    half = rope.dim // 2
    angle = np.arange(len(x))[:, None] * rope.inverse_frequencies()
    cos, sin = rope.magnitude * np.cos(angle)[:, None], rope.magnitude * np.sin(angle)[:, None]
    out = x.copy()
    pairs = (
        (np.arange(0, 2 * half, 2), np.arange(1, 2 * half, 2))
        if rope.pairing == "interleaved"
        else (np.arange(half), np.arange(half, 2 * half))
    )
    a, b = x[..., pairs[0]], x[..., pairs[1]]
    out[..., pairs[0]], out[..., pairs[1]] = a * cos - b * sin, a * sin + b * cos
    return out
