"""How much memory an executor takes for a model: known before the model is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from paceline import _native
from paceline.executors.base import BLOCK_SIZE
from paceline.executors.native import KVDType, kv_bytes_per_block
from paceline.executors.quantize import Quantize, kept_type
from paceline.models.quants import UNQUANTIZED, QuantType
from paceline.models.spec import ModelSpec, ModelWeights

_LOGITS_ROWS = 32  # csrc/model.hpp: kLogitsChunk
_LINEAR_SCRATCH = 135_168  # csrc/model.hpp: Scratch, what is as large for every model
_RUNS_OF_16 = {QuantType.Q2_K, QuantType.Q3_K, QuantType.Q6_K}  # csrc/form.hpp: their readers need one more sum
_THREAD_BYTES = 160 << 10  # measured: resident memory with 64 threads less that with one
_TILE_QUERIES = 12  # csrc/matrix.hpp: kMostTileQueries


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a model's memory; what Python itself takes comes on top."""

    weights: int
    """Repacked."""
    buffers: int
    """Activations of the largest step, and what sampling needs."""
    threads: int
    """Stacks, and what the allocator keeps for each thread."""
    kv_block: int
    """32 tokens of one request in every layer."""

    @property
    def without_kv(self) -> int:
        """All but the KV cache."""
        return self.weights + self.buffers + self.threads

    def kv(self, tokens: int, requests: int = 1) -> int:
        """KV cache of requests of so many tokens each."""
        return requests * -(-tokens // BLOCK_SIZE) * self.kv_block

    def requests_that_fit(self, memory: int, tokens: int) -> int:
        """How many requests of so many tokens find room in ``memory`` beside the model itself."""
        return max(memory - self.without_kv, 0) // self.kv(tokens)

    def longest_request(self, memory: int) -> int:
        """Tokens of the longest request whose KV cache ``memory`` holds."""
        return memory // self.kv_block * BLOCK_SIZE


def native_footprint(
    weights: ModelWeights,
    *,
    kv_dtype: KVDType,
    max_batched_tokens: int,
    max_num_seqs: int,
    threads: int,
    quantize: Quantize | None = None,
) -> Footprint:
    """The memory of a ``NativeExecutor`` with these arguments that samples for ``max_num_seqs`` requests."""
    kept = {
        name: kept_type(name, tensor, quantize) for name, tensor in weights.tensors.items() if len(tensor.shape) == 2
    }
    return Footprint(
        weights=sum(_native.packed_bytes(int(kind), *weights.tensors[name].shape) for name, kind in kept.items()),
        buffers=_activations(weights.spec, kept, max_batched_tokens)
        + threads * _scratch(weights.spec)
        + _logits(weights.spec.vocab_size, max_num_seqs, threads),
        threads=threads * _THREAD_BYTES,
        kv_block=kv_bytes_per_block(weights.spec, kv_dtype),
    )


def torch_footprint(weights: ModelWeights, *, dtype: Literal["float32", "bfloat16"], half_kv: bool) -> Footprint:
    """The memory of a ``TorchExecutor``: matrices in ``dtype``. What a step takes is PyTorch's affair, and left out."""
    width = 2 if dtype == "bfloat16" else 4
    spec = weights.spec
    return Footprint(
        weights=sum(prod(t.shape) * (width if len(t.shape) == 2 else 4) for t in weights.tensors.values()),
        buffers=0,
        threads=0,
        kv_block=2 * BLOCK_SIZE * spec.num_layers * spec.kv_size * (2 if half_kv else 4),
    )


def _activations(spec: ModelSpec, kept: Mapping[str, QuantType], tokens: int) -> int:
    """What csrc/model.cpp allocates in ``finish_loading`` for matrices of these types."""
    floats = spec.hidden_size + spec.query_size + 2 * spec.kv_size
    if spec.post_norms or spec.residual_scale != 1.0:
        floats += spec.hidden_size
    if spec.query_size // spec.num_kv_heads % 32:
        floats += spec.query_size
    per_token = 4 * floats
    per_token += _row_bytes(spec, kept, spec.hidden_size, ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"))
    per_token += _row_bytes(spec, kept, spec.query_size, ("attn_output",))
    per_token += _row_bytes(spec, kept, spec.intermediate_size, ("ffn_down",))
    per_token += sum(4 * rope.dim for rope in {layer.rope for layer in spec.layers if layer.rope})
    return tokens * per_token


def _scratch(spec: ModelSpec) -> int:
    """What each thread has of its own."""
    return _LINEAR_SCRATCH + 4 * (_TILE_QUERIES * spec.head_dim + spec.hidden_size)


def _logits(vocab_size: int, rows: int, threads: int) -> int:
    """A float for each row that is sampled at a time, and the arrays of csrc/sampler.hpp for each thread: two are
    written at the start, the candidates (of three numbers) only where the thread samples."""
    sampled = min(rows, _LOGITS_ROWS)
    return 4 * vocab_size * (sampled + 2 * threads + 3 * min(sampled, threads))


def _row_bytes(spec: ModelSpec, kept: Mapping[str, QuantType], width: int, readers: tuple[str, ...]) -> int:
    """One row of activations as its readers in all layers want it: int8 with sums, float32, or both."""
    kinds = {
        kept[name]
        for layer in range(spec.num_layers)
        for reader in readers
        if (name := f"blk.{layer}.{reader}.weight") in kept
    }
    floats = 4 * width if kinds & UNQUANTIZED else 0
    codes = width + 12 * (width // 32) if kinds - UNQUANTIZED else 0
    return floats + codes + (4 * (width // 32) if kinds & _RUNS_OF_16 else 0)
