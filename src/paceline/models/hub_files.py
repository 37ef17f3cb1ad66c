"""Which of a repository's GGUF files is meant."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from paceline.errors import InputError
from paceline.models.part_name import PartName

_NO_MODEL = ("mmproj", "imatrix")
"""How files begin that are in GGUF but are no language model: image projectors, and statistics for quantizing."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model in a repository: one file, or all parts of a split one."""

    files: tuple[str, ...]
    """Paths in the repository, in the order of the parts."""
    sizes: tuple[int, ...]
    """Bytes of each; empty where the hub does not tell them."""

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def __str__(self) -> str:
        parts = f", {len(self.files)} parts" if len(self.files) > 1 else ""
        size = "" if not self.sizes else f" ({self.size / 1e6:.0f} MB{parts})"
        return self.files[0] + size


def models_among(files: Mapping[str, int | None]) -> list[HubModel]:
    """The models among a repository's files (path: bytes), in the order of their names.

    Raises:
        InputError: parts of a split model are missing.
    """
    models: dict[str, HubModel] = {}
    for name in sorted(files):
        if not name.lower().endswith(".gguf"):
            continue
        part = PartName.parse(name)
        parts = [name] if part is None else part.all_parts()
        missing = [part_name for part_name in parts if part_name not in files]
        if missing:
            raise InputError(f"the repository has {name}, but not {', '.join(missing)}", param="model")
        sizes = tuple(size for part_name in parts if (size := files[part_name]) is not None)
        models[parts[0]] = HubModel(tuple(parts), sizes if len(sizes) == len(parts) else ())
    return list(models.values())


def choose(repository: str, models: Sequence[HubModel], wanted: str | None) -> HubModel:
    """The model called ``wanted``, a file or a quantization such as ``Q4_K_M``; without it, the only one.

    Raises:
        InputError: there is none, or there are several; they are listed with their sizes.
    """
    by_name = [model for model in models if wanted in model.files]
    usable = [model for model in models if not PurePosixPath(model.files[0]).name.lower().startswith(_NO_MODEL)]
    if not usable and not by_name:
        raise InputError(
            f"hf:{repository} has no GGUF file; look for a repository of the same model whose name ends in -GGUF",
            param="model",
        )
    fitting = by_name or [model for model in usable if wanted is None or _is_quantization(model, wanted)]
    if len(fitting) == 1:
        return fitting[0]
    problem = f"nothing that fits {wanted!r}" if not fitting else f"{len(fitting)} models"
    raise InputError(
        f"hf:{repository} has {problem}; choose one as hf:{repository}:FILE, or by its quantization as in "
        f"hf:{repository}:Q4_K_M:\n" + "\n".join(f"  {model}" for model in fitting or usable),
        param="model",
    )


def _is_quantization(model: HubModel, wanted: str) -> bool:
    """Whether the name has ``wanted`` as a word of its own: Q4_K is not in ``x-Q4_K_M.gguf``, nor Q4_XS in IQ4_XS."""
    return re.search(rf"(?<![0-9a-z_]){re.escape(wanted)}(?![0-9a-z_])", model.files[0], re.IGNORECASE) is not None
