"""From text to `Spec`: merging, includes, constants, `--set`, origins, the resolved text."""

from pathlib import Path

import attrs
import pytest

from xtrain.dsl.diagnostics.diagnostic import SpecErrors
from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.setting import AUTO
from xtrain.dsl.values import Quantity

BASE = (Path(__file__).parent / "data" / "quickstart.xtrain").read_text(encoding="utf-8")

DATA = Path(__file__).parent / "data"


def test_the_quickstart():
    loaded = load_spec(DATA / "quickstart.xtrain")
    assert not loaded.diagnostics
    spec = loaded.require()
    assert spec.experiment.budget == Quantity(600, "steps")
    assert spec.model.family == "qwen3" and spec.model.head_dim is AUTO
    assert spec.optimizer.lr == 3e-3 and spec.optimizer.betas == (0.9, 0.95)
    assert spec.datasets["stdlib"].holdout.fraction == 0.05
    assert [len(tick.actions) for tick in spec.ticks] == [1, 2, 1]
    assert [event.event for event in spec.events] == ["finish", "sigterm"]
    assert spec.events[0].actions[0].batches is None


def test_the_taste_of_the_language_has_nothing_wrong():
    loaded = load_spec(DATA / "taste.xtrain")
    assert not loaded.diagnostics
    events = loaded.require().events
    assert [(event.event, event.count) for event in events] == [("nan", 3), ("sigterm", None)]
    assert loaded.require().ticks[3].actions[0].limit == Quantity(60, "seconds")


def test_a_spec_with_mistakes_is_none(tmp_path):
    (tmp_path / "wrong.xtrain").write_text("batch { sequence = many }\n")
    loaded = load_spec(tmp_path / "wrong.xtrain")
    assert loaded.spec is None
    with pytest.raises(SpecErrors) as raised:
        loaded.require()
    assert raised.value.diagnostics is loaded.diagnostics


@pytest.mark.parametrize("name", ["quickstart", "every_form"])
def test_the_resolved_text_loads_to_an_equal_spec(name, tmp_path):
    loaded = load_spec(DATA / f"{name}.xtrain")
    assert not loaded.diagnostics, loaded.diagnostics.render()
    copy = tmp_path / "resolved.xtrain"
    copy.write_text(loaded.resolved_text(), encoding="utf-8")
    again = load_spec(copy)
    assert not again.diagnostics, again.diagnostics.render()
    assert again.spec == loaded.spec
    assert again.resolved_text() == loaded.resolved_text()


def test_every_setting_has_an_origin():
    spec = load_spec(DATA / "every_form.xtrain").require()
    paths = "model model.family model.router.aux_loss parallel.tp parallel.tp.size dataset.c++ dataset.web.source"
    for path in f"{paths} collate every.1 every.1.every every.1.actions.0.dataset on.2".split():
        origin = spec.origins[path]
        assert origin.kind in ("text", "let", "param", "set") and origin.span is not None, path
    assert spec.origins["model.dim"].kind == "param"
    assert spec.origins["model.heads"].kind == "let"
    assert spec.origins["launch.nodes"].span.source.path.endswith("cluster.xtrain")
    assert spec.origins["dataset.web.text"].kind == "default"
    quick = load_spec(DATA / "quickstart.xtrain").require()
    assert quick.origins["loss.chunk"].kind == "default"
    assert "model.experts" not in quick.origins


def test_later_blocks_win_field_by_field(good):
    before = 'include "good.xtrain"\nbatch { micro = 4 }\noptimizer { lr = 1e-4 }\n'
    spec = good('include "before.xtrain"\nbatch { micro = 2, accumulate = 3 }\nmodel llama', base=False, before=before)
    assert (spec.batch.sequence, spec.batch.micro, spec.batch.accumulate, spec.batch.rows) == (512, 2, 3, 32)
    assert spec.optimizer.kind == "adamw" and spec.optimizer.lr == 1e-4 and spec.optimizer.clip == 1.0
    assert spec.model.family == "llama" and spec.model.dim == 192


ONE_FILE_TWICE = [
    ("phase p { from = 30% }\nphase p { from = 60%, lr_scale = 2 }", "X206", "from", "`from` of `phase p`"),
    ("phase p { from = 30% }\nphase p { from = 30% }", "X206", "from", "`from` of `phase p`"),
    ('dataset web { source = text("a") }\ndataset web { source = text("b") }', "X206", "source", "`dataset web`"),
    ("optimizer adamw { lr = 1 }\noptimizer adamw { lr = 2 }", "W205", "lr", "`lr` of `optimizer`"),
    ("scheduler cosine\nscheduler wsd { warmup = 2 steps }", "W205", "scheduler wsd", "the label of `scheduler`"),
    ("parallel { tp 2 }\nparallel { tp 4 }", "W205", "tp 4", "the label of `tp`"),
    ("parallel { tp 2 { loss = true } }\nparallel { tp { loss = false } }", "W205", "loss", "`loss` of `tp`"),
    ("mixture { stdlib = 1 }\nmixture { stdlib = 2 }", "W205", "stdlib", "`stdlib` of `mixture`"),
    ("collate = pack\ncollate = pack(sequential)", "X206", "collate", "`collate`"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "code", "place", "what"), ONE_FILE_TWICE, ids=[case[0] for case in ONE_FILE_TWICE])
def test_what_one_file_gives_twice_is_reported_with_both_places(load, text, code, place, what):
    (diagnostic,) = load(text).diagnostics
    assert diagnostic.code == code and what in diagnostic.message
    assert diagnostic.span is not None and diagnostic.span.text == place
    ((_, first),) = diagnostic.notes
    assert first is not None and first.start < diagnostic.span.start and first.source is diagnostic.span.source


@pytest.mark.parametrize("text", [text for text, *_ in ONE_FILE_TWICE])
def test_an_including_file_may_give_it_again(load, text):
    first, second = text.split("\n")
    assert not load(f'include "first.xtrain"\n{second}', first=first).diagnostics


def test_blocks_of_one_file_share_the_settings(good):
    spec = good("phase p { from = 30% }\noptimizer { lr = 1 }\nphase p { lr_scale = 2 }\noptimizer { clip = 2 }")
    assert (spec.phases["p"].from_, spec.phases["p"].lr_scale) == (Quantity(30, "%"), 2.0)
    assert (spec.optimizer.lr, spec.optimizer.clip) == (1.0, 2.0)


def test_nested_blocks_merge_too(good):
    spec = good("parallel { tp 2 { sequence = false } }\nparallel { tp { loss = false }, pp 2 }")
    assert (spec.parallel.tp.size, spec.parallel.tp.sequence, spec.parallel.tp.loss) == (2, False, False)
    assert spec.parallel.pp.size == 2


def test_none_is_a_label_too(good):
    assert good("activation none").activation.mode == "none"
    spec = good('include "before.xtrain"\nactivation none\ncompile', before="activation full { every = 2 }")
    assert (spec.activation.mode, spec.activation.every, spec.compile.mode) == ("none", 2, "default")


def test_datasets_of_different_names_are_different_things(good):
    spec = good('dataset web { source = text("a") }\ndataset stdlib { holdout = 1% }\ndataset web { text = "t" }')
    assert list(spec.datasets) == ["stdlib", "web"]
    assert spec.datasets["stdlib"].holdout == Quantity(1, "%")
    assert spec.datasets["web"].source.patterns == ("a",) and spec.datasets["web"].text == "t"


def test_an_included_spec_is_overridden_by_the_one_that_includes_it(good):
    spec = good(
        'include "a"\nbatch { micro = 4 }'.replace('"a"', '"a.xtrain"'),
        a='include "sub.xtrain"\nbatch { micro = 1, accumulate = 7 }',
        sub="batch { micro = 9 }\nevery 7 steps log",
    )
    assert (spec.batch.micro, spec.batch.accumulate) == (4, 7)
    assert spec.ticks[-1].every == Quantity(7, "steps")


def test_an_include_starts_at_the_folder_of_its_file(load, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.xtrain").write_text('include "b.xtrain"')
    (tmp_path / "sub" / "b.xtrain").write_text("batch { micro = 3 }")
    loaded = load('include "sub/a.xtrain"')
    assert loaded.require().batch.micro == 3
    paths = ["spec.xtrain", "good.xtrain", "sub/a.xtrain", "sub/b.xtrain"]
    assert [source.path for source in loaded.sources] == paths


def test_constants_in_any_order(good):
    spec = good("batch { sequence = c }\nlet c = b * 2\nlet b = a + 1\nparam a = 127")
    assert spec.batch.sequence == 256


def test_a_let_stays_in_its_file_and_a_param_does_not(load, codes):
    loaded = load('include "a.xtrain"\nbatch { sequence = width }', a="param width = 256")
    assert loaded.require().batch.sequence == 256
    assert codes('include "a.xtrain"\nbatch { sequence = hidden }', a="let hidden = 256") == ["X202"]
    assert codes('include "a.xtrain"\nlet n = 4\nbatch { sequence = n, micro = m }',
                 a="let n = 5\nparam m = n") == []  # fmt: skip


def test_unused_constants_are_warned_of(load):
    loaded = load("let a = 1\nparam b = 2\nlet c = 3\nlet d = c\nbatch { micro = d }")
    assert [(d.code, d.severity, d.span.text) for d in loaded.diagnostics] == [
        ("W201", "warning", "a"),
        ("W202", "warning", "b"),
    ]
    assert loaded.spec is not None


def test_labels_that_are_numbers_may_be_constants(good):
    assert good("let ranks = 4\nparallel { tp ranks, pp 2 }").parallel.tp.size == 4
    assert list(good('let web = 3\ndataset web { source = text("a") }\nbatch { micro = web }').datasets)[1] == "web"


@pytest.mark.parametrize(("override", "path", "value"), [
    ("optimizer.lr=1e-3", "optimizer.lr", 1e-3),
    ("parallel.tp=2", "parallel.tp.size", 2),
    ("parallel.tp.size=2", "parallel.tp.size", 2),
    ("parallel.tp.sequence=false", "parallel.tp.sequence", False),
    ("parallel.fsdp=auto", "parallel.fsdp.size", AUTO),
    ("experiment.budget=20 steps", "experiment.budget", Quantity(20, "steps")),
    ("experiment.name=other", "experiment.name", "other"),
    ("dataset.stdlib.holdout=7%", "dataset.stdlib.holdout", Quantity(7, "%")),
    ("workspace.root=/tmp/a b", "workspace.root", "/tmp/a b"),
    ('workspace.root="quoted"', "workspace.root", "quoted"),
    ("workspace.lineage=none", "workspace.lineage", None),
    ("launch.device=cpu", "launch.device", "cpu"),
    ("parallel.pp.schedule=1f1b", "parallel.pp.schedule", "1f1b"),
    ("parallel.pp.layers=[3, 1]", "parallel.pp.layers", (3, 1)),
    ("activation=full", "activation.mode", "full"),
    ("activation=none", "activation.mode", "none"),
    ("compile.mode=none", "compile.mode", "none"),
    ("tokenizer=assets/tok", "tokenizer.source", "assets/tok"),
    ("model.family=llama", "model.family", "llama"),
    ("model=llama", "model.family", "llama"),
    ("scheduler=linear", "scheduler.kind", "linear"),
    ("batch.sequence = 4 * 128", "batch.sequence", 512),
    ("optimizer.betas=[0.8, 0.9]", "optimizer.betas", (0.8, 0.9)),
    ("checkpoint.keep=none", "checkpoint.keep", None),
    ("batch.micro=2 * width", "batch.micro", 8),
    ('dataset.stdlib.source=text("a","b")', "dataset.stdlib.source.patterns", ("a", "b")),
])  # fmt: skip
def test_set(load, override, path, value):
    spec = load("param width = 4\nmodel qwen3 { ffn = width }", override).require()
    found = spec
    for part in path.replace("dataset.", "datasets.").split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value
    written = path.removesuffix(".patterns")
    assert spec.origins[written].kind == "set" and spec.origins[written].span.source.path == "--set"


def test_set_replaces_a_param_everywhere(good):
    spec = good("param width = 64\nlet ffn = 4 * width\nmodel qwen3 { dim = width, ffn = ffn }", "width=128")
    assert (spec.model.dim, spec.model.ffn) == (128, 512)
    assert spec.origins["model.dim"].kind == "set"
    spec = good("param a = 1\nparam b = a\nparam c = b\nbatch { micro = c, accumulate = a }", "b=7", "a=2")
    assert (spec.batch.micro, spec.batch.accumulate) == (7, 2)
    spec = good("param a = 1\nparam b = a\nparam c = b\nbatch { micro = b, accumulate = c }", "c=7", "a=2")
    assert (spec.batch.micro, spec.batch.accumulate) == (2, 7)


@pytest.mark.parametrize(
    ("default", "value", "fits"),
    [
        ("1", "2", True), ("1", "2.5", False), ("1", '"2"', False), ("1", "2 steps", False), ("1", "true", False),
        ("1.0", "2", True), ("1.0", "2.5", True), ("1 step", "2 steps", True), ("1 step", "2 tokens", False),
        ("1 step", "2", False), ("true", "false", True), ("true", "1", False), ('"a"', "b c", True),
    ],
)  # fmt: skip
def test_the_default_of_a_param_fixes_its_type(load, default, value, fits):
    loaded = load(f"param p = {default}\nlet used = [p]\n", f"p={value}")
    assert [d.code for d in loaded.diagnostics if d.severity == "error"] == ([] if fits else ["X310"])


@pytest.mark.parametrize(("override", "code", "marked", "hint"), [
    ("optimizer.lr=abc", "X202", "abc", None),
    ("optimizer.lr=", "X218", "optimizer.lr=", None),
    ("lr", "X218", "lr", None),
    ("optimzer.lr=1", "X217", "optimzer", "did you mean `optimizer`?"),
    ("lr=1", "X217", "lr", "did you mean `optimizer.lr`?"),
    ("learning_rate=1", "X217", "learning_rate", "did you mean `optimizer.lr`?"),
    ("holdout=1%", "X217", "holdout", "did you mean `dataset.stdlib.holdout`?"),
    ("batch_size=4", "X217", "batch_size",
     "`rows` is the batch of a step on all ranks, `micro` the rows of one forward on a rank"),
    ("scheduler.min_lr=2e-5", "X217", "min_lr",
     "did you mean `floor`? `floor` is the final rate as a share of the peak: 100% · min_lr / `lr` of `optimizer`"),
    ("warmup_ratio=0.03", "X217", "warmup_ratio", "did you mean `scheduler.warmup`? a share of 0.03 is `3%`"),
    ("save_steps=50", "X217", "save_steps", "write `every 500 steps checkpoint` at the top level"),
    ("sequence=1", "X217", "sequence", "did you mean `batch.sequence` or `parallel.tp.sequence`?"),
    ("optimizer.rl=1", "X217", "rl", "did you mean `lr`?"),
    ("dataset.stdlb.holdout=1%", "X217", "stdlb", "did you mean `stdlib`?"),
    ("dataset.holdout=1%", "X217", "holdout", None),
    ("optimizer.lr.x=1", "X217", "x", None),
    ("batch=4", "X217", "batch=4", None),
    ("batch.micro=2.5", "X306", "2.5", None),
    ("model.family=lama", "X305", "lama", "did you mean `llama`?"),
    ("batch.micro=(2", "X103", "(", None),
    ("batch.micro=2, 3", "X101", "3", None),
    ("optimizer=sgd { lr = 1e-3 }", "X101", "{ lr = 1e-3 }", None),
    ("precision.compute=fp8 { recipe = rowwise }", "X101", "{ recipe = rowwise }", None),
    ("=3", "X218", "=3", None),
    ("..=3", "X217", "", None),
])  # fmt: skip
def test_mistakes_of_set(load, override, code, marked, hint):
    loaded = load("", override)
    first = next(iter(loaded.diagnostics))
    assert first.code == code
    assert first.span.source.path == "--set"
    assert first.span.text == marked
    assert hint is None or first.hint == hint
    assert loaded.spec is None


def test_files_that_cannot_be_read(tmp_path, monkeypatch, load):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.xtrain").write_text("")
    (tmp_path / "latin.xtrain").write_bytes(b"a = 1\n# caf\xe9\n")
    for path, code, text in [
        ("god.xtrain", "X120", "no such file"),
        (".", "X120", "folder"),
        ("a\0b", "X120", "cannot read"),
        ("x" * 5000, "X120", "cannot read"),
        ("latin.xtrain", "X121", "0xe9 in line 2"),
    ]:
        loaded = load_spec(path)
        (error,) = loaded.diagnostics
        assert loaded.spec is None and error.code == code and text in error.message
    assert next(iter(load_spec("god.xtrain").diagnostics)).hint == "did you mean `good.xtrain`?"
    assert [d.code for d in load('include "latin.xtrain"').diagnostics] == ["X121"]


def test_a_byte_order_mark_and_crlf_are_accepted(tmp_path):
    text = (DATA / "quickstart.xtrain").read_text(encoding="utf-8")
    path = tmp_path / "spec.xtrain"
    path.write_bytes(("\ufeff" + text.replace("\n", "\r\n")).encode())
    loaded = load_spec(path)
    assert not loaded.diagnostics
    assert loaded.spec == load_spec(DATA / "quickstart.xtrain").spec


def test_a_broken_item_does_not_make_its_field_missing(codes):
    assert codes("batch { sequence = }\n", base=False) == ["X106", "X205"]
    assert codes("batch { = 512 }\n", base=False) == ["X101", "X205"]
    assert codes("model = \noptimizer adamw { lr = 1e-3 ]}\n", base=False) == ["X106", "X104"]


def test_broken_files_say_nothing_of_missing_blocks(codes):
    assert codes("experiment a {\n", base=False) == ["X103"]
    assert codes('tokenizer """\n', base=False) == ["X102"]


@pytest.mark.parametrize(
    ("text", "label"),
    [("loss.chunk=8KiB", "cross_entropy"), ("scheduler.warmup=5 steps", "constant"), ("activation.every=2", "none")],
)
def test_set_needs_no_block_with_a_label(load, text, label):
    """The blocks are those of a spec that does not write them."""
    block, _, setting = text.partition(".")
    name = setting.partition("=")[0]
    base = "".join(line for line in BASE.splitlines(keepends=True) if not line.startswith(block))
    spec = load(base, text, base=False).require()
    found = getattr(spec, block)
    assert label in (getattr(found, "kind", ""), getattr(found, "mode", ""))
    assert (
        getattr(found, name) != attrs.fields_dict(type(found))[name].default
        and spec.origins[f"{block}.{name}"].kind == "set"
    )
    origin = spec.origins.get(f"{block}.kind") or spec.origins[f"{block}.mode"]
    assert origin.kind == "default"


def test_a_set_that_another_kind_has_says_so_without_a_block(codes):
    assert codes("", "cluster.price=2") == ["X207"]
    base = "".join(line for line in BASE.splitlines(keepends=True) if not line.startswith("scheduler"))
    assert codes(base, "scheduler.floor=10%", base=False) == ["X208"]
