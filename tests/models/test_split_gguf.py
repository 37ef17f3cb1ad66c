"""Split files as the gguf package writes them, which is also what llama.cpp's converter does."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from paceline.errors import ModelFileError
from paceline.models.gguf import read_gguf
from paceline.models.part_name import PartName
from paceline.models.quants import dequantize

NAMES = [f"blk.{number}.weight" for number in range(5)]


def weight(number: int) -> np.ndarray:
    return np.arange(number, number + 64, dtype=np.float32).reshape(2, 32)


def write(path: Path, **options: int) -> list[Path]:
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_name("split")
    for number, name in enumerate(NAMES):
        writer.add_tensor(name, weight(number))
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob("*.gguf"))


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    parts = write(tmp_path / "model.gguf", split_max_tensors=2)
    assert [part.name for part in parts] == [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    return parts


def edit(part: Path, key: str, value: int) -> None:
    """Change a number of the metadata in place, by the gguf package's own map of the file."""
    reader = gguf.GGUFReader(part, "r+")
    reader.fields[key].parts[-1][0] = value
    reader.data.flush()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_any_part_opens_all(parts: list[Path], number: int) -> None:
    with read_gguf(parts[number - 1]) as file:
        assert file.paths == tuple(parts)
        assert file.path == parts[0]
        assert file.metadata["general.name"] == "split"
        assert list(file.tensors) == NAMES
        for index, name in enumerate(NAMES):
            assert np.array_equal(dequantize(file.tensors[name]), weight(index))


def test_one_file_is_one_part(tmp_path: Path) -> None:
    (path,) = write(tmp_path / "model.gguf")
    assert read_gguf(path).paths == (path,)


def test_a_merged_model_may_keep_its_old_name(tmp_path: Path) -> None:
    """llama.cpp's gguf-split --merge leaves split.count in the file, as 0."""
    path = tmp_path / "model-00001-of-00003.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 0)
    writer.add_tensor("a", weight(0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert list(read_gguf(path).tensors) == ["a"]


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(ModelFileError, match=r"model-00002-of-00003\.gguf: this part of a model that is split in 3 is"):
        read_gguf(parts[0])


def test_a_part_that_lost_its_name_cannot_find_the_others(parts: list[Path]) -> None:
    for name in ("blob", "model-00001-of-00002.gguf"):
        moved = parts[0].rename(parts[0].with_name(name))
        with pytest.raises(
            ModelFileError, match=r"one of 3 parts of a split model, .* must end in -00001-of-00003\.gguf"
        ):
            read_gguf(moved)
        moved.rename(parts[0])


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        (1, "split.count", 4, "split.no and split.count are 1 and 4, but by its name .* must be 1 and 3"),
        (2, "split.no", 1, "split.no and split.count are 1 and 3, but by its name .* must be 2 and 3"),
        (0, "split.tensors.count", 6, "split.tensors.count is 6, but the 3 parts have 5 tensors"),
    ],
)
def test_parts_that_do_not_belong_together(parts: list[Path], part: int, key: str, value: int, message: str) -> None:
    edit(parts[part], key, value)
    with pytest.raises(ModelFileError, match=message):
        read_gguf(parts[0])


def test_a_tensor_in_two_parts(parts: list[Path]) -> None:
    content = parts[1].read_bytes()
    parts[1].write_bytes(content.replace(b"blk.3.weight", b"blk.0.weight"))
    with pytest.raises(ModelFileError, match=r"00002-of-00003\.gguf: tensor 'blk\.0\.weight' is in an earlier part"):
        read_gguf(parts[0])


def test_a_count_that_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("split.count", [1, 2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match=r"split\.count is .*; an integer is needed"):
        read_gguf(path)


@pytest.mark.parametrize(
    "name", ["m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-1-of-3.gguf", "m.gguf", "m-00001-of-00003.bin"]
)
def test_names_of_no_part(name: str) -> None:
    assert PartName.parse(name) is None
