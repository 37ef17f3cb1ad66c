"""``paceline models``: what can be pulled, and what is here."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.models.catalog import CatalogEntry
    from paceline.models.ollama_store import StoredModel


def models() -> None:
    """List the models that can be pulled by name, and those that Ollama has here.

    In a pipe each model is one line, without a heading and with tabs between
    name, size, licence, path (empty: not cached) and description.
    """
    from paceline.models.catalog import CATALOG
    from paceline.models.ollama_store import stored_models

    rows = [*map(_from_catalog, CATALOG.values()), *map(_from_ollama, stored_models())]
    for row in rows:
        if sys.stdout.isatty():
            print("  ".join(filter(None, (row.name, row.size, row.licence))))
            for line in (row.description, str(row.path or f"not cached; `paceline pull {row.name}` fetches it")):
                print(f"  {line}")
        else:
            print(row.name, row.size, row.licence, row.path or "", row.description, sep="\t")


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    size: str
    licence: str
    path: Path | None
    description: str


def _from_catalog(entry: "CatalogEntry") -> _Row:
    licence = entry.licence if entry.terms is None else f"{entry.licence}, {entry.terms}"
    return _Row(entry.name, _size(entry.size), licence, entry.path if entry.cached else None, entry.description)


def _from_ollama(model: "StoredModel") -> _Row:
    from paceline.errors import PacelineError

    name = f"ollama:{model.name}"
    try:
        manifest = model.manifest()
    except PacelineError as error:
        return _Row(name, "", "", model.store, f"cannot be used: {error}".replace("\n", " "))
    set_by_owner = ", ".join(f"{key} {value}" for key, value in manifest.sampling.items())
    return _Row(
        name, _size(manifest.size), "", manifest.model, f"in Ollama's store{set_by_owner and '; '}{set_by_owner}"
    )


def _size(number: int) -> str:
    return f"{number / 1e6:.0f} MB"
