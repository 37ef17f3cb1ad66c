"""Fused matrices come apart, whatever their type."""

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import ModelFileError
from paceline.models.quants import QuantType, Tensor, dequantize
from paceline.models.spec import ModelSpec, tensor_shapes
from paceline.models.tensors import normalised
from tests.executors.tiny import random_stored, tiny_spec

QKV = ("attn_q", "attn_k", "attn_v")
PATH = Path("tiny.gguf")


def biased() -> ModelSpec:
    return replace(tiny_spec(layers=2), biases=frozenset(QKV))


def fused(spec: ModelSpec, kind: QuantType) -> dict[str, Tensor]:
    """The model's tensors, with queries, keys and values in one."""
    rng = np.random.default_rng(0)
    rows = spec.query_size + 2 * spec.kv_size
    tensors = {}
    for name, shape in tensor_shapes(spec):
        if not any(part in QKV for part in name.split(".")):
            tensors[name] = Tensor(name, shape, QuantType.F32, np.zeros(4 * prod(shape), np.uint8))
    for layer in range(spec.num_layers):
        weight, bias = f"blk.{layer}.attn_qkv.weight", f"blk.{layer}.attn_qkv.bias"
        shape = (rows, spec.hidden_size)
        tensors[weight] = Tensor(weight, shape, kind, random_stored(rng, shape, kind))
        values = rng.standard_normal(rows).astype(np.float32)
        tensors[bias] = Tensor(bias, (rows,), QuantType.F32, values.view(np.uint8))
    return tensors


@pytest.mark.parametrize("kind", [QuantType.F32, QuantType.BF16, QuantType.Q4_1, QuantType.Q8_0])
def test_a_fused_matrix_comes_apart_without_a_copy(kind: QuantType) -> None:
    spec = biased()
    tensors = fused(spec, kind)
    apart = normalised(PATH, tensors, spec)
    assert set(apart) == {name for name, _ in tensor_shapes(spec)}
    for part in ("weight", "bias"):
        whole = tensors[f"blk.1.attn_qkv.{part}"]
        parts = [apart[f"blk.1.{name}.{part}"] for name in QKV]
        np.testing.assert_array_equal(np.concatenate([dequantize(tensor) for tensor in parts]), dequantize(whole))
        assert all(np.shares_memory(tensor.data, whole.data) for tensor in parts)


def test_a_fused_matrix_of_another_height_is_refused() -> None:
    spec = biased()
    name = "blk.1.attn_qkv.weight"
    tensors = fused(spec, QuantType.F32)
    tensors[name] = Tensor(name, (64, 64), QuantType.F32, np.zeros(4 * 64 * 64, np.uint8))
    with pytest.raises(ModelFileError, match=r"attn_qkv.weight has 64 rows; 320 are needed, .* of 192, 64 and 64"):
        normalised(PATH, tensors, spec)


def test_fused_and_apart_at_once_is_refused() -> None:
    spec = biased()
    tensors = fused(spec, QuantType.F32)
    tensors["blk.0.attn_k.weight"] = tensors["blk.0.attn_output.weight"]
    with pytest.raises(ModelFileError, match=r"has both blk.0.attn_qkv.weight and blk.0.attn_k.weight; one is needed"):
        normalised(PATH, tensors, spec)
