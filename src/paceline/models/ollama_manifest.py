"""One model in Ollama's store: its manifest, and the layers that the manifest names (OCI image manifest, version 2)."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import InputError, ModelFileError
from paceline.models.ollama_name import OllamaName

_LAYER = "application/vnd.ollama.image."
_SAMPLING = {
    "frequency_penalty": "frequency_penalty",
    "min_p": "min_p",
    "num_predict": "max_tokens",
    "presence_penalty": "presence_penalty",
    "repeat_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
"""Ollama's parameters (docs/modelfile) and our SamplingParams' names for them."""


class _Layer(msgspec.Struct, rename="camel"):
    media_type: str
    digest: str
    size: int


class _Manifest(msgspec.Struct):
    layers: list[_Layer]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a model consists of."""

    model: Path
    """The GGUF file."""
    size: int
    """Bytes of it."""
    template: str | None
    """In Go's template language."""
    system: str | None
    sampling: dict[str, Any]
    """Fields of SamplingParams."""
    context_length: int | None
    unused: tuple[str, ...]
    """What else the model brings, in words."""


def read_manifest(store: Path, name: OllamaName) -> Manifest:
    """
    Raises:
        InputError: the model needs a LoRA adapter.
        ModelFileError: the manifest or a blob is missing, damaged, or may not be read.
    """
    path = store / "manifests" / name.host / name.namespace / name.model / name.tag
    layers = _layers(path)
    if "adapter" in layers:
        raise InputError(
            f"ollama:{name} applies a LoRA adapter to its model, which is not supported; serve the model that it was "
            "made from, or merge the two",
            param="model",
        )
    if "model" not in layers:
        raise ModelFileError(
            f"{path}: ollama:{name} has no GGUF file (it has {', '.join(sorted(layers)) or 'nothing'}); it may be a "
            "model that Ollama runs elsewhere, or keeps in another format"
        )
    model = _blob(store, layers["model"], path)
    parameters = _parameters(store, layers["params"], path) if "params" in layers else {}
    context_length = parameters.pop("num_ctx", None)
    if context_length is not None and (type(context_length) is not int or context_length < 1):
        raise ModelFileError(f"{path}: num_ctx is {context_length!r}; a positive number of tokens is needed")
    if parameters.get("num_predict", 1) in (-1, -2):  # to the end, to the end of the context: as without it
        del parameters["num_predict"]
    unused = [f"its parameter {key}" for key in sorted(parameters.keys() - _SAMPLING.keys())]
    if "projector" in layers:
        unused.insert(0, "its projector (images cannot be seen)")
    if "messages" in layers:
        unused.insert(0, "its example messages")
    return Manifest(
        model=model,
        size=layers["model"].size,
        template=_text(store, layers.get("template"), path),
        system=_text(store, layers.get("system"), path),
        sampling={_SAMPLING[key]: value for key, value in parameters.items() if key in _SAMPLING},
        context_length=context_length,
        unused=tuple(unused),
    )


def _layers(path: Path) -> dict[str, _Layer]:
    """By the last word of their type; the first of a kind, as only licences come in numbers."""
    found: dict[str, _Layer] = {}
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=_Manifest)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise _damaged(path, f"no manifest of Ollama: {error}") from error
    for layer in manifest.layers:
        kind = layer.media_type.partition(";")[0]
        if kind.startswith(_LAYER):
            found.setdefault(kind.removeprefix(_LAYER), layer)
    return found


def _blob(store: Path, layer: _Layer, manifest: Path) -> Path:
    if re.fullmatch("sha256:[0-9a-f]{64}", layer.digest) is None:
        raise _damaged(manifest, f"{layer.digest[:80]!r} is no digest")
    path = store / "blobs" / layer.digest.replace(":", "-")
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise _damaged(manifest, f"its blob {path} is missing") from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    if size != layer.size:
        raise _damaged(manifest, f"its blob {path} has {size} bytes, not {layer.size}")
    return path


def _text(store: Path, layer: _Layer | None, manifest: Path) -> str | None:
    if layer is None:
        return None
    path = _blob(store, layer, manifest)
    try:
        return path.read_text(encoding="utf-8") or None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise _damaged(manifest, f"its blob {path} is no text: {error}") from error


def _parameters(store: Path, layer: _Layer, manifest: Path) -> dict[str, Any]:
    text = _text(store, layer, manifest)
    try:
        return msgspec.json.decode(text or "", type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise _damaged(manifest, f"its parameters are no JSON object: {error}") from error


def _damaged(manifest: Path, problem: str) -> ModelFileError:
    return ModelFileError(f"{manifest}: {problem}; Ollama's store is damaged: `ollama pull` the model again")
