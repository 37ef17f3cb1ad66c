"""Every architecture with every tensor type: the native executor beside the float64 reference."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from paceline.executors.base import Batch, Float32
from paceline.executors.native import NativeExecutor
from paceline.executors.torch.executor import TorchExecutor
from paceline.models.quants import QuantType
from paceline.models.spec import ModelSpec, ModelWeights
from tests.executors.batches import Row, Sequence, make_batch
from tests.executors.float64_model import reference_logits
from tests.executors.tiny import tiny_weights

TOKENS = 64
BLOCKS = 16


class LogitsExecutor(Protocol):
    def logits(self, batch: Batch) -> Float32: ...

    def close(self) -> None: ...


def native(weights: ModelWeights) -> LogitsExecutor:
    return NativeExecutor(weights, num_blocks=BLOCKS, max_model_len=512, kv_dtype="f32", threads=2)


def torch(weights: ModelWeights) -> LogitsExecutor:
    return TorchExecutor(weights, num_blocks=BLOCKS, max_model_len=512, kv_dtype="f32")


EXECUTORS: dict[str, Callable[[ModelWeights], LogitsExecutor]] = {"native": native, "torch": torch}


def all_logits(executor: LogitsExecutor, token_ids: list[int]) -> np.ndarray[Any, Any]:
    """Logits of every position, in one chunk."""
    table = list(range(BLOCKS))
    logits = executor.logits(make_batch([Sequence(token_ids, table)], [Row(0, i) for i in range(len(token_ids))]))
    executor.close()
    return logits


def quantized_error(spec: ModelSpec, kind: QuantType) -> float:
    """Root mean square of the difference from the reference, relative to the logits' own, for random weights."""
    # K-quants need rows of 256; a few layers are enough
    wide = replace(spec, hidden_size=256, intermediate_size=256, num_heads=4, head_dim=64, layers=spec.layers[:4])
    wide = replace(wide, num_kv_heads=min(spec.num_kv_heads, 4))
    weights = tiny_weights(wide, kind)
    token_ids = np.random.default_rng(3).integers(0, spec.vocab_size, TOKENS).tolist()
    expected = reference_logits(weights, token_ids)
    difference = all_logits(native(weights), token_ids) - expected
    return float(np.sqrt((difference**2).mean() / (expected**2).mean()))
