"""The three shares against numbers worked out by hand, and against published ones."""

import pytest

from xtrain.plan.estimates import Work
from xtrain.runtime.feed.microbatch import DocumentSums
from xtrain.runtime.loop.metrics import CountedWork, Rates

# Llama 3 8B: 7,504,658,432 weights in products, 32 layers of 32 heads of 128.
PRODUCTS, ATTENTION = 6 * 7_504_658_432, 12 * 32 * 32 * 128
LLAMA_8B = Work(position=PRODUCTS, pair=ATTENTION)
AGAIN = Work(position=PRODUCTS, pair=ATTENTION, position_again=PRODUCTS // 3, pair_again=ATTENTION // 3)


def counted(*lengths: int, padding: tuple[int, ...] = ()) -> CountedWork:
    """A step of documents of some lengths, with segments of padding."""
    pairs = sum(length**2 for length in lengths)
    found = CountedWork()
    laid = pairs + sum(length**2 for length in padding)
    found.add(sum(lengths), sum(lengths) + sum(padding), DocumentSums(sum(lengths), pairs, laid))
    return found


def rates(work: Work = LLAMA_8B, devices: int = 1, peak: float | None = 989e12) -> Rates:
    return Rates(work=work, devices=devices, peak=peak)


@pytest.mark.parametrize(
    "lengths, model, hardware",
    [((4096,), 210.82, 281.10), ((1024,) * 4, 191.03, 254.71), ((2048, 1024, 512, 512), 193.51, 258.01)],
)  # fmt: skip
def test_operations_of_packed_rows(lengths, model, hardware):
    """Published for rows of 4,096 positions, in TFLOP; the second with all of the forward done again."""
    assert round(rates().model_flops(counted(*lengths)) / 1e12, 2) == model
    assert round(rates(AGAIN).hardware_flops(counted(*lengths)) / 1e12, 2) == hardware


def test_a_published_speed():
    """10,471 tokens a second of 4,096 in a document on one H200: 539 TFLOP/s, 54.5 % of what it can do."""
    documents = counted(*(4096,) * 1000)
    found = rates().of(documents, seconds=4_096_000 / 10_471)
    assert round(LLAMA_8B.position + LLAMA_8B.pair * 4096, -7) == 51_470_000_000
    assert found["tflops"] == pytest.approx(538.94, abs=0.01)
    assert found["mfu"] == pytest.approx(0.5449, abs=5e-5)
    assert found["hfu"] == found["mfu"], "nothing is done again, and nothing is padding"
    assert rates(AGAIN).of(documents, seconds=4_096_000 / 10_471)["hfu"] == pytest.approx(0.5449 * 4 / 3, abs=1e-4)


def test_causality_leaves_half_and_the_diagonal():
    work = Work(position=0, pair=2)
    assert rates(work).causal_flops(counted(3)) == 2 * (1 + 2 + 3)
    assert rates(work).causal_flops(counted(3, 1)) == 2 * (6 + 1)
    assert rates(work).model_flops(counted(3)) == 2 * 9


def test_a_window_leaves_pairs_that_lie_less_than_it_apart():
    half = Work(position=0, pair=2, windows=((None, 0.5), (2, 0.5)))
    documents = DocumentSums(8, half.pairs(5) + half.pairs(3), 0)
    assert half.pairs(5) == (25 + 5 + 2 * 4) / 2 and half.pairs(3) == (9 + 3 + 2 * 2) / 2
    found = CountedWork()
    found.add(8, 8, documents)
    # Of five positions one sees one and four see two, in the blocks with a window.
    assert rates(half).causal_flops(found) == 2 * ((15 + 9) + (6 + 5)) / 2


def test_padding_is_work_of_devices_and_of_nothing_else():
    work, step = Work(position=10, pair=1), counted(4, 2, padding=(3,))
    found = rates(work, peak=1.0).of(step, seconds=1.0)
    assert found["mfu"] == 10 * 6 + 16 + 4
    assert found["hfu"] == 10 * 9 + 16 + 4 + 9
    assert found["mfu_causal"] == 10 * 6 + 10 + 3


def test_shares_are_of_all_devices_and_tflops_of_one():
    step = counted(4096)
    alone, eight = rates().of(step, 1.0), rates(devices=8, peak=8 * 989e12).of(step, 1.0)
    assert eight["mfu"] == pytest.approx(alone["mfu"] / 8) and eight["tflops"] == pytest.approx(alone["tflops"] / 8)
    assert alone["mfu"] == pytest.approx(alone["tflops"] * 1e12 / 989e12)


def test_without_a_known_peak_there_is_no_share():
    found = rates(peak=None).of(counted(100), 2.0)
    assert set(found) == {"tflops", "valid_tokens_per_second"} and found["valid_tokens_per_second"] == 50
    assert rates().of(CountedWork(), 0.0) == {}, "no step was counted, as where each was left out"
