import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.peers_home import SCRIPT, Peers


def _peers(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *words], env=os.environ | {"PEERS_HOME": str(home)}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("words", [(), ("install", "ollama"), ("decode", "llama"), ("serve", "vllm", "folder")])
def test_what_it_does_not_know_gets_its_usage(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = _peers(tmp_path, *words)
    assert done.returncode == 2
    assert "peers" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "peer"),
    [
        (("decode", "llama", "m.gguf"), "llama"),
        (("prefill", "llama-avx2", "m.gguf"), "llama-avx2"),
        (("decode", "openvino", "m.gguf"), "openvino"),
        (("serve", "llama", "m.gguf", "8000"), "llama"),
        (("client", "http://localhost", "m", "folder"), "vllm"),
    ],
)
def test_a_peer_that_is_missing_is_said_to_be(tmp_path: Path, words: tuple[str, ...], peer: str) -> None:
    done = _peers(tmp_path, *words)
    assert done.returncode == 2
    assert f"{peer} is not installed: run" in done.stderr


def test_versions_are_read_from_what_is_installed(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    log = "-- ggml version: 0.25.3\n-- Looking for pthread\n-- Adding CPU backend variant ggml-cpu: -march=native \n"
    (tmp_path / "llama/cmake.log").write_text(log)
    (tmp_path / "vllm/lib/python3.11/site-packages/vllm-0.32.0+cpu.dist-info").mkdir(parents=True)
    assert Peers(2, tmp_path).versions() == {
        "llama.cpp": "ggml version: 0.25.3; Adding CPU backend variant ggml-cpu: -march=native",
        "vLLM": "0.32.0+cpu",
    }


def test_a_converted_model_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def output(command: list[str], _environment: object) -> None:
        made.append(command[1:])
        Path(command[-1]).touch()

    monkeypatch.setattr("benchmarks.peers_home.output", output)
    peers = Peers(2, tmp_path)
    assert peers.requantized(Path("m.Q4_1.gguf")) == peers.requantized(Path("m.Q4_1.gguf"))
    assert made == [["requantize", "m.Q4_1.gguf", str(tmp_path / "m.Q4_1.as-Q4_0.gguf")]]
