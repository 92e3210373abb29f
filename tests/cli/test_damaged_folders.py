"""Folders of models that are damaged, or not what they seem: a run is refused with file and tensor named, before
anything is written and any rank is started."""

import json
import os
import pickle
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from model_folders import QUERY, Folder, safetensors, shapes

from xtrain.cli.main import main
from xtrain.runtime.observe.stopping import stop_signals

LLAMA = shapes()
OTHERS = {name: shape for name, shape in LLAMA.items() if name != QUERY}
ONE, INDEX, VOCABULARY = "model.safetensors", "model.safetensors.index.json", "tokenizer.json"
IN_A = dict.fromkeys(LLAMA, "a.safetensors")
TOKENS = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "</s>", "id": 2, "special": True}]}
Do = Callable[[Path], Any]
"""Damages the folder of a model."""


@frozen
class Damage:
    """code: of the diagnostic; words: some of it. tokenizer: of the spec. status: of the command, 3 where there is a
    plan."""

    do: Do
    code: str
    words: tuple[str, ...]
    tokenizer: str = "bytes"
    status: int = 2


def config(**changes: Any) -> Do:
    return lambda model: Folder(model.parent).config(**changes)


def file(name: str, content: bytes) -> Do:
    return lambda model: (model / name).write_bytes(content)


def index(content: Any) -> Do:
    """An index and two files, of which the second has one tensor."""

    def do(model: Path) -> None:
        folder = Folder(model.parent)
        folder.weights(safetensors(LLAMA), "a.safetensors")
        folder.weights(safetensors({QUERY: LLAMA[QUERY]}), "b.safetensors")
        folder.index({})
        text = content if isinstance(content, bytes) else json.dumps({"weight_map": content}).encode()
        (model / INDEX).write_bytes(text)

    return do


def without(name: str, then: Do = lambda model: None) -> Do:
    """In place of a file something else, or nothing."""

    def do(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        then(model)

    return do


def header(change: Callable[[dict[str, Any]], Any]) -> Do:
    """The file of weights with another header; `change` may give its text."""

    def do(model: Path) -> None:
        content = (model / ONE).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        entries = json.loads(content[8 : 8 + length])
        changed = change(entries)
        text = changed if isinstance(changed, bytes) else json.dumps(entries).encode()
        (model / ONE).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return do


def entry(**changes: Any) -> Do:
    """One tensor with another entry in the header."""
    return header(lambda entries: entries[QUERY].update(changes))


def tokens(**changes: Any) -> Do:
    return file(VOCABULARY, json.dumps({**TOKENS, **changes}).encode())


def sparse(name: str, size: int) -> Do:
    """A file so large, of which nothing is on disk."""

    def do(model: Path) -> None:
        (model / ONE).unlink()
        with (model / name).open("wb") as opened:
            opened.truncate(size)

    return do


CONFIGS: dict[str, Damage] = {
    "empty": Damage(file("config.json", b""), "X520", ("model/config.json", "not a JSON object")),
    "no JSON": Damage(file("config.json", b"{'a': 1}"), "X520", ("not a JSON object",)),
    "a list": Damage(file("config.json", b"[]"), "X520", ("not a JSON object",)),
    "cut off": Damage(file("config.json", b'{"model_type": "llama", '), "X520", ("not a JSON object",)),
    "a key twice": Damage(file("config.json", b'{"model_type": "llama", "model_type": "qwen3"}'), "X520", ("twice",)),
    "a key twice inside": Damage(file("config.json", b'{"rope_parameters": {"a": 1, "a": 2}}'), "X520",
        ("`a` is given twice",)),
    "two objects": Damage(file("config.json", b'{"model_type": "llama"} {}'), "X520", ("something follows",)),
    "a comma too much": Damage(file("config.json", b'{"model_type": "llama",}'), "X520", ("not a JSON object",)),
    "NaN": Damage(file("config.json", b'{"rms_norm_eps": NaN}'), "X520", ("NaN",)),
    "infinity": Damage(file("config.json", b'{"rms_norm_eps": 1e999}'), "X520", ("1e999",)),
    "a huge whole number": Damage(file("config.json", b'{"id": 1' + b"0" * 400 + b"}"), "X520", ("too large",)),
    "more digits than Python reads": Damage(file("config.json", b'{"id": 1' + b"0" * 5000 + b"}"), "X520",
        ("too large",)),
    "no UTF-8": Damage(file("config.json", b'{"model_type": "\xff"}'), "X520", ("UTF-8",)),
    "deep": Damage(file("config.json", b'{"a":' + b"[" * 100_000), "X520", ("not a JSON object",)),
    "larger than any": Damage(sparse("config.json", 2**40), "X520", ("larger than 16 MiB",)),
    "absent": Damage(without("config.json"), "X520", ("No such file",)),
    "a link to itself": Damage(without("config.json", lambda model: (model / "config.json").symlink_to("config.json")),
        *("X520", ("symbolic links",))),
    "a pipe": Damage(without("config.json", lambda model: os.mkfifo(model / "config.json")), "X520",
        ("not a regular file",)),
    "a folder": Damage(without("config.json", lambda model: (model / "config.json").mkdir()), "X520",
        ("Is a directory",)),
    "a file in place of the folder": Damage(lambda model: [shutil.rmtree(model), model.touch()], "X520",
        ("config.json", "Not a directory")),
    "a link to itself in place of the folder": Damage(
        lambda model: [shutil.rmtree(model), model.symlink_to(model.name)], "X520", ("config.json", "symbolic links")),
    "no family": Damage(config(model_type=None), "X521", ("`model_type`",)),
    "quantised by fp8": Damage(config(quantization_config={"quant_method": "fp8"}), "X522", ("quantization_config",)),
    "quantised and compressed": Damage(config(compression_config={"format": "int"}), "X522", ("compression_config",)),
    "an unknown type of positions": Damage(config(rope_scaling={"rope_type": "ntk", "factor": 8.0}), "X522",
        ("rope_type", "longrope")),
    "a key that is not known": Damage(config(logit_scale=0.5), "X522", ("logit_scale",)),
    "a key that a terminal would obey": Damage(config(**{"\x1b[2J": 1}), "X522", ("[2J", "unknown")),
    "of another width": Damage(config(intermediate_size=40), "X524", ("gate_proj", "48 × 32", "40 × 32", ONE)),
    "of more layers": Damage(config(num_hidden_layers=3), "X524", ("layers.2.", "are missing")),
    "of fewer layers": Damage(config(num_hidden_layers=1), "X524", ("layers.1.", "not of this model", ONE)),
    "of no heads": Damage(config(num_attention_heads=0), "X304", ("heads",)),
    "of a vocabulary beyond any memory": Damage(config(vocab_size=10**15), "X524", ("embed_tokens", ONE)),
}  # fmt: skip
FILES: dict[str, Damage] = {
    "a tensor is missing": Damage(file(ONE, safetensors(OTHERS)), "X524", (QUERY, "missing")),
    "a tensor too much": Damage(file(ONE, safetensors({**LLAMA, "model.layers.2.x": [3]})), "X524",
        ("layers.2.x", ONE, "not of this model")),
    "another shape": Damage(file(ONE, safetensors({**LLAMA, QUERY: [16, 32]})), "X524",
        (QUERY, "16 × 32", "32 × 32", ONE)),
    "whole numbers": Damage(file(ONE, safetensors(LLAMA, {QUERY: "I8"})), "X524", (QUERY, "I8", ONE)),
    "quantised": Damage(file(ONE, safetensors(LLAMA, {QUERY: "F8_E4M3"})), "X524", (QUERY, "F8_E4M3", ONE)),
    "cut off": Damage(file(ONE, safetensors(LLAMA)[:-10]), "X524", ("cut off", ONE, "layers.1.mlp.down_proj")),
    "cut off in its header": Damage(file(ONE, safetensors(LLAMA)[:100]), "X524", ("header", ONE)),
    "something behind": Damage(file(ONE, safetensors(LLAMA) + b"x"), "X524", ("bytes after its last tensor", ONE)),
    "empty": Damage(file(ONE, b""), "X524", (ONE, "not a safetensors file")),
    "a zip": Damage(file(ONE, b"PK\3\4" + bytes(100)), "X524", (ONE, "pickle", "save_pretrained")),
    "a pickle": Damage(file(ONE, pickle.dumps({"a": 1}, protocol=2)), "X524", (ONE, "pickle", "save_pretrained")),
    "a newer pickle": Damage(file(ONE, pickle.dumps({"a": 1}, protocol=5)), "X524", (ONE, "pickle")),
    "a page of the web": Damage(file(ONE, b"<!DOCTYPE html><html>Sign in</html>"), "X524", (ONE, "not a safetensors")),
    "a pointer of Git LFS": Damage(file(ONE, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "X524", (ONE, "Git LFS")),
    "a length that is a lie": Damage(file(ONE, struct.pack("<Q", 2**62) + bytes(100)), "X524", (ONE, "header")),
    "a length beyond the header": Damage(file(ONE, struct.pack("<Q", 100) + b"{}" + bytes(98)), "X524",
        (ONE, "header cannot be read")),
    "a header of nonsense": Damage(header(lambda entries: b"nope"), "X524", (ONE, "not a safetensors file")),
    "a header of a list": Damage(header(lambda entries: b"[]"), "X524", (ONE, "not a safetensors file")),
    "a header that is no UTF-8": Damage(header(lambda entries: b'{"\xff": 1}'), "X524", (ONE, "header cannot be read")),
    "a header that is deep": Damage(header(lambda entries: b'{"a":' + b"[" * 100_000), "X524",
        (ONE, "header cannot be read")),
    "a tensor twice": Damage(
        header(lambda entries: (json.dumps(entries)[:-1] + f', "{QUERY}": {json.dumps(entries[QUERY])}}}').encode()),
        *("X524", (ONE, f"`{QUERY}` is given twice"))),
    "a hole": Damage(header(lambda entries: entries[QUERY]["data_offsets"].__setitem__(0, 2)), "X524",
        (ONE, "damaged", QUERY)),
    "tensors that overlap": Damage(entry(data_offsets=[0, 2048]), "X524", (ONE, "damaged")),
    "a tensor backwards": Damage(entry(data_offsets=[4096, 2048]), "X524", (ONE, "damaged")),
    "places before the file": Damage(entry(data_offsets=[-2048, 0]), "X524", (ONE, QUERY)),
    "places that are none": Damage(entry(data_offsets="0-1"), "X524", (ONE, QUERY)),
    "a huge shape": Damage(entry(shape=[10**39, 10**39]), "X524", (ONE, "damaged", QUERY)),
    "a number that is too large": Damage(entry(shape=[10**41]), "X524", (ONE, "too large")),
    "a hundred thousand dimensions": Damage(entry(shape=[10**9] * 10**5), "X524", (ONE, QUERY)),
    "half a row": Damage(entry(shape=[32, 31.5]), "X524", (ONE, QUERY)),
    "tensors without end": Damage(header(lambda entries: b"{" + b'"data_offsets",' * 200_001), "X524",
        (ONE, "names 200,001 tensors")),
    "an entry that is none": Damage(header(lambda entries: entries.update({QUERY: 3})), "X524", (ONE, QUERY)),
    "an unknown format": Damage(entry(dtype="BF99"), "X524", (ONE, QUERY, "BF99")),
    "a format that is none": Damage(entry(dtype=["BF16"]), "X524", (ONE, QUERY)),
    "a name that a terminal would obey": Damage(file(ONE, safetensors({**LLAMA, "\x1b[2J": [3]})), "X524",
        ("[2J", ONE, "not of this model")),
    "no weights": Damage(without(ONE), "X524", ("has no weights", "weights = none")),
    "pickles": Damage(without(ONE, file("pytorch_model.bin", b"PK")), "X524", ("pytorch_model.bin", "save_pretrained")),
    "a link to itself": Damage(without(ONE, lambda model: (model / ONE).symlink_to(ONE)), "X524", ("symbolic links",)),
    "a link to nothing": Damage(without(ONE, lambda model: (model / ONE).symlink_to("no")), "X524", ("No such file",)),
    "a link to what no disk gives": Damage(without(ONE, lambda model: (model / ONE).symlink_to("/proc/self/mem")),
        "X524", (ONE, "cannot be read")),
    "a folder": Damage(without(ONE, lambda model: (model / ONE).mkdir()), "X524", (ONE, "directory")),
    "a pipe": Damage(without(ONE, lambda model: os.mkfifo(model / ONE)), "X524", (ONE, "not a regular file")),
    "a pipe for an index": Damage(without(ONE, lambda model: os.mkfifo(model / INDEX)), "X524",
        (INDEX, "not a regular file")),
    "an index and one file": Damage(lambda model: (model / INDEX).touch(), "X524", (INDEX, "remove one of")),
}  # fmt: skip
INDICES: dict[str, Damage] = {
    "no map": Damage(index(b'{"weight_map": []}'), "X524", (INDEX, "no `weight_map`")),
    "a list": Damage(index(b"[]"), "X524", (INDEX, "no `weight_map`")),
    "cut off": Damage(index(b'{"weight_map": {'), "X524", (INDEX, "not an index")),
    "no UTF-8": Damage(index(b'{"weight_map": {"\xff": "a.safetensors"}}'), "X524", (INDEX, "not an index")),
    "larger than any": Damage(sparse(INDEX, 2**40), "X524", (INDEX, "larger than")),
    "a tensor twice": Damage(index(b'{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}'), "X524",
        (INDEX, "`a` is given twice")),
    "nothing": Damage(index({}), "X524", (INDEX, "names no tensor")),
    "tensors without end": Damage(index({str(number): "a.safetensors" for number in range(200_001)}), "X524",
        (INDEX, "names 200,001 tensors")),
    "another folder": Damage(index({"a": "../a.safetensors"}), "X524", ("../a.safetensors", "is not in the folder")),
    "an absolute path": Damage(index({"a": "/etc/passwd.safetensors"}), "X524", ("/etc/passwd", "is not in the")),
    "a name with NUL": Damage(index({"a": "a\0.safetensors"}), "X524", ("`a`", "is not in the folder")),
    "a name that is no text": Damage(index({"a": "\ud800.safetensors"}), "X524", ("`a`", "is not in the folder")),
    "no name": Damage(index({"a": 3}), "X524", ("`a`", "is not in the folder")),
    "a file that is missing": Damage(index({"a": "model-00001-of-00001.safetensors"}), "X524",
        ("model-00001-of-00001", "No such file")),
    "a pickle": Damage(index({"a": "pytorch_model.bin"}), "X524", ("`a`", "pytorch_model.bin")),
    "a tensor that is missing": Damage(index({**IN_A, "b": "a.safetensors"}), "X524",
        ("`b`", "a.safetensors", "not there")),
    "a tensor too little": Damage(index(dict.fromkeys(OTHERS, "a.safetensors")), "X524",
        ("does not name", QUERY, "a.safetensors")),
    "a tensor in two files": Damage(index({**IN_A, QUERY: "b.safetensors"}), "X524",
        (QUERY, "a.safetensors", "b.safetensors")),
}  # fmt: skip
OWN = '"model"'
VOCABULARIES: dict[str, Damage] = {
    "absent": Damage(lambda model: None, "X507", (VOCABULARY, "no such tokenizer"), OWN, 3),
    "empty": Damage(file(VOCABULARY, b""), "X505", (VOCABULARY, "not JSON"), OWN),
    "no vocabulary": Damage(file(VOCABULARY, b"{}"), "X505", (VOCABULARY, "no vocabulary"), OWN),
    "deep": Damage(file(VOCABULARY, b"[" * 100_000), "X505", (VOCABULARY, "not JSON"), OWN),
    "a folder": Damage(lambda model: (model / VOCABULARY).mkdir(), "X507", (VOCABULARY,), OWN, 3),
    "a link to itself": Damage(lambda model: (model / VOCABULARY).symlink_to(VOCABULARY), "X507",
        (VOCABULARY, "symbolic links"), OWN, 3),
    "a pipe": Damage(lambda model: os.mkfifo(model / VOCABULARY), "X505", (VOCABULARY, "not a regular file"), OWN),
    "no end of a text": Damage(tokens(added_tokens=[]), "X505", ("neither a bos nor an eos",), OWN),
    "more ids than the model has": Damage(tokens(model={"vocab": {f"t{number}": number for number in range(264)}}),
        "X506", ("265 ids", "264"), OWN),
    "a deep file beside it": Damage(
        lambda model: [each(model) for each in (tokens(), file("tokenizer_config.json", b"[" * 100_000))],
        *("X505", ("tokenizer_config.json", "invalid JSON"), OWN)),
}  # fmt: skip
DAMAGED = {
    f"{what}: {name}": damage
    for what, table in (("config", CONFIGS), ("weights", FILES), ("index", INDICES), ("tokenizer", VOCABULARIES))
    for name, damage in table.items()
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in stop_signals()}
    yield Folder.whole(tmp_path)
    for number, handler in handlers.items():  # which a run that is not refused replaces
        signal.signal(number, handler)


def state(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Everything in the folder, as it is."""
    paths = sorted(folder.rglob("*"))
    return {str(path): (found.st_mode, found.st_size, found.st_mtime_ns) for path in paths for found in [path.lstat()]}


def refused(folder: Folder, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status and message of a run, that leaves everything as it was."""
    before = state(folder.path)
    status = main(["run", *arguments, "--ui", "plain"])
    said = capsys.readouterr().err
    assert state(folder.path) == before
    assert "Traceback" not in said and all(sign.isprintable() or sign == "\n" for sign in said), said
    return status, said


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_folder_is_refused(folder: Folder, name: str, capsys: pytest.CaptureFixture[str]):
    damage = DAMAGED[name]
    spec = folder.spec(tokenizer=damage.tokenizer)
    damage.do(folder.path / "model")
    status, said = refused(folder, capsys, str(spec))
    assert (status, said.count("error[")) == (damage.status, 1) and f"error[{damage.code}]" in said, said
    assert all(word in said for word in damage.words), said


def test_a_file_that_must_not_be_read_is_refused(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Tests may run as a user who may read everything, so that the mode of a file would not do."""
    opened = Path.open

    def refuse(path: Path, *args: Any, **more: Any) -> Any:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **more)

    monkeypatch.setattr(Path, "open", refuse)
    for name, code in (("config.json", "X520"), (ONE, "X524")):
        status, said = refused(folder, capsys, str(folder.spec()))
        assert status == 2 and f"error[{code}]" in said and f"model/{name} cannot be read: Permission denied" in said


# What has become of the folder since a plan was made of it.
SINCE: dict[str, tuple[Do, tuple[str, ...]]] = {
    "cut off": (file(ONE, safetensors(LLAMA)[:-10]), (ONE, "cut off")),
    "a zip": (file(ONE, b"PK\3\4" + bytes(100)), (ONE, "pickle")),
    "cut off in a tensor whose name a terminal would obey": (file(ONE, safetensors({"\x1b[2J": [3]})[:-1]),
        (ONE, "[2J", "cut off")),
    "removed": (without(ONE), ("has no weights",)),
    "of another size": (file(ONE, safetensors({**LLAMA, QUERY: [16, 32]})), ("other files",)),
    "another config.json": (config(rope_theta=1e4), ("another config.json",)),
}  # fmt: skip


@pytest.mark.parametrize("name", SINCE)
def test_a_folder_that_has_changed_since_the_plan_is_refused(
    folder: Folder, name: str, capsys: pytest.CaptureFixture[str]
):
    do, words = SINCE[name]
    assert main(["plan", str(folder.spec()), "--out", "plan.json"]) == 0
    do(folder.path / "model")
    status, said = refused(folder, capsys, "plan.json")
    assert status == 2 and "error[X710]" in said, said
    status, said = refused(folder, capsys, "plan.json", "--accept-drift")
    assert status == 3 and "error[X524]" in said and all(word in said for word in words), said
