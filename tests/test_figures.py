"""The comparison of documented figures with new measurements."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "benchmarks" / "figures.py"


@pytest.fixture(scope="module")
def figures():
    spec = spec_from_file_location("figures", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["figures"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_table_has_rows_of_the_page(figures):
    page = figures.PAGE.read_text()
    assert all(figures.on_page(page, table) for table in figures.TABLES)


@pytest.mark.parametrize(("measured", "lines"), [
    ({"multipack": 2.0, "best_fit": 1.2}, []),
    ({"multipack": 2.39, "best_fit": 0.97}, []),
    ({"multipack": 2.41, "best_fit": 1.2}, ["uniform · 8 · 4 · 1, multipack: 2 on the page, 2.41 measured"]),
    ({"multipack": 2.0, "best_fit": 0.9}, ["uniform · 8 · 4 · 1, best_fit: 1.2 on the page, 0.9 measured"]),
])  # fmt: skip
def test_figures_that_are_more_than_a_share_away_are_named(figures, measured, lines):
    heading = "Distributing rows over data ranks"
    page = f"""# Page

## {heading}

| lengths | ranks | micro · accumulate | multipack | best_fit |
| --- | --: | --: | --: | --: |
| uniform | 8 | 4 · 1 | 2.0 | 1.2 |
| short | 8 | 4 · 1 | 1,000 | 1 |
"""
    (table,) = (table for table in figures.TABLES if table.heading == heading)
    line = {"lengths": "uniform", "ranks": 8, "micro": 4, "accumulate": 1, **measured}
    found = figures.compare(figures.on_page(page, table), table.read([json.dumps(line)]), 0.2)
    assert list(found) == lines
