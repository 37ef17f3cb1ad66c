"""What a model's owner set reaches the engine: the real weights, in a store like Ollama's."""

import dataclasses
import json
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from paceline.cli.inspect import inspect
from paceline.errors import ModelFileError
from paceline.loading import load_model
from paceline.models import catalog, ollama_store
from tests.models.ollama_fixture import OllamaStore


@pytest.fixture
def store(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OllamaStore:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(ollama_store, "SYSTEM_STORES", ())
    return OllamaStore(tmp_path)


def add_smollm2(store: OllamaStore, path: Path, parameters: dict[str, object], **layers: bytes) -> None:
    """The blob is a link, so that the weights are not copied."""
    manifest = store.add("smollm2", "135m", params=json.dumps(parameters).encode(), **layers)
    sha256 = catalog.CATALOG["smollm2-135m"].sha256
    (store.folder / "blobs" / f"sha256-{sha256}").symlink_to(path)
    content = json.loads(manifest.read_text())
    weights = {"digest": f"sha256:{sha256}", "size": path.stat().st_size}
    content["layers"].append({"mediaType": "application/vnd.ollama.image.model", **weights})
    manifest.write_text(json.dumps(content))


def test_a_model_of_ollama_answers_as_its_owner_wants(store: OllamaStore, smollm2_path: Path) -> None:
    parameters = {"temperature": 0, "stop": [" 8"], "num_predict": 30, "num_ctx": 256}
    add_smollm2(store, smollm2_path, parameters, system=b"Count on.", template=b"{{ .Prompt }}")
    with LLM("ollama:smollm2:135m") as llm:
        assert llm.model.name == "smollm2:135m"
        assert llm.model.engine.config.max_model_len == 256
        output = llm.generate("1, 2, 3, 4,", use_tqdm=False)[0].outputs[0]
        assert (output.text, output.stop_reason) == (" 5, 6, 7,", " 8")
        asked = llm.generate("1, 2, 3, 4,", SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        assert asked[0].outputs[0].finish_reason == "length"
        hello = [{"role": "user", "content": "Hello"}]
        assert "Count on." in (llm.chat(hello, use_tqdm=False)[0].prompt or "")
        assert "Be brief." in (llm.chat(hello, system="Be brief.", use_tqdm=False)[0].prompt or "")
        assert llm.model.describe()["model"].startswith("smollm2:135m (instruct)")
        without = dataclasses.replace(llm.model, chat_template=None)
        assert "its chat template is in Go's language" in without.describe()["model"]


def test_inspect_shows_what_the_owner_set(
    store: OllamaStore, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = {"temperature": 0.5, "num_ctx": 256}
    add_smollm2(store, smollm2_path, parameters, system=b"Count on.", template=b"{{ .Prompt }}")
    inspect("ollama:smollm2:135m", render=True)
    lines = capsys.readouterr().out.splitlines()
    assert "set by its owner  temperature: 0.5" in lines
    assert [line.strip() for line in lines].count("context: 256 tokens") == 1
    assert lines[lines.index("<|im_start|>system") + 1] == "Count on.<|im_end|>"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [({"temperature": -1}, "temperature must be"), ({"stop": 5}, "not iterable"), ({"top_k": "x"}, "top_k must be")],
)
def test_parameters_out_of_range_are_the_models_fault(
    store: OllamaStore, smollm2_path: Path, parameters: dict[str, object], message: str
) -> None:
    add_smollm2(store, smollm2_path, parameters)
    with pytest.raises(ModelFileError, match=f"^smollm2:135m: the sampling parameters that it brings: .*{message}"):
        load_model("ollama:smollm2:135m")


def test_a_context_beyond_what_the_model_was_trained_for_is_cut(store: OllamaStore, smollm2_path: Path) -> None:
    add_smollm2(store, smollm2_path, {"num_ctx": 1_000_000})
    with LLM("ollama:smollm2:135m") as llm:
        assert llm.model.engine.config.max_model_len == 8192
