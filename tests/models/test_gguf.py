import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import ModelFileError
from paceline.models.gguf import GGUFFile, read_gguf
from paceline.models.quants import QuantType, dequantize

WEIGHT = np.arange(128, dtype=np.float32).reshape(2, 64)


def write_small(path: Path) -> bytes:
    """A valid file by the gguf package: every metadata type and three tensors."""
    writer = gguf.GGUFWriter(path, "test")
    writer.add_string("text", "grüße")
    writer.add_bool("flag", True)
    writer.add_uint8("u8", 255)
    writer.add_int64("i64", -(2**40))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_array("strings", ["a", "", "안녕"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("flags", [True, False])
    writer.add_tensor("a.weight", WEIGHT)
    writer.add_tensor("b.weight", np.ones(3, np.float16))
    writer.add_tensor(
        "c.weight",
        gguf.quants.quantize(WEIGHT, gguf.GGMLQuantizationType.Q8_0),
        raw_dtype=gguf.GGMLQuantizationType.Q8_0,
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_small(tmp_path_factory.mktemp("gguf") / "small.gguf")


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def info(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return string(name) + dimensions + struct.pack("<IQ", kind, offset)


def build(entries: list[bytes], infos: list[bytes], data: bytes = bytes(64), version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(entries)) + b"".join(entries + infos)
    return head + bytes(-len(head) % 32) + data


def read(path: Path, content: bytes) -> GGUFFile:
    path.write_bytes(content)
    return read_gguf(path)


def test_reads_what_the_gguf_package_wrote(tmp_path: Path, small: bytes) -> None:
    file = read(tmp_path / "m.gguf", small)
    meta = file.metadata
    assert (meta["text"], meta["flag"], meta["u8"], meta["i64"]) == ("grüße", True, 255, -(2**40))
    assert (meta["f32"], meta["f64"], meta["strings"]) == (0.5, 0.1, ["a", "", "안녕"])
    assert isinstance(meta["flag"], bool)
    assert isinstance(meta["numbers"], np.ndarray)
    assert meta["numbers"].dtype == np.int32
    assert meta["numbers"].tolist() == [1, -2, 3]
    assert isinstance(meta["flags"], np.ndarray)
    assert meta["flags"].tolist() == [True, False]
    assert {name: (t.shape, t.type) for name, t in file.tensors.items()} == {
        "a.weight": ((2, 64), QuantType.F32),
        "b.weight": ((3,), QuantType.F16),
        "c.weight": ((2, 64), QuantType.Q8_0),
    }
    assert np.array_equal(dequantize(file.tensors["a.weight"]), WEIGHT)
    assert np.allclose(dequantize(file.tensors["c.weight"]), WEIGHT, atol=0.5)


def test_the_data_is_a_read_only_view_that_outlives_close(tmp_path: Path, small: bytes) -> None:
    with read(tmp_path / "m.gguf", small) as file:
        tensor = file.tensors["a.weight"]
    assert not file.tensors
    assert not tensor.data.flags.writeable
    assert tensor.data.base is not None
    assert np.array_equal(dequantize(tensor), WEIGHT)


def test_agrees_with_the_gguf_package_on_the_real_file(smollm2: GGUFFile) -> None:
    reader = gguf.GGUFReader(smollm2.path)
    assert [t.name for t in reader.tensors] == list(smollm2.tensors)
    for theirs in reader.tensors:
        ours = smollm2.tensors[theirs.name]
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
        assert ours.type.name == theirs.tensor_type.name
        assert ours.data.nbytes == theirs.n_bytes
        assert ours.data[:64].tobytes() == theirs.data.reshape(-1).view(np.uint8)[:64].tobytes()
    assert set(smollm2.metadata) == {key for key in reader.fields if not key.startswith("GGUF.")}
    for key, ours_value in smollm2.metadata.items():
        if isinstance(ours_value, np.ndarray):
            assert ours_value.tolist() == reader.fields[key].contents()
        else:
            assert ours_value == reader.fields[key].contents()


def test_version_2_is_the_same_format(tmp_path: Path) -> None:
    file = read(tmp_path / "m.gguf", build([], [info("t", [4])], version=2))
    assert file.tensors["t"].shape == (4,)


def test_alignment_of_the_file_is_honoured(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "test")
    writer.add_custom_alignment(128)
    writer.add_tensor("a", np.arange(5, dtype=np.float32))
    writer.add_tensor("b", np.arange(7, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert dequantize(read_gguf(path).tensors["b"]).tolist() == list(range(7))


HUGE = 2**62
FAULTS: dict[str, tuple[bytes, str, int | None]] = {
    "empty": (b"", "empty", 0),
    "magic": (b"GGML" + bytes(60), "not a GGUF file", 0),
    "short": (b"GGUF\3", "the version", 4),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version 1", 4),
    "version 0": (b"GGUF" + bytes(40), "version 0", 4),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian", 4),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), f"number of tensors is {HUGE}", 8),
    "entry count": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), f"metadata entries is {HUGE}", 16),
    "key length": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE) + bytes(40), "a metadata key needs", 24),
    "key not UTF-8": (build([struct.pack("<Q", 1) + b"\xff" + struct.pack("<IB", 0, 1)], []), "UTF-8", 24),
    "value type": (build([entry("k", 13, b"")], []), "unknown type 13", 33),
    "array length": (build([entry("k", 9, struct.pack("<IQ", 4, HUGE))], []), f"value 'k' is {HUGE}", 41),
    "string array length": (build([entry("k", 9, struct.pack("<IQ", 8, HUGE))], []), "the file ends after", 41),
    "array of arrays": (build([entry("k", 9, struct.pack("<IQ", 9, 1))], []), "array of arrays", 37),
    "array elements": (build([entry("k", 9, struct.pack("<IQ", 99, 1))], []), "unknown elements 99", 37),
    "boolean": (build([entry("k", 7, b"\2")], []), "a boolean is 0 or 1", 37),
    "same key": (build([entry("k", 0, b"\1")] * 2, []), "'k' appears twice", 38),
    "alignment": (build([entry("general.alignment", 4, struct.pack("<I", 48))], []), "general.alignment is 48", None),
    "alignment 0": (build([entry("general.alignment", 4, bytes(4))], []), "general.alignment is 0", None),
    "no dimensions": (build([], [info("t", [])]), "0 dimensions", 24),
    "dimensions": (build([], [info("t", [1] * 5)]), "5 dimensions", 24),
    "zero dimension": (build([], [info("t", [4, 0])]), "impossible dimensions", 24),
    "overflow": (build([], [info("t", [2**63, 2**63, 2**63, 2])]), "but the file has only", 24),
    "half a block": (build([], [info("t", [33], kind=8)]), "impossible dimensions [33]", 24),
    "tensor type": (build([], [info("t", [256], kind=15)]), "type 15 (Q8_K)", 24),
    "tensor type unheard of": (build([], [info("t", [256], kind=777)]), "type 777 (unknown)", 24),
    "misaligned": (build([], [info("t", [4], offset=16)]), "no multiple of the alignment 32", 24),
    "out of range": (build([], [info("t", [4], offset=64)]), "may be truncated", 24),
    "offset overflow": (build([], [info("t", [4], offset=2**64 - 32)]), "may be truncated", 24),
    "overlap": (build([], [info("t", [12]), info("u", [4], offset=32)]), "'t' and 'u' overlap", 57),
    "same name": (build([], [info("t", [4]), info("t", [4], offset=32)]), "'t' appears twice", 57),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_an_error_that_names_file_and_offset(tmp_path: Path, fault: str) -> None:
    content, message, offset = FAULTS[fault]
    path = tmp_path / "m.gguf"
    with pytest.raises(ModelFileError) as raised:
        read(path, content)
    assert str(path) in str(raised.value)
    assert message in str(raised.value)
    assert f"(offset {'' if offset is None else f'{offset})'}" in str(raised.value)


def test_every_truncation_is_an_error(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "m.gguf"
    data_end = len(small.rstrip(b"\0"))
    for length in range(0, data_end, 7):
        with pytest.raises(ModelFileError):
            read(path, small[:length])


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="No such file"):
        read_gguf(tmp_path / "missing.gguf")
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_gguf(tmp_path)


def survives(path: Path, content: bytes) -> None:
    """Either it is read, and every tensor can be touched, or it is a ModelFileError."""
    path.write_bytes(content)
    try:
        file = read_gguf(path)
    except ModelFileError:
        return
    with np.errstate(all="ignore"):
        for tensor in file.tensors.values():
            dequantize(tensor)


fuzzing = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzzing
@given(data=st.data())
def test_mutated_files(data: st.DataObject, small: bytes, tmp_path: Path) -> None:
    mutated = bytearray(small)
    extremes = st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1]).map(lambda number: number.to_bytes(8, "little"))
    patches = st.one_of(st.binary(min_size=1, max_size=8), extremes)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(small) - 1))
        patch = data.draw(patches)
        mutated[at : at + len(patch)] = patch
    survives(tmp_path / "m.gguf", bytes(mutated))


@fuzzing
@given(tail=st.binary(max_size=200), head=st.sampled_from([b"", b"GGUF", b"GGUF" + struct.pack("<IQQ", 3, 1, 1)]))
def test_random_bytes(tail: bytes, head: bytes, tmp_path: Path) -> None:
    survives(tmp_path / "m.gguf", head + tail)


def test_memory_is_bounded_by_the_file(tmp_path: Path) -> None:
    """Counts that would need gigabytes are refused before anything is allocated for them."""
    tracemalloc.start()
    for kind in (0, 4, 7, 8, 12):
        with pytest.raises(ModelFileError):
            read(tmp_path / "m.gguf", build([entry("k", 9, struct.pack("<IQ", kind, 2**33))], []))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
