"""Metadata as published files have it, sizes aside: harmless oddities of their converters are no reason to refuse."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.models.architectures import model_weights
from paceline.models.gguf import GGUFFile
from paceline.models.ollama_gguf import in_terms_of_llama_cpp
from paceline.models.rope import LinearScaling, RopeSpec
from paceline.models.tokenizer import Tokenizer
from tests.models.tiny_gguf import GEMMA3_NORMS, HIDDEN, KV_HEADS, VOCAB, Shapes, tiny

HEAD = 16
KV = KV_HEADS * HEAD
TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", *map(chr, range(ord("a"), ord("a") + VOCAB - 4))]
VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, 2] + [1] * (VOCAB - 4),
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.unknown_token_id": 3,
    "tokenizer.ggml.padding_token_id": 0,
}
BYTE_LEVEL = VOCABULARY | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["a b"]}
BYTE_LEVEL["tokenizer.ggml.tokens"] = [*TOKENS[:-1], "ab"]
SENTENCEPIECE = VOCABULARY | {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.scores": [0.0] * VOCAB,
}

EACH_LAYER: dict[str, Shapes] = {
    "qwen2": {"attn_q.bias": (HIDDEN,), "attn_k.bias": (KV,), "attn_v.bias": (KV,)},
    "qwen3": {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)},
}


def per_layer(architecture: str) -> Shapes:
    each = EACH_LAYER.get(architecture, {})
    return {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in each.items()}


@pytest.mark.parametrize(
    ("architecture", "metadata", "tensors"),
    [
        pytest.param(
            "llama",
            {
                "llama.vocab_size": VOCAB,
                "llama.rope.dimension_count": HEAD,
                "llama.rope.freq_base": 500000.0,
                "llama.attention.key_length": HEAD,
                "llama.attention.value_length": HEAD,
                "tokenizer.ggml.pre": "llama-bpe",
                "general.quantization_version": 2,
                "general.file_type": 15,
                "quantize.imatrix.file": "calibration.dat",
            },
            {"rope_freqs.weight": (HEAD // 2,)},
            id="Llama 3.2",
        ),
        pytest.param(
            "llama",
            SENTENCEPIECE
            | {
                "llama.rope.dimension_count": HEAD,
                "llama.tensor_data_layout": "Meta AI original pth",
                "tokenizer.ggml.pre": None,
                "tokenizer.ggml.seperator_token_id": 2**32 - 1,
                "tokenizer.ggml.padding_token_id": 2**32 - 1,
            },
            {"output.weight": (VOCAB, HIDDEN)},
            id="Llama 2 and llama2.c's stories",
        ),
        pytest.param(
            "qwen2", {"llama.use_parallel_residual": True, "tokenizer.ggml.pre": None}, {}, id="Qwen 1.5 of early 2024"
        ),
        pytest.param(
            "qwen3",
            {
                "llama.rope.freq_base": 5000000.0,
                "llama.attention.key_length": HEAD,
                "llama.attention.value_length": HEAD,
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "tokenizer.ggml.pre": "qwen2",
                "tokenizer.ggml.add_bos_token": False,
            },
            {},
            id="Qwen 3, its context made longer",
        ),
        pytest.param(
            "granite",
            {
                "llama.vocab_size": VOCAB,
                "llama.rope.dimension_count": HEAD,
                "llama.attention.scale": 0.0078125,
                "llama.embedding_scale": 12.0,
                "llama.residual_scale": 0.22,
                "llama.logit_scale": 8.0,
                "tokenizer.ggml.pre": "refact",
            },
            {},
            id="Granite 3.1",
        ),
        pytest.param(
            "gemma",
            SENTENCEPIECE | {"llama.attention.key_length": HEAD, "llama.attention.value_length": HEAD},
            {},
            id="Gemma 1",
        ),
    ],
)
def test_it_is_read(tmp_path: Path, architecture: str, metadata: dict[str, Any], tensors: Shapes) -> None:
    file = in_terms_of_llama_cpp(tiny(tmp_path, BYTE_LEVEL | metadata, per_layer(architecture) | tensors, architecture))
    model_weights(file)
    assert Tokenizer.from_gguf(file.metadata).encode("a")


IMAGES: Shapes = {
    "v.patch_embedding.weight": (4, 4),
    "v.blk.0.attn_k.weight": (4, 4),
    "mm.mm_soft_emb_norm.weight": (4,),
}
IMAGE_KEYS: dict[str, Any] = {
    "llama.mm.tokens_per_image": 256,
    "llama.vision.block_count": 27,
    "llama.vision.attention.layer_norm_epsilon": 1e-6,
}


def gemma3(folder: Path, layers: int, metadata: dict[str, Any], tensors: Shapes) -> GGUFFile:
    norms = {name: shape for name, shape in GEMMA3_NORMS.items() if int(name.split(".")[1]) < layers}
    sizes: dict[str, Any] = {
        "llama.attention.key_length": HEAD,
        "llama.attention.value_length": HEAD,
        "llama.attention.sliding_window": 64,
    }
    return in_terms_of_llama_cpp(tiny(folder, SENTENCEPIECE | sizes | metadata, norms | tensors, "gemma3", layers))


def global_and_local(file: GGUFFile) -> tuple[RopeSpec | None, RopeSpec | None]:
    layers = model_weights(file).spec.layers
    return layers[5].rope, layers[0].rope


def test_ollamas_gemma3_4b(tmp_path: Path) -> None:
    """With the image encoder and a token for images, and without what only Ollama's runner knows."""
    longer: dict[str, Any] = {
        "llama.attention.layer_norm_rms_epsilon": None,
        "tokenizer.ggml.tokens": [*TOKENS, "<image_soft_token>"],
        "tokenizer.ggml.scores": [0.0] * (VOCAB + 1),
        "tokenizer.ggml.token_type": VOCABULARY["tokenizer.ggml.token_type"] + [3],
        "tokenizer.ggml.eos_token_ids": [1, 2],
    }
    file = gemma3(tmp_path, 34, IMAGE_KEYS | longer, IMAGES)
    assert model_weights(file).spec.norm_eps == 1e-6
    everywhere, local = global_and_local(file)
    assert everywhere == RopeSpec(theta=1e6, dim=HEAD, pairing="half", scaling=LinearScaling(8.0))
    assert local == RopeSpec(theta=1e4, dim=HEAD, pairing="half")
    assert Tokenizer.from_gguf(file.metadata).vocab_size == VOCAB


def test_ollamas_gemma3_1b(tmp_path: Path) -> None:
    old_names = {"llama.rope.global.freq_base": 2e6, "llama.rope.local.freq_base": 2e4}
    file = gemma3(tmp_path, 26, old_names | {"llama.final_logit_softcapping": 30.0}, {})
    assert model_weights(file).spec.logits_softcap is None
    everywhere, local = global_and_local(file)
    assert everywhere == RopeSpec(theta=2e6, dim=HEAD, pairing="half")
    assert local == RopeSpec(theta=2e4, dim=HEAD, pairing="half")


def test_googles_quantized_gemma3(tmp_path: Path) -> None:
    """It has the image encoder's keys and not its tensors, and says itself how it is scaled."""
    stated: dict[str, Any] = {
        "llama.rope.freq_base": 1e6,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
        "tokenizer.ggml.add_padding_token": False,
    }
    everywhere, _ = global_and_local(gemma3(tmp_path, 34, IMAGE_KEYS | stated, {}))
    assert everywhere
    assert everywhere.scaling == LinearScaling(4.0)


def test_a_file_of_llama_cpps_converter_stays_as_it_is(tmp_path: Path) -> None:
    file = gemma3(tmp_path, 26, {"llama.rope.freq_base": 1e6, "llama.final_logit_softcapping": 30.0}, {})
    assert model_weights(file).spec.logits_softcap == 30.0


@pytest.mark.parametrize("architecture", [1, np.ones(2), None])
def test_what_names_no_architecture_is_left_to_its_reader(tmp_path: Path, architecture: Any) -> None:
    file = GGUFFile((tmp_path,), {"general.architecture": architecture}, {})
    assert in_terms_of_llama_cpp(file) is file
