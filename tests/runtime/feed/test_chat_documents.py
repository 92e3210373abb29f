"""Conversations as documents: tokens and what is predicted of them, held against tables written by hand."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.components.tokenizers.folder_run import HuggingFaceTokenizer
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.chat.template import TEMPLATES
from xtrain.runtime.feed.documents import DocumentEncoder, TokenDocument
from xtrain.runtime.feed.records import BadRecord, SourceRecord

pytestmark = pytest.mark.usefixtures("lean_forks")

SPECIAL = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>",
]  # fmt: skip
WORDS = [
    "system", "user", "assistant", "\n", "\n\n", "Be", " kind", ".", "Hi", " there", "?", "Yes", "Bye", "!", " ", "@",
]  # fmt: skip
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi there?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye!"},
]

# A token a line, ⏎ for a line end and ␣ for a blank, and for which `train_on` it is predicted: a(ssistant), l(ast).
CHATML = """
<|begin_of_text|>
<|im_start|>
system
⏎
Be
␣kind
.
<|im_end|>
⏎
<|im_start|>
user
⏎
Hi
␣there
?
<|im_end|>
⏎
<|im_start|>
assistant
⏎
Yes                   a
.                     a
<|im_end|>            a
⏎
<|im_start|>
user
⏎
Bye
<|im_end|>
⏎
<|im_start|>
assistant
⏎
Bye                   a l
!                     a l
<|im_end|>            a l
⏎
<|end_of_text|>
"""

LLAMA3 = """
<|begin_of_text|>
<|start_header_id|>
system
<|end_header_id|>
⏎⏎
Be
␣kind
.
<|eot_id|>
<|start_header_id|>
user
<|end_header_id|>
⏎⏎
Hi
␣there
?
<|eot_id|>
<|start_header_id|>
assistant
<|end_header_id|>
⏎⏎
Yes                   a
.                     a
<|eot_id|>            a
<|start_header_id|>
user
<|end_header_id|>
⏎⏎
Bye
<|eot_id|>
<|start_header_id|>
assistant
<|end_header_id|>
⏎⏎
Bye                   a l
!                     a l
<|eot_id|>            a l
<|end_of_text|>
"""
TABLES = {"chatml": CHATML, "llama3": LLAMA3}

MakeTokenizer = Callable[..., Path]


@pytest.fixture
def chat_tokenizer(tmp_path: Path) -> MakeTokenizer:
    """Writes a folder with a tokenizer of the words above; what is given goes into its settings."""

    def make(**settings: Any) -> Path:
        vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="@"))
        tokenizer.pre_tokenizer = Split(Regex(r"\n+| ?[A-Za-z]+|."), "isolated")
        tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
        folder = tmp_path / "tokenizer"
        folder.mkdir(exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        named = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"} | settings
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
        return folder

    return make


def parsed(table: str) -> list[tuple[str, str]]:
    rows = [(line.split(), "".join(line.split()[1:])) for line in table.strip().splitlines()]
    return [(words[0].replace("⏎", "\n").replace("␣", " "), marks) for words, marks in rows]


def encode(messages: Any, tokenizer: Any, form: str = "chat", **reads: str) -> TokenDocument | BadRecord:
    encoder = pickle.loads(pickle.dumps(DocumentEncoder(tokenizer, {"form": form, **reads})))
    (document,) = encoder.encode([SourceRecord(messages, "here")])
    return document


def pieces(document: TokenDocument | BadRecord, tokenizer: HuggingFaceTokenizer) -> list[tuple[str, bool]]:
    assert isinstance(document, TokenDocument), document
    trained = np.ones(len(document.ids), bool) if document.trained is None else document.trained
    return list(zip(map(tokenizer.piece, document.ids.tolist()), trained.tolist(), strict=True))


def without_marks(template: str) -> str:
    return template.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
@pytest.mark.parametrize("where", ["built in", "own", "file without marks", "own without marks"])
def test_the_tables(name: str, train_on: str, where: str, chat_tokenizer: MakeTokenizer, tmp_path: Path):
    text = without_marks(TEMPLATES[name]) if "without" in where else TEMPLATES[name]
    assert ("generation -%}" in text) == ("without" not in where)
    (tmp_path / "file.jinja").write_text(text)
    own = where.startswith("own")
    tokenizer = HuggingFaceTokenizer(chat_tokenizer(**({"chat_template": text} if own else {})))
    template = "auto" if own else name if where == "built in" else str(tmp_path / "file.jinja")
    document = encode(TALK, tokenizer, template=template, train_on=train_on)
    expected = [(token, train_on == "all" or train_on[0] in marks) for token, marks in parsed(TABLES[name])]
    assert pieces(document, tokenizer) == expected
    if train_on == "all":
        assert isinstance(document, TokenDocument) and document.trained is None


@pytest.mark.parametrize("train_on", ["assistant", "last"])
def test_a_pair_is_a_conversation_of_two(train_on: str, chat_tokenizer: MakeTokenizer):
    tokenizer = HuggingFaceTokenizer(chat_tokenizer())
    pair = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes"}]
    found = pieces(encode(pair, tokenizer, form="instruction", template="chatml", train_on=train_on), tokenizer)
    assert [token for token, _ in found] == [
        "<|begin_of_text|>", "<|im_start|>", "user", "\n", "Hi", "?", "<|im_end|>", "\n",
        "<|im_start|>", "assistant", "\n", "Yes", "<|im_end|>", "\n", "<|end_of_text|>",
    ]  # fmt: skip
    assert [place for place, (_, trained) in enumerate(found) if trained] == [11, 12]


def test_plain_ends_each_answer_with_eos(chat_tokenizer: MakeTokenizer):
    tokenizer = HuggingFaceTokenizer(chat_tokenizer())
    found = pieces(encode(TALK[1:], tokenizer, template="plain"), tokenizer)
    assert "".join(token for token, trained in found if trained) == "@.<|end_of_text|>@!<|end_of_text|>"
    assert found[-1] == ("<|end_of_text|>", True)
    assert [token for token, _ in found].count("<|end_of_text|>") == 2


def test_on_bytes_the_same_characters_are_predicted():
    for train_on, expected in (("assistant", "Yes, é.<|im_end|>Bye!<|im_end|>"), ("last", "Bye!<|im_end|>")):
        talk = [*TALK[:2], {"role": "assistant", "content": "Yes, é."}, *TALK[3:]]
        document = encode(talk, ByteTokenizer(), template="chatml", train_on=train_on)
        assert isinstance(document, TokenDocument) and document.trained is not None
        assert (document.ids[0], document.ids[-1]) == (256, 257)
        assert ByteTokenizer().decode(document.ids[document.trained]) == expected
        assert not document.trained[0] and not document.trained[-1]
        assert (
            ByteTokenizer().decode(document.ids).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user")
        )
    plain = encode(TALK[1:], ByteTokenizer(), template="plain")
    assert isinstance(plain, TokenDocument) and plain.trained is not None
    assert plain.ids[plain.trained].tolist().count(257) == 2  # eos itself, not its name


def test_bos_and_eos_are_not_put_where_the_template_has_them(chat_tokenizer: MakeTokenizer):
    folder = chat_tokenizer(eos_token="<|im_end|>", chat_template="{{ bos_token }}" + TEMPLATES["chatml"])
    tokenizer = HuggingFaceTokenizer(folder)
    tokens = [token for token, _ in pieces(encode(TALK, tokenizer), tokenizer)]
    assert tokens[:2] == ["<|begin_of_text|>", "<|im_start|>"]
    assert tokens[-3:] == ["!", "<|im_end|>", "\n"]


def test_a_tokenizer_without_a_bos_of_its_own_gives_conversations_none(chat_tokenizer: MakeTokenizer):
    tokenizer = HuggingFaceTokenizer(chat_tokenizer(bos_token=None, eos_token="<|im_end|>"))
    tokens = [token for token, _ in pieces(encode(TALK, tokenizer, template="chatml"), tokenizer)]
    assert tokens[0] == "<|im_start|>"


def test_a_token_of_the_header_and_of_the_answer_is_predicted(chat_tokenizer: MakeTokenizer):
    tokenizer = HuggingFaceTokenizer(chat_tokenizer())
    talk = [TALK[1], {"role": "assistant", "content": "\nYes"}]
    found = pieces(encode(talk, tokenizer, template="chatml"), tokenizer)
    assert found[found.index(("assistant", False)) + 1 :] == [
        ("\n\n", True), ("Yes", True), ("<|im_end|>", True), ("\n", False), ("<|end_of_text|>", False),
    ]  # fmt: skip


@pytest.mark.parametrize("content", ["Yes<|im_end|>\n<|im_start|>system", "<|eot_id|>", "Be <|end_of_text|>"])
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_a_content_that_spells_a_special_token_is_a_bad_record(content: str, role: str, chat_tokenizer: MakeTokenizer):
    tokenizer = HuggingFaceTokenizer(chat_tokenizer())
    spelt = next(name for name in ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>") if name in content)
    talk = [*TALK, {"role": role, "content": content}]
    found = encode(talk, tokenizer, template="chatml")
    assert found == BadRecord(origin="here", reason=f"message 6 contains the special token {spelt}")
    also = encode([{**TALK[0], "name": content}, *TALK[1:]], tokenizer, template="chatml")
    assert isinstance(also, BadRecord) and "message 1 contains" in also.reason


@pytest.mark.parametrize("spelt", ["<|im_end|>", "⟨eos⟩", "⟨bos⟩"])
def test_on_bytes_the_signs_of_the_template_are_guarded_too(spelt: str):
    found = encode([*TALK, {"role": "user", "content": f"so {spelt}"}], ByteTokenizer(), template="chatml")
    assert found == BadRecord(origin="here", reason=f"message 6 contains the special token {spelt}")
    (text,) = DocumentEncoder(ByteTokenizer(), {"form": "text"}).encode([SourceRecord(spelt, "here")])
    assert isinstance(text, TokenDocument) and text.ids.tolist() == [256, *spelt.encode(), 257]


@pytest.mark.parametrize("train_on", ["assistant", "last"])
@pytest.mark.parametrize("template", ["chatml", "unmarked"])
def test_without_anything_to_predict_it_is_a_bad_record(train_on: str, template: str, tmp_path: Path):
    (tmp_path / "unmarked").write_text(without_marks(TEMPLATES["chatml"]))
    encoder = DocumentEncoder(ByteTokenizer(), {"form": "chat", "template": template, "train_on": train_on}, tmp_path)
    found = encoder.encode([SourceRecord(TALK[:2], "a"), SourceRecord(TALK, "b"), SourceRecord(TALK[1:2], "c")])
    for record, origin, roles in ((found[0], "a", "`system`, `user`"), (found[2], "c", "`user`")):
        assert record == BadRecord(origin=origin, reason=f"the assistant says nothing: the roles are {roles}")
    assert isinstance(found[1], TokenDocument)
    assert isinstance(encode(TALK[:2], ByteTokenizer(), template="chatml", train_on="all"), TokenDocument)


def test_a_batch_gives_what_single_records_give(chat_tokenizer: MakeTokenizer):
    tokenizer = HuggingFaceTokenizer(chat_tokenizer())
    encoder = DocumentEncoder(tokenizer, {"form": "chat", "template": "llama3"})
    talks = [TALK, TALK[:2], TALK[:3], [{"role": "user", "content": "<|eot_id|>"}], TALK[2:]]
    batch = encoder.encode([SourceRecord(talk, str(index)) for index, talk in enumerate(talks)])
    for index, talk in enumerate(talks):
        (alone,) = encoder.encode([SourceRecord(talk, str(index))])
        if isinstance(alone, BadRecord):
            assert batch[index] == alone
        else:
            assert np.array_equal(batch[index].ids, alone.ids)  # type: ignore[union-attr]
            assert np.array_equal(batch[index].trained, alone.trained)  # type: ignore[union-attr]
    assert [isinstance(each, BadRecord) for each in batch] == [False, True, False, True, False]


def test_what_the_key_covers(chat_tokenizer: MakeTokenizer, tmp_path: Path):
    tokenizer = HuggingFaceTokenizer(chat_tokenizer())
    (tmp_path / "file.jinja").write_text(TEMPLATES["chatml"])
    reads = [
        {"form": "text"}, {"form": "chat", "template": "chatml"}, {"form": "chat", "template": "llama3"},
        {"form": "chat", "template": "chatml", "train_on": "last"}, {"form": "instruction", "template": "chatml"},
    ]  # fmt: skip
    covers = [json.dumps(DocumentEncoder(tokenizer, each).covers) for each in reads]
    assert len(set(covers)) == len(covers)
    # It is the text of a template that counts, not where it stands.
    by_file = DocumentEncoder(tokenizer, {"form": "chat", "template": "file.jinja"}, tmp_path)
    assert json.dumps(by_file.covers) == covers[1]


def test_templates_that_are_not_there(chat_tokenizer: MakeTokenizer, tmp_path: Path):
    reads = {"form": "chat"}
    for tokenizer in (ByteTokenizer(), HuggingFaceTokenizer(chat_tokenizer())):
        with pytest.raises(DataError, match=r"has no chat template\n.*chatml, llama3, plain"):
            DocumentEncoder(tokenizer, reads)
    with pytest.raises(DataError, match=r"mine\.jinja: no such chat template\n.*chatml"):
        DocumentEncoder(ByteTokenizer(), reads | {"template": "mine.jinja"}, tmp_path)
    (tmp_path / "mine.jinja").write_text("{% for message in messages %}\n{{ message.content }\n{% endfor %}")
    with pytest.raises(DataError, match=r"mine\.jinja:2: invalid chat template: unexpected '}'"):
        DocumentEncoder(ByteTokenizer(), reads | {"template": "mine.jinja"}, tmp_path)
    (tmp_path / "mine.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"mine\.jinja: cannot be read"):
        DocumentEncoder(ByteTokenizer(), reads | {"template": "mine.jinja"}, tmp_path)


def test_a_conversation_of_endless_text_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()  # a fork of this process knows what follows
    monkeypatch.setattr("xtrain.runtime.feed.chat.writer.LONGEST_CONVERSATION", 100)
    found = encode([TALK[1], {"role": "assistant", "content": "a" * 100}], ByteTokenizer(), template="chatml")
    assert found == BadRecord(origin="here", reason="a conversation of more than 100 characters")
