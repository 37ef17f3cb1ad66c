"""What a container may use, from cgroup files that the test writes."""

import os
from pathlib import Path

import pytest

from paceline import machine


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    return tmp_path


def test_cores_are_those_of_the_affinity_without_a_quota(cgroup: Path) -> None:
    assert machine.usable_cores() == len(os.sched_getaffinity(0))
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert machine.usable_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 2), ("20000 100000", 1), ("800000 100000", 4)])
def test_a_quota_of_the_cgroup_counts(cgroup: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(4)))
    (cgroup / "cpu.max").write_text(quota)
    assert machine.usable_cores() == cores


def test_free_memory_is_what_the_cgroup_leaves(cgroup: Path) -> None:
    unlimited = machine.free_memory()
    assert unlimited > 0
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("123\n")
    assert abs(machine.free_memory() - unlimited) < unlimited / 2
    (cgroup / "memory.max").write_text("1000000\n")
    (cgroup / "memory.current").write_text("700000\n")
    (cgroup / "memory.stat").write_text("anon 500000\ninactive_file 150000\n")
    assert machine.free_memory() == 1000000 - 700000 + 150000
    (cgroup / "memory.current").write_text("2000000\n")
    (cgroup / "memory.stat").write_text("")
    assert machine.free_memory() == 0
