"""The page a person reads: it fits, it holds the numbers that matter, it has colour only where asked for."""

import io
import re
from pathlib import Path

import pytest

from xtrain.planner.load import plan_from_spec
from xtrain.planner.render import render, render_summary
from xtrain.planner.text import Page, shows_color
from xtrain.planner.units import bytes_text, count_text, flops_text, plural

SPECS = sorted((Path(__file__).parents[2] / "specs").glob("*.xtrain"))
ESCAPE = re.compile(r"\x1b\[\d+m")


def made(path):
    compiled = plan_from_spec(path)
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_the_page_of_every_spec_fits(path):
    plan = made(path)
    lines = render(plan).splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 100
    assert all(line == line.rstrip() for line in lines)
    colored = render(plan, color=True)
    assert ESCAPE.search(colored)
    assert [line.rstrip() for line in ESCAPE.sub("", colored).splitlines()] == lines


def test_the_page_says_what_matters(plan):
    model = "model qwen3_moe { dim = 64, layers = 4, heads = 8, kv_heads = 4, experts = 8 }"
    text = render(plan(model=model, parallel="parallel { fsdp 2, pp 2 }", every="every 10 steps eval code"))
    for words in (
        "tiny: 100 steps on 4 ranks",
        "active",
        "2,048  8 rows · 256 tokens",
        "each rank as pp.fsdp",
        "0.0  0.1  1.0  1.1",
        "activations not estimated",
        "setup.parallel.expert_fsdp",
        "to_tensor → flatten → shift_tokens → pack → microbatches",
        "every 10 steps  eval code",
    ):
        assert re.sub(r"\s+", " ", words) in re.sub(r"\s+", " ", text), words


def test_the_page_says_where_offloaded_states_lie(plan):
    assert "a rank, in host memory;" in render(plan(parallel="parallel { fsdp 2 { offload = true } }"))
    assert "host memory" not in render(plan(parallel="parallel { fsdp 2 }"))


def test_large_and_small_grids(plan):
    assert "each rank as" not in render(plan(parallel="parallel { fsdp 64, tp 2 }"))
    spread = render(plan(parallel="parallel { fsdp 4, tp 2 }", launch="launch { nodes = 2 }"))
    assert "| 2.0" in spread


def test_the_summary_is_short(plan):
    lines = render_summary(plan(parallel="parallel { fsdp 2 }")).splitlines()
    assert 3 <= len(lines) <= 5 and max(map(len, lines)) <= 100
    assert "fsdp 2" in lines[2]


def test_colour_is_for_terminals(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert shows_color(Terminal()) and not shows_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not shows_color(Terminal())


def test_tables_give_way_in_the_last_column():
    page = Page()
    page.table([("name", "x" * 200), ("longer name", "y")])
    first, second = str(page).splitlines()
    assert len(first) == 100 and first.endswith("…")
    assert second == "  longer name  y"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(1536), "1.50 KiB"),
        (bytes_text(130 * 2**20), "130 MiB"),
        (count_text(8_030_261_248), "8.03B"),
        (count_text(999), "999"),
        (flops_text(51.47e9), "51.5 GF"),
        (plural(1, "batch"), "1 batch"),
        (plural(2000, "matrix"), "2,000 matrices"),
    ],
)
def test_numbers_as_people_read_them(text, expected):
    assert text == expected
