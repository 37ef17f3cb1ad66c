"""From a GGUF file's metadata and tensors to a ModelSpec: one function per architecture.

A hyperparameter or tensor that a function does not understand is refused by name: a model that is computed almost
right is worse than one that is not computed. Keys and defaults are those of llama.cpp (src/llama-model.cpp,
``load_hparams``, and src/models/<architecture>.cpp); what the values mean is what its converter (conversion/*.py) puts
in from the original model. docs/adding-a-model.md shows how to add one.
"""

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from typing import Literal

from paceline.errors import ModelFileError
from paceline.models.gguf import GGUFFile
from paceline.models.hyperparameters import Hyperparameters
from paceline.models.layers import alternating, read_rope, uniform
from paceline.models.spec import LayerSpec, ModelSpec, ModelWeights
from paceline.models.tensors import normalised


def model_weights(file: GGUFFile) -> ModelWeights:
    """The model in a GGUF file, with the shape of every tensor checked; its tensors outlive ``file.close()``.

    Raises:
        ModelFileError: an architecture, hyperparameter or tensor is missing, contradictory or not supported.
    """
    kind = file.metadata.get("general.type", "model")  # a LoRA adapter names the architecture of its model
    if kind != "model":
        raise ModelFileError(f"{file.path}: a GGUF file of the kind {kind!r}; only whole language models can be run")
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelFileError(f"{file.path}: architecture {architecture!r} is not supported; supported: {known}")
    read = Hyperparameters(file, architecture)
    spec = ARCHITECTURES[architecture](read)
    read.refuse_unread()
    _check_vocabulary(file, spec)
    return ModelWeights(spec, normalised(file.path, read.tensors, spec))


_QKV = frozenset({"attn_q", "attn_k", "attn_v"})
_UNGATED = _QKV | {"attn_output", "ffn_up", "ffn_down"}
_GATED = _UNGATED | {"ffn_gate"}


def _llama(read: Hyperparameters) -> ModelSpec:
    """Llama 1 to 3 and what copies it (SmolLM2, TinyLlama, Mistral with its window)."""
    spec = _transformer(read)
    # convert_hf_to_gguf.py permutes the rows of q and k (LlamaModel.permute), so that partners are neighbours
    return replace(spec, layers=uniform(read, spec, "interleaved"), biases=_biases_found(read))


def _granite(read: Hyperparameters) -> ModelSpec:
    read.neutral("rope.scaling.finetuned", True)  # here it switches the rotation itself
    spec = _llama(read)
    return replace(
        spec,
        attention_scale=read.number_or_off("attention.scale") or spec.attention_scale,
        embedding_scale=read.number_or_off("embedding_scale") or 1.0,
        residual_scale=read.number_or_off("residual_scale") or 1.0,
        logits_scale=1 / read.number("logit_scale"),
    )


def _qwen2(read: Hyperparameters) -> ModelSpec:
    spec = _transformer(read)
    return replace(spec, layers=uniform(read, spec, "half"), biases=_QKV)


def _qwen3(read: Hyperparameters) -> ModelSpec:
    spec = _transformer(read)
    return replace(spec, layers=uniform(read, spec, "half"), qk_norm="head")


def _gemma(read: Hyperparameters) -> ModelSpec:
    """The file's norm weights are Gemma's 1 + w already."""
    spec = _transformer(read)
    return replace(
        spec, layers=uniform(read, spec, "half"), activation="gelu_tanh", embedding_scale=sqrt(spec.hidden_size)
    )


def _gemma2(read: Hyperparameters) -> ModelSpec:
    spec = _transformer(read)
    rope = read_rope(read, spec, "half")
    local = replace(rope, theta=read.number("rope.freq_base_swa", rope.theta))
    return replace(
        spec,
        layers=alternating(read, spec, rope, local, read.window(4096), period=2),
        activation="gelu_tanh",
        post_norms=True,
        embedding_scale=sqrt(spec.hidden_size),
        attention_scale=_gemma_attention_scale(spec, layers_of_27b=46),
        attention_softcap=read.number_or_off("attn_logit_softcapping", 50.0),
        logits_softcap=read.number_or_off("final_logit_softcapping", 30.0),
    )


def _gemma3(read: Hyperparameters) -> ModelSpec:
    """Layers with a window have a base of their own, and are not scaled."""
    spec = _transformer(read)
    rope = read_rope(read, spec, "half")
    local = replace(rope, theta=read.number("rope.freq_base_swa", 10000.0), scaling=None)
    return replace(
        spec,
        layers=alternating(read, spec, rope, local, read.window(), period=6),
        activation="gelu_tanh",
        post_norms=True,
        qk_norm="head",
        embedding_scale=sqrt(spec.hidden_size),
        attention_scale=_gemma_attention_scale(spec, layers_of_27b=62),
        logits_softcap=read.number_or_off("final_logit_softcapping"),
    )


def _gemma_attention_scale(spec: ModelSpec, *, layers_of_27b: int) -> float:
    """GGUF has no key for Gemma's ``query_pre_attn_scalar``; llama.cpp tells the 27B models, in which it is not
    head_dim, by their number of layers."""
    is_27b = spec.num_layers == layers_of_27b
    return 1 / sqrt(spec.hidden_size // spec.num_heads if is_27b else spec.head_dim)


def _gpt2(read: Hyperparameters) -> ModelSpec:
    return replace(
        _transformer(read, norm="layer"),
        learned_positions=True,
        activation="gelu_tanh",
        gated=False,
        biases=_UNGATED,
    )


def _phi2(read: Hyperparameters) -> ModelSpec:
    spec = _transformer(read, norm="layer")
    return replace(
        spec,
        layers=uniform(read, spec, "half"),
        parallel_residual=True,
        activation="gelu_tanh",
        gated=False,
        biases=_UNGATED | {"output"},
    )


def _olmo2(read: Hyperparameters) -> ModelSpec:
    """OLMo 2, and OLMo 3, whose layers with a window are not scaled."""
    spec = _transformer(read)
    rope = read_rope(read, spec, "half")
    local = replace(rope, theta=read.number("rope.freq_base_swa", rope.theta), scaling=None)
    return replace(
        spec,
        layers=alternating(read, spec, rope, local, read.window(), period=4),
        pre_norms=False,
        post_norms=True,
        qk_norm="whole",
    )


def _starcoder2(read: Hyperparameters) -> ModelSpec:
    spec = _transformer(read, norm="layer")
    return replace(
        spec,
        layers=uniform(read, spec, "half"),
        activation="gelu_tanh",
        gated=False,
        biases=_UNGATED,
    )


ARCHITECTURES: dict[str, Callable[[Hyperparameters], ModelSpec]] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "granite": _granite,
    "llama": _llama,
    "mistral3": _llama,
    "olmo2": _olmo2,
    "phi2": _phi2,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "starcoder2": _starcoder2,
}
"""By ``general.architecture``; tests/executors/tiny_models.py has a variant of each."""


def _transformer(read: Hyperparameters, norm: Literal["rms", "layer"] = "rms") -> ModelSpec:
    """What all architectures describe alike; without rotation and windows."""
    hidden_size, num_heads = read.integer("embedding_length"), read.integer("attention.head_count")
    num_kv_heads = read.integer("attention.head_count_kv", num_heads)
    head_dim = read.integer("attention.key_length", max(hidden_size // num_heads, 1))
    if num_heads % num_kv_heads:
        raise read.fault(f"{num_heads} attention heads cannot be shared out among {num_kv_heads} key/value heads")
    epsilon, other = ("rms_epsilon", "epsilon") if norm == "rms" else ("epsilon", "rms_epsilon")
    # the converter writes every epsilon of the original's configuration, and until 2024 this residual by default
    read.ignore(f"attention.layer_norm_{other}", "use_parallel_residual")
    read.neutral("attention.head_dim", head_dim)  # Ollama's name
    read.neutral("attention.value_length", head_dim)
    read.neutral("attention.causal", True)
    read.neutral("expert_count", 0)
    read.neutral("expert_used_count", 0)
    read.neutral("tensor_data_layout", "Meta AI original pth")
    return ModelSpec(
        architecture=read.architecture,
        name=read.model_name,
        vocab_size=read.integer("vocab_size", _vocab_size(read)),
        context_length=read.integer("context_length"),
        layers=(LayerSpec(rope=None),) * read.layer_count(),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=read.integer("feed_forward_length"),
        attention_scale=head_dim**-0.5,
        norm=norm,
        norm_eps=read.number(f"attention.layer_norm_{epsilon}"),
        tied_embeddings="output.weight" not in read.tensors,
    )


def _vocab_size(read: Hyperparameters) -> int:
    embedding = read.tensors.get("token_embd.weight")
    if embedding is None:
        raise read.fault("the tensor token_embd.weight is missing")
    return embedding.shape[0]


def _biases_found(read: Hyperparameters) -> frozenset[str]:
    """Where biases are a choice of each model, those of the first layer."""
    fused = _QKV if "blk.0.attn_qkv.bias" in read.tensors else frozenset[str]()
    return fused | {name for name in _GATED if f"blk.0.{name}.bias" in read.tensors}


def _check_vocabulary(file: GGUFFile, spec: ModelSpec) -> None:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != spec.vocab_size:
        raise ModelFileError(
            f"{file.path}: the tokenizer has {len(tokens)} tokens, but the model a vocabulary of {spec.vocab_size}"
        )
