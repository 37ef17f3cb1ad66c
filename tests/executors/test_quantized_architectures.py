"""Architectures with quantized weights: what differs from the reference is the rounding of activations to 8 bits."""

import pytest

from paceline.models.quants import QuantType
from tests.executors.tiny_models import TinyModel
from tests.proof.quantized import quantized_error

CASES = [("llama", kind) for kind in QuantType]
CASES += [(name, QuantType.Q4_K) for name in ("qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "granite")]
CASES += [(name, QuantType.Q6_K) for name in ("gpt2", "phi2", "starcoder2", "gemma", "mistral")]


@pytest.mark.parametrize(("name", "kind"), CASES, ids=[f"{name}-{kind.name}" for name, kind in CASES])
def test_only_the_rounding_of_activations_differs(
    tiny_models: dict[str, TinyModel], name: str, kind: QuantType
) -> None:
    exact = kind in (QuantType.F32, QuantType.F16, QuantType.BF16)
    assert quantized_error(tiny_models[name].weights.spec, kind) < (1e-5 if exact else 0.06)
