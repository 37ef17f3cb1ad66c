"""Memory and utilisation through a run, in a process of its own: reading /proc would hold up the measuring one.

``python -m paceline.bench.sampler HOST PORT SECONDS FILE`` appends a row every SECONDS until its standard input ends,
which also happens when its parent dies.
"""

import csv
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns

import psutil
import pynvml

INTERVAL_S = 0.5
_STOP_TIMEOUT_S = 5


def listening_processes(host: str, port: int) -> list[int]:
    """Process ids that listen on `port`, if `host` is this machine and they can be seen; else none."""
    if not _is_this_machine(host):
        return []
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return []
    listening = [
        each for each in connections if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
    ]
    return sorted({each.pid for each in listening if each.pid is not None})


def _is_this_machine(host: str) -> bool:
    try:
        targets = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {address.address.partition("%")[0] for each in psutil.net_if_addrs().values() for address in each}
    return any(target in own or target.startswith("127.") or target == "::1" for target in targets)


class Sampler:
    """Takes one sample after the other. A column whose source does not exist is not there."""

    def __init__(self, host: str, port: int) -> None:
        self._server = [psutil.Process(pid) for pid in listening_processes(host, port)]
        self._gpus = _gpu_handles()
        self._cpu_seconds: dict[int, float] = {}
        self._last_ns = 0
        psutil.cpu_percent()
        self.sample()

    def sample(self) -> dict[str, float]:
        """One row: ``ns`` on the clock of the records, bytes and percent (100 = one core busy)."""
        row: dict[str, float] = {"ns": perf_counter_ns()}
        row["host_memory_bytes"] = psutil.virtual_memory().total - psutil.virtual_memory().available
        row["host_cpu_percent"] = psutil.cpu_percent()
        if self._server:
            row |= self._server_tree(int(row["ns"]))
        for number, gpu in enumerate(self._gpus):
            row[f"gpu{number}_memory_bytes"] = float(pynvml.nvmlDeviceGetMemoryInfo(gpu).used)
            row[f"gpu{number}_utilisation_percent"] = float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
        return row

    def _server_tree(self, ns: int) -> dict[str, float]:
        """Resident memory (pages shared between processes counted in each) and CPU time of the server's processes."""
        memory = 0
        cpu_seconds: dict[int, float] = {}
        for process in self._tree():
            try:
                times = process.cpu_times()
                memory += process.memory_info().rss
            except psutil.Error:
                continue
            cpu_seconds[process.pid] = times.user + times.system
        spent = sum(seconds - self._cpu_seconds.get(pid, 0.0) for pid, seconds in cpu_seconds.items())
        elapsed = (ns - self._last_ns) / 1e9
        self._cpu_seconds, self._last_ns = cpu_seconds, ns
        if not cpu_seconds:
            return {}
        return {"server_rss_bytes": memory, "server_cpu_percent": 100 * spent / elapsed}

    def _tree(self) -> set[psutil.Process]:
        tree = set(self._server)
        for process in self._server:
            try:
                tree.update(process.children(recursive=True))
            except psutil.Error:
                continue
        return tree


def _gpu_handles() -> list[object]:
    try:
        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


@contextmanager
def sampling(host: str, port: int, path: Path) -> Iterator[None]:
    """Samples into `path` while the block runs, beginning before it."""
    command = [sys.executable, "-m", "paceline.bench.sampler", host, str(port), str(INTERVAL_S), str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        # Its start would take time from the first cell. A sampler that dies ends the wait too, and the run goes on.
        process.stdout.readline()
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def read_samples(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Every column of a ``samples.csv`` as (ns, value) pairs, empty cells left out; nothing where there is no file."""
    if not path.exists():
        return {}
    columns: dict[str, list[tuple[int, float]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            ns = int(row.pop("ns"))
            for name, value in row.items():
                if value:
                    columns.setdefault(name, []).append((ns, float(value)))
    return columns


def main(host: str, port: str, seconds: str, path: str) -> None:
    # Ctrl-C goes to the whole process group; the parent ends us by closing our standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sampler = Sampler(host, int(port))
    with Path(path).open("w", newline="") as file:
        row = sampler.sample()
        writer = csv.DictWriter(file, row, extrasaction="ignore")
        writer.writeheader()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            writer.writerow(row)
            file.flush()
            if select.select([sys.stdin], [], [], float(seconds))[0]:
                break
            row = sampler.sample()


if __name__ == "__main__":
    main(*sys.argv[1:])
