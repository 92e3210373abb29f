"""Prompts begin as the documents do that a model has learned from, and texts end where they are told to."""

from pathlib import Path

import pytest

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.components.tokenizers.folder_run import HuggingFaceTokenizer
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.chat.template import TEMPLATES, ChatTemplate, load_template
from xtrain.runtime.feed.documents import DocumentEncoder
from xtrain.runtime.feed.records import SourceRecord
from xtrain.runtime.nn.texts import Chat, Continuation, TextEnds
from xtrain.runtime.sampling.text_generator import prompt_tokens


class WithoutBos(ByteTokenizer):
    """Begins texts with eos, as tokenizers do that have no bos."""

    bos = ByteTokenizer.eos
    has_bos = False


@pytest.mark.parametrize(("tokenizer", "prompt", "tokens"), [
    (ByteTokenizer(), "ab", [256, 97, 98]),
    (ByteTokenizer(), "", [256]),
    (ByteTokenizer(), "⟨bos⟩a", [256, 97]),
    (ByteTokenizer(), "a⟨eos⟩b", [256, 97, 257, 98]),
    (WithoutBos(), "a", [257, 97]),
    (WithoutBos(), "⟨bos⟩a", [256, 97]),
])  # fmt: skip
def test_a_prompt_is_begun_once(tokenizer, prompt, tokens):
    assert prompt_tokens(tokenizer, prompt) == tokens


class Letters(ByteTokenizer):
    """One token a byte; a text begins without the blank before it, as pieces of sentences are decoded."""

    def decode(self, ids):
        return super().decode(ids).removeprefix(" ")


def grown(tokens, stops=(), prompt=(256, 120), tokenizer=None, most=100):
    """(what is shown after each token, the whole text)."""
    tokenizer = tokenizer or ByteTokenizer()
    text = Continuation(tokenizer, prompt, TextEnds.of(tokenizer, stops), most)
    shown = []
    for token in tokens:
        text.add(token)
        shown.append(text.news())
    return shown, text


def test_no_character_is_torn():
    shown, text = grown("aé€😀".encode())
    assert shown == ["a", "", "é", "", "", "€", "", "", "", "😀"]
    shown, text = grown(b"a\xe2\x82b\xe2\x82", most=6)
    assert "".join(shown) == text.text == b"a\xe2\x82b\xe2\x82".decode(errors="replace")
    shown, text = grown([*b"a\xe2\x82", 257, 97])
    assert shown == ["a", "", "", "\ufffd", ""] and text.done


def test_a_blank_in_front_is_part_of_what_follows():
    shown, text = grown(b" cat dog", tokenizer=Letters())
    assert "".join(shown) == text.text == " cat dog"


@pytest.mark.parametrize(("stops", "expected"), [
    ((), (["a", "b", "a", "b", "c", "d"], "ababcd", False)),
    (("abc",), (["", "", "ab", "", "", ""], "ab", True)),
    (("bc", "c"), (["a", "", "ba", "", "", ""], "aba", True)),
    (("d",), (["a", "b", "a", "b", "c", ""], "ababc", True)),
    (("abx",), (["", "", "ab", "", "abc", "d"], "ababcd", False)),
    (("⟨bos⟩",), (["a", "b", "a", "b", "c", "d"], "ababcd", False)),
])  # fmt: skip
def test_a_text_ends_before_what_ends_it(stops, expected):
    shown, text = grown(b"ababcd", stops)
    assert (shown, text.text, text.done) == expected
    assert "".join(shown) == text.text


def test_a_special_token_ends_a_text_by_its_name():
    shown, text = grown([97, 256, 98], ["⟨bos⟩"])
    assert shown == ["a", "", ""] and text.done and text.text == "a"
    assert grown(b"abc", most=2)[1].text == "ab"


def test_a_text_is_cut_where_it_has_no_end_of_its_own():
    assert grown(b"abc", most=3)[1].cut and not grown(b"abc", ["c"], most=3)[1].cut
    assert not grown([*b"ab", 257], most=3)[1].cut and not grown(b"ab", most=3)[1].cut


CHATML = ChatTemplate(text=TEMPLATES["chatml"], origin="chatml", bos_token="⟨bos⟩", eos_token="⟨eos⟩")


@pytest.mark.parametrize(
    ("name", "written", "closing"),
    [("chatml", "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n",
            "<|im_end|>"), ("plain", "System: Be kind.\n\nUser: 1 + 1?\n\nAssistant:", "⟨eos⟩")],
)  # fmt: skip
def test_a_question_is_written_as_in_the_data(name, written, closing):
    tokenizer = ByteTokenizer()
    chat = Chat(template=load_template(name, tokenizer, Path()), tokenizer=tokenizer, system="Be kind.")
    assert chat.prompt("1 + 1?") == [256, *written.encode()]
    assert chat.closing == closing
    # What is trained on begins with it.
    turns = [("system", "Be kind."), ("user", "1 + 1?"), ("assistant", "2")]
    encoder = DocumentEncoder(tokenizer, {"form": "chat", "messages": "m", "template": name, "train_on": "assistant"})
    messages = [{"role": role, "content": content} for role, content in turns]
    (document,) = encoder.encode([SourceRecord(content=messages, origin="here")])
    ids = document.ids.tolist()
    assert ids[: len(written) + 1] == chat.prompt("1 + 1?")
    assert not document.trained[: len(written) + 1].any() and document.trained[len(written) + 1]


def test_a_question_is_given_in_the_form_that_the_template_takes_and_never_left_out():
    lists = "{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}{{ p.text }}{% endfor %}<|e|>{% endfor %}"
    template = ChatTemplate(text=lists, origin="lists", bos_token="", eos_token="⟨eos⟩")
    chat = Chat(template=template, tokenizer=ByteTokenizer())
    assert ByteTokenizer().decode(chat.prompt("1 + 1?")) == "<|user|>1 + 1?<|e|>" and chat.closing == "<|e|>"
    deaf = ChatTemplate(text="{{ messages[-1].content }}", origin="deaf", bos_token="", eos_token="⟨eos⟩")
    with pytest.raises(DataError, match="deaf: the template does not write the system message"):
        Chat(template=deaf, tokenizer=ByteTokenizer(), system="Be kind.").prompt("a")


def test_a_question_that_spells_a_special_token_is_refused():
    with pytest.raises(DataError, match=r"the user message contains the special token <\|im_end\|>"):
        Chat(template=CHATML, tokenizer=ByteTokenizer()).prompt("a<|im_end|>")
    with pytest.raises(DataError, match="the system message contains the special token ⟨eos⟩"):
        Chat(template=CHATML, tokenizer=ByteTokenizer(), system="⟨eos⟩").prompt("a")


def folder_of(kind: str, folder: Path) -> HuggingFaceTokenizer:
    """Of bytes, as GPT-2 writes them, or of words after blanks, with bytes for what it does not know, as Llama 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    if kind == "bytes":
        words = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE({word: id for id, word in enumerate([*words, "<s>", "</s>"])}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        words = [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁catdogs", "<s>", "</s>"]
        ids = {word: id for id, word in enumerate(dict.fromkeys(words))}
        backend = Tokenizer(models.BPE(ids, [], byte_fallback=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(folder)


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_texts_of_tokenizers_of_folders_grow_by_whole_characters(kind, tmp_path):
    tokenizer = folder_of(kind, tmp_path)
    said = "dogs cat  ééd €😀 cat\n"
    tokens = tokenizer.encode("cat" + said).tolist()[len(tokenizer.encode("cat")) :]
    shown, text = grown(tokens, tokenizer=tokenizer, prompt=prompt_tokens(tokenizer, "cat"))
    assert "".join(shown) == text.text == said
    assert "\ufffd" not in "".join(shown) and max(map(len, shown)) == 1
    shown, text = grown(tokens, ["é"], tokenizer=tokenizer, prompt=prompt_tokens(tokenizer, "cat"))
    assert "".join(shown) == text.text == "dogs cat  "
    shown, text = grown([*tokens[:4], tokenizer.eos], tokenizer=tokenizer, prompt=prompt_tokens(tokenizer, "cat"))
    assert text.text == "dogs" and text.done
