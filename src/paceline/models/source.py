"""What a MODEL on a command line comes down to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.models.part_name import PartName


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's file, and what its keeper says beside the file."""

    name: str
    """What requests call the model."""
    path: Path
    """Any part, if it is split."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that the model's owner set, as yet unchecked; for requests that do not say."""
    system: str | None = None
    """System prompt for conversations that bring none."""
    context_length: int | None = None
    """How many tokens of context the model's owner runs it with."""
    go_template: str | None = None
    """The chat template in Go's template language, which cannot be run here: for people to read."""


def file_source(path: Path) -> ModelSource:
    """A file that stands for itself, named like it."""
    part = PartName.parse(path.name)
    return ModelSource(path.stem if part is None else part.prefix, path)
