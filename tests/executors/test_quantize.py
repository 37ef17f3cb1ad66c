"""Quantization at load, beside the ``gguf`` package's quantizer and a search through all scales."""

from dataclasses import replace

import gguf
import numpy as np
import pytest

from paceline import _native
from paceline.errors import InputError
from paceline.executors.footprint import native_footprint
from paceline.executors.native import NativeExecutor
from paceline.executors.quantize import Quantize, kept_type
from paceline.models.quants import UNQUANTIZED, QuantType, Tensor, dequantize
from paceline.models.spec import ModelWeights
from paceline.options import EngineOptions
from tests.executors.batches import Row, Sequence, make_batch
from tests.executors.tiny import tiny_spec, tiny_weights
from tests.executors.tiny_specs import TINY_SPECS

FLOATS = sorted(UNQUANTIZED)
TOKENS = np.random.default_rng(3).integers(0, 150, 70).tolist()
IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float64)


def stored_floats(kind: QuantType, n: int = 48, k: int = 96) -> Tensor:
    """Random rows of very different sizes, among them zeros, and ties in the rounding to 8 bits."""
    rng = np.random.default_rng(int(kind))
    values = (rng.standard_normal((n, k)) * 10.0 ** rng.uniform(-4, 1, (n, 1))).astype(np.float32)
    values[3] = 0
    values[4] = 1e-12
    values[6] = 1e4 * rng.standard_normal(k)
    values[5] = np.arange(k) % 32 * 0.5 + 0.5
    values[5, ::32] = 127
    if kind == QuantType.BF16:
        stored = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        stored = values.astype(np.float16 if kind == QuantType.F16 else np.float32)  # type: ignore[assignment]
    return Tensor("w", (n, k), kind, stored.view(np.uint8).reshape(-1))


def quantized(tensor: Tensor, to: QuantType) -> np.ndarray:
    """Its values after quantization."""
    return _native.unpack(int(tensor.type), *tensor.shape, tensor.data, kept_as=int(to))


def q8_0_of_gguf(name: str, tensor: Tensor) -> Tensor:
    blocks = gguf.quants.quantize(dequantize(tensor), gguf.GGMLQuantizationType.Q8_0)
    return Tensor(name, tensor.shape, QuantType.Q8_0, blocks.reshape(-1))


def executor(weights: ModelWeights, quantize: Quantize | None, threads: int = 2) -> NativeExecutor:
    return NativeExecutor(weights, num_blocks=16, max_model_len=512, kv_dtype="f32", threads=threads, quantize=quantize)


def all_logits(executor: NativeExecutor) -> np.ndarray:
    """Logits of every position of TOKENS; the executor is closed."""
    rows = [Row(0, position) for position in range(len(TOKENS))]
    logits = executor.logits(make_batch([Sequence(TOKENS, list(range(16)))], rows))
    executor.close()
    return logits


@pytest.mark.parametrize("kind", FLOATS)
def test_q8_blocks_are_ggufs(kind: QuantType) -> None:
    tensor = stored_floats(kind)
    np.testing.assert_array_equal(quantized(tensor, QuantType.Q8_0), dequantize(q8_0_of_gguf("w", tensor)))


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("name", ["untied", "post-norms", "biases", "learned-positions", "ungated"])
def test_q8_logits_are_those_of_a_file_that_gguf_quantized(name: str, kind: QuantType) -> None:
    weights = tiny_weights(TINY_SPECS[name], kind)
    tensors = {
        name: q8_0_of_gguf(name, tensor) if len(tensor.shape) == 2 and "position_embd" not in name else tensor
        for name, tensor in weights.tensors.items()
    }
    expected = all_logits(executor(ModelWeights(weights.spec, tensors), None))
    for threads in (1, 2):
        np.testing.assert_array_equal(all_logits(executor(weights, "q8", threads)), expected)


def weighted_error(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Of each group of 32, with larger weights counting more."""
    x = x.astype(np.float64)
    return (x**2 * (values - x) ** 2).reshape(-1, 32).sum(1)


def least_q4_errors(x: np.ndarray) -> np.ndarray:
    """The least that any of 2000 scales on either side of zero leaves."""
    groups = x.astype(np.float64).reshape(-1, 32)
    most = np.abs(groups).max(1)
    best = np.full(len(groups), np.inf)
    for size in np.linspace(80, 180, 1000):
        for scale in (most / size, -most / size):
            with np.errstate(divide="ignore", invalid="ignore"):
                values = scale[:, None] * IQ4_NL[np.abs(groups[:, :, None] / scale[:, None, None] - IQ4_NL).argmin(2)]
            best = np.fmin(best, (groups**2 * (values - groups) ** 2).sum(1))
    return best


@pytest.mark.parametrize("kind", FLOATS)
def test_q4_finds_all_but_the_best_scale(kind: QuantType) -> None:
    tensor = stored_floats(kind, n=32, k=64)
    x = dequantize(tensor)
    fine = np.abs(x).reshape(-1, 32).max(1) > 1e-3  # the scale is no subnormal of float16, where that rounds coarsely
    found = weighted_error(x, quantized(tensor, QuantType.IQ4_NL))[fine]
    ratios = found / least_q4_errors(x)[fine]
    assert len(ratios) > 40
    assert ratios.mean() < 1.06
    assert ratios.max() < 1.5


def test_q4_logits_are_those_of_its_blocks() -> None:
    """The layers have the values that the search found, the head and the embedding those of Q8_0."""
    weights = tiny_weights(tiny_spec(tied=False))
    tensors = {}
    for name, tensor in weights.tensors.items():
        kind = kept_type(name, tensor, "q4")
        if kind in UNQUANTIZED:
            tensors[name] = tensor
        else:
            values = quantized(tensor, kind)
            tensors[name] = Tensor(name, tensor.shape, QuantType.F32, values.view(np.uint8).reshape(-1))
    exact = all_logits(executor(ModelWeights(weights.spec, tensors), None))
    difference = all_logits(executor(weights, "q4")) - exact  # activations are rounded to 8 bits
    assert np.sqrt((difference**2).mean() / (exact**2).mean()) < 0.06


@pytest.mark.parametrize("to", [QuantType.Q8_0, QuantType.IQ4_NL])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e30])
def test_a_group_with_what_no_scale_reaches_is_nan(to: QuantType, wrong: float) -> None:
    """The executor then reports logits that are not finite, as it does for the float weights."""
    values = np.ones((2, 96), np.float32)
    values[1, 40] = wrong
    got = _native.unpack(0, 2, 96, values.view(np.uint8).reshape(-1), kept_as=int(to))
    broken = np.zeros((2, 96), bool)
    broken[1, 32:64] = True
    np.testing.assert_array_equal(np.isnan(got), broken)
    np.testing.assert_allclose(got[~broken], 1, rtol=1e-3)


@pytest.mark.parametrize(
    ("stored", "kept_as"),
    [(QuantType.Q4_1, QuantType.Q8_0), (QuantType.F32, QuantType.Q4_K), (QuantType.F32, QuantType.F16)],
)
def test_other_changes_of_type_are_refused(stored: QuantType, kept_as: QuantType) -> None:
    data = np.zeros(256 // stored.block.elements * stored.block.bytes, np.uint8)
    with pytest.raises(ValueError, match=f"tensor type {int(stored)} cannot be kept as {int(kept_as)}"):
        _native.unpack(int(stored), 1, 256, data, kept_as=int(kept_as))


@pytest.mark.parametrize(
    ("name", "shape", "stored", "q8", "q4"),
    [
        ("blk.0.ffn_down.weight", (64, 96), QuantType.BF16, QuantType.Q8_0, QuantType.IQ4_NL),
        ("token_embd.weight", (64, 96), QuantType.F16, QuantType.Q8_0, QuantType.Q8_0),
        ("output.weight", (64, 96), QuantType.F32, QuantType.Q8_0, QuantType.Q8_0),
        ("blk.0.ffn_down.weight", (64, 96), QuantType.Q5_1, QuantType.Q5_1, QuantType.Q5_1),
        ("blk.0.attn_norm.weight", (96,), QuantType.F32, QuantType.F32, QuantType.F32),
        ("position_embd.weight", (64, 96), QuantType.F16, QuantType.F16, QuantType.F16),
    ],
)
def test_what_is_quantized(name: str, shape: tuple[int, ...], stored: QuantType, q8: QuantType, q4: QuantType) -> None:
    tensor = Tensor(name, shape, stored, np.zeros(0, np.uint8))
    assert [kept_type(name, tensor, quantize) for quantize in (None, "q8", "q4")] == [stored, q8, q4]  # type: ignore[arg-type]


@pytest.mark.parametrize("quantize", ["q8", "q4"])
def test_what_is_quantized_already_stays_as_it_is(quantize: Quantize) -> None:
    weights = tiny_weights(tiny_spec(), QuantType.Q5_0)
    expected = all_logits(executor(weights, None))
    np.testing.assert_array_equal(all_logits(executor(weights, quantize)), expected)


@pytest.mark.parametrize("quantize", ["q8", "q4"])
def test_the_predicted_memory_is_what_it_takes(quantize: Quantize) -> None:
    """With matrices of all kinds in the file, so that some activations are kept both as floats and as 8 bits."""
    floats = tiny_weights(replace(tiny_spec(), hidden_size=256, intermediate_size=256, num_heads=8))
    k_quants = tiny_weights(floats.spec, QuantType.Q6_K)
    mixed = {name: (k_quants if "ffn_up" in name else floats).tensors[name] for name in floats.tensors}
    weights = ModelWeights(floats.spec, mixed)
    for max_batched_tokens in (64, 512):
        predicted = native_footprint(
            weights,
            kv_dtype="f16",
            max_batched_tokens=max_batched_tokens,
            max_num_seqs=32,
            threads=1,
            quantize=quantize,
        )
        loaded = NativeExecutor(
            weights, num_blocks=1, max_model_len=32, max_batched_tokens=max_batched_tokens, quantize=quantize
        )
        assert loaded.weight_bytes == pytest.approx(predicted.weights, rel=0.01)
        if max_batched_tokens == 64:
            first, first_predicted = loaded.buffer_bytes, predicted.buffers
    assert loaded.buffer_bytes - first == predicted.buffers - first_predicted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "q5"}, "quantize is 'q5'; there are q8, q4"),
        ({"quantize": "q8", "device": "cuda"}, "on the device cuda PyTorch computes with floats"),
        ({"quantize": "q4", "device": "torch:cpu"}, "on the device torch:cpu PyTorch computes with floats"),
    ],
)
def test_what_cannot_be_quantized_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EngineOptions(**options)  # type: ignore[arg-type]
