"""Memory and utilisation samples."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest

from paceline.bench import sampler
from paceline.bench.environment import describe_environment
from paceline.bench.sampler import Sampler, listening_processes, read_samples, sampling
from tests.bench.schedule_server import Schedule, ScheduleServer


def test_the_process_that_listens_is_found_on_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScheduleServer(Schedule()) as server:
        for host in ("localhost", "127.0.0.1", socket.gethostname()):
            assert listening_processes(host, server.port) == [os.getpid()]
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [(0, 0, 0, "", ("192.0.2.7", 0))])
        assert listening_processes("elsewhere.test", server.port) == []


def test_nobody_listens_or_nobody_may_look(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert listening_processes("127.0.0.1", unused.getsockname()[1]) == []

    def denied(kind: str) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", denied)
    assert listening_processes("127.0.0.1", 80) == []
    assert "server_rss_bytes" not in Sampler("127.0.0.1", 80).sample()


def test_a_sample_has_the_server_where_there_is_one() -> None:
    with ScheduleServer(Schedule()) as server:
        row = Sampler("localhost", server.port).sample()
    assert 0 < row["server_rss_bytes"] < psutil.virtual_memory().total
    assert 0 < row["host_memory_bytes"] <= psutil.virtual_memory().total
    assert row["server_cpu_percent"] >= 0


def test_what_does_not_exist_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    row = Sampler("192.0.2.7", 80).sample()
    assert set(row) == {"ns", "host_memory_bytes", "host_cpu_percent"}
    assert "gpus" not in describe_environment()


def test_gpus_are_sampled_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        used, gpu = 3 * 2**30, 71

    def fake(name: str, value: Any) -> None:
        monkeypatch.setattr(pynvml, name, lambda *_: value)

    fake("nvmlInit", None)
    fake("nvmlDeviceGetCount", 2)
    fake("nvmlDeviceGetHandleByIndex", object())
    fake("nvmlDeviceGetMemoryInfo", Fake)
    fake("nvmlDeviceGetUtilizationRates", Fake)
    fake("nvmlDeviceGetName", "NVIDIA H200")
    row = Sampler("192.0.2.7", 80).sample()
    assert (row["gpu0_memory_bytes"], row["gpu1_utilisation_percent"]) == (3 * 2**30, 71)
    monkeypatch.setattr("paceline.machine._NVIDIA_DEVICES", (Path("/dev/null"),))
    assert describe_environment()["gpus"] == ["NVIDIA H200", "NVIDIA H200"]


def test_samples_are_written_by_a_process_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "INTERVAL_S", 0.01)
    path = tmp_path / "samples.csv"
    with ScheduleServer(Schedule()) as server, sampling("localhost", server.port, path):
        (child,) = [each for each in psutil.Process().children() if "paceline.bench.sampler" in each.cmdline()]
        for _ in range(2000):
            if read_samples(path).get("server_rss_bytes"):
                break
            time.sleep(0.01)
    assert not child.is_running()
    stamps = [ns for ns, _ in read_samples(path)["server_rss_bytes"]]
    assert stamps == sorted(stamps)


def test_reading_samples_leaves_empty_cells_out(tmp_path: Path) -> None:
    path = tmp_path / "samples.csv"
    assert read_samples(path) == {}
    path.write_text("ns,host_memory_bytes,server_rss_bytes\n5,100,7\n6,101,\n")
    assert read_samples(path) == {"host_memory_bytes": [(5, 100.0), (6, 101.0)], "server_rss_bytes": [(5, 7.0)]}


def test_the_environment_names_the_machine() -> None:
    found = describe_environment()
    assert {"cpu", "cores_usable", "memory_bytes", "os", "python", "paceline"} <= set(found)
    assert found["cores_usable"] >= 1
