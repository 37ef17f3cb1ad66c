"""The real models are as good as transformers makes them, with the weights of the same file."""

import pytest

from paceline.models import catalog
from tests.proof.quality import measure

# The second one weighs 250 MB and the last one 1.1 GB, and transformers computes them in float32.
MODELS = [
    "smollm2-135m",
    pytest.param("gemma3-270m", marks=pytest.mark.slow),
    pytest.param("qwen2.5-coder-1.5b", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
]


@pytest.mark.parametrize("name", MODELS)
def test_perplexity_and_distributions_are_transformers(name: str) -> None:
    for quality in measure(catalog.pull(name), ["f16", "int8"], chunks=4).values():
        assert quality.perplexity <= 1.005 * quality.reference_perplexity
        assert quality.divergence <= 0.01
        assert quality.top1 >= 0.95
