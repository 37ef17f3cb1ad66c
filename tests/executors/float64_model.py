"""The forward pass as the papers write it: numpy, float64, one sequence, no cache. An oracle; slow on purpose."""

from typing import Any

import numpy as np

from paceline.models.quants import dequantize
from paceline.models.spec import ModelSpec, ModelWeights

Float64 = np.ndarray[Any, np.dtype[np.float64]]


def reference_logits(weights: ModelWeights, token_ids: list[int]) -> Float64:
    """Logits [T, vocab_size] of every position of a sequence."""
    spec = weights.spec
    w = {name: dequantize(tensor).astype(np.float64) for name, tensor in weights.tensors.items()}
    x = w["token_embd.weight"][token_ids]
    for layer in range(spec.num_layers):
        block = {name.split(".")[2]: w[name] for name in w if name.startswith(f"blk.{layer}.")}
        x = x + attention(spec, block, rms_norm(x, block["attn_norm"], spec.norm_eps))
        h = rms_norm(x, block["ffn_norm"], spec.norm_eps)
        x = x + (silu(h @ block["ffn_gate"].T) * (h @ block["ffn_up"].T)) @ block["ffn_down"].T
    head = w["token_embd.weight"] if spec.tied_embeddings else w["output.weight"]
    return rms_norm(x, w["output_norm.weight"], spec.norm_eps) @ head.T


def rms_norm(x: Float64, weight: Float64, eps: float) -> Float64:
    """https://arxiv.org/abs/1910.07467"""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def silu(x: Float64) -> Float64:
    return x / (1 + np.exp(-x))


def attention(spec: ModelSpec, block: dict[str, Float64], h: Float64) -> Float64:
    """Causal grouped-query attention (https://arxiv.org/abs/2305.13245) with rotary positions."""
    tokens = len(h)
    q = rotate(spec, (h @ block["attn_q"].T).reshape(tokens, spec.num_heads, spec.head_dim))
    k = rotate(spec, (h @ block["attn_k"].T).reshape(tokens, spec.num_kv_heads, spec.head_dim))
    v = (h @ block["attn_v"].T).reshape(tokens, spec.num_kv_heads, spec.head_dim)
    group = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(spec.head_dim)
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", p, v).reshape(tokens, -1) @ block["attn_output"].T


def rotate(spec: ModelSpec, x: Float64) -> Float64:
    """https://arxiv.org/abs/2104.09864, eq. 34, in the file's own pairing: no permutation here."""
    rope = spec.layers[0].rope
    assert rope
    half = rope.dim // 2
    angle = np.arange(len(x))[:, None] * rope.theta ** (-2 * np.arange(half) / rope.dim)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    out = x.copy()
    pairs = (
        (np.arange(0, 2 * half, 2), np.arange(1, 2 * half, 2))
        if rope.pairing == "interleaved"
        else (np.arange(half), np.arange(half, 2 * half))
    )
    a, b = x[..., pairs[0]], x[..., pairs[1]]
    out[..., pairs[0]], out[..., pairs[1]] = a * cos - b * sin, a * sin + b * cos
    return out
