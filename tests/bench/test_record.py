"""The record of an exchange and the run directory."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.bench.client import Exchange, Failure
from paceline.bench.record import CellPlan, RequestRecord, RunDirectory, RunInfo, record_exchange
from paceline.errors import InputError


def info(**changes: Any) -> RunInfo:
    fields: dict[str, Any] = {
        "kind": "bench-load",
        "started": "2026-01-01T00:00:00+00:00",
        "started_ns": 5,
        "argv": ["paceline"],
        "environment": {},
        "plan": {},
        "cells": [CellPlan(0, {"concurrency": 1})],
    }
    return RunInfo(**fields | changes)


def answered(body: bytes, **fields: Any) -> Exchange:
    headers = {"content-type": "text/event-stream; charset=utf-8"}
    defaults = {"scheduled_ns": 1, "sent_ns": 2, "end_ns": 9, "http_status": 200, "headers": headers}
    return Exchange(7, reads=[(5, body)], **defaults | fields)


STREAM = b'data: {"choices":[{"delta":{"content":"a b c"},"finish_reason":"stop"}]}\n\n'


def read(exchange: Exchange, **options: Any) -> RequestRecord:
    return record_exchange(exchange, **{"cell": 3, "mode": "stream", "count_tokens": None, "secret": None} | options)


def test_a_line_has_the_fields_that_the_design_names() -> None:
    record = read(answered(STREAM), count_tokens=lambda text: len(text.split()))
    line = msgspec.json.decode(msgspec.json.encode(record))
    named = (
        "cell id repeat scheduled sent first last events tokens token_source cached_tokens status error server_times"
    )
    assert set(named.split()) <= set(line)
    expected = {"cell": 3, "id": 7, "scheduled": 1, "sent": 2, "first": 5, "last": 5, "end": 9, "events": [[5, 5]]}
    assert expected.items() <= line.items()
    assert (line["tokens"], line["token_source"]) == (3, "tokenizer")


def test_the_servers_count_goes_before_the_reference_tokenizers() -> None:
    usage = b'data: {"choices":[],"usage":{"completion_tokens":8}}\n\n'
    record = read(answered(STREAM + usage), count_tokens=lambda text: 1)
    assert (record.tokens, record.token_source) == (8, "usage")


def test_the_api_key_that_a_server_quotes_is_blotted_out() -> None:
    exchange = answered(b'{"error":{"message":"bad key sk-secret"}}', http_status=401)
    record = read(exchange, secret="sk-secret")
    assert record.error == "HTTP 401: bad key ***"


def test_an_error_event_explains_a_stream_better_than_the_disconnect_after_it() -> None:
    error = b'data: {"error":{"message":"out of memory"}}\n\n'
    cut = Failure("disconnected", "closed")
    assert read(answered(STREAM + error, failure=cut)).status == "server_error"
    assert read(answered(STREAM, failure=cut)).status == "disconnected"


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    directory = RunDirectory.for_new_run(tmp_path / "deep" / "run", "bench-load")
    directory.create(info())
    record = read(answered(STREAM))
    directory.append([record])
    directory.append([record, record])
    assert directory.info() == info()
    assert directory.records() == [record] * 3
    assert len(directory.requests_jsonl.read_text().splitlines()) == 3


def test_the_default_directory_is_named_after_the_time_and_the_command() -> None:
    path = RunDirectory.for_new_run(None, "bench-load").path
    assert path.parent == Path("runs")
    assert path.name.endswith("Z-bench-load")
    assert not path.exists()


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        RunDirectory.for_new_run(tmp_path, "bench-load")
    with pytest.raises(InputError, match="is a file"):
        RunDirectory.for_new_run(tmp_path / "notes.txt", "bench-load")
    with pytest.raises(InputError, match="cannot write"):
        RunDirectory(tmp_path / "notes.txt" / "run").create(info())


def test_damaged_runs_are_named_errors(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with pytest.raises(InputError, match="not a run"):
        directory.info()
    directory.create(info(schema=99))
    with pytest.raises(InputError, match="schema 99"):
        directory.info()
    directory.run_json.write_text("{")
    with pytest.raises(InputError, match=r"run\.json"):
        directory.info()
    directory.append([read(answered(STREAM))])
    with directory.requests_jsonl.open("a") as file:
        file.write('{"cell": "no"}\n')
    with pytest.raises(InputError, match="line 2"):
        directory.records()
