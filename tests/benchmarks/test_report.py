from pathlib import Path

import pytest

from benchmarks.report import full_report, replace_section, summary
from benchmarks.results import OURS, Results, Run
from benchmarks.tables import summary_table, target_tables, value_tables
from paceline.errors import InputError


def _row(table: str, start: str) -> str:
    (row,) = (line for line in table.splitlines() if line.startswith(f"| {start}"))
    return row


def test_a_row_has_both_medians_the_ratio_and_what_it_was_to_be() -> None:
    results = Results(values={"smollm2 decode 8": {OURS: [700, 705, 100], "OpenVINO": [290], "llama.cpp": [350]}})
    lines = [line for line in target_tables(results).splitlines() if line.startswith("| decode, batch 8 |")]
    assert lines == [
        "| decode, batch 8 | 700 tok/s | OpenVINO: 290 tok/s | 2.41× | ≥ 2.2× | 2.8× | met |",
        "| decode, batch 8 | 700 tok/s | llama.cpp: 350 tok/s | 2× | ≥ 1× |  | met |",
    ]


def test_a_row_of_our_own_has_the_peer_beside_it_and_no_ratio() -> None:
    results = Results(values={"smollm2 startup": {OURS: [1.5], "llama-server Q4_0": [0.38]}})
    row = _row(target_tables(results), "start to first token")
    assert row == "| start to first token | 1.5 s | llama-server Q4_0: 0.38 s |  | ≤ 1.2 s | 0.6 s | missed |"


def test_a_part_of_a_peers_time_is_told_with_both_times() -> None:
    engines = {"paceline --target-itl 50ms": [2.5], "llama-server Q4_0": [10.0]}
    row = _row(target_tables(Results(values={"smollm2 long-prompt ttft": engines})), "that prompt's own first token")
    assert row.endswith("| 2.5 s | llama-server Q4_0: 10 s | 0.25× | ≤ 0.5× |  | met |")


def test_shares_are_told_in_percent() -> None:
    results = Results(values={"smollm2 decode 1": {OURS: [160], "read bandwidth": [200]}})
    row = _row(target_tables(results), "the same, of the roofline")
    assert row == "| the same, of the roofline | 160 tok/s | read bandwidth: 200 tok/s | 80% | ≥ 75% | 90% | met |"


def test_a_cell_that_failed_says_why_on_one_line() -> None:
    results = Results()
    results.fail("OpenVINO", ("qwen2.5-coder decode 8",), "pip | says:\nno such package")
    row = _row(target_tables(results), "decode, batch 8")
    assert row.endswith("| not measured: OpenVINO: pip / says: no such package |")


def test_models_and_rows_that_nobody_tried_are_left_out() -> None:
    results = Results(values={"gemma3 prefill": {OURS: [10], "llama.cpp": [5]}})
    table = target_tables(results)
    assert "### Gemma 3 270M" in table
    assert "SmolLM2" not in table
    assert "decode" not in table


def test_values_have_their_spread_and_share_a_table_where_the_engines_are_the_same() -> None:
    values = {"a decode 1": {"x": [1.0], OURS: [2, 3, 4]}, "a prefill": {OURS: [5], "x": [7]}, "a startup": {OURS: [1]}}
    first, second = value_tables(Results(values=values)).split("\n\n")
    assert first.splitlines() == [
        "|  | paceline | x |",
        "|---|--:|--:|",
        "| a decode 1, tok/s | 3 (2–4) | 1 |",
        "| a prefill, tok/s | 5 | 7 |",
    ]
    assert second.splitlines()[-1] == "| a startup, s | 1 |"


def test_the_summary_takes_the_better_of_a_peers_files() -> None:
    values = {"smollm2 decode 1": {OURS: [200], "llama.cpp": [100], "llama.cpp Q4_0": [90], "vLLM": [30]}}
    assert summary_table(Results(values=values)).splitlines() == [
        "| tokens/s | Paceline | llama.cpp | OpenVINO GenAI | vLLM |",
        "|---|--:|--:|--:|--:|",
        "| decode, 1 request | 200 | 100 |  | 30 |",
    ]


def _measured() -> Results:
    environment = {"cpu": "Some CPU", "instruction_sets": ["avx2"]}
    runs = [Run(f"python -m benchmarks --parts {part}", "2026-12-01 12:00", 2, environment, {}) for part in "ab"]
    return Results(runs=runs, values={"smollm2 decode 1": {OURS: [200, 210, 190], "llama.cpp": [100, 100]}})


@pytest.mark.parametrize("text", [full_report(_measured()), summary(_measured())])
def test_a_report_tells_machine_date_rounds_and_commands(text: str) -> None:
    assert "Some CPU (avx2), 2 threads each; 2026-12-01; medians of 3 interleaved rounds" in text
    assert "$ python -m benchmarks --parts a\n$ python -m benchmarks --parts b\n" in text


def test_a_section_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    begin, end = "<!-- made by python -m benchmarks: begin -->", "<!-- made by python -m benchmarks: end -->"
    path = tmp_path / "README.md"
    path.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    replace_section(path, "new")
    replace_section(path, "newer")
    assert path.read_text() == f"before\n{begin}\n\nnewer\n\n{end}\nafter\n"


@pytest.mark.parametrize("text", ["", "<!-- made by python -m benchmarks: begin -->\n"])
def test_a_file_without_both_marks_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "README.md"
    path.write_text(text)
    with pytest.raises(InputError, match="no section to write into"):
        replace_section(path, "new")
    assert path.read_text() == text


def test_the_repositorys_files_have_their_sections() -> None:
    root = Path(__file__).parents[2]
    for path in (root / "README.md", root / "benchmarks/README.md"):
        assert path.read_text().count("<!-- made by python -m benchmarks: ") == 2
