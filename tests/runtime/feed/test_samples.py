"""Shards of MosaicML's Streaming and tar files of WebDataset: each sample is read once, and damage is told."""

import base64
import gzip
import io
import json
import pickle
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.records import BadRecord, SourceRecord, TokenIds
from xtrain.runtime.feed.sources import samples as reading
from xtrain.runtime.feed.sources.source import open_source

# Three samples as mosaicml-streaming 0.13 writes them.
WRITTEN = zlib.decompress(base64.b85decode(
    "c-oy&K~BRk5Ok6XLGP6~Mi$2$;uMuC7sLyA0E#NpxYUq1D0ZQx%7Zxa1|9~xwu`E^NR*X!y&h+0CU!&!SqFp+LP9<uZzI^#X;Up~H4$pslu|utn#Xrk"
    "mAq~FiY76gRSh@83|o)pQUQ<;5qi{(!WAG~?pH==Y_w@79)os!cmXgQ(E=bZt#~b*ELTp_7P%B9HnlL^5@2chtL4OE#L^0w=1C~M&8X#@V^oW(O5)2TW"
    "?2%u&3M!7RySWiw?b<Pf0g?)I&0dR8`#sjw8C?)=Z+s|P;64kTH+_8E0&JOBT%F-qV+skcL7)5hdhTIK%POKK;E2&@DMHnzixnt{KWO<9M9I2qjXwyUp"
    "{_gVCjLtTZ_~9^Su}1#35&=M>q@iow1@LJMkB1%sOM}EW(NKptt@J-okxvS<wam@RnI`8G7qEZxQ(h7*CpE"
))  # fmt: skip
PACKERS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress, ".zstd": zstandard.compress}
Record = SourceRecord | BadRecord


def records(path: Path, **reads: Any) -> list[Record]:
    kind = "mds" if ".mds" in path.name else "webdataset"
    reader = open_source(kind, patterns=(path.name,), base=path.parent, reads=reads).reader
    units = list(reader.units())
    assert sum(unit.size for unit in units) == reader.num_bytes() == path.stat().st_size
    return [record for unit in pickle.loads(pickle.dumps(units)) for record in reader.read(unit)]


def contents(found: list[Record]) -> list[Any]:
    return [record.content if isinstance(record, SourceRecord) else record.reason for record in found]


def shard(columns: dict[str, str], samples: Sequence[Sequence[bytes]]) -> bytes:
    """Write columns of varying size, as MDSWriter does."""
    config = {
        "column_names": [*columns],
        "column_encodings": [*columns.values()],
        "column_sizes": [None] * len(columns),
    }
    header = json.dumps(config).encode()
    bodies = [np.array([*map(len, values)], "<u4").tobytes() + b"".join(values) for values in samples]
    offsets = np.cumsum([4 + 4 * (len(samples) + 1) + len(header), *map(len, bodies)]).astype("<u4")
    return np.uint32(len(samples)).tobytes() + offsets.tobytes() + header + b"".join(bodies)


def tar(*members: tuple[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def shown(value: Any) -> str | None:
    return value if isinstance(value, str) else ""


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize(("name", "data", "place"), [("x.mds", WRITTEN, "1"), ("x.tar", b"", "a/1")])
def test_samples_are_read_once_in_order(name: str, data: bytes, place: str, suffix: str, tmp_path: Path):
    data = data or tar(*((f"a/{number}.text", f"text {number} é".encode()) for number in range(3)))
    path = written(tmp_path / (name + suffix), PACKERS[suffix](data))
    found = records(path)
    assert contents(found) == ["text 0 é", "text 1 é", "text 2 é"]
    assert isinstance(found[1], SourceRecord) and found[1].origin == f"{path}, sample {place}"


@pytest.mark.parametrize(("column", "ids"), [
    ("tokens", [[0, 1], [0, 1, 2], [0, 1, 2, 3]]),
    ("fixed", [[0, 1, 2], [1, 1, 2], [2, 1, 2]]),
    ("raw", [[0, 1, 2]] * 3),
    ("any", ["field `any`, token 0, is a list"] * 3),  # two dimensions
    ("f", ["field `f` is a number, not a list of token ids"] * 3),
])  # fmt: skip
def test_arrays_of_a_shard_are_tokens(column: str, ids: list[Any], tmp_path: Path):
    found = contents(records(written(tmp_path / "x.mds", WRITTEN), form="tokens", tokens=column))
    said = [each.ids.tolist() if isinstance(each, TokenIds) else each for each in found]
    assert [each[: len(wanted)] for each, wanted in zip(said, ids, strict=True)] == ids


@pytest.mark.parametrize(("encoding", "value", "reads", "content"), [
    ("str", b"a\xff", {}, "field `x`: invalid UTF-8 at byte 1"),
    ("json", b'{"y": "a"}', {"text": "x.y"}, "a"),
    ("json", b'{"y": ', {"text": "x.y"}, "field `x`: invalid JSON: "),
    ("int", np.int64(-7).tobytes(), {"text": "x"}, "field `x` is a number, not a string"),
], ids=shown)  # fmt: skip
def test_values_of_shards(encoding: str, value: bytes, reads: dict[str, str], content: str, tmp_path: Path):
    path = written(tmp_path / "x.mds", shard({"x": encoding}, [[value]]))
    (found,) = contents(records(path, **{"text": "x"} | reads))
    assert found.startswith(content)


TEXT = [[b"abc"], [b"de"]]


@pytest.mark.parametrize(("data", "message"), [
    (shard({"text": "str"}, TEXT)[:-1], "damaged: a part has 5 of 6 bytes"),
    (shard({"text": "str"}, TEXT)[:9], "damaged: a part has 5 of 12 bytes"),
    (shard({"text": "str"}, TEXT) + b"x", "damaged: more follows the last sample"),
    (b"\xff" * 100, "damaged: a part has 0 of 17,179,869,184 bytes"),
    (bytes(100), "damaged: it does not begin as a shard"),
    (shard({"text": "str"}, [[b"abc"]]).replace(np.uint32(3).tobytes() + b"abc", np.uint32(9).tobytes() + b"abc"),
     "damaged: sample 0: it has 7 bytes, and its columns 13"),
    (shard({"text": "pkl"}, TEXT), "column `text` is `pkl`"),
], ids=shown)  # fmt: skip
def test_a_damaged_shard_ends_the_reading(data: bytes, message: str, tmp_path: Path):
    with pytest.raises(DataError, match=message):
        records(written(tmp_path / "x.mds", data))


def test_columns_that_are_not_read_may_be_pickles(tmp_path: Path):
    path = written(tmp_path / "x.mds", shard({"text": "str", "y": "pkl"}, [[b"abc", b"\x80\x04."]]))
    assert contents(records(path)) == ["abc"]


def test_a_shard_of_the_index_may_not_be_missing(tmp_path: Path):
    names = [{"raw_data": {"basename": f"shard.0000{number}.mds"}, "zip_data": None} for number in range(2)]
    (tmp_path / "index.json").write_text(json.dumps({"shards": names}))
    path = written(tmp_path / "shard.00000.mds", WRITTEN)
    with pytest.raises(DataError, match=r"shard shard\.00001\.mds is missing"):
        records(path)
    names[1]["zip_data"] = {"basename": "shard.00001.mds.zstd"}  # type: ignore[assignment]
    (tmp_path / "index.json").write_text(json.dumps({"shards": names}))
    written(tmp_path / "shard.00001.mds.zstd", b"")
    assert len(records(path)) == 3


def npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


PAIR = tar(("a.json", b'{"t": "x"}'), ("a.txt", b"y"), ("b.json", b'{"t": "z"}'), ("__notes__", b"?"), ("b.cls", b"3"))


@pytest.mark.parametrize(("data", "reads", "content"), [
    (PAIR, {"text": "json.t"}, ["x", "z"]),
    (PAIR, {"text": "txt"}, ["y", "no field `txt`; there are `__key__`, `json`, `cls`"]),
    (PAIR, {"text": "json.t", "values": {"weight": "cls"}}, ["no field `cls`; there are `__key__`, `json`", None]),
    (tar(("a.jpg", b"?")), {"text": "jpg"}, ["field `jpg`: files .jpg are not read, only .txt"]),
    (tar(("a.npy", npy(np.arange(3)))), {"form": "tokens", "tokens": "npy"}, [[0, 1, 2]]),
    (tar(("a.npy", npy(np.array([{}])))), {"form": "tokens", "tokens": "npy"}, ["field `npy`: not an array of numpy"]),
    (tar(("a.x.txt", b"1"), ("a.y.txt", b"2"), ("a.x.txt", b"3")), {"text": "x.txt"}, ["1", "3"]),
    (tar(("b/a.TXT", b"1"), ("b/a", b"?"), ("c/a.txt", b"2")), {"text": "txt"}, ["1", "2"]),
    (tar(), {}, ["no documents: no sample"]),
], ids=shown)  # fmt: skip
def test_members_of_one_name_are_a_record(data: bytes, reads: dict[str, Any], content: list[Any], tmp_path: Path):
    found = contents(records(written(tmp_path / "x.tar", data), **reads))
    said = [each.ids.tolist() if isinstance(each, TokenIds) else each for each in found]
    assert len(said) == len(content)
    for each, wanted in zip(said, content, strict=True):
        assert wanted is None or (each.startswith(wanted) if isinstance(each, str) else each == wanted), said


@pytest.mark.parametrize(("data", "message"), [
    (tar(("a.txt", b"1"))[:1024], "the archive has no end"),
    (tar(("a.txt", b"1" * 2000))[:1024], "unexpected end of data"),
    (b"no archive" * 100, "damaged"),
    (gzip.compress(PAIR), "it is packed with gzip"),
], ids=shown)  # fmt: skip
def test_a_damaged_archive_ends_the_reading(data: bytes, message: str, tmp_path: Path):
    with pytest.raises(DataError, match=message):
        records(written(tmp_path / "x.tar", data), text="txt")


@pytest.mark.parametrize("last", [0, 2])
def test_units_hold_a_bounded_part_of_a_file(last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "UNIT", 1000)
    path = written(tmp_path / "x.tar.gz", gzip.compress(tar(*((f"{n}.text", b"a" * 300) for n in range(16 + last)))))
    reader = open_source("webdataset", patterns=(path.name,), base=tmp_path).reader
    units = list(reader.units())
    assert [len(unit.part) for unit in units] == [4, 4, 4, 4, last]
    assert sum(len([*reader.read(unit)]) for unit in units) == 16 + last
