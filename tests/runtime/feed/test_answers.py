"""Preference pairs, labelled answers and token ids with numbers: from lines of a file to samples."""

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from xtrain.components.collators.flatten_torch import flatten
from xtrain.components.collators.pack_torch import pack
from xtrain.components.collators.shift_tokens_torch import shift_tokens
from xtrain.components.collators.to_tensor_torch import to_tensor
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.collate import compose
from xtrain.runtime.feed.curriculum import TrainingRows
from xtrain.runtime.feed.documents import DocumentEncoder, TokenDocument
from xtrain.runtime.feed.loader import RowFeeder
from xtrain.runtime.feed.microbatch import Samples
from xtrain.runtime.feed.packing.rows import cut_sides, pack_pairs, pack_rows, sides_of
from xtrain.runtime.feed.packing.stored_rows import RowReader
from xtrain.runtime.feed.prepared import build_store
from xtrain.runtime.feed.records import BadRecord, Reads, TokenIds, Unusable
from xtrain.runtime.feed.row_kernels import row_costs
from xtrain.runtime.feed.sources.fields import taker, token_ids
from xtrain.runtime.feed.sources.source import open_source
from xtrain.runtime.feed.token_store import TokenStore, open_store
from xtrain.runtime.feed.tokenizers import TextTokenizer, load_tokenizer
from xtrain.runtime.feed.tokenizing.store_writer import StoreWriter
from xtrain.runtime.feed.tokenizing.workers import encode_unit

pytestmark = pytest.mark.usefixtures("lean_forks")

PAIRS = {"form": "preference", "prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "template": "chatml"}
INSIDE = PAIRS | {"prompt": None}
TEXTS = INSIDE | {"template": "auto"}
RATED = {"form": "instruction", "prompt": "prompt", "response": "answer", "label": "label", "template": "chatml"}
DRAWN = {
    "form": "tokens", "tokens": "tokens", "mask": "mask",
    "columns": {"logprobs": "old", "advantages": "gain"}, "values": {"reward": "reward"},
}  # fmt: skip
SCORED = PAIRS | {"values": {"margin": "margin"}}


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer("bytes", Path.cwd())


def read(lines: list[Any], reads: dict[str, Any], folder: Path, tokenizer: TextTokenizer) -> list[Any]:
    """What a file of these lines becomes: documents and bad records, in their order."""
    path = folder / "in.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    source = open_source("jsonl", patterns=(path.name,), reads=reads, base=folder)
    records = [record for unit in source.units() for record in source.read(unit)]
    encoded = iter(DocumentEncoder(tokenizer, reads).encode([r for r in records if not isinstance(r, BadRecord)]))
    return [record if isinstance(record, BadRecord) else next(encoded) for record in records]


def stored(lines: list[Any], reads: dict[str, Any], folder: Path, tokenizer: TextTokenizer) -> TokenStore:
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    source = open_source("jsonl", patterns=("in.jsonl",), reads=reads, base=folder, bad_record_limit=99)
    return build_store(source, DocumentEncoder(tokenizer, reads), folder / "cache", jobs=1)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def predicted(document: TokenDocument, tokenizer: TextTokenizer) -> list[str]:
    """The text that is predicted of each side, special tokens by name."""
    cuts = [slice(0, document.first), slice(document.first, None)] if document.first else [slice(None)]
    assert document.trained is not None
    return [tokenizer.decode(document.ids[cut][document.trained[cut]]) for cut in cuts]


def talk(question: str, answer: str) -> list[dict[str, str]]:
    return [said("user", question), said("assistant", answer)]


PROMPT = [said("system", "be kind"), said("user", "and?")]


@pytest.mark.parametrize(("reads", "line", "answers"), [
    (PAIRS, {"prompt": "q", "chosen": "good", "rejected": "bad"}, ["good<|im_end|>", "bad<|im_end|>"]),
    (PAIRS, {"prompt": PROMPT, "chosen": [said("assistant", "good")], "rejected": "bad"},
        ["good<|im_end|>", "bad<|im_end|>"]),
    # The prompt by itself, and once more in both sides, as UltraFeedback has it.
    (PAIRS, {"prompt": "q", "chosen": [said("user", "q"), said("assistant", "good")], "rejected": "bad"},
        ["good<|im_end|>", "bad<|im_end|>"]),
    (PAIRS, {"prompt": "q", "chosen": [said("system", "s"), *talk("q", "good")],
            "rejected": [said("system", "s"), *talk("q", "bad")]}, ["good<|im_end|>", "bad<|im_end|>"]),
    (INSIDE, {"chosen": [*PROMPT, said("assistant", "good")], "rejected": [*PROMPT, said("assistant", "bad")]},
        ["good<|im_end|>", "bad<|im_end|>"]),
    # Of the messages in common the assistant's are part of the prompt.
    (INSIDE, {"chosen": [said("user", "q"), said("assistant", "a"), said("user", "r"), said("assistant", "good")],
            "rejected": [said("user", "q"), said("assistant", "a"), said("user", "r"), said("assistant", "bad")]},
        ["good<|im_end|>", "bad<|im_end|>"]),
    # Of texts the tokens in common are the prompt; eos ends both.
    (TEXTS, {"chosen": "1+1=2", "rejected": "1+1=11"}, ["2", "11"]),
    (TEXTS, {"chosen": "1+1=2", "rejected": "1+1=2!"}, ["", "!"]),
    (RATED, {"prompt": "q", "answer": "good", "label": True}, ["good<|im_end|>"]),
    (RATED, {"prompt": PROMPT, "answer": [said("assistant", "good")], "label": False}, ["good<|im_end|>"]),
])  # fmt: skip
def test_what_is_predicted_of_answers(reads, line, answers, tmp_path: Path, tokenizer: TextTokenizer):
    (document,) = read([line], reads, tmp_path, tokenizer)
    assert predicted(document, tokenizer) == answers
    if reads is not RATED:
        first = document.ids[: document.first]
        assert all(side[0] == tokenizer.bos and side[-1] == tokenizer.eos for side in (first, document.ids))
        prompt = int(np.argmax(document.trained))
        other = document.first + int(np.argmax(document.trained[document.first :]))
        assert np.array_equal(first[:prompt], document.ids[document.first : other])


def line(**changes: Any) -> dict[str, Any]:
    """A good line of pairs, answers and token ids, but for `changes`; ... takes a field out."""
    good = {
        "prompt": "q", "chosen": "good", "rejected": "bad", "margin": 1, "answer": "good", "label": True,
        "tokens": [1, 2, 3], "mask": [0, 1, 1], "old": [0, -1.5, -2], "gain": 0.5, "reward": 1,
    }  # fmt: skip
    return {name: value for name, value in (good | changes).items() if value is not ...}


MALFORMED = [
    (PAIRS, line(rejected=...), "no field `rejected`; there are"),
    (PAIRS, line(chosen=None), "field `chosen` is null, not a string"),
    (PAIRS, line(chosen=3), "field `chosen` is a number, not a string"),
    (PAIRS, line(chosen=""), "field `chosen` is empty"),
    (PAIRS, line(prompt=""), "field `prompt` is empty"),
    (PAIRS, line(prompt=...), "no field `prompt`; there are"),
    (PAIRS, line(rejected="good"), "fields `chosen` and `rejected` are equal"),
    (PAIRS, line(rejected=[said("assistant", "good")]), "fields `chosen` and `rejected` have the same tokens"),
    (PAIRS, line(rejected=[]), "field `rejected` has no messages"),
    (PAIRS, line(rejected=[said("assistant", "")]), "field `rejected`, message 1: the assistant says nothing"),
    (PAIRS, line(rejected=[said("user", "hm")]), "`rejected`: the answer begins with message 2, which has the role u"),
    (PAIRS, line(chosen=[said("system", "s"), *talk("q", "a")], rejected=[said("system", "t"), *talk("q", "b")]),
        "`chosen`: the answer begins with message 2, which has the role system"),
    (PAIRS, line(chosen="a<|im_end|>"), "field `chosen`: message 2 contains the special token <|im_end|>"),
    (PAIRS, line(chosen="\ud800"), "field `chosen` has an unpaired surrogate"),
    (INSIDE, {"chosen": talk("q", "a"), "rejected": talk("r", "a")},
        "answers to different prompts: message 1 has the role user"),
    (INSIDE, {"chosen": "text", "rejected": talk("q", "a")}, "field `chosen` is a text, and `rejected` is not"),
    (TEXTS, {"chosen": talk("q", "a"), "rejected": "b"}, "field `rejected` is a text, and `chosen` is not"),
    (INSIDE | {"tools": "t"}, {"chosen": "a", "rejected": "b", "t": []}, "is a text, and field `t` is for conv"),
    (INSIDE | {"system": "s"}, {"chosen": "a", "rejected": "b", "s": ""}, "a text, and field `s` is only for conv"),
    (SCORED, line(margin="big"), "field `margin` is a string, not a number"),
    (SCORED, line(margin=True), "field `margin` is a boolean, not a number"),
    (SCORED, line(margin=...), "no field `margin`"),
    (SCORED, line(margin=1e39), "field `margin` is 1e+39, too large for float32"),
    (RATED, line(label="true"), "field `label` is a string, neither true nor false"),
    (RATED, line(label=1), "field `label` is 1, neither true nor false"),
    (RATED, line(label=...), "no field `label`"),
    (RATED, line(answer=""), "field `answer` is empty"),
    (RATED, line(answer=["x"]), "field `answer`, message 1: a string, not an object"),
    (DRAWN, line(tokens="1 2"), "field `tokens` is a string, not a list of token ids"),
    (DRAWN, line(tokens=[1, 2.5, 3]), "field `tokens`, token 1, is 2.5, not a whole number"),
    (DRAWN, line(tokens=[1, -2, 3]), "field `tokens`, token 1, is -2, which is not a token id"),
    (DRAWN, line(tokens=[1, 2, 999]), "its token 2 is 999, which is not in the vocabulary"),
    (DRAWN, line(tokens=[1]), "field `tokens` has 1 tokens, and nothing to predict"),
    (DRAWN, line(mask=[0, 1]), "field `mask` has 2 entries, and `tokens` has 3 tokens"),
    (DRAWN, line(mask=[0, 1, 2]), "field `mask`, entry 2, is 2, neither 0 nor 1"),
    (DRAWN, line(mask=[-100, 2, 9]), "field `mask`, label 2, is 9, neither the token there, 3, nor -100"),
    (DRAWN, line(mask=[-100, 0, 1]), "field `mask`, label 1, is 0, neither the token there, 2, nor -100"),
    (DRAWN, line(mask=[1, -100, -100]), "field `mask` leaves no token to predict"),
    (DRAWN, line(mask=[1, 0, 0]), "field `mask` leaves no token to predict"),
    (DRAWN, line(old=[0, -1]), "field `old` has 2 numbers, and `tokens` has 3 tokens"),
    (DRAWN, line(old=[0, None, -1]), "field `old`, number 1, is null, not a number"),
    (DRAWN, '{"tokens": [1, 2], "mask": [0, 1], "old": 0, "gain": NaN, "reward": 1}', "NaN is not a valid JSON number"),
    (DRAWN, line(old=[9, -1, 0.25]), "field `old` is 0.25 for a predicted token, but log-probabilities are at most"),
    (DRAWN, line(old=3), "field `old` is 3 for a predicted token"),
    (DRAWN, line(gain=[1, 1, 1e60]), "field `gain`, number 2, is 1e+60, too large for float32"),
    (DRAWN, line(reward=[1]), "field `reward` is a list, not a number"),
    (DRAWN, line(reward=10**400), "field `reward` is a number of more than 20 digits, too large for float32"),
    (DRAWN, line(gain=[1, 1, -(10**400)]), "field `gain`, number 2, is a number of more than 20 digits, too large"),
    (DRAWN, line(tokens=[1, 2, 10**400]), "field `tokens`, token 2, is a number of more than 20 digits, which is no"),
]  # fmt: skip


@pytest.mark.parametrize(("reads", "bad", "reason"), MALFORMED)
def test_malformed_records_are_left_out_with_their_line(reads, bad, reason, tmp_path: Path, tokenizer: TextTokenizer):
    good = line() if reads["form"] != "preference" or reads["prompt"] else {"chosen": "ab", "rejected": "ac"}
    if reads["form"] == "preference" and reads is not TEXTS and not reads["prompt"]:
        good = {"chosen": talk("q", "a"), "rejected": talk("q", "b"), "t": [], "s": ""}
    before, found, after = read([good, bad, good], reads, tmp_path, tokenizer)
    assert isinstance(before, TokenDocument) and isinstance(after, TokenDocument)
    assert isinstance(found, BadRecord) and found.origin == f"{tmp_path / 'in.jsonl'}:2"
    assert reason in found.reason


def test_there_are_thirty_cases():
    assert len(MALFORMED) >= 30


def test_numbers_that_are_not_finite_are_refused_wherever_they_come_from(tmp_path: Path):
    take = taker(Reads.of(DRAWN))
    assert not isinstance(take(line()), Unusable)
    for wrong in (float("nan"), [0.0, float("nan"), 1.0], np.array([0, np.inf, 1])):
        found = take(line(gain=wrong))
        assert isinstance(found, Unusable) and found.reason.startswith("field `gain`")


def test_a_template_that_writes_the_prompt_otherwise_before_an_answer_is_refused(tmp_path, tokenizer):
    # As templates do that drop what the assistant thought before, from all turns but the last.
    template = tmp_path / "thinking.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}{% if loop.last %}!{% endif %}: "
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}"
        "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (found,) = read([line()], PAIRS | {"template": str(template)}, tmp_path, tokenizer)
    assert found.reason == "field `chosen`: the template writes the prompt differently before an answer"


def test_a_prompt_whose_tokens_change_where_an_answer_follows_is_refused(tmp_path: Path):
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    # "a" and "b" merge: the prompt "a" alone has another token than in front of "b".
    vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "<s>": 4, "</s>": 5}
    made = Tokenizer(BPE(vocabulary, [("a", "b")]))
    made.add_special_tokens(["<s>", "</s>"])
    folder = tmp_path / "merging"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    template = tmp_path / "joined.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    lines = [{"prompt": "a", "chosen": "c", "rejected": "cc"}, {"prompt": "a", "chosen": "bc", "rejected": "c"}]
    good, bad = read(lines, PAIRS | {"template": str(template)}, tmp_path, load_tokenizer("merging", tmp_path))
    assert isinstance(good, TokenDocument)
    reason = "the prompt has other tokens alone than before the answer"
    assert bad.reason == f"field `chosen`: {reason}"


# stores and rows ------------------------------------------------------------------------------------------------------


def pair_of(chosen: int, rejected: int, number: int = 0) -> dict[str, Any]:
    """Texts whose sides have so many positions: bos, `q`, then the answer; eos is only ever a label."""
    return {"chosen": "q" + "g" * (chosen - 2), "rejected": "q" + "b" * (rejected - 2), "margin": number / 2}


def test_a_store_of_pairs_is_opened_as_it_was_built(tmp_path: Path, tokenizer: TextTokenizer):
    reads = TEXTS | {"values": {"margin": "margin"}, "columns": {"weights": "margin"}}
    lines = [pair_of(5, 7, number) for number in range(3)]
    built = stored(lines, reads, tmp_path, tokenizer)
    opened = open_store(tmp_path / "cache" / built.folder)
    assert opened is not None and not opened.is_plain
    assert opened.firsts.tolist() == [6, 6, 6] and opened.lengths().tolist() == [14, 14, 14]
    assert opened.values["margin"].tolist() == [0, 0.5, 1] and opened.values["margin"].dtype == np.float32
    assert opened.columns["weights"].tolist() == [0.0] * 14 + [0.5] * 14 + [1.0] * 14
    (tmp_path / "cache" / built.folder / "value-margin.bin").write_bytes(b"1234")
    assert open_store(tmp_path / "cache" / built.folder) is None


def test_other_columns_of_the_same_file_are_another_store(tmp_path: Path, tokenizer: TextTokenizer):
    keys = {
        stored([line()], DRAWN | changed, tmp_path, tokenizer).key
        for changed in ({}, {"columns": {"logprobs": "old", "advantages": "old"}}, {"mask": None}, {"values": {}})
    }
    assert len(keys) == 4


@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("method", ["sequential", "multipack"])
def test_both_sides_of_a_pair_lie_behind_each_other_in_one_row(align, method, tmp_path, tokenizer: TextTokenizer):
    sizes = [(5, 3), (4, 4), (9, 2), (2, 9), (20, 13), (16, 16), (17, 16), (30, 31)]
    lines = [pair_of(*both, number) for number, both in enumerate(sizes)]
    store = stored(lines, TEXTS | {"values": {"margin": "margin"}}, tmp_path, tokenizer)
    documents = np.arange(len(lines))
    assert list(zip(*map(np.ndarray.tolist, sides_of(store, documents)), strict=True)) == sizes
    rows = pack_pairs(store, documents, 32, "skip", align, method=method)
    fits = [number for number, both in enumerate(sizes) if sum(-(-side // align) * align for side in both) <= 32]
    assert sorted(rows.document.tolist()) == fits
    assert rows.num_skipped == len(sizes) - len(fits) and rows.num_truncated == rows.num_empty == 0
    assert rows.num_positions == sum(sum(sizes[number]) for number in fits)
    assert rows.num_dropped_positions == sum(map(sum, sizes)) - rows.num_positions
    reader = RowReader(store=store, documents=documents, rows=rows)
    met = []
    for index in range(rows.num_rows):
        row = reader.row(index)
        assert sum(-(-(len(tokens) - 1) // align) * align for tokens in row.segments) <= 32
        assert row.sides == [0, 1] * (len(row.segments) // 2)
        for first, second, margin in zip(row.segments[::2], row.segments[1::2], row.values["margin"][::2], strict=True):
            number = round(margin * 2)
            assert (len(first) - 1, len(second) - 1) == sizes[number]
            assert all((side[0], side[-1]) == (tokenizer.bos, tokenizer.eos) for side in (first, second))
            texts = tokenizer.decode(first), tokenizer.decode(second)
            assert texts == (lines[number]["chosen"], lines[number]["rejected"])
            met.append(number)
    assert sorted(met) == fits
    costs = row_costs(store, documents, rows, np.arange(rows.num_rows))
    assert costs.sum() == sum(side**2 for number in fits for side in sizes[number])


def test_pairs_that_are_too_long_are_cut_alike(tmp_path: Path, tokenizer: TextTokenizer):
    cases = [((8, 30), (8, 24)), ((30, 8), (24, 8)), ((17, 16), (16, 16)), ((40, 50), (16, 16)), ((16, 16), (16, 16))]
    for given, kept in cases:
        cut = cut_sides(*(np.array([side]) for side in given), 32, 1)
        assert tuple(int(side[0]) for side in cut) == kept
    assert [int(side[0]) for side in cut_sides(np.array([13]), np.array([30]), 32, 8)] == [13, 16]
    # A prompt of 20 tokens leaves no answer where both sides are cut to 16.
    lines = [pair_of(40, 50), {"chosen": "q" * 20 + "g" * 30, "rejected": "q" * 20 + "b" * 30}, pair_of(4, 40)]
    store = stored(lines, TEXTS, tmp_path, tokenizer)
    rows = pack_pairs(store, np.arange(3), 32, "truncate")
    assert sorted(rows.document.tolist()) == [0, 2] and (rows.num_truncated, rows.num_skipped) == (2, 1)
    assert rows.num_positions == 64
    row = RowReader(store=store, documents=np.arange(3), rows=rows).row(1)
    assert [len(tokens) for tokens in row.segments] == [5, 29]
    with pytest.raises(DataError, match="pair 0 has sides of 40 and 50 positions, but a row holds 32"):
        pack_pairs(store, np.arange(3), 32, "error")


def test_a_dataset_of_which_nothing_fits_is_said_to_be_too_long(tmp_path: Path, tokenizer: TextTokenizer):
    store, documents = stored([pair_of(40, 50), pair_of(30, 60)], TEXTS, tmp_path, tokenizer), np.arange(2)
    reader = RowReader(store=store, documents=documents, rows=pack_pairs(store, documents, 32, "skip"))
    with pytest.raises(DataError, match="dataset p has no rows to train on: all of its 2 documents are left out"):
        TrainingRows.of("p", reader, 0)


def test_pairs_whose_sides_would_be_the_same_are_left_out(tmp_path: Path, tokenizer: TextTokenizer):
    """Answers that begin alike, and differ behind the place at which they are cut."""
    same, other = ({"prompt": "q", "chosen": "x" * at + "good", "rejected": "x" * at + "bad"} for at in (300, 10))
    store = stored([same, other], PAIRS, tmp_path, tokenizer)
    rows = pack_pairs(store, np.arange(2), 160, "truncate")
    assert rows.document.tolist() == [1] and (rows.num_truncated, rows.num_skipped) == (0, 1)


def test_numbers_go_with_the_labels_up_to_samples(tmp_path: Path, tokenizer: TextTokenizer):
    lines = [line(), line(tokens=[4, 5, 6, 7], mask=[0, 0, 1, 1], old=[9, -8, -7, -6], gain=-1, reward=2)]
    store = stored(lines, DRAWN, tmp_path, tokenizer)
    rows = pack_rows(store.lengths(), 8, "skip")
    row = RowReader(store=store, documents=np.arange(2), rows=rows).row(0)
    found = shift_tokens()(flatten()(to_tensor()([row])))
    assert isinstance(found, Samples)
    first, second = found.samples
    assert second.tokens.tolist() == [4, 5, 6] and second.labels is not None
    assert second.labels.tolist() == [-100, 6, 7] and second.columns["logprobs"].tolist() == [-8, -7, -6]
    assert second.columns["advantages"].tolist() == [-1, -1, -1] and second.values == {"reward": 2.0}
    assert first.columns["logprobs"].tolist() == [-1.5, -2] and first.values == {"reward": 1.0} and first.side == 0
    assert first.columns["logprobs"].dtype == torch.float32


def test_an_interrupted_store_goes_on_with_its_numbers(tmp_path: Path, tokenizer: TextTokenizer):
    encoder = DocumentEncoder(tokenizer, TEXTS | {"values": {"margin": "margin"}, "columns": {"weights": "margin"}})
    units = []
    for number in range(3):
        (tmp_path / "in.jsonl").write_text(json.dumps(pair_of(4 + number, 5, number)))
        source = open_source("jsonl", patterns=("in.jsonl",), reads=attrs.asdict(encoder.reads), base=tmp_path)
        units.append(encode_unit(source, encoder, next(iter(source.units())), np.dtype(np.uint16)))

    def whole(folder: Path, *, broken: bool) -> dict[str, bytes]:
        folder.mkdir()
        writer = StoreWriter(folder, "key", np.dtype(np.uint16))
        writer.begin()
        for number, unit in enumerate(units):
            writer.append(10, unit)
            if broken and number == 1:
                writer.commit()
                writer.append(10, units[2])  # that is not in the journal, and is done again
                writer.close()
                (folder / "column-old.bin").write_bytes(b"of another time")
                writer = StoreWriter(folder, "key", np.dtype(np.uint16))
                assert writer.resume() and writer.journal.documents == 2
        writer.finish(files=1, covers={})
        writer.close()
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    straight = whole(tmp_path / "straight", broken=False)
    assert {"firsts.bin", "value-margin.bin", "column-weights.bin"} <= straight.keys()
    assert whole(tmp_path / "broken", broken=True) == straight
    store = open_store(tmp_path / "broken")
    assert store is not None and store.values["margin"].tolist() == [0, 0.5, 1]


def test_rows_of_pairs_go_through_the_stages_of_the_chain(tmp_path: Path, tokenizer: TextTokenizer):
    store = stored([pair_of(5, 3), pair_of(4, 6)], TEXTS, tmp_path, tokenizer)
    documents = np.arange(2)
    rows = pack_pairs(store, documents, 24, "skip", 2)
    chain = compose([to_tensor(), flatten(), shift_tokens(), pack(capacity=24, align=2)])
    assert chain.lays_out is not None
    batch = RowFeeder(store=store, documents=documents, rows=rows, collate=chain).microbatch(np.array([0]))
    assert batch.real_lengths.tolist()[:4] == [5, 3, 4, 6]
    assert batch.cumulative_lengths.tolist()[:5] == [0, 6, 10, 14, 20]
    assert batch.labels_BS is not None and batch.num_valid == (3 + 1) + (1 + 1) + (2 + 1) + (4 + 1)
    first = batch.labels_BS[0, :6].tolist()
    assert first == [-100, *(int(t) for t in tokenizer.encode("ggg")), tokenizer.eos, -100]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_tables_have_them_too(kind: str, tmp_path: Path, tokenizer: TextTokenizer):
    pa = pytest.importorskip("pyarrow")
    good = [line(), line(prompt="p", rejected="worse", margin=2)]
    messages = [{**each, "chosen": [said("assistant", each["chosen"])]} for each in good]

    def rows(lines: list[dict[str, Any]], reads: dict[str, Any]) -> list[Any]:
        table, path = pa.Table.from_pylist(lines), tmp_path / f"in.{kind}"
        if kind == "parquet":
            import pyarrow.parquet

            pyarrow.parquet.write_table(table, path)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
        source = open_source(kind, patterns=(path.name,), reads=reads, base=tmp_path)
        records = [record for unit in source.units() for record in source.read(unit)]
        if any(isinstance(record, BadRecord) for record in records):
            return records
        return DocumentEncoder(tokenizer, reads).encode(records)

    for lines, reads in ((good, SCORED), (messages, SCORED), (good, RATED), (good, DRAWN)):
        for found, expected in zip(rows(lines, reads), read(lines, reads, tmp_path, tokenizer), strict=True):
            assert np.array_equal(found.ids, expected.ids) and np.array_equal(found.trained, expected.trained)
            assert found.values == expected.values and found.first == expected.first
            assert found.columns.keys() == expected.columns.keys()
            assert all(np.array_equal(found.columns[name], expected.columns[name]) for name in found.columns)
    _, bad = rows([line(), line(gain=float("nan"))], DRAWN)
    assert bad.origin.endswith("row 2") and bad.reason == "field `gain` is NaN"
    _, bad = rows([line(), line(rejected=None)], PAIRS)
    assert bad.reason == "field `rejected` is null, not a string"


@pytest.mark.parametrize(("mask", "trained"), [
    ([-100, 2, -100], [False, True, False]),
    ([-100, -100, 3], [False, False, True]),
    ([1, 2, 3], [True, True, True]),
    ([0, 1, 1], [False, True, True]),
])  # fmt: skip
def test_labels_are_a_mask(mask: list[int], trained: list[bool]):
    found = token_ids([1, 2, 3], mask, Reads.of({"form": "tokens", "mask": "labels"}))
    assert isinstance(found, TokenIds) and found.trained is not None
    assert found.trained.tolist() == trained
