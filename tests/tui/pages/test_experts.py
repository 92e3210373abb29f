"""The load of experts: what the shares say, and the map of them."""

import math

import numpy as np
import pytest
from rich.cells import cell_len

from xtrain.tui.board.app import in_ascii
from xtrain.tui.pages.experts import (
    ExpertsPage,
    ExpertsView,
    LayerLoad,
    in_words,
    layer_loads,
    level_of,
    moved,
    of_layer,
    page,
    reordered,
)
from xtrain.tui.pages.sheet import plain


def load(*shares: float, layer: int = 0) -> LayerLoad:
    return LayerLoad(layer=layer, shares=np.array(shares))


def layers(count: int, experts: int, dead: int | None = None) -> tuple[LayerLoad, ...]:
    found = []
    for layer in range(count):
        weights = 1 + 0.4 * np.sin(np.arange(experts) * (layer + 1))
        if dead is not None:
            weights[dead] = 0
        found.append(LayerLoad(layer=layer, shares=weights / weights.sum()))
    return tuple(found)


def rows(found: ExpertsPage) -> list[str]:
    return [plain(row).rstrip() for row in found.rows]


def test_loads_are_read_from_a_record() -> None:
    record = {"step": 3, "loss": 2.0, "moe/aux_loss": 1.0, "moe/load/10": [0.5, 0.5], "moe/load/2": [1.0, 0.0]}
    found = layer_loads(record | {"moe/load/x": [1.0], "moe/load/3": [], "moe/load/4": "nan", "moe/load/5": ["nan"]})
    assert [each.layer for each in found] == [2, 10]
    assert layer_loads({}) == ()


def test_what_the_shares_of_a_layer_say() -> None:
    even, uneven, one = load(0.25, 0.25, 0.25, 0.25), load(0.7, 0.1, 0.2, 0.0), load(1.0, 0.0, 0.0, 0.0)
    assert (even.imbalance, even.entropy, even.dead) == (1.0, pytest.approx(1.0), ())
    assert (one.imbalance, one.entropy, one.dead) == (4.0, 0.0, (1, 2, 3))
    assert uneven.imbalance == pytest.approx(2.8) and (uneven.most, uneven.least) == (0, 3)
    expected = -sum(p * math.log(p) for p in (0.7, 0.1, 0.2)) / math.log(4)
    assert uneven.entropy == pytest.approx(expected)
    # Not known is not nothing.
    assert load(0.5, math.nan, 0.5).dead == () and load(0.5, math.nan, 0.5).least == 0


def test_the_load_in_words() -> None:
    said = [text for text, _ in in_words((load(0.25, 0.25, 0.25, 0.25), load(0.7, 0.1, 0.2, 0.0, layer=7)))]
    assert said == [
        "Uneven: one expert takes 2.80 times an even share.",
        "1 expert gets almost no tokens: layer 7: 3.",
        "Most loaded: expert 0 of layer 7 with 70.0% of its tokens, 2.80 times an even share.",
        "Least loaded: expert 3 of layer 7 with 0.0% of its tokens, 0.00 times an even share.",
    ]
    balanced = in_words((load(0.3, 0.2, 0.25, 0.25),))
    assert balanced[0] == ("Balanced: no expert takes more than 1.20 times an even share.", "good")
    assert balanced[1][0] == "Every expert of every layer gets tokens."
    assert in_words((load(*[1.0, *[0.0] * 7]),))[0][1] == "bad"


def test_of_many_dead_experts_a_dozen_is_named() -> None:
    lost = load(*[1.0] * 2, *[0.0] * 20)
    said = in_words((lost, load(0.0, 1.0, layer=1)))[1][0]
    assert said == ("21 experts get almost no tokens: layer 0: 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13 and 9 more.")
    assert of_layer(lost).endswith("13 and 8 more")


def test_a_layer_by_its_ends() -> None:
    assert of_layer(load(0.1, 0.6, 0.3, layer=4)) == "layer 4, experts by load  1: 60.0%  2: 30.0%  0: 10.0%"
    many = of_layer(layers(1, 64)[0])
    assert many.count("%") == 6 and "…" in many


@pytest.mark.parametrize(("width", "height"), [(200, 44), (120, 30), (80, 20), (60, 16), (40, 8), (20, 3), (5, 1)])
@pytest.mark.parametrize(("count", "experts"), [(1, 2), (4, 8), (24, 64), (64, 256)])
def test_every_size_is_filled_exactly(width: int, height: int, count: int, experts: int) -> None:
    found = page(layers(count, experts, 3 if experts > 8 else None), ExpertsView(), width, height)
    assert len(found.rows) == height and {cell_len(plain(row)) for row in found.rows} == {width}
    assert len(page((), ExpertsView(), width, height).rows) == height


def test_few_experts_are_figures() -> None:
    found = rows(page((load(0.5, 0.125, 0.375, 0.0),), ExpertsView(), 80, 16, facts=["step 60"]))
    assert found[0].endswith("─ step 60")
    assert "layer     0    1    2    3     max  entropy   dead" in found
    assert "    0  2.00 0.50 1.50    ✗   2.00×    0.703      1" in found


def test_many_experts_are_shades_that_are_distinguished_without_colour() -> None:
    shares = np.ones(64)
    shares[[3, 7, 9]] = 0, 4, 0.4
    (line,) = (line for line in rows(page((load(*shares / shares.sum()),), ExpertsView(), 120, 20)) if "×" in line)
    cells = line[6:70]
    assert cells[3] == "✗" and cells[7] == "█" and cells[9] == "░" and set(cells) - set("✗█░") == {"▒"}
    assert in_ascii(cells)[:10] == "===x===#=:"


def test_experts_that_do_not_fit_share_cells_and_a_dead_one_is_seen() -> None:
    found = rows(page(layers(64, 256, dead=100), ExpertsView(), 60, 20))
    maps = [line for line in found if "×" in line]
    assert maps and all("✗" in line[6:50] for line in maps)
    assert "more layers" in found[-1]
    wide = rows(page(layers(64, 256, dead=100), ExpertsView(), 200, 20))
    assert "each cell the most loaded of 2" in wide[-1]


def test_levels_go_from_none_to_three_times() -> None:
    assert level_of(np.array([0, 0.2, 0.3, 0.6, 0.9, 1.1, 1.3, 1.7, 2.5, 9])).tolist() == list(range(10))


def test_the_cursor_goes_through_all_layers() -> None:
    many = layers(64, 16)
    found = page(many, ExpertsView(), 80, 16)
    assert found.place == 0 and "layer 0, experts" in "\n".join(rows(found))
    down = page(many, moved(found, 40), 80, 16)
    assert down.view.layer == 40 and "layer 40, experts" in "\n".join(rows(down))
    assert page(many, moved(down, 1000), 80, 16).view.layer == 63
    assert moved(page((), ExpertsView(), 80, 16), 1) == ExpertsView()


def test_the_worst_layer_first() -> None:
    some = (load(0.5, 0.5), load(0.9, 0.1, layer=1), load(0.7, 0.3, layer=2))
    found = page(some, reordered(page(some, ExpertsView(), 80, 16)), 80, 16)
    assert found.layers == (1, 2, 0)
    assert page(some, reordered(found), 80, 16).layers == (0, 1, 2)
