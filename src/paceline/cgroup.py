"""Limits of the control groups that this process is in: what a container or a systemd unit may use.

Version 1 (https://docs.kernel.org/admin-guide/cgroup-v1/) has a hierarchy for each controller, version 2
(https://docs.kernel.org/admin-guide/cgroup-v2.html) one for all, and a machine may have both. A limit holds for all
groups below, so the levels above this process's own count, too, as far as they are mounted.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_PROCESS = Path("/proc/self")


def cpu_quota() -> float | None:
    """Processor time as a number of cores; None without a quota."""
    quotas = (_quota(level) for level in _levels("cpu"))
    return min((quota for quota in quotas if quota is not None), default=None)


def unused_memory() -> int | None:
    """Bytes up to the nearest limit; negative above it, None without a limit."""
    rests = (_unused(level) for level in _levels("memory"))
    return min((rest for rest in rests if rest is not None), default=None)


def _quota(level: Path) -> float | None:
    quota, _, period = _read(level / "cpu.max").partition(" ")
    if not quota:  # version 1, where -1 is none
        quota, period = _read(level / "cpu.cfs_quota_us"), _read(level / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _unused(level: Path) -> int | None:
    limit, used, inactive = _read(level / "memory.max"), _read(level / "memory.current"), "inactive_file"
    if not limit:  # version 1, where "none" is a limit of nearly 2**63
        limit, used = _read(level / "memory.limit_in_bytes"), _read(level / "memory.usage_in_bytes")
        inactive = "total_inactive_file"
    if not (limit.isdigit() and used.isdigit()):
        return None
    # The page cache is counted as used, but the kernel gives it back on demand.
    statistics = dict(line.split() for line in _read(level / "memory.stat").splitlines())
    return int(limit) - int(used) + int(statistics.get(inactive, 0))


def _levels(controller: str) -> Iterator[Path]:
    """Folders of the groups that can limit this process, its own first (proc(5): /proc/pid/cgroup, mountinfo)."""
    groups: dict[str, str] = {}
    for line in _read(_PROCESS / "cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), group)
    for line in _read(_PROCESS / "mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        root, point = mount.split(" ")[3:5]
        name = "" if kind == "cgroup2" else controller
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            yield from _up_to(Path(point), _below(root, groups.get(name, root)))


def _below(root: str, group: str) -> PurePosixPath:
    """A group's place below the mount that shows ``root``: the mount itself where the group is not below it, as in a
    container that has its own view of one of the two."""
    inside = PurePosixPath(group).is_relative_to(root) and ".." not in group
    return PurePosixPath(group).relative_to(root) if inside else PurePosixPath()


def _up_to(mount: Path, below: PurePosixPath) -> Iterator[Path]:
    yield mount / below
    for parent in below.parents:
        yield mount / parent


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
