from pathlib import Path

import pytest

from benchmarks import __main__ as benchmark
from benchmarks.command import BenchmarkError
from benchmarks.peers_home import Peers
from benchmarks.results import OURS, Results, load_results
from benchmarks.turn import Turn


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part, of us, a peer that is there, and one that cannot be installed."""

    def install(_peers: Peers, peer: str) -> None:
        if peer == "vllm":
            raise BenchmarkError("vllm could not be installed")

    metric = "smollm2 decode 8"
    turns = [
        Turn(OURS, (metric,), lambda: {metric: 30.0}),
        Turn("OpenVINO", (metric,), lambda: {metric: 10.0}, ("openvino",)),
        Turn("vLLM", (metric,), lambda: {metric: 1.0}, ("vllm",)),
    ]
    monkeypatch.setattr(Peers, "install", install)
    monkeypatch.setattr(benchmark, "PARTS", {"one": lambda _peers: turns})


@pytest.mark.usefixtures("parts")
def test_it_prints_the_table_and_keeps_every_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs/r.json"
    assert benchmark.main(["--rounds", "2", "--parts", "one", "--output", str(path)]) == 0
    assert "| decode, batch 8 | 30 tok/s | OpenVINO: 10 tok/s | 3× |" in capsys.readouterr().out
    results = load_results(path)
    assert results.values == {"smollm2 decode 8": {OURS: [30, 30], "OpenVINO": [10, 10]}}
    assert results.failures == {"smollm2 decode 8": {"vLLM": "vllm could not be installed"}}
    assert results.runs[0].command == "python -m benchmarks --rounds 2 --parts one"


@pytest.mark.usefixtures("parts")
def test_it_adds_to_what_is_there_only_when_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    words = ["--rounds", "1", "--parts", "one", "--output", str(path)]
    assert benchmark.main(words) == 0
    assert benchmark.main(words) == 2
    assert "is there already: give --add" in capsys.readouterr().err
    assert benchmark.main([*words, "--add", "--engines", "OpenVINO"]) == 0
    assert load_results(path).values == {"smollm2 decode 8": {OURS: [30], "OpenVINO": [10, 10]}}
    assert len(load_results(path).runs) == 2


@pytest.mark.usefixtures("parts")
def test_only_known_parts_and_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = ["--output", str(tmp_path / "r.json")]
    assert benchmark.main(["--parts", "one,two", *output]) == 2
    assert "there is no part two; there are one" in capsys.readouterr().err
    assert benchmark.main(["--parts", "one", "--engines", "ollama", *output]) == 2
    assert "no turn of ollama" in capsys.readouterr().err


@pytest.mark.usefixtures("parts")
def test_no_rounds_print_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--parts", "one", "--output", str(tmp_path / "r.json")]
    assert benchmark.main(["--rounds", "0", *words]) == 2
    assert "holds nothing that was measured" in capsys.readouterr().err
    benchmark.main(["--rounds", "1", *words])
    printed = capsys.readouterr().out
    assert benchmark.main(["--rounds", "0", *words, "--add"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.usefixtures("parts")
def test_publishing_writes_the_results_and_both_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = "<!-- made by python -m benchmarks: begin -->\n<!-- made by python -m benchmarks: end -->\n"
    (tmp_path / "benchmarks").mkdir()
    readmes = [tmp_path / "README.md", tmp_path / "benchmarks/README.md"]
    for readme in readmes:
        readme.write_text(marks)
    monkeypatch.setattr(benchmark, "HERE", tmp_path / "benchmarks")
    words = ["--rounds", "1", "--parts", "one", "--output", str(tmp_path / "r.json"), "--publish"]
    assert benchmark.main(words) == 0
    assert "| decode, 8 requests | 30 |" in readmes[0].read_text()
    assert "| decode, batch 8 | 30 tok/s |" in readmes[1].read_text()
    assert load_results(tmp_path / "benchmarks/results.json") == load_results(tmp_path / "r.json")


@pytest.mark.usefixtures("parts")
def test_an_interrupted_run_keeps_its_values_and_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_turns: object, _rounds: int, results: Results, output: Path) -> None:
        results.add(OURS, {"smollm2 decode 8": 30})
        results.save(output)
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "take_turns", interrupted)
    monkeypatch.setattr(benchmark, "_publish", lambda _results: pytest.fail("published"))
    words = ["--parts", "one", "--output", str(tmp_path / "r.json"), "--publish"]
    assert benchmark.main(words) == 130
    assert load_results(tmp_path / "r.json").values == {"smollm2 decode 8": {OURS: [30]}}
