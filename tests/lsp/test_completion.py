"""What is offered where a spec goes on: the cursor is `|`."""

from pathlib import Path

import called_curves
import pytest

from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.model import Model
from xtrain.dsl.schema.setting import settings_of
from xtrain.lsp.analysis import OpenSpecs
from xtrain.lsp.completion import Suggestion, complete

ROOT = Path(__file__).parents[2]
PATH = str(ROOT / "specs" / "written.xtrain")
REST = """\
use "sums.py"
let width = 64
param steps = 10 steps
experiment e { budget = steps }
model qwen3 { dim = width, layers = 1, heads = 1 }
tokenizer bytes
dataset web { source = synthetic() }
dataset drills { source = sums(count = 20) }
mixture { web = 1 }
batch { sequence = 64 }
optimizer adamw { lr = 1e-3 }
"""


def offered(text: str, rest: str = REST) -> list[Suggestion]:
    """What is offered at the `|` of a text behind a spec that is right."""
    text = f"{rest}\n{text}"
    offset = text.index("|")
    specs = OpenSpecs()
    specs.open(PATH, text[:offset] + text[offset + 1 :])
    return complete(specs.analysis(PATH), PATH, offset)


@pytest.mark.parametrize(("text", "expected"), [
    ("|", {*blocks.KINDS, "let", "param", "include", "use", "every", "on", "collate"}),
    ("model |", {"qwen3", "llama", "deepseek_v3"}),
    ("model qw|", {"qwen3"}),
    ("parallel {\n  |", {"tp", "cp", "pp", "ep", "fsdp", "stack"}),
    ("parallel {\n  fsdp auto { |", {"replicate", "reduce", "reshard", "sync", "offload"}),
    ("parallel {\n  fsdp auto {\n    re|\n\nlog {}", {"replicate", "reduce", "reshard"}),
    ("parallel { fsdp |", {"auto", "width", "steps"}),
    ("parallel { pp 2 { schedule = |", {"gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"}),
    ("parallel { tp 2 { sequence = |", {"true", "false"}),
    ("optimizer adamw { lr = 1e-3, |", {"betas", "weight_decay", "clip", "eps"}),
    ("experiment e { budget = 100 |", {"steps", "tokens", "epochs"}),
    ("experiment e { budget = 100 st|", {"steps"}),
    ("launch { time_limit = 3 |", {"s", "min", "h", "d"}),
    ("every |", {"step", "width", "steps"}),
    ("every 10 |", {"steps", "tokens", "epochs", "min", "%"}),
    ("every 10 steps |", set(blocks.ACTIONS)),
    ("every 10 steps ev|", {"eval"}),
    ("every 10 steps eval |", {"web", "drills", "then"}),
    ("every 10 steps log then |", {"eval", "checkpoint"}),
    ("every steps eval web { |", {"batches", "answers"}),
    ("every 10 steps log then eval web { |", {"batches", "answers"}),
    ("on |", set(blocks.EVENTS)),
    ("on sigterm |", set(blocks.ACTIONS)),
    ("on nan(3) |", {"skip", "rollback"}),
    ("phase late { from = 3 steps, mix = { |", {"web", "drills"}),
    ("mixture { |", {"web", "drills", "temperature", "exact"}),
    ("checkpoint { best = |", {"eval.web.loss", "none"}),
    ("dataset x { source = |", {"jsonl", "text", "sums", "python_stdlib"}),
    ("dataset x { source = sums(|", {"count", "seed"}),
    ("dataset x { source = synthetic(|", {"documents", "length"}),
    ("collate = |", {"to_tensor", "flatten", "pack"}),
    ("collate = to_tensor -> |", {"flatten", "shift_tokens"}),
    ("collate = pack(|", {"method", "group", "align"}),
    ("scheduler |", {"cosine", "wsd"}),
    ("loss |", {"cross_entropy"}),
    ("precision { compute = |", {"auto", "bf16", "fp32"}),
    ("precision { compute = fp8 { |", {"recipe", "rest", "skip"}),
    ("precision { compute = fp8 { recipe = |", {"tensorwise", "rowwise", "rowwise_with_gw_hp"}),
    ("let other = |", {"width", "steps", "min", "env"}),
    ("cluster |", {"h100", "cpu", "other"}),
    ('include "|', {"quickstart.xtrain", "chat.xtrain"}),
    ('use "|', {"sums.py", "chain.py"}),
    ('dataset x { source = jsonl("|', {"specs/", "README.md"}),
    ('dataset x { source = jsonl("specs/su|', {"sums.py"}),
    ('tokenizer "sp|', {"specs/"}),
])  # fmt: skip
def test_what_may_follow(text: str, expected: set[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    assert expected <= {each.label for each in offered(text)}


@pytest.mark.parametrize(("text", "unexpected"), [
    ("parallel {\n  |", {"model", "let", "dim"}),
    ("model qwen3 {\n  |", {"experts", "model"}),  # of families with experts
    ("batch { rows = 2, |", {"rows"}),  # is given
    ("every 10 steps |", {"web"}),
    ('use "|', {"quickstart.xtrain"}),
    ("launch { time_limit = 3 |", {"steps", "GiB"}),
    ("dataset x { holdout = 3 |", {"steps"}),
])  # fmt: skip
def test_what_may_not_follow(text: str, unexpected: set[str]):
    found = {each.label for each in offered(text)}
    assert found and not unexpected & found


@pytest.mark.parametrize("text", [
    'include |"base.xtrain"', 'include "base.xtrain"|', "# a comm|ent", "batch { rows = 5|", 'experiment "a na|me" {}',
])  # fmt: skip
def test_nothing_is_offered_in_comments_numbers_and_names(text: str):
    assert offered(text) == []


def test_what_is_written_takes_the_place_of_the_word():
    text = "batch { ro|ws = 4 }"
    (row,) = [each for each in offered(text) if each.label == "rows"]
    start = len(REST) + 1 + text.index("ro")
    assert (row.start, row.end, row.text) == (start, start + 4, "rows")  # ` = ` is there already
    (row,) = [each for each in offered("batch { ro|") if each.label == "rows"]
    assert row.text == "rows = " and "global batch size" in row.doc


def test_what_must_be_given_comes_first():
    first = [each.label for each in offered("model qwen3 {\n  |", rest="tokenizer bytes")][:3]
    assert first == sorted(n for n, (_, meta) in settings_of(Model).items() if n in ("dim", "layers", "heads"))


def test_what_is_offered_is_explained():
    for text in ("|", "model qwen3 {\n  |", "checkpoint { |", "every 10 steps |", "dataset x { source = |"):
        found = offered(text, rest="")
        assert found and all(each.detail or each.doc for each in found)
    blocks_offered = {each.label: each for each in offered("|", rest="") if each.kind == "block"}
    assert blocks_offered.keys() == blocks.KINDS.keys()
    assert all(each.detail and name in each.doc for name, each in blocks_offered.items())


def test_every_setting_of_every_block_is_offered():
    for kind, block in blocks.KINDS.items():
        label = blocks.label_of(block)
        words = (*blocks.choices_of(label.type), "NAME", "1")[0] if label is not None else ""
        missing = settings_of(block).keys() - {each.label for each in offered(f"{kind} {words} {{ |", rest="")}
        only = {name for name in missing if settings_of(block)[name][1].only}
        assert missing == only, kind


def test_calls_of_another_kind_are_offered_where_they_are_values(monkeypatch: pytest.MonkeyPatch):
    def found(text: str) -> dict[str, str]:
        specs, offset = OpenSpecs(), len(REST) + text.index("|")
        specs.open(PATH, REST + text.replace("|", ""))
        analysis = specs.analysis(PATH)
        with called_curves.known(monkeypatch):
            return {each.label: each.text for each in complete(analysis, PATH, offset)}

    values = found("bend { by = |")
    assert {"line": "line()", "wave": "wave()", "auto": "auto"}.items() <= values.items()
    assert not {"text", "synthetic", "pack"} & set(values), "these are sources and links"
    assert "slope" in found("bend { by = line(|")
    assert {"line", "auto"} <= set(found("bend { by = wave(by = |"))
    assert "line" not in found("dataset x { source = |")


def test_what_a_sweep_varies_is_offered_a_step_at_a_time():
    first = {each.label: each.text for each in offered("sweep {\n  |")}
    assert first["optimizer"] == "optimizer." and first["steps"] == "steps in " and first["trials"] == "trials = "
    assert not {"launch", "workspace", "sweep", "width"} & set(first)
    assert {"lr", "betas", "weight_decay"} <= {each.label for each in offered("sweep {\n  optimizer.|")}
    (rate,) = [each for each in offered("sweep {\n  optimizer.l|\n}") if each.label == "lr"]
    assert rate.text == "lr in " and rate.end - rate.start == 1
    assert "reduce" in {each.label for each in offered("sweep { parallel.fsdp.|")}
    assert {"web", "drills"} == {each.label for each in offered("sweep { dataset.|")}
    assert "holdout" in {each.label for each in offered("sweep { dataset.web.|")}
    assert [each.text for each in offered("sweep { optimizer.lr in |")] == ["[", "log(", "uniform("]
    assert offered("sweep { nothing.|") == [] == offered("sweep { optimizer.lr.|")
