"""What this process may use of the machine: cores and memory, cgroup limits (containers, systemd) included; GPUs."""

import os
from math import ceil
from pathlib import Path

import psutil

from paceline import cgroup
from paceline.errors import InputError

_NVIDIA_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""One of them is there where NVIDIA's driver is: on Linux, and in Windows' subsystem for Linux."""


def usable_cores() -> int:
    """Cores the scheduler grants us, at least 1: CPU affinity and cgroup quota, whichever is less.

    Part of a core counts as one: 2 threads make use of 1.5 cores, 1 does not.
    """
    cores, quota = len(os.sched_getaffinity(0)), cgroup.cpu_quota()
    return max(cores if quota is None else min(cores, ceil(quota)), 1)


def free_memory() -> int:
    """Bytes that can still be taken without swapping: of the machine, and of the cgroup's limit if it has one."""
    free, unused = int(psutil.virtual_memory().available), cgroup.unused_memory()
    return max(free if unused is None else min(free, unused), 0)


def free_gpu_memory(number: int) -> int:
    """Bytes of a GPU that nobody has taken.

    Raises:
        InputError: NVIDIA's driver shows no such GPU.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(number)).free)
    except pynvml.NVMLError as error:
        raise InputError(f"there is no GPU {number} for the device cuda:{number}: {error}", param="device") from error


def gpu_names() -> list[str]:
    """The GPUs that NVIDIA's driver shows; none without a driver."""
    if not any(device.exists() for device in _NVIDIA_DEVICES):
        return []
    import pynvml  # not at the top: it takes long, and every server starts by asking

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except pynvml.NVMLError:
        return []
