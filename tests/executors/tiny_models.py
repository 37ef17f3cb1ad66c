"""Tiny random models of every architecture: made by transformers, converted by llama.cpp.

No converter of ours is involved: a reader and a writer that share a mistake would agree.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.models.architectures import model_weights
from paceline.models.gguf import read_gguf
from paceline.models.spec import ModelWeights

VOCABULARY = 300  # no multiple of 16, so that a padded panel is always there
LENGTH = 300  # past windows, blocks of 32, a partition of 256 and the original context of a stretched rotation
WINDOW = 40
ORIGINAL_CONTEXT = 64


@dataclass(frozen=True)
class Variant:
    """A model to be made: transformers' config class, and what it gets besides ``_SIZES``."""

    config: str
    options: dict[str, Any]
    flags: tuple[str, ...] = ()
    """For the converter."""
    architectures: tuple[str, ...] = ()
    """Written to config.json in place of transformers' own class, where the converter tells models by that."""


_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_CONTEXT,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": ORIGINAL_CONTEXT,
}
_DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
_GEMMA2 = {"head_dim": 32, "sliding_window": WINDOW, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0}

VARIANTS = {
    "llama": Variant("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-multi-head": Variant("LlamaConfig", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-biases": Variant("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-fused": Variant("LlamaConfig", {"attention_bias": True}, flags=("--fuse-qkv",)),
    "llama3": Variant("LlamaConfig", {"rope_parameters": _LLAMA3}),
    "llama-linear": Variant("LlamaConfig", {"rope_parameters": _LINEAR}),
    "llama-yarn": Variant("LlamaConfig", {"rope_parameters": _YARN}),
    "mistral": Variant("MistralConfig", {"sliding_window": WINDOW}),
    "mistral3": Variant(
        "MistralConfig", {"sliding_window": None, "head_dim": 64}, architectures=("Mistral3ForConditionalGeneration",)
    ),
    "qwen2": Variant("Qwen2Config", {"tie_word_embeddings": False}),
    "qwen2.5-tied": Variant("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-yarn": Variant(
        "Qwen2Config", {"rope_parameters": _YARN | {"attention_factor": 1.5, "beta_fast": 8.0, "beta_slow": 0.5}}
    ),
    "qwen3-tied": Variant("Qwen3Config", {"head_dim": 64, "tie_word_embeddings": True}),
    "qwen3": Variant("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": False}),
    "gemma": Variant("GemmaConfig", {"head_dim": 64, "num_key_value_heads": 1}),
    "gemma2": Variant("Gemma2Config", {"num_hidden_layers": 4, "query_pre_attn_scalar": 32, **_GEMMA2}),
    "gemma2-27b": Variant(
        "Gemma2Config",
        {
            "num_hidden_layers": 46,
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 64,
            **_GEMMA2,
        },
    ),
    "gemma3": Variant(
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 7,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "full_attention": _LINEAR | {"rope_theta": 1e6},
                "sliding_attention": _DEFAULT | {"rope_theta": 5000.0},
            },
        },
    ),
    "gpt2": Variant("GPT2Config", {"n_ctx": 512}),
    "phi2": Variant(
        "PhiConfig",
        {
            "num_key_value_heads": 4,
            "intermediate_size": 512,
            "rope_parameters": _DEFAULT | {"partial_rotary_factor": 0.5},
        },
    ),
    "olmo2": Variant("Olmo2Config", {}),
    "olmo3": Variant(
        "Olmo3Config",
        {
            "num_hidden_layers": 5,
            "sliding_window": WINDOW,
            "rope_parameters": {"full_attention": _YARN, "sliding_attention": _DEFAULT},
        },
    ),
    "granite": Variant(
        "GraniteConfig",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.4,
            "logits_scaling": 4.0,
        },
    ),
    "starcoder2": Variant("Starcoder2Config", {"sliding_window": None, "intermediate_size": 512}),
}


@dataclass(frozen=True)
class TinyModel:
    """A variant in both worlds."""

    folder: Path
    """As ``save_pretrained`` leaves it, with ``model.gguf`` beside."""
    weights: ModelWeights
    """Of the GGUF file, as we read it."""
    token_ids: list[int]
    logits: np.ndarray[Any, np.dtype[np.float32]] = field(repr=False)
    """[T, vocab_size], transformers' for ``token_ids``."""

    def difference(self, logits: np.ndarray[Any, Any]) -> float:
        """Largest difference from transformers' logits, relative to the largest of those."""
        return float(np.abs(logits - self.logits).max() / np.abs(self.logits).max())


def make_tiny_models(variants: Mapping[str, Variant], folder: Path, llama_cpp: Path) -> dict[str, TinyModel]:
    """The variants, each in a folder of its own, and transformers' logits of a random sequence for each."""
    token_ids = np.random.default_rng(7).integers(2, VOCABULARY, LENGTH).tolist()
    logits = {name: _save(variant, folder / name, token_ids) for name, variant in variants.items()}
    _convert(variants, folder, llama_cpp)
    return {
        name: TinyModel(folder / name, _weights(folder / name / "model.gguf"), token_ids, values)
        for name, values in logits.items()
    }


def _save(variant: Variant, folder: Path, token_ids: list[int]) -> Any:
    import torch
    import transformers

    config = getattr(transformers, variant.config)(**(_SIZES | variant.options))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    _randomise(model)
    model.save_pretrained(folder)
    _save_vocabulary(folder)
    if variant.architectures:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": list(variant.architectures)}))
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].numpy()


def _randomise(model: Any) -> None:
    """Weights large enough for attention to be sharp, and norms and biases far from 1 and 0: mistakes show."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(1.5 / max(parameter.shape[1], 64) ** 0.5 * noise)


def _save_vocabulary(folder: Path) -> None:
    """The converter wants a tokenizer; nothing here ever uses it."""
    vocabulary = {f"token{i}": i for i in range(VOCABULARY)}
    tokenizer = {"added_tokens": [], "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _convert(variants: Mapping[str, Variant], folder: Path, llama_cpp: Path) -> None:
    jobs = [
        [str(folder / name), "--outfile", str(folder / name / "model.gguf"), "--outtype", "f32", *variant.flags]
        for name, variant in variants.items()
    ]
    script = Path(__file__).with_name("convert_tiny_models.py")
    command = [sys.executable, str(script), str(llama_cpp), json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def _weights(path: Path) -> ModelWeights:
    with read_gguf(path) as file:
        return model_weights(file)
