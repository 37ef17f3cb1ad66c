"""``ollama:`` models out of stores that the tests make; no Ollama is there, nor needed."""

import json
import os
from pathlib import Path

import pytest

from paceline.errors import InputError, ModelFileError
from paceline.models import ollama_store
from paceline.models.gguf import read_gguf
from paceline.models.ollama_name import OllamaName
from paceline.models.ollama_store import find, stored_models
from paceline.models.resolve import resolve
from tests.models.ollama_fixture import OllamaStore, tiny_gguf

PARAMETERS = {"temperature": 0.6, "stop": ["<|eot|>", "User:"], "num_ctx": 4096, "repeat_penalty": 1.1, "top_k": 20}


@pytest.fixture(autouse=True)
def no_other_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr(ollama_store, "SYSTEM_STORES", (tmp_path / "system" / "models",))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OllamaStore:
    """The user's."""
    return OllamaStore(tmp_path / "home" / ".ollama" / "models")


def test_a_model_with_all_that_it_can_bring(store: OllamaStore, tmp_path: Path) -> None:
    model = tiny_gguf(tmp_path)
    store.add(
        "llama3.2",
        model=model,
        template=b"{{ .Prompt }}",
        system="Sei höflich.".encode(),
        params=json.dumps(PARAMETERS).encode(),
        license=b"MIT",
    )
    source = resolve("ollama:llama3.2")
    assert source.name == "llama3.2:latest"
    assert source.path.read_bytes() == model
    assert source.sampling == {
        "temperature": 0.6,
        "stop": ["<|eot|>", "User:"],
        "repetition_penalty": 1.1,
        "top_k": 20,
    }
    assert source.context_length == 4096
    assert source.system == "Sei höflich."
    assert source.go_template == "{{ .Prompt }}"
    with read_gguf(source.path) as file:
        assert file.metadata["general.name"] == "tiny"


def test_a_model_of_nothing_but_weights(store: OllamaStore) -> None:
    store.add("plain", model=b"GGUF")
    source = find("plain")
    assert (source.sampling, source.system, source.context_length, source.go_template) == ({}, None, None, None)


def test_more_licences_than_one(store: OllamaStore, tmp_path: Path) -> None:
    manifest = store.add("m", model=b"GGUF")
    content = json.loads(manifest.read_text())
    content["layers"] += [store.layer("license", b"one"), store.layer("license", b"two")]
    manifest.write_text(json.dumps(content))
    assert find("m").path.read_bytes() == b"GGUF"


@pytest.mark.parametrize("value", [-1, -2])
def test_endless_answers_are_the_default(store: OllamaStore, value: int) -> None:
    store.add("m", model=b"GGUF", params=json.dumps({"num_predict": value}).encode())
    assert find("m").sampling == {}
    store.add("m", model=b"GGUF", params=b'{"num_predict": 99}')
    assert find("m").sampling == {"max_tokens": 99}


@pytest.mark.parametrize(
    ("written", "stored", "tag", "shown"),
    [
        ("qwen3", "qwen3", "latest", "qwen3:latest"),
        ("Qwen3:4B", "qwen3", "4b", "qwen3:4b"),
        ("library/qwen3", "qwen3", "latest", "qwen3:latest"),
        ("me/qwen3:x", "me/qwen3", "x", "me/qwen3:x"),
        ("hf.co/Org/Repo-GGUF:Q4_K_M", "/hf.co/Org/Repo-GGUF", "Q4_K_M", "hf.co/Org/Repo-GGUF:Q4_K_M"),
        ("localhost:5000/a/b", "/localhost:5000/a/b", "latest", "localhost:5000/a/b:latest"),
    ],
)
def test_names(store: OllamaStore, written: str, stored: str, tag: str, shown: str) -> None:
    store.add(stored, tag, model=b"GGUF")
    store.add("decoy", tag, model=b"other")
    assert find(written).name == shown
    assert find(written).path.read_bytes() == b"GGUF"


@pytest.mark.parametrize("written", ["", ":4b", "../../x", "a/b/c/d", "a:", "a b", "/a"])
def test_what_is_no_name(written: str) -> None:
    with pytest.raises(InputError, match="is no ollama:"):
        find(written)


def test_stores_in_their_order(store: OllamaStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, named = OllamaStore(tmp_path / "system" / "models"), OllamaStore(tmp_path / "named")
    system.add("m", model=b"system")
    assert find("m").path.read_bytes() == b"system"
    store.add("m", model=b"user")
    assert find("m").path.read_bytes() == b"user"
    monkeypatch.setenv("OLLAMA_MODELS", str(named.folder))
    named.add("m", model=b"named")
    assert find("m").path.read_bytes() == b"named"
    system.add("only-there", model=b"x")
    assert [str(model.name) for model in stored_models()] == ["m:latest", "only-there:latest"]


def test_files_that_are_no_manifests_are_passed_over(store: OllamaStore) -> None:
    manifest = store.add("m", model=b"GGUF")
    (manifest.parent / ".DS_Store").write_bytes(b"\0")
    (store.folder / "manifests" / "stray").touch()
    assert [str(model.name) for model in stored_models()] == ["m:latest"]


def test_a_missing_model_lists_what_there_is(store: OllamaStore) -> None:
    store.add("b", "7b", model=b"GGUF")
    store.add("a", model=b"GGUF")
    with pytest.raises(InputError, match=r"has no x:latest on this machine; it has a:latest, b:7b\. `ollama pull x:l"):
        find("x")


def test_no_store_at_all_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "named"))
    with pytest.raises(InputError, match="no x:latest, and no other model of Ollama, in ") as raised:
        find("x")
    places = [str(tmp_path / "named"), str(tmp_path / "home/.ollama/models"), str(tmp_path / "system/models")]
    assert ", ".join(places) in str(raised.value)


def test_a_store_of_another_user_says_how_to_get_in(
    store: OllamaStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's store belongs to the user ``ollama``; to root, who may run these tests, nothing is forbidden."""
    real = os.scandir
    system = tmp_path / "system" / "models"

    def scandir(path: Path) -> object:
        if Path(path).is_relative_to(system):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    closed = r"system/models cannot be read \(Permission denied\): become a member .* usermod -aG ollama"
    with pytest.raises(InputError, match=f"no other model of Ollama, in .*{closed}"):
        find("x")
    store.add("mine", model=b"GGUF")
    with pytest.raises(InputError, match=f"it has mine:latest.*{closed}"):
        find("x")
    assert find("mine").path.read_bytes() == b"GGUF"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda manifest: manifest.write_text("{"), "no manifest of Ollama"),
        (lambda manifest: manifest.write_text('{"layers": [{"mediaType": 1}]}'), "no manifest of Ollama"),
        (lambda manifest: _relabel(manifest, "sha256:../../../etc/passwd"), "is no digest"),
        (lambda manifest: _relabel(manifest, "sha256:" + "0" * 64), r"its blob .*sha256-0+ is missing"),
        (lambda manifest: _resize(manifest), "has 4 bytes, not 5; Ollama's store is damaged: `ollama pull`"),
    ],
)
def test_a_damaged_store(store: OllamaStore, damage: object, message: str) -> None:
    manifest = store.add("m", model=b"GGUF")
    damage(manifest)  # type: ignore[operator]
    with pytest.raises(ModelFileError, match=message) as raised:
        find("m")
    assert str(manifest) in str(raised.value)


def _relabel(manifest: Path, digest: str) -> None:
    content = json.loads(manifest.read_text())
    content["layers"][0]["digest"] = digest
    manifest.write_text(json.dumps(content))


def _resize(manifest: Path) -> None:
    content = json.loads(manifest.read_text())
    content["layers"][0]["size"] += 1
    manifest.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"params": b"[1]"}, "its parameters are no JSON object"),
        ({"params": b'{"num_ctx": "big"}'}, "num_ctx is 'big'"),
        ({"system": b"\xff"}, "is no text"),
    ],
)
def test_damaged_layers(store: OllamaStore, layers: dict[str, bytes], message: str) -> None:
    store.add("m", model=b"GGUF", **layers)
    with pytest.raises(ModelFileError, match=message):
        find("m")


def test_an_adapter_is_refused(store: OllamaStore) -> None:
    store.add("m", model=b"GGUF", adapter=b"LoRA")
    with pytest.raises(InputError, match="applies a LoRA adapter"):
        find("m")


def test_a_model_without_weights_here(store: OllamaStore) -> None:
    store.add("gpt-oss", "120b-cloud", template=b"x")
    with pytest.raises(ModelFileError, match=r"has no GGUF file \(it has template\)"):
        find("gpt-oss:120b-cloud")


def test_what_is_not_used_is_said(store: OllamaStore, caplog: pytest.LogCaptureFixture) -> None:
    store.add("m", model=b"GGUF", projector=b"clip", messages=b"[]", params=b'{"mirostat": 1, "num_gpu": 3}')
    find("m")
    assert caplog.messages == [
        "ollama:m:latest: not used here: its example messages, its projector (images cannot be seen), "
        "its parameter mirostat, its parameter num_gpu"
    ]


def test_names_are_equal_whatever_the_case() -> None:
    assert OllamaName.parse("A/B:C") == OllamaName.parse("a/b:c")
    assert OllamaName.parse("a:1") != OllamaName.parse("a:2")
