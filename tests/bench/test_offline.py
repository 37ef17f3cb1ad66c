"""Rounds of the engine by itself: formulas on stamps written by hand, and one real round."""

import json
import subprocess
import sys
from csv import DictReader
from pathlib import Path

import pytest

from paceline import loading
from paceline.bench import offline
from paceline.bench.offline import Round, Shape
from paceline.cli import bench_engine
from paceline.errors import InputError

MS = 1_000_000


def test_the_formulas() -> None:
    # Submitted at 10 ms. A: first token at 30, then every 10 ms; B: first at 50, then every 10 ms. Four tokens each.
    a = tuple(MS * t for t in (30, 40, 50, 60))
    b = tuple(MS * t for t in (50, 60, 70, 80))
    one = Round(10 * MS, (a, b))
    shape = Shape(2, 100, 4)
    assert offline.prefill_tps(one, shape) == pytest.approx(200 / 0.040)
    # Both decode from 50 to 60 ms; one token of each falls into it.
    assert offline.decode_tps(one) == pytest.approx(2 / 0.010)
    assert offline.ttft_ms(one) == [20, 40]
    assert offline.total_ms(one) == [50, 70]


def test_no_decode_speed_where_the_requests_never_decode_together() -> None:
    one = Round(0, ((10 * MS, 20 * MS), (30 * MS, 40 * MS)))
    assert offline.decode_tps(one) is None
    cell = offline.summarize(Shape(2, 8, 2), [one])
    assert cell.metrics["decode_tps"].mean is None
    assert cell.metrics["decode_tps"].note == "no moment at which all requests were decoding"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline.cli.main", "bench", "engine", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_json_csv_and_table_tell_the_same_cells(smollm2_path: Path) -> None:
    small = [str(smollm2_path), "--prompt-tokens", "40", "--new-tokens", "8", "--batch", "1,3", "--repeat", "2"]
    cells = json.loads(bench(*small, "--json").stdout)["cells"]
    assert [(cell["batch"], cell["prompt_tokens"], cell["new_tokens"]) for cell in cells] == [(1, 40, 8), (3, 40, 8)]
    for cell in cells:
        assert cell["metrics"]["ttft"]["n"] == cell["metrics"]["total"]["n"] == 2 * cell["batch"]
        assert cell["metrics"]["prefill_tps"]["n"] == cell["metrics"]["decode_tps"]["n"] == 2
        assert 0 < cell["metrics"]["ttft"]["p50"] < cell["metrics"]["total"]["p50"]

    rows = list(DictReader(bench(*small, "--csv").stdout.splitlines()))
    assert [(row["batch"], row["metric"]) for row in rows] == [
        (size, metric) for size in ("1", "3") for metric in ("prefill_tps", "decode_tps", "ttft", "total")
    ]

    table = bench(*small).stdout
    assert "2 rounds after one of warm-up" in table
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["1", "3"]


def test_the_model_can_be_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_model(_model: str, *, options: loading.EngineOptions, progress: object) -> None:
        asked.append(options.quantize)
        raise InputError("enough")

    monkeypatch.setattr(loading, "load_model", load_model)
    with pytest.raises(InputError, match="enough"):
        bench_engine.engine("m", quantize="q8")
    assert asked == ["q8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "1,x"], "--batch '1,x' is not a list of positive numbers"),
        (["--batch", "0"], "--batch '0' is not a list"),
        (["--json", "--csv"], "exclude each other"),
        (["--prompt-tokens", "9000"], "9000 prompt \\+ 128 new tokens are more than the context of 8192"),
        (["--batch", "64", "--kv-memory", "200MiB"], "batch 64 of 640 tokens needs 1280 KV blocks, the pool has"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(smollm2_path: Path, arguments: list[str], message: str) -> None:
    run = bench(str(smollm2_path), *arguments)
    assert run.returncode == 2
    assert run.stdout == ""
    import re

    assert re.search(message, run.stderr), run.stderr
