"""The pages of keys and values that a server samples with, and how many of them there are."""

from collections.abc import Mapping
from typing import Final

from xtrain.planner.blocks.block import Layer
from xtrain.planner.model.cache import plain_parameters
from xtrain.planner.plan import Estimates
from xtrain.planner.resolved import Resolved, TrainedKind
from xtrain.planner.units import BYTES

PAGE: Final = 16  # positions of a page
MOST_ROWS: Final = 64  # samples that are written at once; of more, some wait


def pages_of(positions: int) -> int:
    """That a sample of so many positions has in layers without a window."""
    return -(-positions // PAGE)


def window_pages(window: int) -> int:
    """The most pages that a window touches, wherever it begins."""
    return (window + PAGE - 2) // PAGE + 1


def sampling_pages(run: Resolved, estimates: Estimates) -> dict[int | None, int]:
    """How many pages there are, by the window of layers.

    With what a layer reads they may take what activations and the loss take at the peak of a forward_backward, of
    which nothing is there while samples are written: the peak stays where it is. One sample of the longest text has
    room in any case, beside a page for each of the others, and more than MOST_ROWS of these never need it.
    """
    assert run.spec.serve is not None
    bytes_of, longest = [_page_bytes(run, own) for own in run.pipeline.owners], pages_of(run.spec.serve.max_tokens)
    room = min(each.memory.activations + each.memory.loss for each in estimates.classes) - read_bytes(run)
    low, high = longest + MOST_ROWS, MOST_ROWS * max(longest, 2)
    while low < high:
        middle = (low + high + 1) // 2
        fits = max(_all(middle, each) for each in bytes_of) <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    windows = dict.fromkeys(window for each in bytes_of for window in each)
    return {window: _count(low, window) for window in windows}


def read_bytes(run: Resolved) -> int:
    """Of all pages of MOST_ROWS rows, those of the longest text, as one layer reads them."""
    assert run.spec.serve is not None
    pages, found = MOST_ROWS * pages_of(run.spec.serve.max_tokens), 0
    for kind in run.kinds:
        for layer in kind.block.layers():
            if layer.attends:
                found = max(found, _count(pages, layer.window) * PAGE * _position_bytes(run, kind, layer))
    return found


def pages_bytes(run: Resolved, pages: Mapping[int | None, int]) -> int:
    """On the rank with the most, with page 0, which is zero."""
    every = [_page_bytes(run, own) for own in run.pipeline.owners]
    return max(sum((pages[window] + 1) * each for window, each in own.items()) for own in every)


def _count(pages: int, window: int | None) -> int:
    """Of `pages` without a window as many are needed with one."""
    return pages if window is None else min(pages, MOST_ROWS * window_pages(window))


def _all(pages: int, bytes_of: Mapping[int | None, int]) -> int:
    return sum((_count(pages, window) + 1) * each for window, each in bytes_of.items())


def _page_bytes(run: Resolved, stages: tuple[int, ...]) -> dict[int | None, int]:
    """Of a page in all layers of a pipeline coordinate, by their window."""
    found: dict[int | None, int] = {}
    own = {layer for stage in stages for layer in range(run.pipeline.spans[stage][0], run.pipeline.spans[stage][1] + 1)}
    for kind in run.kinds:
        if count := len(own.intersection(kind.layers)):
            for layer in kind.block.layers():
                if layer.attends:
                    numbers = count * PAGE * _position_bytes(run, kind, layer)
                    found[layer.window] = found.get(layer.window, 0) + numbers
    return found


def _position_bytes(run: Resolved, kind: TrainedKind, layer: Layer) -> int:
    """Of a position in one layer. Ranks of context and data parallel have the whole of it; those of tensor parallel
    their own heads."""
    numbers = layer.cached(run.architecture, run.size("tp"), 1, plain_parameters(run, kind))
    return numbers * BYTES[run.formats.compute]
