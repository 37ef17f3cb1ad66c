"""The engines we are measured against: where ``benchmarks/peers`` installs them, and models in the forms they want."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import BenchmarkError, output

SCRIPT = Path(__file__).parent / "peers"


@dataclass(frozen=True, slots=True)
class Peers:
    """The peers of this machine, each of which is to use ``threads`` threads."""

    threads: int
    home: Path = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache/paceline-peers"))

    def command(self, *words: str | Path | int) -> list[str]:
        return [str(SCRIPT), *map(str, words)]

    def environment(self, **sizes: str | int) -> dict[str, str]:
        """Variables of the script: ``prompt=128`` is PEERS_PROMPT."""
        given = {"home": self.home, "threads": self.threads, **sizes}
        return {f"PEERS_{name.upper()}": str(value) for name, value in given.items()}

    def install(self, peer: str) -> None:
        """Takes minutes the first time.

        Raises:
            BenchmarkError: it cannot be installed.
        """
        print(f"installing {peer}, unless it is there", file=sys.stderr, flush=True)
        done = subprocess.run(
            self.command("install", peer), env=os.environ | self.environment(), stdout=sys.stderr, check=False
        )
        if done.returncode:
            raise BenchmarkError(f"{peer} could not be installed: peers install {peer} failed, see above")

    def requantized(self, model: Path) -> Path:
        """The file in Q4_0, for which llama.cpp has its fastest kernels."""
        return self._converted("requantize", model, f"{model.stem}.as-Q4_0.gguf")

    def hf_folder(self, model: Path) -> Path:
        """The model in float32 as vLLM reads it, with its tokenizer."""
        return self._converted("hf", model, f"{model.stem}.float32")

    def versions(self) -> dict[str, str]:
        """Of what is installed, by the names of the engines."""
        found = {}
        for engine, folder in (("llama.cpp", "llama"), ("llama.cpp AVX2", "llama-avx2")):
            log = self.home / folder / "cmake.log"
            if log.exists():
                lines = re.findall(r"^-- (ggml version: .*|Adding CPU backend variant .*)$", log.read_text(), re.M)
                found[engine] = "; ".join(" ".join(line.split()) for line in sorted(lines, reverse=True))
        for engine, pattern in (("OpenVINO", "openvino_genai-*"), ("vLLM", "vllm-*")):
            for metadata in self.home.glob(f"*/lib/python3*/site-packages/{pattern}.dist-info"):
                found[engine] = metadata.name.removesuffix(".dist-info").partition("-")[2]
        return found

    def _converted(self, how: str, model: Path, name: str) -> Path:
        target = self.home / name
        if not target.exists():
            output(self.command(how, model, target), self.environment())
        return target
