"""Our engine against llama.cpp and OpenVINO, without HTTP: in turn on the same file, 128 tokens in, 64 out.

    .venv/bin/python benchmarks/engine.py [--rounds 5] [--model smollm2-135m]

The machine may be shared and drift, so they take turns within every round, and what counts is the ratio of the medians.
llama.cpp runs on the file as it is and, since its own Q4_0 kernels are faster, requantized to Q4_0 as well.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
PEERS = HERE / "peers"
PEERS_HOME = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache/paceline-peers"))
PROMPT, NEW, BATCHES = 128, 64, (1, 8, 32)

Figures = dict[tuple[str, int], float]
"""(what, batch) -> tokens per second."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    arguments = parser.parse_args()
    stored = Path(output([sys.executable, "-m", "paceline.cli.main", "pull", arguments.model]).splitlines()[-1])
    for peer in ("llama", "openvino"):
        subprocess.run([PEERS, "install", peer], check=True)
    contenders = {
        "paceline": lambda: ours(stored),
        "llama.cpp": lambda: theirs("llama", stored),
        "llama.cpp Q4_0": lambda: theirs("llama", requantized(stored)),
        "OpenVINO": lambda: theirs("openvino", stored),
    }
    seen: dict[str, dict[tuple[str, int], list[float]]] = {name: defaultdict(list) for name in contenders}
    for number in range(arguments.rounds):
        for name, run in contenders.items():
            print(f"round {number + 1} of {arguments.rounds}: {name}", file=sys.stderr)
            for key, value in run().items():
                seen[name][key].append(value)
    medians = {name: {key: median(values) for key, values in figures.items()} for name, figures in seen.items()}
    print(report(medians, arguments.rounds, stored))


def ours(model: Path) -> Figures:
    command = [sys.executable, "-m", "paceline.cli.main", "bench", "engine", str(model), "--json", "--repeat", "2"]
    command += ["--prompt-tokens", str(PROMPT), "--new-tokens", str(NEW), "--batch", ",".join(map(str, BATCHES))]
    figures = {}
    for cell in json.loads(output(command))["cells"]:
        figures["prefill", cell["batch"]] = cell["metrics"]["prefill_tps"]["p50"]
        figures["decode", cell["batch"]] = cell["metrics"]["decode_tps"]["p50"]
    return figures


def theirs(peer: str, model: Path) -> Figures:
    sizes = {"PEERS_PROMPT": PROMPT, "PEERS_NEW": NEW, "PEERS_BATCH": ",".join(map(str, BATCHES))}
    lines = output([str(PEERS), "offline", peer, str(model)], {name: str(value) for name, value in sizes.items()})
    figures = {}
    for cell in map(json.loads, lines.splitlines()):
        figures["prefill", cell["pl"]] = cell["speed_pp"]
        figures["decode", cell["pl"]] = cell["speed_tg"]
    return figures


def requantized(model: Path) -> Path:
    target = PEERS_HOME / f"{model.stem}.as-Q4_0.gguf"
    if not target.exists():
        tools = PEERS_HOME / "llama/bin"
        output(
            [str(tools / "llama-quantize"), "--allow-requantize", str(model), str(target), "Q4_0"],
            {"LD_LIBRARY_PATH": str(tools)},
        )
    return target


def output(command: list[str], environment: dict[str, str] | None = None) -> str:
    run = subprocess.run(command, env=os.environ | (environment or {}), capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{run.stderr}")
    return run.stdout


def report(medians: dict[str, Figures], rounds: int, model: Path) -> str:
    """A Markdown section: medians in tok/s, and ours over the better of llama.cpp's two and over OpenVINO's."""
    names = list(medians)
    lines = [
        f"{model.name}, {PROMPT} tokens in, {NEW} out, {rounds} rounds in turn, medians in tok/s; "
        f"{cpu()}, {len(os.sched_getaffinity(0))} cores, {time.strftime('%Y-%m-%d')}",
        "",
        "| | batch | " + " | ".join(names) + " | to llama.cpp's better | to OpenVINO |",
        "|---|--:|" + "--:|" * (len(names) + 2),
    ]
    for what in ("prefill", "decode"):
        for batch in BATCHES:
            values = [medians[name][what, batch] for name in names]
            ratios = values[0] / max(values[1:3]), values[0] / values[3]
            columns = [f"{v:.0f}" for v in values] + [f"{ratio:.2f}" for ratio in ratios]
            lines.append(f"| {what} | {batch} | {' | '.join(columns)} |")
    return "\n".join(lines)


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
