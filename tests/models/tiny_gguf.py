"""Small GGUF files, with metadata and tensors at will."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from paceline.models.architectures import model_weights
from paceline.models.gguf import GGUFFile, read_gguf
from paceline.models.spec import ModelSpec

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


Shapes = dict[str, tuple[int, ...] | None]


def shapes(layers: int = 2) -> Shapes:
    key = HIDDEN // HEADS * KV_HEADS
    found: Shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(layers):
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
    tensors: Shapes | None = None,
    architecture: str = "llama",
    layers: int = 2,
) -> GGUFFile:
    """A small file with some of llama's metadata and tensors replaced; None takes one out."""
    path = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (HYPERPARAMETERS | {"llama.block_count": layers} | (metadata or {})).items():
        key = name.replace("llama.", f"{architecture}.", 1)
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
    for name, shape in (shapes(layers) | (tensors or {})).items():
        if shape is not None:
            writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path)


GEMMA3_NORMS: Shapes = {
    f"blk.{layer}.{name}.weight": (width,)
    for layer in range(62)
    for name, width in (
        ("post_attention_norm", HIDDEN),
        ("post_ffw_norm", HIDDEN),
        ("attn_q_norm", HIDDEN // HEADS),
        ("attn_k_norm", HIDDEN // HEADS),
    )
}


def tiny_gemma3(folder: Path, metadata: dict[str, Any], layers: int) -> ModelSpec:
    tensors = {name: shape for name, shape in GEMMA3_NORMS.items() if int(name.split(".")[1]) < layers}
    return model_weights(tiny(folder, metadata, tensors, "gemma3", layers)).spec
