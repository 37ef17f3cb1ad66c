import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from paceline.errors import ModelFileError
from paceline.models.architectures import model_weights
from paceline.models.gguf import GGUFFile, read_gguf
from paceline.models.rope import RopeSpec
from paceline.models.spec import LayerSpec, ModelSpec

HIDDEN, HEADS, KV_HEADS, INNER, VOCAB = 64, 4, 2, 96, 32

HYPERPARAMETERS: dict[str, Any] = {
    "general.name": "tiny",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 0.5,
}


def shapes() -> dict[str, tuple[int, ...]]:
    key = HIDDEN // HEADS * KV_HEADS
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(2):
        found |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (key, HIDDEN),
            f"blk.{layer}.attn_v.weight": (key, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (INNER, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (INNER, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, INNER),
        }
    return found


def tiny(
    folder: Path,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, tuple[int, ...] | None] | None = None,
    architecture: str = "llama",
) -> GGUFFile:
    """A small llama file with some of its metadata and tensors replaced; None takes one out."""
    path = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (HYPERPARAMETERS | (metadata or {})).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    for name, shape in (shapes() | (tensors or {})).items():
        if shape is not None:
            writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path)


def test_the_real_model(smollm2: GGUFFile) -> None:
    weights = model_weights(smollm2)
    assert weights.spec.norm_eps == pytest.approx(1e-5)
    assert dataclasses.replace(weights.spec, norm_eps=1e-5) == ModelSpec(
        architecture="llama",
        name="Smollm2 135M 8k Lc100K Mix1 Ep2",
        vocab_size=49152,
        hidden_size=576,
        layers=(LayerSpec(RopeSpec(theta=100000.0, dim=64, pairing="interleaved")),) * 30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        context_length=8192,
        norm_eps=1e-5,
        attention_scale=0.125,
        tied_embeddings=True,
    )
    assert len(weights.tensors) == 272


def test_defaults_are_llama_cpps(tmp_path: Path) -> None:
    spec = model_weights(tiny(tmp_path, {"llama.attention.head_count_kv": None}, key_values(HIDDEN))).spec
    assert spec.num_kv_heads == HEADS
    assert spec.head_dim == HIDDEN // HEADS
    assert spec.layers[0].rope == RopeSpec(theta=10000.0, dim=16, pairing="interleaved")
    assert spec.vocab_size == VOCAB


def key_values(width: int) -> dict[str, tuple[int, ...] | None]:
    return {f"blk.{layer}.attn_{part}.weight": (width, HIDDEN) for layer in range(2) for part in "kv"}


def test_an_output_head_of_its_own(tmp_path: Path) -> None:
    assert not model_weights(tiny(tmp_path, tensors={"output.weight": (VOCAB, HIDDEN)})).spec.tied_embeddings


def test_features_that_are_switched_off_are_no_obstacle(tmp_path: Path) -> None:
    off = {
        "llama.rope.scaling.type": "none",
        "llama.expert_count": 0,
        "llama.attention.sliding_window": 0,
        "llama.attention.value_length": 16,
        "llama.tensor_data_layout": "Meta AI original pth",
    }
    assert model_weights(tiny(tmp_path, off)).spec.head_dim == 16


def test_the_tensors_outlive_the_file(tmp_path: Path) -> None:
    with tiny(tmp_path) as file:
        weights = model_weights(file)
    assert set(weights.tensors) == set(shapes())


@pytest.mark.parametrize("key", [key for key in HYPERPARAMETERS if key.startswith("llama.") and "kv" not in key])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelFileError, match=f"no {key}$"):
        model_weights(tiny(tmp_path, {key: None}))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", 3, "blk.2.attn_norm.weight is missing"),
        ("llama.block_count", 2**32 - 1, "block_count is 4294967295, but the file has only 20 tensors"),
        ("llama.block_count", 0, "llama.block_count is 0; a positive integer is needed"),
        ("llama.block_count", "two", "llama.block_count is 'two'; a positive integer"),
        ("llama.attention.head_count", 2**31, "dimension_count is 1; it must be even and at most 1"),
        ("llama.attention.head_count_kv", 3, "4 attention heads cannot be shared out among 3"),
        ("llama.attention.head_count_kv", [2, 4], "head_count_kv is .*; a positive integer"),
        ("llama.attention.layer_norm_rms_epsilon", 0.0, "epsilon is 0.0; a positive number"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "epsilon is nan; a positive number"),
        ("llama.rope.freq_base", float("inf"), "freq_base is inf; a positive number"),
        ("llama.rope.dimension_count", 15, "must be even and at most 16"),
        ("llama.rope.dimension_count", 18, "must be even and at most 16"),
        ("llama.attention.value_length", 32, r"llama.attention.value_length = 32 is not supported; only 16 is"),
        ("llama.rope.scaling.type", "yarn", "llama.rope.scaling.type = 'yarn' is not supported; only 'none'"),
        ("llama.rope.scaling.factor", 8.0, "llama.rope.scaling.factor = 8.0 is not supported"),
        ("llama.rope.scale_linear", 4.0, "llama.rope.scale_linear = 4.0 is not supported"),
        ("llama.expert_count", 8, "llama.expert_count = 8 is not supported"),
        ("llama.attention.sliding_window", 4096, "llama.attention.sliding_window = 4096 is not supported"),
        ("llama.attention.causal", False, "llama.attention.causal = False is not supported"),
        ("llama.logit_scale", 0.5, "llama.logit_scale = 0.5 is not supported"),
        ("llama.vocab_size", 33, r"token_embd.weight has shape \(32, 64\); \(33, 64\) is needed"),
        ("tokenizer.ggml.tokens", ["a"], "tokenizer has 1 tokens, but the model a vocabulary of 32"),
    ],
)
def test_a_wrong_or_unsupported_hyperparameter_is_named(tmp_path: Path, key: str, value: Any, message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as raised:
        model_weights(tiny(tmp_path, {key: value}))
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("token_embd.weight", None, "token_embd.weight is missing"),
        ("blk.1.ffn_up.weight", None, "blk.1.ffn_up.weight is missing"),
        ("blk.0.attn_k.weight", (64, 64), r"blk.0.attn_k.weight has shape \(64, 64\); \(32, 64\) is needed"),
        ("rope_freqs.weight", (8,), "rope_freqs.weight is not supported"),
        ("blk.0.attn_q.bias", (64,), "blk.0.attn_q.bias is not supported"),
        ("blk.0.ffn_gate_inp.weight", (8, 64), "blk.0.ffn_gate_inp.weight is not supported"),
    ],
)
def test_a_wrong_or_unsupported_tensor_is_named(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        model_weights(tiny(tmp_path, tensors={name: shape}))


def test_an_unknown_architecture_gets_the_list_of_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="'mamba' is not supported; supported: llama"):
        model_weights(tiny(tmp_path, architecture="mamba"))
