"""What a container may use, from files that the test writes in the place of the kernel's."""

import os
from pathlib import Path

import psutil
import pytest

from paceline import cgroup, machine


class ControlGroups:
    """Mounts in a folder, and the groups of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "mountinfo").write_text("22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n")
        (folder / "cgroup").write_text("")

    def mount(self, controllers: str, group: str, root: str = "/") -> None:
        """A hierarchy of version 1 with controllers such as ``cpu,cpuacct``, or without any that of version 2, in a
        folder of that name or ``unified``; ``root`` is the group that the mount shows."""
        kind, point = "cgroup" if controllers else "cgroup2", self.folder / (controllers or "unified")
        with (self.folder / "mountinfo").open("a") as mountinfo:
            mountinfo.write(f"30 23 0:26 {root} {point} rw,nosuid shared:4 - {kind} cgroup rw,{controllers}\n")
        with (self.folder / "cgroup").open("a") as groups:
            groups.write(f"{4 if controllers else 0}:{controllers}:{group}\n")

    def write(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ControlGroups:
    monkeypatch.setattr(cgroup, "_PROCESS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    return ControlGroups(tmp_path)


def test_cores_are_those_of_the_affinity_without_a_quota(groups: ControlGroups) -> None:
    assert machine.usable_cores() == 8
    groups.mount("", "/unit")
    groups.mount("cpu,cpuacct", "/unit")
    groups.write("unified/unit/cpu.max", "max 100000")
    groups.write("cpu,cpuacct/unit/cpu.cfs_quota_us", "-1")
    groups.write("cpu,cpuacct/unit/cpu.cfs_period_us", "100000")
    assert machine.usable_cores() == 8


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_PROCESS", tmp_path / "missing")
    assert machine.usable_cores() == len(os.sched_getaffinity(0))
    assert machine.free_memory() > 0


@pytest.mark.parametrize(("quota", "cores"), [(150_000, 2), (20_000, 1), (400_000, 4), (400_001, 5), (9_000_000, 8)])
def test_a_quota_counts(groups: ControlGroups, quota: int, cores: int) -> None:
    groups.mount("", "/")
    groups.write("unified/cpu.max", f"{quota} 100000")
    assert machine.usable_cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [(150_000, 2), (20_000, 1), (400_000, 4), (400_001, 5), (9_000_000, 8)])
def test_a_quota_of_version_1_counts(groups: ControlGroups, quota: int, cores: int) -> None:
    groups.mount("cpu,cpuacct", "/")
    groups.write("cpu,cpuacct/cpu.cfs_quota_us", str(quota))
    groups.write("cpu,cpuacct/cpu.cfs_period_us", "100000")
    assert machine.usable_cores() == cores


@pytest.mark.parametrize("tight", ["", "/slice", "/slice/unit"])
def test_the_tightest_level_counts(groups: ControlGroups, tight: str) -> None:
    groups.mount("", "/slice/unit")
    for level in ("", "/slice", "/slice/unit", "/other"):
        groups.write(f"unified{level}/cpu.max", "200000 100000" if level == tight else "600000 100000")
    groups.write("unified/other/cpu.max", "100000 100000")  # not ours
    assert machine.usable_cores() == 2


@pytest.mark.parametrize(
    ("group", "root"),
    [
        ("/docker/1a2b", "/docker/1a2b"),  # a container that sees the host's names but only its own group
        ("/", "/docker/1a2b"),
        ("/../../other", "/"),  # moved out of the root of its namespace
    ],
)
def test_a_container_sees_its_own_group_as_the_mount(groups: ControlGroups, group: str, root: str) -> None:
    groups.mount("cpu", group, root)
    groups.write("cpu/cpu.cfs_quota_us", "300000")
    groups.write("cpu/cpu.cfs_period_us", "100000")
    assert machine.usable_cores() == 3


@pytest.mark.parametrize(
    ("controllers", "limit", "used", "inactive"),
    [
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_free_memory_is_what_the_nearest_limit_leaves(
    groups: ControlGroups, monkeypatch: pytest.MonkeyPatch, controllers: str, limit: str, used: str, inactive: str
) -> None:
    machine_has = psutil.virtual_memory()._replace(available=10_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine_has)
    mount = controllers or "unified"
    groups.mount(controllers, "/slice/unit")
    assert machine.free_memory() == 10_000_000
    groups.write(f"{mount}/{limit}", "9223372036854771712" if controllers else "max")
    groups.write(f"{mount}/{used}", "123")
    assert machine.free_memory() == 10_000_000
    groups.write(f"{mount}/slice/{limit}", "1000000")
    groups.write(f"{mount}/slice/{used}", "700000")
    groups.write(f"{mount}/slice/memory.stat", f"anon 500000\n{inactive} 150000")
    assert machine.free_memory() == 1_000_000 - 700_000 + 150_000
    groups.write(f"{mount}/slice/unit/{limit}", "500000")
    groups.write(f"{mount}/slice/unit/{used}", "600000")
    assert machine.free_memory() == 0
