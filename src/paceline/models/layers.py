"""What may differ from layer to layer, from a GGUF file's metadata: rotation and windows."""

from dataclasses import replace
from math import log
from typing import Literal

import numpy as np

from paceline.models.hyperparameters import Hyperparameters
from paceline.models.rope import LinearScaling, RopeSpec, YarnScaling
from paceline.models.spec import LayerSpec, ModelSpec

Pairing = Literal["interleaved", "half"]


def uniform(read: Hyperparameters, spec: ModelSpec, pairing: Pairing) -> tuple[LayerSpec, ...]:
    """Layers all alike, with a window or with Llama 3's scaling if the file has it."""
    rope = read_rope(read, spec, pairing)
    divisors = read.tensor_values("rope_freqs.weight", rope.dim // 2)
    return (LayerSpec(replace(rope, frequency_divisors=divisors), read.window()),) * spec.num_layers


def alternating(
    read: Hyperparameters, spec: ModelSpec, rope: RopeSpec, local: RopeSpec, window: int | None, *, period: int
) -> tuple[LayerSpec, ...]:
    """All layers but every ``period``-th have the window and ``local``, unless the file says which."""
    if window is None:
        return (LayerSpec(rope),) * spec.num_layers
    windowed = read.windowed_layers(spec.num_layers, period)
    return tuple(LayerSpec(local, window) if has_window else LayerSpec(rope) for has_window in windowed)


def read_rope(read: Hyperparameters, spec: ModelSpec, pairing: Pairing) -> RopeSpec:
    """The rotation of layers without a window; an architecture's pairing is the one that ``llama_model_rope_type``
    in llama.cpp's src/llama-model.cpp says."""
    dim = read.integer("rope.dimension_count", spec.head_dim)
    if dim % 2 or dim > spec.head_dim:
        raise read.fault(
            f"{read.architecture}.rope.dimension_count is {dim}; it must be even and at most {spec.head_dim}"
        )
    rope = RopeSpec(
        theta=read.number("rope.freq_base", 10000.0),
        dim=dim,
        pairing=pairing,
        scaling=_scaling(read, spec.context_length),
    )
    if not _is_finite(rope):
        raise read.fault(f"rotation by {rope} has frequencies that are no finite numbers")
    return rope


def _is_finite(rope: RopeSpec) -> bool:
    try:
        with np.errstate(all="ignore"):
            return bool(np.isfinite(rope.inverse_frequencies()).all())
    except ArithmeticError:
        return False


def _scaling(read: Hyperparameters, context_length: int) -> LinearScaling | YarnScaling | None:
    read.neutral("rope.scaling.finetuned", False, True)  # says how the model came to be, not how it is computed
    kind = read.word("rope.scaling.type", "linear", "none", "yarn")
    old_factor = read.number_or_off("rope.scale_linear")
    factor = read.number_or_off("rope.scaling.factor") or old_factor or 1.0
    if kind == "yarn":
        return _yarn(read, factor, context_length)
    read.integer("rope.scaling.original_context_length", context_length)  # nothing but YaRN needs it
    read.neutral("rope.scaling.attn_factor", 1.0)
    return None if kind == "none" or factor == 1.0 else LinearScaling(factor)


def _yarn(read: Hyperparameters, factor: float, context_length: int) -> YarnScaling:
    """The magnitude is transformers' ``attention_factor`` (``_compute_yarn_parameters`` in modeling_rope_utils.py).

    The converter writes it as ``yarn_attn_factor`` if the original model states it; otherwise it is 0.1·ln(factor) + 1,
    which ``yarn_log_multiplier`` (``mscale_all_dim``) divides. llama.cpp multiplies all of it by ``attn_factor``
    (src/llama-context.cpp).
    """
    read.neutral("rope.scaling.yarn_ext_factor", 1.0)
    growth = 0.1 * log(max(factor, 1.0))
    multiplier = read.number_or_off("rope.scaling.yarn_log_multiplier") or 0.0
    magnitude = read.number("rope.scaling.yarn_attn_factor", (growth + 1) / (multiplier * growth + 1))
    return YarnScaling(
        factor,
        original_context=read.integer("rope.scaling.original_context_length", context_length),
        beta_fast=read.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=read.number("rope.scaling.yarn_beta_slow", 1.0),
        magnitude=magnitude * read.number("rope.scaling.attn_factor", 1.0),
    )
