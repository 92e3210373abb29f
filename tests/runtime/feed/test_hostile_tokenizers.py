"""tokenizer.json of strangers: patterns that explode, replacements that grow, and what the package panics on."""

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from xtrain.components.tokenizers.folder_run import HuggingFaceTokenizer
from xtrain.runtime.base.errors import DataError

from .test_tokenizer_folders import folder_of


def hostile(tmp_path: Path, **changes: Any) -> Path:
    folder = folder_of(tmp_path / "tok", {})
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def grown(times: int, by: str = "aaaaaaaaaa", regex: bool = False) -> dict[str, Any]:
    pattern = {"Regex": "."} if regex else {"String": "a"}
    return {"type": "Sequence", "normalizers": [replace(pattern, by)] * times}


FILES: dict[str, tuple[dict[str, Any], str]] = {
    "nested repetitions": ({"pre_tokenizer": split("(a+)+$")}, "the tokenizer"),
    "nested repetitions of another letter": ({"pre_tokenizer": split("(q+q+)+y")}, "the tokenizer"),
    "the empty text, replaced": ({"normalizer": replace({"Regex": "x*"}, "y")}, "the tokenizer"),
    "the empty text, replaced by much": ({"normalizer": replace({"Regex": ""}, "y" * 60)}, "the tokenizer"),
    "replacements of replacements": ({"normalizer": grown(12)}, "characters of one"),
    "replacements of any character": ({"normalizer": grown(12, regex=True)}, "characters of one"),
    "one long replacement": ({"normalizer": grown(1, "b" * 10**6)}, "characters of one"),
    "no pattern": ({"pre_tokenizer": split("(")}, "not a tokenizer"),
    "no model": ({"model": {}}, "not a tokenizer"),
    "nested": ({"normalizer": None, "decoder": None, "model": None}, "not a tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_bounded_and_says_why(name: str, tmp_path: Path):
    changes, reason = FILES[name]
    folder = hostile(tmp_path, **changes)
    before, size = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError) as caught:
        HuggingFaceTokenizer(folder).encode_batch(["aaaa" * 100 + "b", "x q" * 100])
    assert reason in str(caught.value) and str(folder / "tokenizer.json") in str(caught.value)
    assert time.process_time() - before < 8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size < 1 << 19  # KiB


def test_nesting_without_end(tmp_path: Path):
    folder = folder_of(tmp_path / "tok", {})
    (folder / "tokenizer.json").write_text("[" * 200_000)
    with pytest.raises(DataError, match="not a tokenizer"):
        HuggingFaceTokenizer(folder)


def test_a_panic_on_a_text_is_a_diagnostic(tmp_path: Path):
    # Nothing that is probed has these letters.
    folder = hostile(tmp_path, pre_tokenizer=split("(é+)+$"))
    tokenizer = HuggingFaceTokenizer(folder)
    assert len(tokenizer.encode("abc"))
    for encode in (
        tokenizer.encode,
        lambda text: tokenizer.encode_rendered([text]),
        lambda text: tokenizer.encode_batch([text]),
    ):
        with pytest.raises(DataError, match=r"tokenizer\.json: the tokenizer fails on a text: "):
            encode("é" * 60 + "!")


@pytest.mark.parametrize("normalizer", [None, replace({"String": " "}, "▁"), grown(1, "aaa"), {"type": "NFKC"}])
def test_usual_normalizers_are_let_through(normalizer: Any, tmp_path: Path):
    assert len(HuggingFaceTokenizer(hostile(tmp_path, normalizer=normalizer)).encode("a b"))
