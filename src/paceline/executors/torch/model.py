"""The forward pass in plain PyTorch: everything that ``ModelSpec`` can say, in the order a reader would write it down.

Products with weight matrices run in the model's ``dtype``; the residual stream, norms, rotations and attention are
float32 whatever that is.
"""

import torch
from torch import Tensor
from torch.nn import functional

from paceline.executors.base import BLOCK_SIZE
from paceline.executors.torch.step import AttentionGroup, Step
from paceline.models.quants import dequantize
from paceline.models.rope import RopeSpec
from paceline.models.spec import LayerSpec, ModelSpec, ModelWeights

Rotations = dict[RopeSpec, tuple[Tensor, Tensor]]
"""cos and sin of each rotation for the step's tokens, [T, 1, dim/2]."""


class KVCache:
    """Keys and values of all layers, [layers, 2, blocks, 32, kv_heads, head_dim].

    Values in it are always finite. Attention gives hidden tokens the weight 0, and 0·NaN is NaN: what is not finite
    would reach queries that must not see it, such as those of the request that gets the block next. So a value with a
    NaN or an infinity is kept as 0 with a NaN key, which only poisons queries that do see it.
    """

    def __init__(self, spec: ModelSpec, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (spec.num_layers, 2, num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        self._blocks = torch.zeros(shape, dtype=dtype, device=device)

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        if len(sources):
            self._blocks[:, :, destinations] = self._blocks[:, :, sources]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values [T, kv_heads, head_dim], rounded to the cache's type."""
        k, v = keys.to(self._blocks.dtype), values.to(self._blocks.dtype)
        broken = ~v.isfinite().all(-1, keepdim=True)
        by_slot = self._blocks[layer].flatten(1, 2)  # a view
        by_slot[0, slots] = k.masked_fill(broken, torch.nan)
        by_slot[1, slots] = v.masked_fill(broken, 0)

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [N, K, kv_heads, head_dim] of block tables [N, K / 32], float32."""
        keys, values = self._blocks[layer][:, blocks].flatten(2, 3).float()
        return keys, values


class TorchModel:
    """A model's weights, dequantized onto a device, and what it computes from them."""

    def __init__(self, weights: ModelWeights, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = weights.spec
        self._dtype = dtype
        self._weights: dict[str, Tensor] = {}
        for name, tensor in weights.tensors.items():
            kept = dtype if len(tensor.shape) == 2 else torch.float32
            self._weights[name] = torch.from_numpy(dequantize(tensor)).to(device, kept)
        self._frequencies = {
            layer.rope: torch.from_numpy(layer.rope.inverse_frequencies()).to(device)
            for layer in self.spec.layers
            if layer.rope is not None
        }

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights.values())

    def hidden(self, step: Step, cache: KVCache) -> Tensor:
        """The residual stream [T, hidden] after all layers; the step's keys and values are in the cache then."""
        rotations = self._rotations(step.positions)
        x = self._embed(step)
        for number, layer in enumerate(self.spec.layers):
            x = x + self._layer(number, layer, x, step, cache, rotations)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, vocab_size], float32, from rows of the residual stream [R, hidden]."""
        spec = self.spec
        head = "token_embd" if spec.tied_embeddings else "output"
        logits = self._matrix(f"{head}.weight", self._norm("output_norm", hidden))
        if "output" in spec.biases:
            logits = logits + self._weights["output.bias"]
        return _softcap(logits * spec.logits_scale, spec.logits_softcap)

    def _embed(self, step: Step) -> Tensor:
        x = self._weights["token_embd.weight"][step.token_ids].float() * self.spec.embedding_scale
        if self.spec.learned_positions:
            x = x + self._weights["position_embd.weight"][step.positions].float()
        return x

    def _layer(
        self, number: int, layer: LayerSpec, x: Tensor, step: Step, cache: KVCache, rotations: Rotations
    ) -> Tensor:
        """What a layer adds to the residual stream."""
        spec, prefix = self.spec, f"blk.{number}."
        h = self._norm(prefix + "attn_norm", x) if spec.pre_norms else x
        q, k, v = self._queries_keys_values(prefix, h)
        if layer.rope is not None:
            q, k = _rotate(layer.rope, q, rotations), _rotate(layer.rope, k, rotations)
        cache.write(number, step.slots, k, v)
        attended = torch.empty_like(q)
        for group in step.groups:
            attended[group.tokens] = self._attend(layer, q[group.tokens], group, *cache.read(number, group.blocks))
        a = self._linear(prefix + "attn_output", attended.flatten(1))
        if spec.post_norms:
            a = self._norm(prefix + "post_attention_norm", a)
        a = spec.residual_scale * a
        if not spec.parallel_residual:
            h = self._norm(prefix + "ffn_norm", x + a) if spec.pre_norms else x + a
        m = self._feed_forward(prefix, h)
        if spec.post_norms:
            m = self._norm(prefix + "post_ffw_norm", m)
        return a + spec.residual_scale * m

    def _queries_keys_values(self, prefix: str, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, heads, head_dim], [T, kv_heads, head_dim] twice."""
        spec = self.spec
        q, k, v = (self._linear(prefix + name, h) for name in ("attn_q", "attn_k", "attn_v"))
        if spec.qk_norm == "whole":
            q, k = self._rms_norm(prefix + "attn_q_norm", q), self._rms_norm(prefix + "attn_k_norm", k)
        q, k, v = (x.view(len(h), -1, spec.head_dim) for x in (q, k, v))
        if spec.qk_norm == "head":
            q, k = self._rms_norm(prefix + "attn_q_norm", q), self._rms_norm(prefix + "attn_k_norm", k)
        return q, k, v

    def _attend(self, layer: LayerSpec, q: Tensor, group: AttentionGroup, keys: Tensor, values: Tensor) -> Tensor:
        """Grouped-query attention (https://arxiv.org/abs/2305.13245): queries [N, Q, heads, head_dim] over keys and
        values [N, K, kv_heads, head_dim] give [N, Q, heads, head_dim].

        Written out, since fused kernels add a mask to the scores instead of choosing: a hidden NaN would show.
        """
        spec = self.spec
        q = q.view(*q.shape[:2], spec.num_kv_heads, -1, spec.head_dim)
        scores = torch.einsum("nqhgd,nkhd->nhgqk", q, keys) * spec.attention_scale
        scores = _softcap(scores, spec.attention_softcap)
        scores = scores.masked_fill(~group.visible(layer.window)[:, None, None], -torch.inf)
        return torch.einsum("nhgqk,nkhd->nqhgd", scores.softmax(-1), values).flatten(2, 3)

    def _feed_forward(self, prefix: str, h: Tensor) -> Tensor:
        """Plain, or with a gate (https://arxiv.org/abs/2002.05202)."""
        up = self._linear(prefix + "ffn_up", h)
        inner = self._activate(self._linear(prefix + "ffn_gate", h)) * up if self.spec.gated else self._activate(up)
        return self._linear(prefix + "ffn_down", inner)

    def _activate(self, x: Tensor) -> Tensor:
        return functional.silu(x) if self.spec.activation == "silu" else functional.gelu(x, approximate="tanh")

    def _norm(self, name: str, x: Tensor) -> Tensor:
        if self.spec.norm == "rms":
            return self._rms_norm(name, x)
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return functional.layer_norm(x, weight.shape, weight, bias, self.spec.norm_eps)

    def _rms_norm(self, name: str, x: Tensor) -> Tensor:
        weight = self._weights[f"{name}.weight"]
        return functional.rms_norm(x, weight.shape, weight, self.spec.norm_eps)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out = self._matrix(f"{name}.weight", x)
        return out + self._weights[f"{name}.bias"] if name.rpartition(".")[2] in self.spec.biases else out

    def _matrix(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x.to(self._dtype), self._weights[name]).float()

    def _rotations(self, positions: Tensor) -> Rotations:
        """Angles in float64: at position 100 000 float32 is off by a hundredth of a radian."""
        angles = {rope: positions[:, None, None] * frequencies for rope, frequencies in self._frequencies.items()}
        return {
            rope: ((angle.cos() * rope.magnitude).float(), (angle.sin() * rope.magnitude).float())
            for rope, angle in angles.items()
        }


def _rotate(rope: RopeSpec, x: Tensor, rotations: Rotations) -> Tensor:
    """https://arxiv.org/abs/2104.09864, eq. 34, in the file's own pairing: heads [T, heads, head_dim] of T tokens."""
    cos, sin = rotations[rope]
    rotated, rest = x[..., : rope.dim], x[..., rope.dim :]
    interleaved = rope.pairing == "interleaved"
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    turned = a * cos - b * sin, a * sin + b * cos
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((joined, rest), -1)


def _softcap(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)
