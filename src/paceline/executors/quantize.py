"""Quantization at load: in which type the native executor keeps each tensor of a model."""

from typing import Literal

from paceline.models.quants import UNQUANTIZED, QuantType, Tensor

Quantize = Literal["q8", "q4"]

_KEPT = {"q8": QuantType.Q8_0, "q4": QuantType.IQ4_NL}
_KEPT_AT_8_BITS = ("token_embd", "output")
"""The head decides between tokens that are close, and an embedding is the whole of what a token says: as in the files
of llama.cpp's tools, they keep more bits than the layers."""


def kept_type(name: str, tensor: Tensor, quantize: Quantize | None) -> QuantType:
    """Where ``quantize`` asks for it, the quantized type that a matrix of floats becomes; else the tensor's own.

    Args:
        name: under GGUF's name, such as ``blk.3.attn_q.weight``.
    """
    stem = name.split(".")[-2]
    if quantize is None or len(tensor.shape) != 2 or tensor.type not in UNQUANTIZED or stem == "position_embd":
        return tensor.type
    return QuantType.Q8_0 if stem in _KEPT_AT_8_BITS else _KEPT[quantize]
