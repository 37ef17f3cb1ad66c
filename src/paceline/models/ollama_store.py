"""Models that Ollama keeps on this machine: manifests that name blobs (ollama/ollama: server/internal/manifest).

Nothing is copied: the GGUF file is used where it lies, and Ollama need not run.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InputError
from paceline.models.ollama_manifest import Manifest, read_manifest
from paceline.models.ollama_name import OllamaName
from paceline.models.source import ModelSource

SYSTEM_STORES = (Path("/usr/share/ollama/.ollama/models"), Path("/var/lib/ollama/.ollama/models"))
"""Of Ollama's own installer on Linux (docs/faq), and of distributions' packages (ollama/ollama issue 4455)."""

logger = logging.getLogger("paceline.models")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model that is in a store."""

    name: OllamaName
    store: Path

    def manifest(self) -> Manifest:
        """
        Raises:
            ModelFileError: it cannot be read, or is none.
        """
        return read_manifest(self.store, self.name)


def stores() -> list[Path]:
    """Where Ollama may keep models, in the order in which they are searched."""
    named = os.environ.get("OLLAMA_MODELS")
    return [*([Path(named).expanduser()] if named else []), Path("~/.ollama/models").expanduser(), *SYSTEM_STORES]


def stored_models() -> list[StoredModel]:
    """What the stores hold, in the order of their names; of equal names the one that is found first."""
    found: dict[OllamaName, StoredModel] = {}
    for store in stores():
        try:
            names = _names_in(store)
        except OSError:
            continue
        for name in names:
            found.setdefault(name, StoredModel(name, store))
    return sorted(found.values(), key=lambda model: str(model.name).lower())


def find(reference: str) -> ModelSource:
    """The source of ``[[host/]namespace/]name[:tag]``, with what its Modelfile set.

    Raises:
        InputError: no store has it; what they have is listed. Or it needs a LoRA adapter.
        ModelFileError: the store is damaged, or may not be read.
    """
    wanted = OllamaName.parse(reference)
    models = stored_models()
    for model in models:
        if model.name == wanted:
            return _source(model)
    raise InputError(_nothing_called(wanted, models), param="model", code="model_not_found")


def _source(model: StoredModel) -> ModelSource:
    manifest = model.manifest()
    if manifest.unused:
        logger.warning("ollama:%s: not used here: %s", model.name, ", ".join(manifest.unused))
    return ModelSource(
        str(model.name),
        manifest.model,
        sampling=manifest.sampling,
        system=manifest.system,
        context_length=manifest.context_length,
        go_template=manifest.template,
    )


def _names_in(store: Path) -> list[OllamaName]:
    """
    Raises:
        OSError: the store is there but may not be read.
    """
    manifests = store / "manifests"
    try:
        os.scandir(manifests).close()  # which says why, where a glob would find nothing
    except (FileNotFoundError, NotADirectoryError):
        return []
    paths = [path.relative_to(manifests).parts for path in manifests.glob("*/*/*/*")]
    return [OllamaName(*parts) for parts in paths if not any(part.startswith(".") for part in parts)]


def _nothing_called(wanted: OllamaName, models: Sequence[StoredModel]) -> str:
    closed = [
        f"{store} cannot be read ({reason}): become a member of its group with `sudo usermod -aG ollama $USER` and "
        "log in again"
        for store in stores()
        if (reason := _why_closed(store)) is not None
    ]
    if models:
        listed = ", ".join(str(model.name) for model in models)
        found = f"Ollama has no {wanted} on this machine; it has {listed}. `ollama pull {wanted}` fetches it"
    else:
        searched = ", ".join(map(str, stores()))
        found = f"no {wanted}, and no other model of Ollama, in {searched}; OLLAMA_MODELS names another folder"
    return "; ".join([found, *closed])


def _why_closed(store: Path) -> str | None:
    try:
        _names_in(store)
    except OSError as error:
        return error.strerror
    return None
