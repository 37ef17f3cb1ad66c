"""The CPU executor: repacks a model's weights once, then runs each batch in one call of the C++ forward pass."""

import os
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline import _native
from paceline.errors import ExecutorError, ModelFileError
from paceline.executors.base import BLOCK_SIZE, Batch, Float32, KVGeometry, StepResult
from paceline.models.quants import Tensor, dequantize
from paceline.models.spec import ModelSpec, ModelWeights

KVDType = Literal["f16", "f32"]

_LAYER_MATRICES = {
    "attn_q": _native.MatrixRole.QUERY,
    "attn_k": _native.MatrixRole.KEY,
    "attn_v": _native.MatrixRole.VALUE,
    "attn_output": _native.MatrixRole.ATTENTION_OUTPUT,
    "ffn_gate": _native.MatrixRole.GATE,
    "ffn_up": _native.MatrixRole.UP,
    "ffn_down": _native.MatrixRole.DOWN,
}
_ROTATED = {"attn_q", "attn_k"}


def kv_bytes_per_block(spec: ModelSpec, kv_dtype: KVDType) -> int:
    """Bytes of one KV block: K and V of 32 tokens in every layer."""
    per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * (2 if kv_dtype == "f16" else 4)
    return BLOCK_SIZE * per_token


class NativeExecutor:
    """Runs a model on the CPU with the kernels of the best instruction set there is.

    ``PACELINE_ISA`` (avx512, avx2, baseline) forces another one. After construction the model file is not needed any
    more.

    Args:
        num_blocks: size of the KV pool in blocks of 32 tokens.
        max_model_len: longest sequence, in tokens.
        max_batched_tokens: most tokens in one batch.
        kv_dtype: type in which K and V are kept.
        threads: size of the thread pool.

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
    ) -> None:
        self.spec = weights.spec
        self.threads = threads
        self.kv_dtype = kv_dtype
        self.max_batched_tokens = max_batched_tokens
        self.kv_geometry = KVGeometry(BLOCK_SIZE, num_blocks, kv_bytes_per_block(weights.spec, kv_dtype))
        try:
            self._model: _native.Model | None = _load(
                weights, num_blocks, max_model_len, max_batched_tokens, kv_dtype, threads
            )
        except ValueError as error:
            raise ModelFileError(f"{weights.spec.name}: the native executor cannot run this model: {error}") from error

    @property
    def isa(self) -> str:
        """Instruction set of the kernels in use."""
        return self._open_model().isa

    @property
    def weight_bytes(self) -> int:
        """Memory of the repacked weights."""
        return self._open_model().weight_bytes

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

    def close(self) -> None:
        """See ``Executor.close``."""
        self._model = None

    def _open_model(self) -> _native.Model:
        if self._model is None:
            raise ExecutorError("the executor is closed")
        return self._model


def _load(
    weights: ModelWeights, num_blocks: int, max_model_len: int, max_batched_tokens: int, kv_dtype: KVDType, threads: int
) -> _native.Model:
    spec = weights.spec
    rope = spec.layers[0].rope
    assert rope
    model = _native.Model(
        vocab_size=spec.vocab_size,
        hidden=spec.hidden_size,
        layers=spec.num_layers,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate=spec.intermediate_size,
        max_positions=max_model_len,
        rope_dim=rope.dim,
        rope_theta=rope.theta,
        norm_eps=spec.norm_eps,
        tied_embeddings=spec.tied_embeddings,
        num_blocks=num_blocks,
        half_kv=kv_dtype == "f16",
        max_tokens=max_batched_tokens,
        threads=threads,
        isa=os.environ.get("PACELINE_ISA", ""),
    )
    tensors = weights.tensors
    _set_matrix(model, _native.MatrixRole.EMBEDDING, 0, tensors["token_embd.weight"])
    if not spec.tied_embeddings:
        _set_matrix(model, _native.MatrixRole.HEAD, 0, tensors["output.weight"])
    model.set_norm(_native.NormRole.FINAL, 0, dequantize(tensors["output_norm.weight"]))
    for layer in range(spec.num_layers):
        for name, role in _LAYER_MATRICES.items():
            tensor = tensors[f"blk.{layer}.{name}.weight"]
            stored = _half_paired(tensor, spec) if name in _ROTATED else tensor.data
            _set_matrix(model, role, layer, tensor, stored)
        model.set_norm(_native.NormRole.ATTENTION, layer, dequantize(tensors[f"blk.{layer}.attn_norm.weight"]))
        model.set_norm(_native.NormRole.FEED_FORWARD, layer, dequantize(tensors[f"blk.{layer}.ffn_norm.weight"]))
    model.finish_loading()
    return model


def _set_matrix(
    model: _native.Model,
    role: _native.MatrixRole,
    layer: int,
    tensor: Tensor,
    stored: NDArray[np.uint8] | None = None,
) -> None:
    outputs, inputs = tensor.shape
    data = tensor.data if stored is None else stored
    model.set_matrix(role, layer, int(tensor.type), outputs, inputs, np.ascontiguousarray(data))


def _half_paired(tensor: Tensor, spec: ModelSpec) -> NDArray[np.uint8]:
    """The stored rows of a query or key matrix, ordered so that dimensions i and i + dim/2 of a head rotate together.

    Where the file pairs (2i, 2i+1), the outputs of each head are permuted: even ones first, odd ones after. Scores do
    not change, since queries and keys move alike.
    """
    rope = spec.layers[0].rope
    assert rope
    if rope.pairing == "half":
        return tensor.data
    rotated = np.arange(rope.dim)
    order = np.arange(spec.head_dim)
    order[: rope.dim] = np.concatenate([rotated[0::2], rotated[1::2]])
    rows = tensor.data.reshape(-1, spec.head_dim, tensor.data.size // tensor.shape[0])
    return rows[:, order].reshape(-1)
