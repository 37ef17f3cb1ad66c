"""What this process may use of the machine: cores and memory, cgroup limits (containers, systemd) included; GPUs."""

import os
from math import ceil
from pathlib import Path

import psutil
import pynvml

from paceline.errors import InputError

_CGROUP = Path("/sys/fs/cgroup")
"""Version 2 (https://docs.kernel.org/admin-guide/cgroup-v2.html); inside a container its own limits stand here."""


def usable_cores() -> int:
    """Cores the scheduler grants us, at least 1: CPU affinity and cgroup quota, whichever is less."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read("cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, ceil(int(quota) / int(period)))
    return max(cores, 1)


def free_memory() -> int:
    """Bytes that can still be taken without swapping: of the machine, and of the cgroup's limit if it has one."""
    free = int(psutil.virtual_memory().available)
    limit, used = _read("memory.max"), _read("memory.current")
    if limit.isdigit() and used.isdigit():
        # The page cache is counted as used, but the kernel gives it back on demand.
        statistics = dict(line.split() for line in _read("memory.stat").splitlines())
        free = min(free, int(limit) - int(used) + int(statistics.get("inactive_file", 0)))
    return max(free, 0)


def free_gpu_memory(number: int) -> int:
    """Bytes of a GPU that nobody has taken.

    Raises:
        InputError: NVIDIA's driver shows no such GPU.
    """
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(number)).free)
    except pynvml.NVMLError as error:
        raise InputError(f"there is no GPU {number} for the device cuda:{number}: {error}", param="device") from error


def gpu_names() -> list[str]:
    """The GPUs that NVIDIA's driver shows; none without a driver."""
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except pynvml.NVMLError:
        return []


def _read(name: str) -> str:
    try:
        return (_CGROUP / name).read_text().strip()
    except OSError:
        return ""
