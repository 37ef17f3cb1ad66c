"""Every architecture against transformers: the same weights, read from llama.cpp's conversion, give the same logits."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from paceline.models.architectures import ARCHITECTURES
from paceline.models.rope import LinearScaling, RopeSpec, YarnScaling
from paceline.models.spec import LayerSpec, ModelSpec, ModelWeights
from tests.executors.batches import Row, Sequence, make_batch
from tests.executors.both_executors import EXECUTORS, LogitsExecutor
from tests.executors.float64_model import reference_logits
from tests.executors.tiny_models import LENGTH, VARIANTS, TinyModel

TOLERANCE = 1e-3
READ_BY_TRANSFORMERS = ["llama", "llama3", "llama-linear", "llama-yarn", "qwen2", "qwen2.5-tied", "qwen2-yarn"]
READ_BY_TRANSFORMERS += ["qwen3", "qwen3-tied", "gemma2", "gemma3", "gpt2", "starcoder2"]


@pytest.fixture(params=EXECUTORS)
def executor_factory(
    request: pytest.FixtureRequest, one_torch_thread: None
) -> Callable[[ModelWeights], LogitsExecutor]:
    return EXECUTORS[request.param]


@pytest.fixture(params=VARIANTS)
def model(request: pytest.FixtureRequest, tiny_models: dict[str, TinyModel]) -> TinyModel:
    return tiny_models[request.param]


def test_every_architecture_has_a_variant(tiny_models: dict[str, TinyModel]) -> None:
    assert {model.weights.spec.architecture for model in tiny_models.values()} == set(ARCHITECTURES)


def test_our_weights_give_transformers_logits(model: TinyModel) -> None:
    assert model.difference(reference_logits(model.weights, model.token_ids)) <= TOLERANCE


@pytest.mark.parametrize("chunk", [7, 128, LENGTH])
def test_executors_give_transformers_logits(
    model: TinyModel, executor_factory: Callable[[ModelWeights], LogitsExecutor], chunk: int
) -> None:
    executor = executor_factory(model.weights)
    table = list(range(15, 5, -1))
    parts = []
    for start in range(0, LENGTH, chunk):
        part = model.token_ids[start : start + chunk]
        parts.append(executor.logits(make_batch([Sequence(part, table, start)], [Row(0, i) for i in range(len(part))])))
    executor.close()
    assert model.difference(np.concatenate(parts)) <= TOLERANCE


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_weights_from_the_file(tiny_models: dict[str, TinyModel], name: str) -> None:
    """The converter's file holds the original weights: its other reader agrees. Given is the config: of the
    hyperparameters that reader drops some, such as RoPE's scaling."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = tiny_models[name]
    config = AutoConfig.from_pretrained(model.folder)
    other = AutoModelForCausalLM.from_pretrained(
        model.folder, gguf_file="model.gguf", config=config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        logits = other(torch.tensor([model.token_ids])).logits[0].numpy()
    assert model.difference(logits) <= TOLERANCE


def change_layers(spec: ModelSpec, change: Callable[[LayerSpec], LayerSpec]) -> ModelSpec:
    return replace(spec, layers=tuple(map(change, spec.layers)))


def change_rope(change: Callable[[RopeSpec], RopeSpec]) -> Callable[[ModelSpec], ModelSpec]:
    def changed(layer: LayerSpec) -> LayerSpec:
        assert layer.rope
        return replace(layer, rope=change(layer.rope))

    return lambda spec: change_layers(spec, changed)


def mis_paired(rope: RopeSpec) -> RopeSpec:
    return replace(rope, pairing="half" if rope.pairing == "interleaved" else "interleaved")


def unscaled(rope: RopeSpec) -> RopeSpec:
    return replace(rope, scaling=None, frequency_divisors=())


def plainly_scaled(rope: RopeSpec) -> RopeSpec:
    assert isinstance(rope.scaling, YarnScaling)
    return replace(rope, scaling=LinearScaling(rope.scaling.factor))


def without_magnitude(rope: RopeSpec) -> RopeSpec:
    assert isinstance(rope.scaling, YarnScaling)
    return replace(rope, scaling=replace(rope.scaling, magnitude=1.0))


def without_window(spec: ModelSpec) -> ModelSpec:
    return change_layers(spec, lambda layer: replace(layer, window=None))


def with_window_of_one_more(spec: ModelSpec) -> ModelSpec:
    return change_layers(spec, lambda layer: replace(layer, window=layer.window and layer.window + 1))


def with_one_rotation_for_all(spec: ModelSpec) -> ModelSpec:
    return change_layers(spec, lambda layer: replace(layer, rope=next(x.rope for x in spec.layers if not x.window)))


def in_reverse(spec: ModelSpec) -> ModelSpec:
    return replace(spec, layers=spec.layers[::-1])


def changed(**fields: object) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: replace(spec, **fields)  # type: ignore[arg-type]


MISTAKES: list[tuple[str, str, Callable[[ModelSpec], ModelSpec]]] = [
    ("llama", "mis-paired", change_rope(mis_paired)),
    ("qwen2", "mis-paired", change_rope(mis_paired)),
    ("gemma3", "mis-paired", change_rope(mis_paired)),
    ("llama3", "unscaled", change_rope(unscaled)),
    ("llama-linear", "unscaled", change_rope(unscaled)),
    ("llama-yarn", "unscaled", change_rope(unscaled)),
    ("llama-yarn", "scaled alike", change_rope(plainly_scaled)),
    ("llama-yarn", "without magnitude", change_rope(without_magnitude)),
    ("qwen2-yarn", "without magnitude", change_rope(without_magnitude)),
    ("phi2", "rotated whole", change_rope(lambda rope: replace(rope, dim=32))),
    ("mistral", "without window", without_window),
    ("mistral", "window of one more", with_window_of_one_more),
    ("gemma2", "without window", without_window),
    ("gemma2", "windows in the other layers", in_reverse),
    ("gemma3", "without window", without_window),
    ("gemma3", "one rotation for all", with_one_rotation_for_all),
    ("olmo3", "without window", without_window),
    ("olmo3", "one rotation for all", with_one_rotation_for_all),
    ("gemma", "embedding scale", changed(embedding_scale=1.0)),
    ("gemma", "activation", changed(activation="silu")),
    ("gemma2", "attention soft cap", changed(attention_softcap=None)),
    ("gemma2", "logits soft cap", changed(logits_softcap=None)),
    ("gemma2-27b", "attention scale", changed(attention_scale=32**-0.5)),
    ("granite", "attention scale", changed(attention_scale=32**-0.5)),
    ("granite", "embedding scale", changed(embedding_scale=1.0)),
    ("granite", "residual scale", changed(residual_scale=1.0)),
    ("granite", "logits scale", changed(logits_scale=1.0)),
]


@pytest.mark.parametrize(("name", "what", "change"), MISTAKES, ids=[f"{name}-{what}" for name, what, _ in MISTAKES])
def test_a_mistake_shows(
    tiny_models: dict[str, TinyModel], name: str, what: str, change: Callable[[ModelSpec], ModelSpec]
) -> None:
    """The oracle has teeth: what is computed almost right is not within its tolerance."""
    model = tiny_models[name]
    mistaken = replace(model.weights, spec=change(model.weights.spec))
    assert model.difference(reference_logits(mistaken, model.token_ids)) > 10 * TOLERANCE
