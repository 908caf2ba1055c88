"""TFRecord files, and the recorded requests in them (tfs 6.6)."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import environments
from tests.process import outcome, start_python
from triglot.core.errors import ModelLoadError
from triglot.pb.tfserving import prediction_log_pb2 as pb
from triglot.protocols.tfserving import tfrecord
from triglot.protocols.tfserving.tfrecord import DamagedRecords, framed, masked_crc32c, read_records
from triglot.protocols.tfserving.warmup import MAX_RECORDS, read_warm_up
from triglot.repository.manager.warm_up import WARM_UP_FILE

SCRIPT = Path(__file__).parent / "clients" / "tensorflow_messages.py"
RUN_SECONDS = 300
RECORDS = [b"", b"a", b"\0" * 9, bytes(range(256)), random.Random(1).randbytes(300)]
LARGE = random.Random(2).randbytes(1_000_003)


def log(name: str) -> pb.PredictionLog:
    return pb.PredictionLog(predict_log={"request": {"model_spec": {"name": name}}})


def plain_crc32c(data: bytes) -> int:
    """Bit by bit, without a table."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def masked(value: int) -> int:
    return (((value >> 15) | (value << 17 & 0xFFFFFFFF)) + 0xA282EAD8) % 2**32


def file_of(*records: bytes) -> bytes:
    """A TFRecord file as it is described."""
    parts = []
    for record in records:
        length = len(record).to_bytes(8, "little")
        for part in (length, record):
            parts += [part, masked(plain_crc32c(part)).to_bytes(4, "little")]
    return b"".join(parts)


SMALL = file_of(*RECORDS)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file that TensorFlow has written: the small records, and a large one."""
    file = tmp_path_factory.mktemp("job") / "job.json"
    file.write_text(json.dumps({"records": [record.hex() for record in (*RECORDS, LARGE)]}))
    done = outcome(start_python([str(SCRIPT), str(file)], environments.python("tensorflow")), RUN_SECONDS)
    assert done.returncode == 0, done.stderr
    return bytes.fromhex(json.loads(done.stdout)["file"])


def test_a_file_that_tensorflow_writes(written: bytes) -> None:
    assert list(read_records(written)) == [*RECORDS, LARGE]
    assert written[: len(SMALL)] == SMALL


@pytest.mark.parametrize(
    ("data", "value"),
    # The values that RFC 3720 gives, and the one that every CRC is known by.
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_checksums(data: bytes, value: int) -> None:
    assert plain_crc32c(data) == value
    assert masked_crc32c(data) == masked(value)


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("extra", [-5, -4, -3, -1, 0, 1, 300])
def test_checksums_where_a_row_ends(rows: int, extra: int) -> None:
    data = LARGE[: tfrecord.ROW * rows + extra]
    assert masked_crc32c(data) == masked(plain_crc32c(data))
    assert masked_crc32c(bytes(len(data))) == masked(plain_crc32c(bytes(len(data))))


def test_records_are_framed_as_tensorflow_does(written: bytes) -> None:
    assert b"".join(map(framed, (*RECORDS, LARGE))) == written


def refused(data: bytes) -> str:
    with pytest.raises(DamagedRecords) as caught:
        list(read_records(data))
    return str(caught.value)


def test_any_changed_byte_is_noticed() -> None:
    assert list(read_records(SMALL)) == RECORDS
    for at in range(len(SMALL)):
        for change in (0x01, 0x80, 0xFF):
            damaged = bytearray(SMALL)
            damaged[at] ^= change
            assert "corrupted record at" in refused(bytes(damaged))


def test_any_missing_byte_is_noticed() -> None:
    ends = {len(file_of(*RECORDS[:count])): count for count in range(len(RECORDS) + 1)}
    for end in range(len(SMALL)):
        if end in ends:
            assert list(read_records(SMALL[:end])) == RECORDS[: ends[end]]
        else:
            assert "truncated record at" in refused(SMALL[:end])
        refused(SMALL[:end] + SMALL[end + 1 :])


@pytest.mark.parametrize("at", [0, 100, 500_000, 1_000_002])
def test_a_changed_byte_in_a_large_record_is_noticed(written: bytes, at: int) -> None:
    start = len(SMALL) + 12
    damaged = bytearray(written)
    damaged[start + at] ^= 0x10
    assert refused(bytes(damaged)) == f"corrupted record at {start}"


@given(st.binary(max_size=64))
def test_any_bytes_are_records_or_refused(data: bytes) -> None:
    try:
        records = list(read_records(data))
    except DamagedRecords:
        return
    assert file_of(*records) == data


def test_records_before_a_damaged_one_are_given() -> None:
    records = read_records(file_of(b"one", b"two")[:-1])
    assert next(records) == b"one"
    with pytest.raises(DamagedRecords, match="truncated record at 31"):
        next(records)


def file_with(folder: Path, data: bytes) -> Path:
    file = folder / WARM_UP_FILE
    file.parent.mkdir()
    file.write_bytes(data)
    return file


def test_recorded_requests(tmp_path: Path) -> None:
    logs = [log("m"), pb.PredictionLog(), log("n" * 40_000)]
    assert read_warm_up(file_with(tmp_path, file_of(*[line.SerializeToString() for line in logs]))) == logs


@pytest.mark.parametrize("data", [file_of(b"")[:-1], b"not in this format at all", file_of(b"") + b"\0" * 100])
def test_a_damaged_file(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read_warm_up(file_with(tmp_path, data))
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / WARM_UP_FILE}: ")
    assert text.endswith(". Please verify your warmup data is in TFRecord format.")


def test_a_record_that_is_no_request(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="Failed to parse warmup record: ") as caught:
        read_warm_up(file_with(tmp_path, file_of(log("m").SerializeToString(), b"\x0a\x05")))
    assert str(caught.value).startswith(f"{tmp_path / WARM_UP_FILE}: ")


def test_the_number_of_records_is_bounded(tmp_path: Path) -> None:
    record = file_of(b"")
    file = file_with(tmp_path, record * MAX_RECORDS)
    assert len(read_warm_up(file)) == MAX_RECORDS == 1000
    file.write_bytes(record * (MAX_RECORDS + 1))
    with pytest.raises(ModelLoadError) as caught:
        read_warm_up(file)
    assert str(caught.value) == f"Number of warmup records exceeds the maximum (1000) at {file}"
