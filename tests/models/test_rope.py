"""Inverse frequencies against transformers', which computes them in float32."""

from typing import Any

import numpy as np
import pytest

from paceline.models.rope import LinearScaling, RopeSpec, YarnScaling


def transformers_frequencies(head_dim: int, parameters: dict[str, Any]) -> tuple[np.ndarray[Any, Any], float]:
    """Inverse frequencies and magnitude."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=8192, rope_parameters=parameters)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, device="cpu")
    return frequencies.double().numpy(), magnitude


def test_linear() -> None:
    rope = RopeSpec(10000.0, 128, "half", LinearScaling(8.0))
    theirs, magnitude = transformers_frequencies(128, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0})
    np.testing.assert_allclose(rope.inverse_frequencies(), theirs, rtol=1e-6)
    assert rope.magnitude == magnitude == 1.0


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize(
    ("factor", "original", "beta_fast", "beta_slow"),
    [(4.0, 2048, 32.0, 1.0), (2.5, 32768, 32.0, 1.0), (8.0, 64, 16.0, 0.5), (40.0, 4096, 1.0, 1.0)],
    ids=["usual", "long", "short", "no-ramp"],
)
def test_yarn(head_dim: int, theta: float, factor: float, original: int, beta_fast: float, beta_slow: float) -> None:
    parameters = {"factor": factor, "original_max_position_embeddings": original, "attention_factor": 1.25}
    betas = {"beta_fast": beta_fast, "beta_slow": beta_slow}
    theirs, magnitude = transformers_frequencies(
        head_dim, {"rope_type": "yarn", "rope_theta": theta, **parameters, **betas}
    )
    rope = RopeSpec(theta, head_dim, "half", YarnScaling(factor, original, **betas, magnitude=1.25))
    np.testing.assert_allclose(rope.inverse_frequencies(), theirs, rtol=2e-6)
    assert rope.magnitude == magnitude


def test_llama3_as_divisors() -> None:
    """GGUF's form of Llama 3's scaling: by what each frequency is divided."""
    parameters = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    theirs, magnitude = transformers_frequencies(
        64, {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, **parameters}
    )
    plain = RopeSpec(5e5, 64, "interleaved")
    divisors = plain.inverse_frequencies() / theirs
    assert divisors.min() == pytest.approx(1.0)
    assert divisors.max() == pytest.approx(32.0)
    rope = RopeSpec(5e5, 64, "interleaved", frequency_divisors=tuple(divisors))
    np.testing.assert_allclose(rope.inverse_frequencies(), theirs, rtol=1e-12)
    assert rope.magnitude == magnitude == 1.0
