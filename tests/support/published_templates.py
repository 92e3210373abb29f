"""Published chat templates, each with conversations of twenty shapes, compared with transformers.

    python tests/support/published_templates.py            # print the table
    python tests/support/published_templates.py --write    # write it into docs/chat_templates.md

The templates are those of the folder XTRAIN_CHAT_TEMPLATES, or of an installed `trl`.
"""

import importlib.util
import os
import re
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field

sys.path.insert(0, str(Path(__file__).parent))

from conversation_shapes import SHAPES, Shape, word_faults, words

from xtrain.runtime.feed.chat.template import TODAY
from xtrain.runtime.feed.documents import DocumentEncoder, TokenDocument
from xtrain.runtime.feed.records import BadRecord, Reads, SourceRecord, Unusable
from xtrain.runtime.feed.sources.fields import taker
from xtrain.runtime.feed.tokenizers import TextTokenizer, load_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "chat_templates.md"
BEGIN, END = "<!-- published templates: begin -->", "<!-- published templates: end -->"
SKIP = "set XTRAIN_CHAT_TEMPLATES to a folder of chat templates, or install trl"
_TOKENS = re.compile(r"<[|｜/]?[A-Za-z_▁|｜\"]+[|｜]?>|\[/?[A-Z_]+\]")
_PLAIN = re.compile(r"</?(think|tool_call|tool_response|function|parameter|tools|arg_key|arg_value)>")


def folder() -> Path | None:
    """Return the folder of templates, or None if there is none."""
    if given := os.environ.get("XTRAIN_CHAT_TEMPLATES"):
        return Path(given)
    spec = importlib.util.find_spec("trl")
    found = Path(spec.origin).parent / "chat_templates" if spec is not None and spec.origin else None
    return found if found is not None and found.is_dir() else None


@define
class Row:
    """What became of the shapes with one template.

    taken: shapes that it writes, with `lost = allow`; of these equal: with the ids of transformers, and other_form: of
    which transformers writes less, or nothing. marked: shapes that the marked template writes alike, and as_marked:
    with the same mask, but for headers and white space. told: shapes of which something is reported as lost. refused:
    shapes that are bad records by default. faults: what must not be, in words.
    """

    name: str
    taken: int = 0
    equal: int = 0
    other_form: int = 0
    marked: int = 0
    as_marked: int = 0
    told: int = 0
    refused: int = 0
    faults: list[str] = field(factory=list)


def tokenizer_folder(templates: list[str], target: Path) -> Path:
    """Write a byte-level tokenizer that has every marker of the templates as a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = sorted({name for text in templates for name in _TOKENS.findall(text)} | {"<s>", "</s>"})
    alphabet = {sign: number for number, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(name, special=_PLAIN.fullmatch(name) is None, normalized=False) for name in names])
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(target)
    return target


class Comparison:
    """Templates of a folder, with one tokenizer."""

    def __init__(self, templates: Path, scratch: Path) -> None:
        from transformers import AutoTokenizer
        from transformers.utils import chat_template_utils

        class Day(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> "datetime":
                return TODAY

        chat_template_utils.datetime = Day  # pyright: ignore
        self.paths = {path.stem: path for path in sorted(templates.glob("*.jinja"))}
        target = tokenizer_folder([path.read_text() for path in self.paths.values()], scratch / "tokenizer")
        self.theirs = AutoTokenizer.from_pretrained(target)
        self.ours: TextTokenizer = load_tokenizer(str(target), Path())

    def row(self, name: str) -> Row:
        """Compare all shapes."""
        found = Row(name)
        for label, shape in SHAPES.items():
            self._compare(found, label, shape)
        return found

    def encoded(self, name: str, shape: Shape, **reads: Any) -> TokenDocument | str:
        """The document of a conversation, or why there is none."""
        settings = {"form": "chat", "tools": "tools", "template": str(self.paths[name]), **reads}
        content = taker(Reads.of(settings))({"messages": shape.messages, "tools": shape.tools})
        assert not isinstance(content, Unusable), content
        (document,) = DocumentEncoder(self.ours, settings).encode([SourceRecord(content, "here")])
        assert not isinstance(document, tuple)
        return document.reason if isinstance(document, BadRecord) else document

    def expected(self, name: str, shape: Shape, *, mask: bool = False) -> tuple[list[int], np.ndarray] | None:
        """The ids of transformers, and its mask where the template has marks; None if it refuses the conversation."""
        text = self.paths[name].read_text()
        try:
            found = self.theirs.apply_chat_template(
                shape.messages, tools=shape.tools, chat_template=text, return_dict=True,
                return_assistant_tokens_mask=mask,
            )  # fmt: skip
        except Exception:  # a template may fail in any way
            return None
        return found["input_ids"], np.array(found["assistant_masks"] if mask else [], dtype=bool)

    def _compare(self, row: Row, label: str, shape: Shape) -> None:
        document, theirs = self.encoded(row.name, shape, lost="allow"), self.expected(row.name, shape)
        strict = self.encoded(row.name, shape)
        row.refused += isinstance(strict, str)
        if isinstance(document, str):
            if theirs is not None and "the assistant says nothing" not in document:
                row.faults.append(f"{label}: {document}")
            return
        row.taken += 1
        ids, trained = self._inner(document, None if theirs is None else theirs[0])
        text = self.ours_text(ids)
        row.told += bool(document.lost)
        wrong = word_faults(shape, text, self.ours_text(ids[trained]), document.lost)
        row.faults += [f"{label}: {each}" for each in wrong]
        if theirs is None:
            row.other_form += 1
            return
        if ids.tolist() != theirs[0]:
            kept = {word for word, _ in words(shape) if word in text}
            fewer = {word for word, _ in words(shape) if word in self.ours_text(np.array(theirs[0]))}
            listed = any(isinstance(message.get("content"), list) for message in shape.messages)
            if fewer < kept or listed:
                row.other_form += 1
            else:
                row.faults.append(f"{label}: other ids than transformers")
            return
        row.equal += 1
        self._check_mask(row, label, shape, ids, trained)

    def _check_mask(self, row: Row, label: str, shape: Shape, ids: np.ndarray, trained: np.ndarray) -> None:
        is_marked = re.search(r"\{%-?\s*generation\b", self.paths[row.name].read_text()) is not None
        twin = row.name if is_marked else f"{row.name}_training"
        if twin not in self.paths or (other := self.expected(twin, shape, mask=True)) is None:
            return
        if other[0][: len(ids)] != ids.tolist():
            return  # the marked template writes another text
        other = other[0], other[1][: len(ids)]
        row.marked += 1
        if is_marked:
            if np.array_equal(trained, other[1]):
                row.as_marked += 1
            else:
                row.faults.append(f"{label}: another mask than transformers")
            return
        unlike = [self._shown(ids[start:stop]) for start, stop in _runs(trained != other[1])]
        more = [self._shown(ids[start:stop]) for start, stop in _runs(trained & ~other[1])]
        header = self._header(row.name)
        if not more and all(not each.strip() or each.strip() in header for each in unlike):
            row.as_marked += 1
        else:
            row.faults.append(f"{label}: unlike the marked template: {unlike}")

    def _header(self, name: str) -> str:
        asked, text = SHAPES["one turn"].messages[:1], self.paths[name].read_text()
        call = SHAPES["text and a call"]
        found = ""
        for messages, tools in ((asked, None), (call.messages[:3], call.tools)):
            try:
                found += self.theirs.apply_chat_template(
                    messages, tools=tools, chat_template=text, add_generation_prompt=True, tokenize=False
                )
            except Exception:
                continue
        return found

    def _inner(self, document: TokenDocument, theirs: list[int] | None) -> tuple[np.ndarray, np.ndarray]:
        """Ids and mask without the bos and the eos that only documents have."""
        assert document.trained is not None
        ids, trained = document.ids.astype(np.int64), document.trained
        front = theirs is not None and len(ids) > len(theirs) and ids[0] == self.ours.bos != theirs[0]
        ids, trained = ids[int(front) :], trained[int(front) :]
        back = theirs is not None and len(ids) == len(theirs) + 1 and ids[-1] == self.ours.eos
        return ids[: len(ids) - int(back)], trained[: len(ids) - int(back)]

    def ours_text(self, ids: np.ndarray) -> str:
        return self.theirs.decode(ids.tolist(), skip_special_tokens=False)

    def _shown(self, ids: np.ndarray) -> str:
        return self.theirs.decode(ids.tolist(), skip_special_tokens=False)


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def table(rows: list[Row]) -> str:
    """The table of the page."""
    lines = [
        "| template | written | ids equal | in another form | mask as marked | losses reported | bad by default |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        mask = f"{row.as_marked} of {row.marked}" if row.marked else "–"
        cells = (row.name, row.taken, row.equal, row.other_form, mask, row.told, row.refused)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _main() -> None:
    if (source := folder()) is None:
        sys.exit(SKIP)
    only = [each for each in sys.argv[1:] if not each.startswith("--")]
    with tempfile.TemporaryDirectory() as scratch:
        comparison = Comparison(source, Path(scratch))
        names = [name for name in comparison.paths if not only or any(re.search(each, name) for each in only)]
        rows = [comparison.row(name) for name in names]
    print(table(rows))
    for row in rows:
        for fault in row.faults:
            print(f"{row.name}, {fault}")
    if "--write" in sys.argv and not only:
        page = PAGE.read_text()
        before, rest = page.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    _main()
