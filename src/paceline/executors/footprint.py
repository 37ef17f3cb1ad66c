"""How much memory the native executor takes for a model: known before the model is loaded."""

from dataclasses import dataclass

from paceline import _native
from paceline.executors.base import BLOCK_SIZE
from paceline.executors.native import KVDType, kv_bytes_per_block
from paceline.models.quants import QuantType
from paceline.models.spec import ModelWeights

_UNQUANTIZED = {QuantType.F32, QuantType.F16, QuantType.BF16}
_LOGITS_ROWS = 32  # csrc/model.hpp: kLogitsChunk


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a model's memory; what Python itself takes comes on top."""

    weights: int
    """Repacked."""
    buffers: int
    """Activations of the largest step, and what sampling needs."""
    kv_block: int
    """32 tokens of one request in every layer."""

    def kv(self, tokens: int, requests: int = 1) -> int:
        """KV cache of requests of so many tokens each."""
        return requests * -(-tokens // BLOCK_SIZE) * self.kv_block

    def requests_that_fit(self, memory: int, tokens: int) -> int:
        """How many requests of so many tokens find room in ``memory`` beside the model itself."""
        return max(memory - self.weights - self.buffers, 0) // self.kv(tokens)

    def longest_request(self, memory: int) -> int:
        """Tokens of the longest request whose KV cache ``memory`` holds."""
        return memory // self.kv_block * BLOCK_SIZE


def footprint(weights: ModelWeights, kv_dtype: KVDType, max_batched_tokens: int, threads: int) -> Footprint:
    """The memory of a ``NativeExecutor`` with these arguments."""
    return Footprint(
        weights=sum(
            _native.packed_bytes(int(tensor.type), *tensor.shape)
            for tensor in weights.tensors.values()
            if len(tensor.shape) == 2
        ),
        buffers=_buffers(weights, max_batched_tokens, threads),
        kv_block=kv_bytes_per_block(weights.spec, kv_dtype),
    )


def _buffers(weights: ModelWeights, tokens: int, threads: int) -> int:
    """What csrc/model.cpp allocates in ``finish_loading``, and the samplers' arrays."""
    spec = weights.spec
    floats = spec.hidden_size + spec.query_size + 2 * spec.kv_size
    if spec.post_norms or spec.residual_scale != 1.0:
        floats += spec.hidden_size
    per_token = 4 * floats
    per_token += _row_bytes(weights, spec.hidden_size, ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"))
    per_token += _row_bytes(weights, spec.query_size, ("attn_output",))
    per_token += _row_bytes(weights, spec.intermediate_size, ("ffn_down",))
    per_token += sum(4 * rope.dim for rope in {layer.rope for layer in spec.layers if layer.rope})
    return tokens * per_token + 4 * spec.vocab_size * (_LOGITS_ROWS + 5 * threads)


def _row_bytes(weights: ModelWeights, width: int, readers: tuple[str, ...]) -> int:
    """One row of activations as its readers in all layers want it: int8 with sums, float32, or both."""
    kinds = {
        weights.tensors[name].type in _UNQUANTIZED
        for layer in range(weights.spec.num_layers)
        for reader in readers
        if (name := f"blk.{layer}.{reader}.weight") in weights.tensors
    }
    return (4 * width if True in kinds else 0) + (width + 16 * (width // 32) if False in kinds else 0)
