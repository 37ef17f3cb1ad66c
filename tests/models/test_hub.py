"""``hf:`` models, through huggingface_hub, from a hub that the tests run."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import InputError, ModelFileError
from paceline.models.hub import download
from paceline.models.hub_files import choose, models_among
from paceline.models.resolve import resolve
from tests.models.hub_server import Hub, running_hub

CONTENT = b"GGUF" + bytes(range(256)) * 2000


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, and the library pointed at it: it reads its environment only once."""
    from huggingface_hub import constants

    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "".join(template[1:]))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        hub.repositories["org/one"] = {"README.md": b"#", "one-Q8_0.gguf": CONTENT}
        yield hub


def test_the_only_file(hub: Hub, tmp_path: Path) -> None:
    source = resolve("hf:org/one")
    assert source.path.read_bytes() == CONTENT
    assert source.path.is_relative_to(tmp_path / "hub")
    assert source.name == "one-Q8_0"
    assert resolve("hf:org/one").path == source.path
    assert hub.downloads() == ["one-Q8_0.gguf"]


def test_all_parts_of_a_split_model_are_fetched(hub: Hub) -> None:
    names = [f"q8/big-q8_0-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    hub.repositories["org/big"] = {name: name.encode() for name in names}
    source = download("org/big:q8_0")
    assert source.name == "big-q8_0"
    assert source.path.name == "big-q8_0-00001-of-00003.gguf"
    assert [source.path.with_name(Path(name).name).read_bytes().decode() for name in names] == names


def test_progress_is_over_all_parts(hub: Hub) -> None:
    hub.repositories["org/big"] = {f"big-0000{number}-of-00002.gguf": bytes([number]) * 100_000 for number in (1, 2)}
    seen: list[tuple[int, int, str]] = []
    download("org/big", lambda *call: seen.append(call))
    assert {call[1:] for call in seen} == {(200_000, "downloading big-00001-of-00002.gguf")}
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1][0] == 200_000


def test_a_connection_that_breaks_is_taken_up_again(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the last whole chunk, which in the library has 10 MB."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    hub.break_at = 200_000
    seen: list[int] = []
    source = download("org/one", lambda done, total, what: seen.append(done))
    assert source.path.read_bytes() == CONTENT
    assert hub.requests[-1] == ("GET", "/org/one/resolve/main/one-Q8_0.gguf", "bytes=200000-")
    assert seen[-1] == len(CONTENT)


def test_without_the_hub_the_cache_answers(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    path = download("org/one").path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.requests)
    assert download("org/one").path.read_bytes() == CONTENT
    assert download("org/one:q8_0").path == path
    assert len(hub.requests) == asked
    with pytest.raises(InputError, match="nothing that fits 'Q4_K_M'"):
        download("org/one:Q4_K_M")
    with pytest.raises(ModelFileError, match="hf:org/other is not in the cache, and the hub cannot be reached"):
        download("org/other")


def test_a_hub_that_is_down_does_not_keep_a_cached_model_from_its_user(hub: Hub) -> None:
    path = download("org/one").path
    hub.status = 503
    assert download("org/one").path == path
    with pytest.raises(ModelFileError, match="hf:org/other is not in the cache, and the hub cannot") as raised:
        download("org/other")
    assert "\n" not in str(raised.value), "not the page that came with the answer"


def test_a_hub_that_does_not_listen(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ModelFileError, match=r"the hub cannot be reached \(http://127\.0\.0\.1:1\)"):
        download("org/one")


def test_a_hub_that_is_out_of_order(hub: Hub) -> None:
    hub.status = 418
    with pytest.raises(ModelFileError, match="hf:org/one: the hub answers HTTP 418") as raised:
        download("org/one")
    assert "\n" not in str(raised.value)


def test_the_token_comes_from_the_environment(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    with pytest.raises(InputError, match=r"there is no .*/org/one, or it is private and needs a token in HF_TOKEN"):
        download("org/one")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(InputError, match="needs the token in HF_TOKEN that may read it") as raised:
        download("org/one")
    assert "hf_wrong" not in str(raised.value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert download("org/one").path.read_bytes() == CONTENT


def test_a_gated_repository_names_its_page_and_the_variable(hub: Hub) -> None:
    hub.gated = True
    with pytest.raises(InputError, match=f"accept its terms on {hub.url}/org/one, and have a token in HF_TOKEN be one"):
        download("org/one")


def test_a_refusal(hub: Hub) -> None:
    hub.status = 403
    with pytest.raises(InputError, match=rf"refuses access \(HTTP 403\); open {hub.url}/org/one in a browser"):
        download("org/one")


def test_no_such_repository(hub: Hub) -> None:
    with pytest.raises(InputError, match=f"hf:org/none: there is no {hub.url}/org/none, or it is private"):
        download("org/none")


def test_a_cache_that_cannot_be_written(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "hub").touch()
    with pytest.raises(ModelFileError, match=r"hf:org/one could not be stored: .*; HF_HOME sets another folder"):
        download("org/one")


@pytest.mark.parametrize("reference", ["", "one", "org/", "org/one:", "a/b/c", "org /one"])
def test_what_is_no_reference(reference: str) -> None:
    with pytest.raises(InputError, match="is no hf:owner/repo"):
        download(reference)


@pytest.mark.parametrize("reference", ["../..", "-a/b", "a--b/c", "a/b.git", "é/b", "a/" + "b" * 100])
def test_what_can_be_no_repository(reference: str) -> None:
    with pytest.raises(InputError, match=f"^hf:{reference} cannot be a repository: "):
        download(reference)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"needs the package huggingface_hub: pip install 'paceline\[hub\]'"):
        download("org/one")


def test_the_command_goes_by_the_librarys_own_environment(tmp_path: Path) -> None:
    with running_hub() as hub:
        hub.repositories["org/one"] = {"one.gguf": CONTENT}
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_x"}
        hub.token = "hf_x"
        command = [sys.executable, "-m", "paceline.cli.main", "pull", "hf:org/one"]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).read_bytes() == CONTENT
    assert Path(result.stdout.strip()).is_relative_to(tmp_path)
    assert "downloading one.gguf: " in result.stderr


FILES: dict[str, int | None] = {
    "README.md": 1,
    "m-Q4_K.gguf": 3_000_000,
    "m-Q4_K_M.gguf": 4_000_000,
    "m.IQ4_XS.GGUF": 5_000_000,
    "BF16/m-BF16-00001-of-00002.gguf": 6_000_000,
    "BF16/m-BF16-00002-of-00002.gguf": 7_000_000,
    "mmproj-m-F16.gguf": 1,
    "imatrix.gguf": 1,
}


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        ("m-Q4_K_M.gguf", "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("Q4_K", "m-Q4_K.gguf"),
        ("iq4_xs", "m.IQ4_XS.GGUF"),
        ("bf16", "BF16/m-BF16-00001-of-00002.gguf"),
        ("BF16/m-BF16-00002-of-00002.gguf", "BF16/m-BF16-00001-of-00002.gguf"),
        ("mmproj-m-F16.gguf", "mmproj-m-F16.gguf"),
    ],
)
def test_a_choice(wanted: str, file: str) -> None:
    assert choose("o/r", models_among(FILES), wanted).files[0] == file


@pytest.mark.parametrize("wanted", ["Q4_XS", "F16", "Q4", "imatrix"])
def test_a_word_within_a_word_is_no_choice(wanted: str) -> None:
    with pytest.raises(InputError, match=f"has nothing that fits '{wanted}'"):
        choose("o/r", models_among(FILES), wanted)


def test_several_models_are_listed_with_their_sizes() -> None:
    with pytest.raises(InputError) as raised:
        choose("o/r", models_among(FILES), None)
    assert str(raised.value).splitlines() == [
        "hf:o/r has 4 models; choose one as hf:o/r:FILE, or by its quantization as in hf:o/r:Q4_K_M:",
        "  BF16/m-BF16-00001-of-00002.gguf (13 MB, 2 parts)",
        "  m-Q4_K.gguf (3 MB)",
        "  m-Q4_K_M.gguf (4 MB)",
        "  m.IQ4_XS.GGUF (5 MB)",
    ]


def test_a_quantization_that_fits_two_lists_those() -> None:
    with pytest.raises(InputError) as raised:
        choose("o/r", models_among({"a-Q8_0.gguf": None, "b-Q8_0.gguf": None, "b-F16.gguf": None}), "q8_0")
    assert str(raised.value).splitlines()[1:] == ["  a-Q8_0.gguf", "  b-Q8_0.gguf"]


def test_no_gguf() -> None:
    with pytest.raises(InputError, match=r"hf:o/r has no GGUF file; look for a repository .* ends in -GGUF"):
        choose("o/r", models_among({"model.safetensors": 1, "mmproj.gguf": 1}), None)


def test_a_repository_that_lost_a_part() -> None:
    with pytest.raises(InputError, match=r"has m-00002-of-00002\.gguf, but not m-00001-of-00002\.gguf"):
        models_among({"m-00002-of-00002.gguf": 1})
