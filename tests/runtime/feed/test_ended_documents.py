"""Documents that get rewards: one eos more behind each, so that their last token is read."""

import numpy as np

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.runtime.feed.documents import DocumentEncoder, TokenDocument
from xtrain.runtime.feed.records import Message, Numbered, PreferencePair, SourceRecord

EOS = ByteTokenizer.eos


def encoded(content: object, **reads: object) -> tuple[TokenDocument, TokenDocument]:
    """As it is for other losses, and for one of rewards."""
    found = []
    for ended in ({}, {"ended": True}):
        encoder = DocumentEncoder(ByteTokenizer(), {**reads, **ended})
        (document,) = encoder.encode([SourceRecord(origin="a:1", content=content)])
        assert isinstance(document, TokenDocument)
        found.append(document)
    return found[0], found[1]


def test_a_text_ends_twice():
    plain, ended = encoded("abc", form="text")
    assert ended.ids.tolist() == [*plain.ids.tolist(), EOS] and ended.ids.dtype == plain.ids.dtype
    assert ended.trained is None


def test_both_sides_of_a_pair_do():
    answers = [[Message(role="user", content="q"), Message(role="assistant", content=each)] for each in ("yes", "no")]
    pair = PreferencePair(chosen=answers[0], rejected=answers[1], prompt=1)
    plain, ended = encoded(pair, form="preference", prompt=None, template="plain")
    assert plain.first is not None and ended.first == plain.first + 1
    chosen, rejected = np.split(ended.ids, [ended.first])
    assert chosen.tolist() == [*plain.ids[: plain.first].tolist(), EOS]
    assert rejected.tolist() == [*plain.ids[plain.first :].tolist(), EOS]
    assert plain.trained is not None and ended.trained is not None
    assert ended.trained.sum() == plain.trained.sum() and not ended.trained[[ended.first - 1, -1]].any()


def test_numbers_stay_with_their_tokens():
    content = Numbered(content="ab", columns={"share": 0.5}, values={"reward": 2.0})
    plain, ended = encoded(content, form="text", values={"reward": "reward"}, columns={"share": "share"})
    assert ended.values == plain.values == {"reward": 2.0}
    assert len(ended.columns["share"]) == len(ended.ids) == len(plain.ids) + 1


def test_the_token_store_is_another():
    covers = [DocumentEncoder(ByteTokenizer(), {"form": "text", **ended}).covers for ended in ({}, {"ended": True})]
    assert covers[0] != covers[1] and "beside" not in covers[0]
