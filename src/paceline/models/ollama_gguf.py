"""Gemma 3 as Ollama's own converter wrote it, and Google's files after it, in llama.cpp's terms.

These files hold the image encoder as well, and leave out what only Ollama's runner knew. What is missing, and what is
wrong, is taken from its runner (ollama/ollama: model/models/gemma3/model_text.go) and from its translation for
llama.cpp (llama/compat).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.gguf import GGUFFile, MetadataValue
from paceline.models.quants import Tensor

_IMAGE_KEYS = ("gemma3.vision.", "gemma3.mm.")
_IMAGE_TENSORS = ("v.", "mm.")
_OLD_NAMES = {"rope.global.freq_base": "rope.freq_base", "rope.local.freq_base": "rope.freq_base_swa"}
_PER_TOKEN = ("tokens", "scores", "token_type")

_LAYERS_OF_1B = 26
_LAYERS_OF_SCALED = (34, 48, 62)
"""Of 4B, 12B and 27B, whose positions are divided by 8."""


def in_terms_of_llama_cpp(file: GGUFFile) -> GGUFFile:
    """The text model in such a file; any other file as it is."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture != "gemma3" or not _is_of_ollama(file.metadata):
        return file
    tensors = {name: tensor for name, tensor in file.tensors.items() if not name.startswith(_IMAGE_TENSORS)}
    kept = {key: value for key, value in file.metadata.items() if not key.startswith(_IMAGE_KEYS)}
    return replace(file, metadata=_completed(kept) | _shortened(kept, tensors), tensors=tensors)


def _is_of_ollama(metadata: Mapping[str, MetadataValue]) -> bool:
    return (
        any(key.startswith(_IMAGE_KEYS) for key in metadata)
        or any(f"gemma3.{name}" in metadata for name in _OLD_NAMES)
        or "gemma3.attention.layer_norm_rms_epsilon" not in metadata
    )


def _completed(metadata: Mapping[str, MetadataValue]) -> dict[str, MetadataValue]:
    renamed = {f"gemma3.{old}": f"gemma3.{new}" for old, new in _OLD_NAMES.items()}
    found = {renamed.get(key, key): value for key, value in metadata.items()}
    layers = found.get("gemma3.block_count")
    if isinstance(layers, int) and layers == _LAYERS_OF_1B:
        found.pop("gemma3.final_logit_softcapping", None)  # 30 in the file, none in the model
    defaults: dict[str, MetadataValue] = {
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.rope.freq_base": 1e6,
        "gemma3.rope.freq_base_swa": 1e4,
    }
    if isinstance(layers, int) and layers in _LAYERS_OF_SCALED:
        defaults |= {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    return defaults | found


def _shortened(metadata: Mapping[str, MetadataValue], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The vocabulary without the tokens that stand for images, which have no embedding."""
    embedding = tensors.get("token_embd.weight")
    lists = {key: metadata[key] for name in _PER_TOKEN if (key := f"tokenizer.ggml.{name}") in metadata}
    if embedding is None:
        return {}
    return {key: value[: embedding.shape[0]] for key, value in lists.items() if not isinstance(value, int | float)}
