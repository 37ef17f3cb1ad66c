import dataclasses
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelFileError
from paceline.models.architectures import model_weights
from paceline.models.gguf import GGUFFile
from paceline.models.rope import RopeSpec
from paceline.models.spec import LayerSpec, ModelSpec
from tests.models.tiny_gguf import GEMMA3_NORMS, HEADS, HIDDEN, HYPERPARAMETERS, VOCAB, Shapes, shapes, tiny


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


def key_values(width: int) -> Shapes:
    return {f"blk.{layer}.attn_{part}.weight": (width, HIDDEN) for layer in range(2) for part in "kv"}


def test_an_output_head_of_its_own(tmp_path: Path) -> None:
    assert not model_weights(tiny(tmp_path, tensors={"output.weight": (VOCAB, HIDDEN)})).spec.tied_embeddings


def test_features_that_are_switched_off_are_no_obstacle(tmp_path: Path) -> None:
    off = {
        "llama.rope.scaling.type": "none",
        "llama.expert_count": 0,
        "llama.attention.sliding_window": 0,
        "llama.rope.scaling.factor": 0.0,
        "llama.rope.scaling.finetuned": True,
        "llama.attention.value_length": 16,
        "llama.tensor_data_layout": "Meta AI original pth",
        "llama.use_parallel_residual": True,
        "llama.attention.layer_norm_epsilon": 0.25,
        "llama.attention.head_dim": 16,
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
        ("llama.block_count", 2**31 - 1, "block_count is 2147483647, but the file has only 20 tensors"),
        ("llama.block_count", 2**31, "block_count is 2147483648; a positive integer below 2\\^31 is needed"),
        ("llama.block_count", 0, "llama.block_count is 0; a positive integer below"),
        ("llama.block_count", "two", "llama.block_count is 'two'; a positive integer"),
        ("llama.attention.head_count", 2**30, "dimension_count is 1; it must be even and at most 1"),
        ("llama.attention.head_count_kv", 3, "4 attention heads cannot be shared out among 3"),
        ("llama.attention.head_count_kv", [2, 4], "head_count_kv is .*; a positive integer"),
        ("llama.attention.layer_norm_rms_epsilon", 0.0, "epsilon is 0.0; a positive number"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "epsilon is nan; a positive number"),
        ("llama.rope.freq_base", float("inf"), "freq_base is inf; a positive number"),
        ("llama.rope.dimension_count", 15, "must be even and at most 16"),
        ("llama.rope.dimension_count", 18, "must be even and at most 16"),
        ("llama.attention.head_dim", 32, "llama.attention.head_dim = 32 is not supported; only 16 is"),
        ("llama.attention.value_length", 32, r"llama.attention.value_length = 32 is not supported; only 16 is"),
        ("llama.rope.scaling.type", "longrope", "type = 'longrope' is not supported; known: linear, none, yarn"),
        ("llama.rope.scaling.factor", -8.0, "llama.rope.scaling.factor is -8.0; a positive number is needed"),
        ("llama.rope.scaling.factor", True, "llama.rope.scaling.factor is True; a positive number is needed"),
        ("llama.rope.scaling.attn_factor", 1.5, "llama.rope.scaling.attn_factor = 1.5 is not supported"),
        ("llama.rope.scaling.yarn_beta_fast", 8.0, "llama.rope.scaling.yarn_beta_fast = 8.0 is not supported"),
        ("llama.expert_count", 8, "llama.expert_count = 8 is not supported"),
        ("llama.attention.sliding_window", "all", "sliding_window is 'all'; a positive integer"),
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
        ("rope_freqs.weight", (4,), r"rope_freqs.weight has shape \(4,\); 8 positive numbers are needed"),
        ("blk.0.attn_q.bias", (64,), "blk.1.attn_q.bias is missing"),
        ("blk.1.attn_q.bias", (64,), "blk.1.attn_q.bias is not supported"),
        ("output.bias", (32,), "output.bias is not supported"),
        ("blk.0.ffn_gate_inp.weight", (8, 64), "blk.0.ffn_gate_inp.weight is not supported"),
    ],
)
def test_a_wrong_or_unsupported_tensor_is_named(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        model_weights(tiny(tmp_path, tensors={name: shape}))


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="of the kind 'adapter'; only whole language models"):
        model_weights(tiny(tmp_path, {"general.type": "adapter"}))


def test_an_unknown_architecture_gets_the_list_of_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"'mamba' is not supported; supported: gemma, .*, llama, .*, starcoder2"):
        model_weights(tiny(tmp_path, architecture="mamba"))


def test_the_attention_scale_of_gemma3_27b(tmp_path: Path) -> None:
    wide = {"llama.attention.key_length": 16, "llama.attention.head_count": 2, "llama.attention.head_count_kv": 2}
    tensors: Shapes = {f"blk.{layer}.attn_q.weight": (32, HIDDEN) for layer in range(62)}
    tensors |= {f"blk.{layer}.attn_output.weight": (HIDDEN, 32) for layer in range(62)}
    spec = model_weights(tiny(tmp_path, wide, GEMMA3_NORMS | tensors, "gemma3", 62)).spec
    assert spec.attention_scale == pytest.approx(32**-0.5)  # hidden / heads, where head_dim is 16


def test_soft_caps_of_gemma2_where_the_file_has_none_and_where_it_switches_them_off(tmp_path: Path) -> None:
    tensors = {
        name: shape for name, shape in GEMMA3_NORMS.items() if name[4] in "01" and name[5] == "." and "post" in name
    }
    spec = model_weights(tiny(tmp_path, {}, tensors, "gemma2")).spec
    assert (spec.attention_softcap, spec.logits_softcap) == (50.0, 30.0)
    assert [layer.window for layer in spec.layers] == [4096, None]
    off = {"llama.attn_logit_softcapping": 0.0, "llama.final_logit_softcapping": 0.0}
    spec = model_weights(tiny(tmp_path, off, tensors, "gemma2")).spec
    assert (spec.attention_softcap, spec.logits_softcap) == (None, None)


def test_granite_without_rotation_is_refused(tmp_path: Path) -> None:
    stated = {"llama.logit_scale": 8.0, "llama.rope.scaling.finetuned": False}
    with pytest.raises(ModelFileError, match=r"rope.scaling.finetuned = False is not supported; only True is"):
        model_weights(tiny(tmp_path, stated, architecture="granite"))


def test_granite_needs_no_scale_but_that_of_the_logits(tmp_path: Path) -> None:
    spec = model_weights(tiny(tmp_path, {"llama.logit_scale": 8.0}, architecture="granite")).spec
    assert spec.logits_scale == 0.125
    assert (spec.attention_scale, spec.embedding_scale, spec.residual_scale) == (0.25, 1.0, 1.0)
