"""How much context and KV memory a model gets."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import InputError
from paceline.loading import OpenModel, load_model, open_model, run_model
from paceline.options import EngineOptions
from tests.executors.tiny import tiny_spec, tiny_weights

BLOCK = 737_280
"""Bytes of one of SmolLM2's KV blocks in f16."""


@pytest.fixture(scope="module")
def opened(smollm2_path: Path) -> OpenModel:
    return open_model(str(smollm2_path))


def test_auto_takes_the_longest_context_that_the_memory_holds(smollm2_path: Path) -> None:
    loaded = load_model(str(smollm2_path), options=EngineOptions(max_model_len="auto", kv_memory=10 * BLOCK))
    try:
        assert loaded.engine.config.max_model_len == 320
        assert loaded.executor.kv_geometry.num_blocks == 10
        assert loaded.describe()["context"] == "320 tokens (the model's own is 8192)"
        assert loaded.describe()["KV cache"] == "up to 7 MiB (f16), 320 tokens in 10 blocks"
    finally:
        loaded.close()


def test_auto_is_the_models_own_context_where_that_fits(smollm2_path: Path) -> None:
    loaded = load_model(str(smollm2_path), options=EngineOptions(max_model_len="auto", kv_memory=300 * BLOCK))
    assert loaded.engine.config.max_model_len == 8192
    loaded.close()


def test_a_context_that_does_not_fit_names_the_longest_that_does(smollm2_path: Path) -> None:
    with pytest.raises(InputError, match="set max_model_len to 320 at most, or to auto"):
        load_model(str(smollm2_path), options=EngineOptions(max_model_len=400, kv_memory=10 * BLOCK))


def test_the_kv_cache_leaves_room_for_the_weights(
    opened: OpenModel, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a little more memory free than the KV cache takes, the weights would not fit."""
    monkeypatch.setattr("paceline.placement.free_memory", lambda: 300 * BLOCK)
    with pytest.raises(InputError, match=r"does not fit .* beside the model's weights"):
        load_model(str(smollm2_path), options=EngineOptions(kv_memory=299 * BLOCK))


def test_it_is_told_in_what_the_weights_are_kept(opened: OpenModel) -> None:
    floats = replace(opened, weights=tiny_weights(tiny_spec()))
    loaded = run_model(floats, EngineOptions(max_model_len=64, max_num_seqs=1, quantize="q4"))
    try:
        assert ", llama, IQ4_NL + Q8_0, 0 MiB of weights" in loaded.describe()["model"]
        assert loaded.executor.weight_bytes == pytest.approx(
            floats.footprint(EngineOptions(quantize="q4")).weights, rel=0.01
        )
    finally:
        loaded.close()


def test_the_footprint_is_what_the_executor_takes(opened: OpenModel, smollm2_path: Path) -> None:
    options = EngineOptions(max_model_len=64, kv_memory=2 * BLOCK, threads=1)
    needs = opened.footprint(options)
    loaded = load_model(str(smollm2_path), options=options)
    assert loaded.executor.weight_bytes == pytest.approx(needs.weights, rel=0.001)
    assert loaded.executor.buffer_bytes == pytest.approx(needs.buffers, rel=0.1)
    assert loaded.executor.kv_geometry.bytes_per_block == needs.kv_block
    loaded.close()


def test_a_length_that_is_no_number_is_refused() -> None:
    with pytest.raises(InputError, match="max_model_len is 'large'"):
        EngineOptions(max_model_len="large")  # type: ignore[arg-type]
