"""Pages of keys and values: what is read is what was written, whoever shared, went round or gave back."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.plan.graph import PAGE, STATES, window_pages
from xtrain.server.engine.writing import DrawnRow, PagedRows, SamplePages

K, A = 2, 3
FULL, NARROW = nn.Identity(), nn.Identity()


class Texts:
    """Samples that grow in pages, and all that they should have there."""

    def __init__(self, window: int, count: int) -> None:
        self.window = window
        self.pages = SamplePages.with_counts({None: count, window: count})
        self.known: dict[str, list[Tensor]] = {}  # of each layer [K, S, A]

    def begin(self, sample: str, length: int, twins: int) -> bool:
        if not self.pages.take(sample, length):
            return False
        rows = PagedRows(self.pages, [sample], [length], 0)
        new = [torch.randn(K, length, A) for _ in range(2)]
        for layer, window, x in zip((FULL, NARROW), (None, self.window), new, strict=True):
            (same,) = rows.extended(layer, x[None], window=window)
            assert same is not None and torch.equal(same[0], x)
        self.known[sample] = new
        for number in range(twins):
            self.pages.share(f"{sample}.{number}", sample)
            self.known[f"{sample}.{number}"] = list(new)
        return True

    def grow(self, samples: list[str]) -> None:
        lengths = [self.known[each][0].shape[1] + 1 for each in samples]
        rows = PagedRows(self.pages, samples, lengths, 1)
        for place, (layer, window) in enumerate(((FULL, None), (NARROW, self.window))):
            new = torch.randn(len(samples), K, 1, A)
            (found,) = rows.extended(layer, new, window=window)
            seen = rows.seen(found.shape[2], window)
            for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
                known = torch.cat((self.known[sample][place], new[row]), 1)
                self.known[sample] = [known if at == place else each for at, each in enumerate(self.known[sample])]
                mask = torch.ones(found.shape[2], dtype=torch.bool) if seen is None else seen[row, 0, 0]
                expected = known[:, -min(length, window or length) :]
                order = found[row][0, mask, 0].argsort()  # positions go round
                assert torch.equal(found[row][:, mask][:, order], expected[:, expected[0, :, 0].argsort()])
                assert found[row].isfinite().all()


@pytest.mark.parametrize("window", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 3])
def test_what_is_read_is_what_was_written(window: int):
    draw, texts = random.Random(window), Texts(window, 40)
    torch.manual_seed(window)
    for turn in range(120):
        if draw.random() < 0.2:
            texts.begin(f"t{turn}", draw.randint(1, 5 * PAGE), draw.randint(0, 2))
        for sample in [each for each in texts.known if draw.random() < 0.02]:
            texts.pages.release(sample)
            del texts.known[sample]

        for sample in list(texts.known):
            while sample in texts.pages and not texts.pages.reserve(sample, texts.known[sample][0].shape[1]):
                texts.pages.release(texts.pages.newest)
        texts.known = {each: known for each, known in texts.known.items() if each in texts.pages}
        growing = [each for each in texts.known if draw.random() < 0.8]
        if growing:
            texts.grow(growing)
    for sample in texts.known:
        texts.pages.release(sample)
    for pages in texts.pages.of_window.values():
        assert sorted(pages.free) == list(range(1, 41)) and not any(pages.users) and not pages.tables


def test_samples_of_a_prompt_have_its_pages_together():
    texts = Texts(window=PAGE, count=20)
    assert texts.begin("a", 3 * PAGE + 1, twins=4)
    full, narrow = texts.pages.of_window[None], texts.pages.of_window[PAGE]
    assert 20 - len(full.free) == 4 and 20 - len(narrow.free) == window_pages(PAGE)
    everyone = list(texts.known)
    assert all(texts.pages.reserve(each, 3 * PAGE + 1) for each in everyone)
    assert 20 - len(full.free) == 3 + 5, "each has the last page for itself"
    texts.grow(everyone)
    assert not texts.pages.take("b", 20 * PAGE) and "b" not in texts.pages
    assert len(full.free) == 12, "what cannot begin has nothing"


@pytest.mark.parametrize(("written", "stops", "most", "length"), [
    (b"abcabd", {}, 6, 6),
    (b"abcabd", {}, 4, 4),
    (b"abcabd", {"stop_texts": ("abd",)}, 9, 6),  # over three tokens
    (b"abcabd", {"stop_texts": ("x", "ca")}, 9, 4),
    (b"abcabd", {"stop_tokens": {ord("c")}}, 9, 3),
    (b"abcabd", {"stop_tokens": {ord("b")}, "stop_texts": ("abc",)}, 9, 2),
    ([97, 257, 98], {"stop_at_end": True}, 9, 2),
    ([97, 257, 98], {}, 9, None),
])  # fmt: skip
def test_a_sample_ends_with_what_ends_it(written, stops, most, length):
    values = {"seed": 1, "most": most, "stop_tokens": (), "stop_texts": (), "stop_at_end": False, **stops}
    row = DrawnRow(request="a", number=0, values=values, prompt=np.array([256]))
    for number, token in enumerate(written, start=1):
        row.add(token, -0.5, ByteTokenizer())
        assert row.done == (number == length)
        if row.done:
            break
    assert row.text == [256, *list(written)[:length]] and row.positions == len(row.tokens)


def test_samples_that_share_a_state_get_their_own():
    """A page each, which begins as the shared one; where there are too few, no sample joins that would need one."""
    pages, layer = SamplePages.with_counts({STATES: 2}), nn.Identity()
    assert pages.take("a", 3 * PAGE)  # one page, whatever the length
    PagedRows(pages, ["a"], [3 * PAGE], 0).keep(layer, (torch.ones(2, 3), torch.ones(1, 4, 5)))  # of two heads and one
    pages.share("b", "a")
    assert pages.spare(64)
    pages.share("c", "a")
    assert not pages.spare(1)
    pages.release("c")
    assert pages.reserve("b", 3 * PAGE) and pages.reserve("a", 3 * PAGE) and not pages.take("d", 1)
    rows = PagedRows(pages, ["b", "a"], [3 * PAGE + 1] * 2, 1)
    heads, last = rows.kept(layer)
    assert heads.shape == (4, 3) and last.shape == (2, 4, 5) and heads.eq(1).all() and last.eq(1).all()
    heads[:2] = 2
    rows.keep(layer, (heads, last))
    assert [PagedRows(pages, [each], [1], 1).kept(layer)[0].unique().tolist() for each in "ab"] == [[1], [2]]


class Prefixed:
    """Texts whose keys and states are functions of their tokens, so that those of equal prefixes are equal."""

    def __init__(self, counts: dict[int | None, int]) -> None:
        self.pages = SamplePages.with_counts(counts)
        self.layers = {window: nn.Identity() for window in counts}
        self.texts: dict[str, list[int]] = {}

    def value(self, tokens: list[int]) -> Tensor:
        return torch.randn(K, A, generator=torch.Generator().manual_seed(hash(tuple(tokens)) % 2**40))

    def compute(self, name: str, text: list[int], ends: range, known: int) -> None:
        """Write the positions before each of `ends`, and compare what is read with `known` others."""
        one = [text[:end] for end in ends]
        rows = PagedRows(self.pages, [name] * len(ends) if known else [name], ends if known else ends[-1:], known, True)
        for window, layer in self.layers.items():
            if window == STATES:
                before = rows.kept(layer)[0] if known else None
                assert before is None or torch.equal(before, self.value(text[:known]))
                rows.keep(layer, (self.value(one[-1]),))
                continue
            new_SKA = torch.stack([self.value(each) for each in one])
            new = new_SKA[:, :, None] if known else new_SKA.transpose(0, 1)[None]
            (found,) = rows.extended(layer, new, window=window)
            for row, each in enumerate(one if known else ()):
                mask = rows.seen(found.shape[2], window)
                own = found[row] if mask is None else found[row][:, mask[row, 0, 0]]
                wanted = [
                    self.value(each[: at + 1]) for at in range(max(0, len(each) - (window or len(each))), len(each))
                ]
                assert sorted(own[0, :, 0].tolist()) == sorted(value[0, 0].item() for value in wanted)

    def begin(self, name: str, text: list[int]) -> int | None:
        """Return the number of positions that were known, if there are pages for the rest."""
        known, border = self.pages.begin(name, None, text)
        assert max(known, border) < len(text), "the last position has logits"
        if not self.pages.take(name, len(text), known):
            return None
        done = known or border or len(text)
        if not known:
            self.compute(name, text, range(1, done + 1), 0)
        while True:
            if done == border:
                self.pages.keep(name, None, text[:done], copies=True)
            if done == len(text):
                break
            end = min((done // PAGE + 1) * PAGE, len(text))
            self.compute(name, text, range(done + 1, end + 1), done)
            done = end
        self.texts[name] = text
        return known

    def grow(self, name: str, token: int) -> None:
        text = self.texts[name]
        if self.pages.reserve(name, len(text)):
            self.texts[name] = [*text, token]
            self.compute(name, self.texts[name], range(len(text) + 1, len(text) + 2), len(text))


@pytest.mark.parametrize("counts", [{None: 60}, {None: 40, 19: 40}, {None: 60, STATES: 20}, {STATES: 16}], ids=str)
def test_texts_begin_with_what_other_texts_have_left(counts: dict[int | None, int]):
    draw, texts, reused = random.Random(3), Prefixed(counts), 0
    starts = [[draw.randrange(5) for _ in range(3 * PAGE + 5)] for _ in range(3)]
    for turn in range(90):
        names = list(texts.texts)
        if draw.random() < 0.5 or not names:
            source = draw.choice([*starts, *(each.tokens.tolist() for each in texts.pages.prefixes)])
            cut, more = draw.choice([len(source), draw.randint(1, len(source))]), draw.randint(0, 9)
            text = source[:cut] + [draw.randrange(5) for _ in range(more)]
            reused += (texts.begin(f"t{turn}", text) or 0) > 0
        for name in draw.sample(names, min(2, len(names))):
            texts.grow(name, draw.randrange(5))
            if draw.random() < 0.5:
                texts.pages.keep(name, None, texts.texts[name])
            if draw.random() < 0.4:
                texts.pages.release(name)
                del texts.texts[name]
    assert reused > 5
    for name in texts.texts:
        texts.pages.release(name)
    for pages in texts.pages.of_window.values():
        held = {page for prefix in texts.pages.prefixes for page in pages.tables[prefix]}
        assert sorted([*pages.free, *held]) == list(range(1, pages.count + 1))
    assert texts.pages.prefixes
    for prefix in list(texts.pages.prefixes):
        texts.pages.drop(prefix)
    assert all(len(pages.free) == pages.count and not pages.tables for pages in texts.pages.of_window.values())


def test_what_another_text_has_left_in_a_shared_page_is_gone():
    pages, layer, text = SamplePages.with_counts({None: 9}), nn.Identity(), list(range(PAGE + 8))
    assert pages.take("a", len(text))
    x_1KSA = torch.randn(1, K, len(text), A)
    x_1KSA[:, :, PAGE + 4 :] = torch.nan
    PagedRows(pages, ["a"], [len(text)], 0).extended(layer, x_1KSA)
    pages.keep("a", None, text)
    assert pages.begin("b", None, [*text[: PAGE + 4], 99]) == (PAGE + 4, 0)
    assert pages.take("b", PAGE + 5, PAGE + 4)
    new = torch.ones(1, K, 1, A)
    (found,) = PagedRows(pages, ["b"], [PAGE + 5], PAGE + 4).extended(layer, new)
    assert torch.equal(found[:, :, : PAGE + 4], x_1KSA[:, :, : PAGE + 4]) and found[:, :, PAGE + 4].eq(1).all()
    assert found[:, :, PAGE + 5 :].eq(0).all()
