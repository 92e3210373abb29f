"""`xtrain coord-check`: specs of other sizes, the exponent of growth, and a check that finds it."""

import json
from pathlib import Path

import pytest

from xtrain.cli.coord_check import _exponent, _page
from xtrain.cli.main import main
from xtrain.dsl.load import load_spec
from xtrain.planner.compile import compile_plan
from xtrain.planner.review.sized import Unsized, sized

SPEC = """
experiment grows {{ budget = 1_000 steps }}
model qwen3 {{ dim = 64, layers = 2, heads = 4, kv_heads = {kv}, head_dim = 16, ffn = 96, init_std = 0.1 }}
tokenizer bytes
dataset code {{ source = python_stdlib(), holdout = 5% }}
batch {{ sequence = 64, rows = 4 }}
optimizer adamw {{ lr = 3e-2 }}
{more}
every 10 steps eval code {{ batches = 1 }}
"""
MUP = "parametrization { base_width = 16 }"


@pytest.fixture
def write(tmp_path: Path):
    def write(more: str = "", kv: int = 2) -> Path:
        path = tmp_path / "grows.xtrain"
        path.write_text(SPEC.format(more=more, kv=kv))
        return path

    return write


def test_sizes_grow_in_proportion(write):
    spec = load_spec(write()).require()
    arch = compile_plan(spec).plan.architecture  # type: ignore[union-attr]
    wide = sized(spec, arch, steps=3, width=128).model
    assert (wide.dim, wide.heads, wide.kv_heads, wide.head_dim, wide.ffn) == (128, 8, 4, 16, 192)  # type: ignore[attr-defined]
    deep = sized(spec, arch, steps=3, depth=7)
    assert (deep.model.layers, deep.model.dim, deep.experiment.budget.value, deep.ticks) == (7, 64, 3, ())  # type: ignore[attr-defined]
    with pytest.raises(Unsized, match=r"width 48 would have 1.5 for `kv_heads`: take multiples of 32"):
        sized(spec, arch, steps=3, width=48)
    spec = load_spec(write(kv=1)).require()
    arch = compile_plan(spec).plan.architecture  # type: ignore[union-attr]
    assert sized(spec, arch, steps=3, width=16).model.kv_heads == 1  # type: ignore[attr-defined]


def test_growth_is_a_power_of_the_size():
    assert _exponent({64: 3.0, 128: 6.0, 512: 24.0}) == pytest.approx(1)
    assert _exponent({64: 8.0, 256: 4.0}) == pytest.approx(-0.5)
    assert not _exponent({64: 8.0, 256: float("nan")}) <= 0.2  # a loss that is not finite is no good sign
    sizes = {64: {"logits": [9.0, 1.0]}, 256: {"logits": [9.0, 2.0]}}
    table = "\n".join(_page("width", sizes, {"logits": 0.5}, 2))
    assert "|         2 | width^0.50 |" in table and "grows with the width: logits" in table


@pytest.mark.parametrize(("asked", "text"), [
    (["--widths", "64"], "one size shows no growth"),
    (["--widths", "64", "65"], "take multiples of 32"),
    (["--widths", "64", "0"], "is not a number of features"),
    (["--set", "loss.kind=bradley_terry"], "error"),
])  # fmt: skip
def test_what_shows_no_growth_is_refused(write, capsys, asked, text):
    with pytest.raises(SystemExit) if "0" in asked else pytest.MonkeyPatch.context():
        assert main(["coord-check", str(write()), *asked]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_standard_models_grow_and_parametrized_ones_do_not(write, tmp_path, capsys):
    asked = ["--widths", "32", "64", "128", "256", "--json"]
    assert main(["coord-check", str(write()), *asked]) == 1
    standard = json.loads(capsys.readouterr().out)
    assert main(["coord-check", str(write(MUP)), *asked, "--svg", str(tmp_path / "sizes.svg")]) == 0
    scaled = json.loads(capsys.readouterr().out)
    assert standard["growth"]["last block"] > 0.4 and standard["growth"]["logits"] > 0.4
    assert all(abs(exponent) < 0.2 for part, exponent in scaled["growth"].items())
    assert len(scaled["sizes"]["64"]["logits"]) == 5
    assert "<svg" in (tmp_path / "sizes.svg").read_text()
