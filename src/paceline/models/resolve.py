"""From a MODEL, as people write it, to its file."""

import os
import re
from pathlib import Path

from paceline.errors import InputError
from paceline.models import catalog, hub, ollama_store
from paceline.models.partial_file import Progress
from paceline.models.source import ModelSource, file_source

_LIKE_THE_HUB = re.compile(
    r"(?:(?:https?://)?(?:huggingface\.co|hf\.co)/)?(?P<repository>\w[\w.-]*/[\w.-]+)(?P<wanted>:.+)?", re.ASCII
)


def resolve(model: str, progress: Progress | None = None) -> ModelSource:
    """The source of a model: a catalog name or ``hf:owner/repo[:file]``, which are downloaded if need be,
    ``ollama:name[:tag]``, or the path of a GGUF file.

    Raises:
        InputError: there is no such model, or what was said fits several.
        ModelFileError: the model could not be downloaded, or Ollama's store is damaged.
    """
    if not model.strip():
        raise InputError("MODEL is empty: is the variable that it comes from set?", param="model")
    try:
        if _is_path(model):
            return file_source(_existing(model))
    except OSError as error:  # a folder that may not be read, a name that is too long
        raise InputError(f"{model:.200}: {error.strerror}", param="model") from None
    return pull(model, progress)


def pull(model: str, progress: Progress | None = None) -> ModelSource:
    """``resolve`` for all but paths, at which there is nothing to fetch."""
    scheme, _, reference = model.partition(":")
    match scheme:
        case "hf":
            return hub.download(reference, progress)
        case "ollama":
            return ollama_store.find(reference)
        case _:
            return ModelSource(model, catalog.pull(model, progress))


def _is_path(model: str) -> bool:
    if model in catalog.CATALOG or model.startswith(("hf:", "ollama:")):
        return False
    return os.sep in model or model.endswith(".gguf") or Path(model).expanduser().exists()


def _existing(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise InputError(f"{model} is a directory; a GGUF file is needed", param="model")
    hub = _LIKE_THE_HUB.fullmatch(model)
    if hub is not None and not model.endswith(".gguf"):
        meant = f"hf:{hub['repository']}{hub['wanted'] or ''}"
        raise InputError(f"{model}: no such file; from the Hugging Face hub it would be {meant}", param="model")
    raise InputError(f"{model}: no such file; {catalog.known_names(model)}", param="model")
