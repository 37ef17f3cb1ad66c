"""The CPU executor: repacks a model's weights once, then runs each batch in one call of the C++ forward pass."""

import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from paceline import _native
from paceline.errors import ExecutorError, ModelFileError
from paceline.executors.base import BLOCK_SIZE, Batch, Float32, KVGeometry, StepResult
from paceline.executors.quantize import Quantize, kept_type
from paceline.models.quants import Tensor, dequantize
from paceline.models.rope import RopeSpec
from paceline.models.spec import ModelSpec, ModelWeights

KVDType = Literal["f16", "f32", "int8"]

_KV_TYPES = {"f16": _native.KVType.F16, "f32": _native.KVType.F32, "int8": _native.KVType.INT8}
_ACTIVATIONS = {"silu": _native.Activation.SILU, "gelu_tanh": _native.Activation.GELU_TANH}
_TOUCHED_BYTES = 2 << 20
"""A huge page. The kernel holds a lock of the whole process meanwhile."""
_STRETCH_BYTES = 32 << 20
_ROTATED = {"attn_q", "attn_k", "attn_q_norm", "attn_k_norm"}


def kv_bytes_per_block(spec: ModelSpec, kv_dtype: KVDType) -> int:
    """Bytes of one KV block: K and V of 32 tokens in every layer."""
    per_head = {"f16": 2 * spec.head_dim, "f32": 4 * spec.head_dim, "int8": spec.head_dim + 2 * -(-spec.head_dim // 32)}
    return 2 * BLOCK_SIZE * spec.num_layers * spec.num_kv_heads * per_head[kv_dtype]


class NativeExecutor:
    """Runs a model on the CPU with the kernels of the best instruction set there is.

    ``PACELINE_ISA`` (avx512, avx2, baseline) forces another one. After construction the model file is not needed any
    more.

    Args:
        num_blocks: size of the KV pool in blocks of 32 tokens.
        max_model_len: longest sequence, in tokens.
        max_batched_tokens: most tokens in one batch.
        kv_dtype: type in which K and V are kept; int8 has a float16 scale per token, head and 32 dimensions.
        threads: size of the thread pool.
        quantize: quantizes the matrices whose weights are floats; see ``kept_type``.

    Raises:
        ModelFileError: the model's shape is one that the kernels do not cover.
        MemoryError: the KV pool or the weights do not fit the address space.
    """

    def __init__(
        self,
        weights: ModelWeights,
        *,
        num_blocks: int,
        max_model_len: int,
        max_batched_tokens: int = 512,
        kv_dtype: KVDType = "f16",
        threads: int = 1,
        quantize: Quantize | None = None,
    ) -> None:
        self.spec = weights.spec
        self.threads = threads
        self.kv_dtype: KVDType = kv_dtype
        self.max_batched_tokens = max_batched_tokens
        self.kv_geometry = KVGeometry(BLOCK_SIZE, num_blocks, kv_bytes_per_block(weights.spec, kv_dtype))
        try:
            self._model: _native.Model | None = _load(
                weights, num_blocks, max_model_len, max_batched_tokens, kv_dtype, threads, quantize
            )
        except ValueError as error:
            raise ModelFileError(f"{weights.spec.name}: the native executor cannot run this model: {error}") from error

    @property
    def isa(self) -> str:
        """Instruction set of the kernels in use."""
        return self._open_model().isa

    @property
    def device(self) -> str:
        """See ``Executor.device``."""
        return f"CPU, {self.isa}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    @property
    def weight_bytes(self) -> int:
        """Memory of the repacked weights."""
        return self._open_model().weight_bytes

    @property
    def buffer_bytes(self) -> int:
        """Memory of the activations of the largest step."""
        return self._open_model().buffer_bytes

    def execute(self, batch: Batch) -> StepResult:
        """See ``Executor.execute``."""
        try:
            return StepResult(*self._open_model().step(batch))
        except (ValueError, TypeError, RuntimeError, MemoryError) as error:
            raise ExecutorError(str(error)) from error

    def logits(self, batch: Batch) -> Float32:
        """Run the batch and return its rows' raw logits, [R, vocab_size], drawing nothing: for tests and scoring.

        Raises:
            ExecutorError: as ``execute`` does.
        """
        try:
            return self._open_model().logits(batch)
        except (ValueError, TypeError, RuntimeError, MemoryError) as error:
            raise ExecutorError(str(error)) from error

    def touch_kv(self) -> Iterator[None]:
        """See ``Executor.touch_kv``."""
        num_bytes = self._open_model().kv_bytes
        for begin in range(0, num_bytes, _TOUCHED_BYTES):
            try:
                self._open_model().touch_kv(begin, _TOUCHED_BYTES)
            except MemoryError as error:
                raise ExecutorError(
                    f"the machine has {begin >> 20} MiB of memory for the KV cache, not {num_bytes >> 20}"
                ) from error
            yield

    def close(self) -> None:
        """See ``Executor.close``."""
        self._model = None

    def _open_model(self) -> _native.Model:
        if self._model is None:
            raise ExecutorError("the executor is closed")
        return self._model


def _load(
    weights: ModelWeights,
    num_blocks: int,
    max_model_len: int,
    max_batched_tokens: int,
    kv_dtype: KVDType,
    threads: int,
    quantize: Quantize | None,
) -> _native.Model:
    spec = weights.spec
    ropes = list(dict.fromkeys(layer.rope for layer in spec.layers if layer.rope))
    model = _native.Model(
        vocab_size=spec.vocab_size,
        hidden=spec.hidden_size,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate=spec.intermediate_size,
        layers=[(ropes.index(layer.rope) if layer.rope else -1, layer.window or 0) for layer in spec.layers],
        ropes=[(rope.inverse_frequencies().tolist(), rope.magnitude) for rope in ropes],
        norm_eps=spec.norm_eps,
        attention_scale=spec.attention_scale,
        attention_softcap=spec.attention_softcap or 0.0,
        logits_softcap=spec.logits_softcap or 0.0,
        logits_scale=spec.logits_scale,
        embedding_scale=spec.embedding_scale,
        residual_scale=spec.residual_scale,
        tied_embeddings=spec.tied_embeddings,
        parallel_residual=spec.parallel_residual,
        activation=_ACTIVATIONS[spec.activation],
        num_blocks=num_blocks,
        max_positions=max_model_len,
        max_tokens=max_batched_tokens,
        threads=threads,
        kv_type=_KV_TYPES[kv_dtype],
        isa=os.environ.get("PACELINE_ISA", ""),
    )
    for stretch in _stretches(weights.tensors):
        _set(model, stretch, spec, quantize)
        for tensor in stretch.values():
            _forget_pages(tensor)
    model.finish_loading()
    return model


def _stretches(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Tensors that follow one another, some 32 MiB at a time."""
    stretch: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        stretch[name] = tensor
        num_bytes += tensor.data.nbytes
        if num_bytes >= _STRETCH_BYTES:
            yield stretch
            stretch, num_bytes = {}, 0
    yield stretch


def _set(model: _native.Model, tensors: Mapping[str, Tensor], spec: ModelSpec, quantize: Quantize | None) -> None:
    """Hand tensors over, under GGUF's names: ``blk.3.attn_q.weight``, ``output_norm.bias``, …

    The matrices in one call, in which the interpreter is free for other threads.
    """
    matrices = []
    for name, tensor in tensors.items():
        *block, stem, kind = name.split(".")
        layer = int(block[1]) if block else -1
        if stem in _ROTATED:
            tensor = _half_paired(tensor, spec.layers[layer].rope, spec.head_dim)
        if stem == "position_embd":
            model.set_positions(dequantize(tensor).reshape(-1))
        elif kind == "bias":
            model.set_bias(stem, layer, dequantize(tensor))
        elif len(tensor.shape) == 1:
            model.set_norm(stem, layer, dequantize(tensor))
        else:
            (outputs, inputs), stored = tensor.shape, np.ascontiguousarray(tensor.data)
            kept_as = kept_type(name, tensor, quantize)
            matrices.append((stem, layer, int(tensor.type), outputs, inputs, stored, int(kept_as)))
    model.set_matrices(matrices)


def _forget_pages(tensor: Tensor) -> None:
    """Give back the pages of the mapped file that have been read, which count as this process's memory otherwise: the
    file and its copy need not be there at once. Who reads them again finds them in the page cache."""
    source: object = tensor.data
    while isinstance(source, np.ndarray | memoryview):
        source = source.base if isinstance(source, np.ndarray) else source.obj
    if isinstance(source, mmap.mmap):
        source.madvise(mmap.MADV_DONTNEED)


def _half_paired(tensor: Tensor, rope: RopeSpec | None, head_dim: int) -> Tensor:
    """A tensor of queries or keys, ordered so that dimensions i and i + dim/2 of a head rotate together.

    Where the file pairs (2i, 2i+1), the outputs of each head are permuted: even ones first, odd ones after. Scores do
    not change, since queries and keys move alike.
    """
    if rope is None or rope.pairing == "half":
        return tensor
    rotated = np.arange(rope.dim)
    order = np.arange(head_dim)
    order[: rope.dim] = np.concatenate([rotated[0::2], rotated[1::2]])
    rows = tensor.data.reshape(-1, head_dim, tensor.data.size // tensor.shape[0])
    return replace(tensor, data=rows[:, order].reshape(-1))
