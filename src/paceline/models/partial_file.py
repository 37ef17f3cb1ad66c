"""A file that grows by checked pieces, and survives being broken off between two of them."""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from paceline.errors import ModelFileError

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in total, and what is being done."""

_CHUNK_BYTES = 1 << 20


class PartialFile:
    """The file as far as it goes, and a journal that says which pieces are in it and where each of them ends.

    A piece is known by the SHA-256 of what carried it. Both files lie in a folder of their own, in which others may
    keep what need not survive.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.path = folder / name
        self.size = 0
        """Bytes of the whole pieces."""
        self._num_pieces = 0
        self._journal = folder / "journal"

    def resume(self, pieces: Sequence[str]) -> int:
        """How many of ``pieces``, which are SHA-256 in hex, are in the file already; all else in the folder goes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = self._journal.read_text("ascii", "replace").splitlines(keepends=True) if self._journal.exists() else []
        available = self.path.stat().st_size if self.path.exists() else 0
        for piece, line in zip(pieces, lines, strict=False):
            # A line that a power cut tore is none, nor is one of another version's piece.
            entry = re.fullmatch(rf"{piece} ([0-9]+)\n", line)
            if entry is None or int(entry[1]) > available:
                break
            self._num_pieces, self.size = self._num_pieces + 1, int(entry[1])
        for left in self.folder.iterdir():
            if left.is_dir():
                shutil.rmtree(left)
            elif left not in (self.path, self._journal):
                left.unlink()
        self._journal.write_text("".join(lines[: self._num_pieces]))
        with self.path.open("ab") as file:
            file.truncate(self.size)
        return self._num_pieces

    def append(self, source: IO[bytes], piece: str) -> None:
        """Add a piece; the journal has it only after the disk has it."""
        with self.path.open("ab") as file:
            shutil.copyfileobj(source, file, _CHUNK_BYTES)
            file.flush()
            os.fsync(file.fileno())
            end = file.tell()
        with self._journal.open("a") as journal:
            journal.write(f"{piece} {end}\n")
            journal.flush()
            os.fsync(journal.fileno())
        self._num_pieces, self.size = self._num_pieces + 1, end

    def check(self, size: int, sha256: str, progress: Progress) -> None:
        """
        Raises:
            ModelFileError: it is not the file that was expected; nothing of it is kept.
        """
        digest, done = hashlib.sha256(), 0
        with self.path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                progress(min(done, size), size, "checking")
        if digest.hexdigest() != sha256:
            self.discard()
            raise wrong_hash(self.path.name, digest.hexdigest(), sha256)

    def finish(self, destination: Path) -> None:
        """Give the file its final name, so that it survives a power cut; the folder goes."""
        self.path.replace(destination)
        descriptor = os.open(destination.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.discard()

    def discard(self) -> None:
        self._num_pieces = 0
        shutil.rmtree(self.folder, ignore_errors=True)

    def discard_if_empty(self) -> None:
        if self._num_pieces == 0:
            self.discard()


def wrong_hash(what: str, found: str, expected: str) -> ModelFileError:
    return ModelFileError(
        f"{what} is not the file this version of Paceline expects: SHA-256 {found}, expected {expected}. "
        "It was not kept; pull again, and if it happens again, look at the package index pip uses"
    )
