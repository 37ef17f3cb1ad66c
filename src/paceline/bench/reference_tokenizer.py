"""A tokenizer at hand, to make prompts of exact lengths and to count output that the server does not count."""

from collections.abc import Callable
from pathlib import Path

from paceline.errors import InputError


def load_token_counter(tokenizer: str) -> Callable[[str], int]:
    """A function that counts the tokens of a text, without any that are put in front.

    `tokenizer` is a ``tokenizer.json``, or a MODEL as ``resolve`` takes it. Raises InputError or ModelFileError.
    """
    path = Path(tokenizer)
    if path.suffix == ".json":
        return _from_tokenizer_json(path)
    from paceline.models.gguf import read_gguf
    from paceline.models.resolve import resolve
    from paceline.models.tokenizer import Tokenizer

    with read_gguf(resolve(tokenizer).path) as file:
        encoder = Tokenizer.from_gguf(file.metadata)
    return lambda text: len(encoder.encode(text, add_special=False))


def _from_tokenizer_json(path: Path) -> Callable[[str], int]:
    from tokenizers import Tokenizer

    if not path.is_file():
        raise InputError(f"--tokenizer {path}: there is no such file")
    try:
        encoder = Tokenizer.from_file(str(path))
    # The library raises plain Exception for a file that it cannot read.
    except Exception as error:
        raise InputError(f"--tokenizer {path} is not a tokenizer.json: {error}") from None
    return lambda text: len(encoder.encode(text, add_special_tokens=False).ids)
