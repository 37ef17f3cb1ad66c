"""The machine and software a run was made on, as every run stores it."""

import platform
from pathlib import Path
from typing import Any

import psutil

import paceline
from paceline.machine import gpu_names, usable_cores

_ISA_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "sve",
    "i8mm",
)
"""Names from /proc/cpuinfo, x86 and Arm, that decide which kernels run."""


def describe_environment() -> dict[str, Any]:
    """CPU, memory, GPUs and versions of this machine, which is the client's; what cannot be found is left out."""
    cpuinfo = _cpuinfo()
    flags = (cpuinfo.get("flags") or cpuinfo.get("Features") or "").split()
    found: dict[str, Any] = {
        "cpu": cpuinfo.get("model name") or platform.processor() or None,
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_logical": psutil.cpu_count(),
        "cores_usable": usable_cores(),
        "instruction_sets": [flag for flag in _ISA_FLAGS if flag in flags],
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpu_names(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "paceline": paceline.__version__,
    }
    return {name: value for name, value in found.items() if value not in (None, [], "")}


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
