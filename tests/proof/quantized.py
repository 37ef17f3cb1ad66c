"""Every architecture with every tensor type: the native executor beside the float64 reference."""

from dataclasses import replace

import numpy as np

from paceline.models.quants import QuantType
from paceline.models.spec import ModelSpec
from tests.executors.both_executors import all_logits, native
from tests.executors.float64_model import reference_logits
from tests.executors.tiny import tiny_weights

TOKENS = 64


def quantized_error(spec: ModelSpec, kind: QuantType) -> float:
    """Root mean square of the difference from the reference, relative to the logits' own, for random weights."""
    # K-quants need rows of 256; a few layers are enough
    wide = replace(spec, hidden_size=256, intermediate_size=256, num_heads=4, head_dim=64, layers=spec.layers[:4])
    wide = replace(wide, num_kv_heads=min(spec.num_kv_heads, 4))
    weights = tiny_weights(wide, kind)
    token_ids = np.random.default_rng(3).integers(0, spec.vocab_size, TOKENS).tolist()
    expected = reference_logits(weights, token_ids)
    difference = all_logits(native(weights), token_ids) - expected
    return float(np.sqrt((difference**2).mean() / (expected**2).mean()))
