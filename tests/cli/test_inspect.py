"""``paceline inspect`` on the real model, as users run it."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import loading
from paceline.cli.inspect import inspect as inspect_command
from tests.executors.tiny import tiny_spec, tiny_weights


def inspect(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline.cli.main", "inspect", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)


def rows(output: str) -> dict[str, str]:
    return dict(
        re.split(r"\s{2,}", line, maxsplit=1) for line in output.splitlines() if re.match(r"\S+.*\s{2,}\S", line)
    )


def test_it_says_what_the_model_is(smollm2_path: Path) -> None:
    done = inspect("smollm2-135m", "--max-model-len", "2048", "--concurrency", "4")
    assert done.returncode == 0, done.stderr
    shown = rows(done.stdout)
    assert shown["model"] == "smollm2-135m, instruct"
    assert shown["file"] == str(smollm2_path)
    assert shown["architecture"] == "llama, 134.5 M parameters"
    assert shown["attention"] == "9 heads of 64 dimensions, 3 of keys and values"
    assert shown["quantization"].startswith("Q4_1: 63.3 MiB (")
    assert shown["context"] == "8192 tokens"
    assert shown["RoPE"] == "base 100000, 64 dimensions, interleaved pairs, unscaled"
    assert "'<|im_end|>' (2)" in shown["ends a turn"]
    assert shown["memory, KV"] == "22.0 MiB per 1000 tokens (f16)"
    assert re.fullmatch(r"\d+ requests of 2048 tokens in the .* that are free", shown["fits"])


def test_render_shows_the_chat_template(smollm2_path: Path) -> None:
    done = inspect("smollm2-135m", "--render")
    assert "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        "--max-model-len 1024 --concurrency 3",
        "--max-model-len 1024 --concurrency 3 --kv-dtype int8",
        "--max-model-len 512 --max-num-batched-tokens 4096",  # a step that is never full
        "--max-model-len 256 --concurrency 8 --max-num-batched-tokens 2048",  # one that several requests fill
        "--max-model-len 2 --concurrency 40",
    ],
)
@pytest.mark.parametrize("cores", [1, 64])
def test_the_predicted_memory_is_what_it_takes(smollm2_path: Path, arguments: str, cores: int) -> None:
    main = f"import paceline.options as o; o.usable_cores = lambda: {cores}; import paceline.cli.main as m; m.main()"
    command = [sys.executable, "-c", main, "inspect", "smollm2-135m", *arguments.split(), "--prove"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = rows(done.stdout)
    difference = float(re.search(r"([+-][\d.]+)%", shown["measured peak"])[1])  # type: ignore[index]
    assert abs(difference) <= 5


def test_a_model_of_floats_can_be_planned_for_as_quantized(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    floats = replace(loading.open_model(str(smollm2_path)), weights=tiny_weights(tiny_spec(layers=64)))
    monkeypatch.setattr(loading, "open_model", lambda _model, progress: floats)
    shown = {}
    for quantize in (None, "q8", "q4"):
        inspect_command("m", quantize=quantize)  # type: ignore[arg-type]
        table = rows(capsys.readouterr().out)
        assert table["quantization"].startswith("F32: ")
        shown[quantize] = table["memory, weights"]
    assert shown[None].endswith(" MiB, kept as F32")
    assert shown["q8"].endswith(" MiB, kept as Q8_0")
    assert shown["q4"].endswith(" MiB, kept as IQ4_NL + Q8_0")
    bits = {quantize: float(text.split()[0]) for quantize, text in shown.items()}
    assert bits["q8"] == pytest.approx(bits[None] * 8.5 / 32, abs=0.1)
    assert bits["q4"] == pytest.approx(bits[None] * 4.5 / 32, abs=0.1)


def test_more_than_the_models_context_is_refused(smollm2_path: Path) -> None:
    done = inspect("smollm2-135m", "--max-model-len", "9000")
    assert done.returncode == 2
    assert "--max-model-len is 9000, but smollm2-135m was trained for 8192 tokens" in done.stderr
