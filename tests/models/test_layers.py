"""Rotation and windows from metadata."""

from math import log
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelFileError
from paceline.models.architectures import model_weights
from paceline.models.rope import LinearScaling, RopeSpec, YarnScaling
from paceline.models.spec import LayerSpec
from tests.models.tiny_gguf import shapes, tiny, tiny_gemma3


def rope(folder: Path, metadata: dict[str, Any]) -> RopeSpec:
    found = model_weights(tiny(folder, metadata)).spec.layers[0].rope
    assert found
    return found


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, LinearScaling(4.0)),
        ({"llama.rope.scaling.factor": 4.0}, LinearScaling(4.0)),
        ({"llama.rope.scale_linear": 4.0}, LinearScaling(4.0)),
        ({"llama.rope.scaling.factor": 2.0, "llama.rope.scale_linear": 4.0}, LinearScaling(2.0)),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, None),
    ],
)
def test_linear_scaling_is_read_as_llama_cpp_does(
    tmp_path: Path, metadata: dict[str, Any], scaling: LinearScaling | None
) -> None:
    assert rope(tmp_path, metadata).scaling == scaling


YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
GROWN = 1 + 0.1 * log(4.0)


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({}, YarnScaling(4.0, 128, magnitude=GROWN)),
        ({"original_context_length": 32}, YarnScaling(4.0, 32, magnitude=GROWN)),
        (
            {"yarn_beta_fast": 16.0, "yarn_beta_slow": 0.5, "yarn_ext_factor": 1.0},
            YarnScaling(4.0, 128, beta_fast=16.0, beta_slow=0.5, magnitude=GROWN),
        ),
        ({"yarn_attn_factor": 1.5}, YarnScaling(4.0, 128, magnitude=1.5)),
        ({"attn_factor": 2.0}, YarnScaling(4.0, 128, magnitude=2 * GROWN)),
        ({"yarn_log_multiplier": 1.0}, YarnScaling(4.0, 128, magnitude=1.0)),
        ({"factor": 0.5}, YarnScaling(0.5, 128, magnitude=1.0)),
    ],
)
def test_yarn_is_read_as_the_converter_writes_it(
    tmp_path: Path, metadata: dict[str, Any], scaling: YarnScaling
) -> None:
    stated = {f"llama.rope.scaling.{name}": value for name, value in metadata.items()}
    assert rope(tmp_path, YARN | stated).scaling == scaling


def test_yarn_without_extrapolation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"yarn_ext_factor = 0.5 is not supported; only 1.0 is"):
        rope(tmp_path, YARN | {"llama.rope.scaling.yarn_ext_factor": 0.5})


def test_a_rotation_that_cannot_be_computed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"rotation by RopeSpec.* has frequencies that are no finite numbers"):
        rope(tmp_path, YARN | {"llama.rope.freq_base": 1.0})


def test_frequency_divisors_are_no_weights(tmp_path: Path) -> None:
    weights = model_weights(tiny(tmp_path, tensors={"rope_freqs.weight": (8,)}))
    assert [layer.rope and layer.rope.frequency_divisors for layer in weights.spec.layers] == [(1.0,) * 8] * 2
    assert set(weights.tensors) == set(shapes())


def test_the_window_of_all_layers(tmp_path: Path) -> None:
    spec = model_weights(tiny(tmp_path, {"llama.attention.sliding_window": 24})).spec
    assert [layer.window for layer in spec.layers] == [24, 24]


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [(None, [9] * 5 + [None] + [9]), (3, [9, 9, None, 9, 9, None, 9]), ([True] + 6 * [False], [9] + 6 * [None])],
)
def test_layers_with_and_without_a_window(tmp_path: Path, pattern: Any, windows: list[int | None]) -> None:
    stated = {"llama.attention.sliding_window": 9, "llama.attention.sliding_window_pattern": pattern}
    assert [layer.window for layer in tiny_gemma3(tmp_path, stated, 7).layers] == windows


def test_a_pattern_for_another_number_of_layers(tmp_path: Path) -> None:
    stated = {"llama.attention.sliding_window": 9, "llama.attention.sliding_window_pattern": [True, False]}
    with pytest.raises(ModelFileError, match=r"sliding_window_pattern is array.*; 7 booleans are needed"):
        tiny_gemma3(tmp_path, stated, 7)


def test_without_a_window_all_layers_are_global(tmp_path: Path) -> None:
    layers = tiny_gemma3(tmp_path, {"llama.rope.freq_base": 1e6, "llama.rope.scaling.factor": 8.0}, 7).layers
    assert layers == (LayerSpec(RopeSpec(1e6, 16, "half", LinearScaling(8.0))),) * 7
