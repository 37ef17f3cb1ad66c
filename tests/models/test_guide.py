"""docs/adding-a-model.md shows the code that there is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_code_in_the_guide_is_the_code() -> None:
    guide = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    source, shown = "", 0
    for path, code in re.findall(r"^`(\S+\.py)`$|^```python\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL):
        if path:
            source = (ROOT / path).read_text(encoding="utf-8")
        else:
            assert code in source, code
            shown += 1
    assert shown == 4


def test_the_files_it_names_are_there() -> None:
    guide = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    for path in re.findall(r"`((?:src/paceline|tests)/\S+?)`", guide):
        assert (ROOT / path).is_file(), path
