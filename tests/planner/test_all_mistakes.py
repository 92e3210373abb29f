"""One spec hears of all its mistakes in one go, those of the language and those of the planner; and of no others.

In the specs below each mistake is marked where it is to be reported: `«X408|100»` is the text `100` with that code.
"""

import functools
import itertools
import re
from importlib import import_module
from pathlib import Path

import pytest
from every_setting import at, replaced
from examples import drawn
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText
from xtrain.dsl.load import load_spec
from xtrain.dsl.syntax.lexer import tokenize
from xtrain.plan.findings import INPUTS, rule_inputs
from xtrain.planner.load import check_from_spec, plan_from_spec
from xtrain.planner.rules.validate import check_spec

SPECS = Path(__file__).parents[2] / "specs"
MARK = re.compile(r"«(\w+)\|(.*?)»", re.DOTALL)

HEAD = """\
experiment e { budget = 100 steps }
tokenizer bytes
optimizer adamw { lr = 1e-3 }
"""
MODEL = "model llama { dim = 64, layers = 4, heads = 8 }\n"
CODE = "dataset code { source = python_stdlib(), holdout = 1% }\n"

GALLERY = {
    "a name, a shape, a type, a reference, a topology": """
        experiment e { «X203|sed» = 1, budget = 100 steps }
        model llama { dim = 64, layers = 4, heads = 8, head_dim = «X408|7», kv_heads = 4 }
        tokenizer bytes
        dataset code { source = python_stdlib(), holdout = 1% }
        batch { sequence = «X301|"512"» }
        optimizer adamw { lr = 1e-3 }
        every 10 steps eval «X501|nowhere»
        parallel { tp «X403|8» }
    """,
    "syntax, range, rows, warm-up, hold-out": """
        experiment e { budget = 100 steps }
        model llama { dim = 64, layers = «X304|0», heads = 8 }
        tokenizer bytes
        dataset code { source = python_stdlib(), oversized = truncate }
        batch { sequence = 256, micro = 2, rows = «X601|6», accumulate = 4 }
        optimizer adamw { lr =«X106|» }
        scheduler cosine { warmup = «X602|200 steps» }
        every 10 steps eval «X504|code»
    """,
    "an adapter, and how what is under it is stored": """
        experiment e { «X203|sed» = 1, budget = 100 steps }
        model llama { dim = 64, layers = 4, heads = 8 }
        adapter lora { rank = 4, targets = [«X435|"q_prj"»] }
        tokenizer bytes
        dataset code { source = python_stdlib() }
        batch { sequence = «X301|"512"» }
        optimizer adamw { lr = «X304|-1» }
        precision { «X210|base = nf4» }
    """,
    "groups of parameters": """
        experiment e { budget = 100 steps }
        model llama { dim = 64, layers = 4, heads = 8 }
        tokenizer bytes
        dataset code { source = python_stdlib() }
        batch { sequence = 256 }
        optimizer adamw { lr = 1e-3 }
        group «X436|"layers.9"» { lr_scale = 2 }
        group "layers.0-1" { lr_scale = 2, weight_decay = «X304|-1» }
        group «X436|"layers.1.mlp"» { optimizer sgd { lr = 1, «X208|clip» = 2 } }
        group norm { optimizer «X305|adam» { lr = 1 } }
        group embed_tokens { «X203|lr» = 2 }
    """,
    "units, an action, a tick that never fires, a chain, a format": """
        experiment e { budget = 100 steps }
        model llama { dim = 64, layers = 4, heads = 8 }
        tokenizer bytes
        dataset code { source = python_stdlib(), holdout = 1% }
        batch { sequence = 512 }
        optimizer adamw { lr = 1e-3 }
        loss cross_entropy { chunk = «X303|512 MiB + 3 steps» }
        launch { nodes = 2 }
        precision { params = «X305|fp8» }
        parallel { fsdp 4 }
        collate = «X508|flatten -> to_tensor -> pack»
        every «W601|1k steps» checkpoint
        every 10 steps «X214|evaluate» code
    """,
    "a bracket, a misspelt unit, experts, a family, a duplicate": """
        experiment e { budget = 100 «X107|stpes» }
        model qwen3_moe { dim = 64, layers = 4, heads = 8, experts = 8, experts_per_token = «X412|9» }
        tokenizer bytes
        dataset code { source = python_stdlib(), holdout = 1% }
        batch { sequence = 512, micro = 1, «X206|micro» = 2 }
        optimizer adamw {
          betas = «X103|[»0.9, 0.95
          lr = 1e-3
        }
        parallel { ep «X406|16», fsdp 16 }
    """,
    "a misspelt block, a label, context, heads, a reference in an event": """
        experiment e { budget = 100 steps }
        model llama { dim = 64, layers = 4, heads = 8, head_dim = «X408|15» }
        tokenizer bytes
        dataset code { source = python_stdlib(), holdout = 1% }
        batch { sequence = 512 }
        «X201|optimzer» adamw { lr = 1e-3 }
        scheduler «X305|cosin» { warmup = 10% }
        parallel { «X413|cp 4» { ring = 2, ulysses = 4 } }
        on finish eval «X501|coed» { batches = none } then checkpoint
    """,
    "unknown constants, a pipeline, a vocabulary, an event": """
        let width = 64
        experiment e { budget = 100 steps }
        model llama { dim = width, layers = 4, heads = 8, vocab = «X506|100», init_std = «X202|widht» }
        tokenizer bytes
        dataset code { source = python_stdlib(), holdout = 1% }
        batch { sequence = 512, accumulate = 8 }
        optimizer adamw { lr = 1e-3 }
        parallel { pp «X404|8», «X203|zp» 2 }
        on «X214|finsh» eval «X501|nothing»
    """,
    "a broken constant is mentioned once": """
        let seed =«X106|»
        experiment e { seed = seed, budget = 10 epochs }
        model llama { dim = 64, layers = 4, heads = 8, kv_heads = «X408|3» }
        tokenizer bytes
        dataset code { source = python_stdlib() }
        batch { sequence = 512, rows = «X601|6» }
        optimizer adamw { lr = «X301|"fast"» }
        parallel { fsdp 4 }
        every «X304|0%» log
    """,
    "two datasets, a missing value, the length of a row, warm-up in a share": """
        experiment e { budget = 2 epochs }
        model llama { dim = 64, layers = 4, heads = 8 }
        tokenizer bytes
        dataset code { source = python_stdlib(), holdout = 1%, bad_records = «X306|2.5» }
        «X503|dataset more» { source = python_stdlib(), «X203|oversize» = skip }
        batch { sequence = «X405|250» }
        optimizer adamw { lr = 1e-3 }
        scheduler wsd { warmup = «X602|60%», decay = 50% }
        parallel { tp 4 }
    """,
    "settings that are missing, a statement in a block, an unreadable tokenizer": """
        experiment e { budget = 100 steps }
        «X204|model llama» { dim = 64, heads = 8, kv_heads = «X408|5» }
        «X505|tokenizer "no/where"»
        dataset code { source = python_stdlib(), holdout = 1% }
        batch { «X216|every 10 steps log»
          sequence = 512
        }
        optimizer adamw { lr = 1e-3 }
        scheduler cosine { warmup = «X602|101 steps» }
    """,
    "a colon, experts where there are none, an unsupported word, a negative": """
        experiment e { budget«X105|:» 100 steps }
        model llama { dim = 64, layers = 4, heads = 8 }
        tokenizer bytes
        dataset code { source = python_stdlib(), holdout = 1% }
        batch { sequence = 512 }
        optimizer adamw { lr = «X304|-1» }
        loss «X209|kl» { }
        scheduler cosine { warmup = «X602|1k steps» }
        parallel { ep «X409|2», fsdp 2 }
    """,
    "the actions that are left keep their places": """
        experiment e { budget = 100 steps }
        model llama { dim = 64, layers = 4, heads = 8 }
        tokenizer bytes
        dataset code { source = python_stdlib(), holdout = 1% }
        batch { sequence = 512 }
        optimizer adamw { lr = 1e-3 }
        every 10 «X107|stpes» log
        every 10 steps «X214|lgo» then «X207|eval» then eval «X501|here» then checkpoint
        every «X302|3» eval «X501|there»
        every «W601|200 steps» log
    """,
    "heads over context, tokens, an unclosed string, a file's encoding of a list": """
        experiment e { budget = 1M tokens, seed = «X301|none» }
        model llama { dim = 72, layers = 4, heads = 9 }
        tokenizer bytes
        dataset code { source = python_stdlib(), holdout = 1%, text = «X102|"content» }
        batch { sequence = 510, rows = 4 }
        optimizer adamw { lr = 1e-3, betas = «X304|[0.9]» }
        parallel { tp 3, cp 2 { ulysses = «X402|2», ring = 1 } }
        every «W601|2M tokens» checkpoint
    """,
    "schedules, stages, widths, kernels, recomputation, alignment, offloading": """
        experiment e { budget = 100 steps }
        model llama { dim = 64, layers = 4, heads = 8, ffn = «X420|190», attention = «X419|mask» }
        tokenizer bytes
        dataset code { source = python_stdlib(), holdout = 1% }
        batch { sequence = 512, accumulate = «X411|5» }
        optimizer adamw { lr = 1e-3 }
        parallel {
          tp 4
          cp 2 { ring = 2 }
          pp 2 { schedule = zero_bubble, layers = «X404|[1, 2]» }
          fsdp 1 { reshard = «X416|true», offload = «X417|true» }
        }
        launch { device = cpu }
        activation full { every = «X418|9» }
        collate = «X414|to_tensor -> flatten -> shift_tokens -> pack(align = 6)»
    """,
    "copies with anything else, a word too many, a list that is none": """
        experiment e { budget = 100 steps }
        model llama { dim = 64, layers = 4, heads = 8 }
        tokenizer bytes
        dataset code { source = python_stdlib(), holdout = 1% }
        batch { sequence = 512 }
        optimizer adamw { lr = 1e-3 }
        precision { compute = «X415|bf16» }
        parallel { stack = ddp, tp «X415|2», fsdp «X415|2» { offload = «X415|true» } }
        activation selective { save = [«X305|softmax»] }
        compile { mode = «X301|3» }
    """,
    "machines that are not filled, an axis that is a setting, a pipeline that starves": """
        experiment e { budget = 100 steps }
        model llama { dim = 64, layers = 4, heads = 8, «X210|ffn 64» }
        tokenizer bytes
        dataset code { source = python_stdlib(), holdout = 1% }
        batch { sequence = 512, accumulate = «X411|2» }
        optimizer adamw { «X203|learning_rate» = 1e-3, lr = 1e-3, clip = «X301|nil» }
        parallel { pp 4, fsdp «X401|1» }
        launch { ranks_per_node = 6 }
    """,
}  # fmt: skip


def marked(text):
    """The text without its marks, and of each mark the code, the offset and the marked text."""
    plain, expected, last = "", [], 0
    for mark in MARK.finditer(text):
        plain += text[last : mark.start()]
        expected.append((mark[1], len(plain), mark[2]))
        plain, last = plain + mark[2], mark.end()
    return plain + text[last:], expected


def said(path, text):
    path.write_text(text, encoding="utf-8")
    return check_from_spec(path)


@pytest.mark.parametrize("name", GALLERY)
def test_all_mistakes_and_only_those(name, tmp_path):
    text, expected = marked(GALLERY[name])
    assert len(expected) >= 5
    found = said(tmp_path / "spec.xtrain", text)
    assert [(d.code, d.span and d.span.start, d.span and d.span.text) for d in found] == expected, found.render()
    assert [d.code for d in plan_from_spec(tmp_path / "spec.xtrain").diagnostics] == [code for code, _, _ in expected]


# What would follow from the default, or from what is left, if a mistake of the language were not minded.
CASCADES = [
    ('tokenizer "no/where"', MODEL.replace("}", ", vocab = x }"), "X202"),
    ("batch { sequence = 512, rows = 8, micro = 3 + 1 step }", "", "X303"),
    ("batch { sequence = 512, rows = 8 }", "parallel { fsdp 3, replicate = 2 }", "X203"),
    ("batch { sequence = 512, rows = 6 }", "parallel { fsdp 4 }\nlaunch 4 { nodes = 3 }", "X207"),
    ("", "dataset code { holdout = 1 }\nevery 10 steps eval code", "X302"),
    ("", "dataset code { holdout = }\nevery 10 steps eval code", "X106"),
    ("", "dataset code { holdot = 0% }\ndataset more { source = python_stdlib(), holdout = 100% }", "X203"),
    ("batch { sequense = 512, rows = 8 }", "", "X203"),
    ("", "datset web { source = python_stdlib() }\nevery 10 steps eval web", "X201"),
    ("", "dataset web = python_stdlib()\nevery 10 steps eval web", "X101"),
    ("", 'include "nowhere.xtrain"\nevery 10 steps eval web', "X120"),
    ("", "mixtur { code = 1, more = 2 }\ndataset more { source = python_stdlib() }", "X201"),
    ("", "mixture { code = 1, more = x }\ndataset more { source = python_stdlib() }", "X202"),
    ("", "mixture { code = 0, more 2 }\ndataset more { source = python_stdlib() }", "X210"),
    ("", "mixture { code = 0, more = 2 }\ndataset more { source = parket() }", "X219"),
    ("", "phase a { from = 50 }\nphase b { from = 50%, lr_scale = 2 }", "X302"),
    ("", "phase a { form = 50%, lr_scale = 2 }\nphase b { from = 50%, lr_scale = 2 }", "X203"),
    ("", "phase a { from = 50%, mix = { cod: 1 }, mix = 2 }", "X206"),
    ("", "dataset code { source = text(1), text = \"body\" }", "X301"),
    ("", "dataset code { prompt = 1, response = \"r\" }", "X301"),
    ("", "experiment e { budget = 1k stps }\nphase a { from = 2k steps, lr_scale = 2 }", "X107"),
    ("", "model llama { heads = 7, head_size = 8 }", "X203"),
    ("", "model llama { heads = 7, colour = 8 }", "X203"),
    ("", "model llama { heads = 7 }\nbatch { head_dim = 8 }", "X203"),
    ("", "model { heads = 7 }\nhead_dim = 8", "X203"),
    ("", "model llama { experts = 8 }\nparallel { ep 2, fsdp 2 }", "X208"),
    ("", "model moe { experts = 8 }\nparallel { ep 2, fsdp 2 }", "X305"),
    ("", "experiment e { budget = 1k stps }\nevery 500 steps log", "X107"),
    ("", "experiment e { bugdet = 1k steps }\nscheduler cosine { warmup = 500 steps }", "X203"),
    ("", "let n = \nlaunch { nodes = n }\nparallel { fsdp 4 }\nbatch { rows = n }", "X106"),
    ("", "let n = 3\nlet n = 4\nlaunch { nodes = n }\nparallel { fsdp 4 }", "X211"),
    ("", "parallel { fsdp 4 }\nlaunch { nodes = 3, nodes = 4 }", "X206"),
    ("", "parallel { fsdp 4 }\nlaunch { nodes = 3 }\nlaunch { nods = 4 }", "X203"),
    ("", "tp 2\nparallel { fsdp 4 }\nlaunch { ranks_per_node = 8 }", "X201"),
    ("", "parallel { fsdp 4 }\nlaunch { ranks_per_node = 8 }\nparalel { tp 2 }", "X201"),
    ("", "parallel { fsdp 4 }\nlaunch { ranks_per_node = 8 }\nmesh { tp = 2 }", "X201"),
    ("", "collate = to_tensor -> flatten -> shfit_tokens -> pack", "X219"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "more", "code"), CASCADES, ids=range(len(CASCADES)))
def test_a_mistake_of_the_language_has_no_consequences(first, more, code, tmp_path):
    batch = "" if first.startswith("batch") else "batch { sequence = 512 }\n"
    (tmp_path / "base.xtrain").write_text(f"{HEAD}{MODEL}{CODE}{batch}")
    found = said(tmp_path / "spec.xtrain", f'include "base.xtrain"\n{first}\n{more}\n')
    assert [d.code for d in found.errors] == [code], found.render()


def test_a_wrong_set_keeps_the_planner_quiet(tmp_path):
    text = f"{HEAD}{MODEL}{CODE}batch {{ sequence = 512, rows = 6 }}\nparallel {{ fsdp 4 }}\n"
    (tmp_path / "spec.xtrain").write_text(text)
    assert [d.code for d in check_from_spec(tmp_path / "spec.xtrain", ["batch.rwos=8"])] == ["X217"]
    assert [d.code for d in check_from_spec(tmp_path / "spec.xtrain", ["batch.rows=8.5"])] == ["X306"]
    assert [d.code for d in check_from_spec(tmp_path / "spec.xtrain", ["optimizer.lr=x"])] == ["X601", "X202"]


def test_a_draft_is_the_spec_where_nothing_is_wrong():
    loaded = load_spec(SPECS / "quickstart.xtrain")
    assert loaded.draft is loaded.spec is not None and not loaded.unknown_settings


# Properties -----------------------------------------------------------------------------------------------------------

RICH = """\
let width = 128
param rows = 32
experiment e { seed = 1, budget = 1M tokens }
launch { nodes = 2, ranks_per_node = 8 }
model qwen3_moe { dim = width, layers = 8, heads = 8, kv_heads = 4, head_dim = 16, ffn = 256, vocab = 300, experts = 8 }
tokenizer bytes
dataset code { source = python_stdlib(), holdout = 5% }
dataset more { source = python_stdlib(), holdout = 100% }
batch { sequence = 256, micro = 2, accumulate = 4, rows = rows }
optimizer adamw { lr = 1e-3, betas = [0.9, 0.95] }
scheduler wsd { warmup = 10 steps, decay = 20%, floor = 1% }
parallel {
  tp 2 { sequence = true }
  fsdp 2 { replicate = 2, reshard = auto }
  ep 4, cp 1
  pp 2 {
    schedule = interleaved_1f1b
    stages_per_rank = 2
  }
}
activation selective {
  every = 2
  save = [matmul]
}
compile { mode = default }
collate = to_tensor -> flatten -> shift_tokens -> pack(sequential)
every 10 steps eval more { batches = 4 } then log
every 10% eval code then checkpoint
on finish eval more then generate { prompts = ["a"] }
"""
TEXTS = [RICH, *((SPECS / f"{name}.xtrain").read_text() for name in ("quickstart", "two_ranks_cpu"))]
WRONG = ["3 steps", "3 tokens", "0.5", "-1", '"x"', "true", "none", "[1]", "99 GiB", "nobody", "1 +", "", "{",
         "10 stpes", "auto", "4%", "pack(1)", "a -> b"]  # fmt: skip
FEW = drawn(40, 2000, suppress_health_check=[HealthCheck.function_scoped_fixture])


def places(text):
    """Of each token but signs: where it begins, where it ends, whether it is a name."""
    quiet = Diagnostics()
    tokens = [t for t in tokenize(SourceText("", text), quiet) if t.type in ("NAME", "NUMBER", "STRING")]
    return [(t.start, t.end, t.type == "NAME") for t in tokens]


PLACES = [places(text) for text in TEXTS]


@st.composite
def mistaken(draw):
    """A good spec in which one word is misspelt or one value replaced."""
    number = draw(st.integers(0, len(TEXTS) - 1))
    text = TEXTS[number]
    start, end, name = draw(st.sampled_from(PLACES[number]))
    if name and draw(st.booleans()):
        word = text[start:end]
        cut = draw(st.integers(0, len(word) - 1))
        before, after = word[:cut], word[cut + 1 :]
        wrong = draw(st.sampled_from([f"{before}{after}", f"{word}q", "colour", f"{before}q{word[cut]}{after}"]))
    else:
        wrong = draw(st.sampled_from(WRONG))
    return text[:start] + wrong + text[end:]


def shown(diagnostics):
    return [(d.code, d.span and (d.span.start, d.span.end), d.message) for d in diagnostics]


@FEW
@example(TEXTS[1].replace("on sigint checkpoint then stop", "on sigint checkpoint { stop"))
@given(mistaken())
def test_one_mistake_of_the_language_is_the_only_one(tmp_path, text):
    path = tmp_path / "spec.xtrain"
    found = said(path, text)
    loaded = load_spec(path)
    if loaded.spec is None:
        assert shown(found) == shown(loaded.diagnostics), found.render()


def test_a_block_that_begins_with_a_word_of_another_kind_is_unread(tmp_path):
    """`parallel { … }` may be meant: what the planner would say without it is not said."""
    path = tmp_path / "spec.xtrain"
    found = said(path, RICH.replace("parallel {", "pack(1) {"))
    assert [d.code for d in found] == ["X101"] and shown(found) == shown(load_spec(path).diagnostics)


@FEW
@given(st.data())
def test_wild_mistakes_never_raise(tmp_path, data):
    number = data.draw(st.integers(0, len(TEXTS) - 1))
    text, spots = TEXTS[number], PLACES[number]
    chosen = sorted(data.draw(st.lists(st.sampled_from(spots), max_size=6, unique=True)), reverse=True)
    for start, end, _ in chosen:
        text = text[:start] + data.draw(st.sampled_from([*WRONG, "}", "[", "every", "0", "1", "7"])) + text[end:]
    found = said(tmp_path / "spec.xtrain", text)
    found.render()
    assert len(set(shown(found))) == len(found)


# Inputs of rules -----------------------------------------------------------------------------------------------------


def test_every_rule_has_inputs():
    """Those that name their rule in place; the few that compute it have a pattern."""
    root = Path(__file__).parents[2]
    texts = {path: path.read_text() for room in ("plan", "planner") for path in (root / room).rglob("*.py")}
    calls = "".join(texts.values())
    rules = set(re.findall(r'found\.(?:fail|warn)\(\s*"([a-z_.]+)"', calls))
    assert len(rules) >= 15
    for path in (path for path, text in texts.items() if "@checks(" in text):  # declares them
        import_module(".".join(("xtrain", *path.relative_to(root).with_suffix("").parts)))
    assert not rules - INPUTS.keys()
    spec = load_spec(SPECS / "quickstart.xtrain").require()
    for rule in ("mesh.tp.heads", "mesh.tp.kv_heads", "data.eval.x", "data.files.x", "schedule.every.3.every"):
        assert "*" not in list(rule_inputs(rule, spec))
    assert list(rule_inputs("mesh.new", spec)) == ["*"]


def variants():
    """The rich spec with one setting given another good value, and the path of the setting."""
    changes = {
        "model.dim": ("dim = width", "dim = 136"), "model.layers": ("layers = 8", "layers = 1"),
        "model.heads": ("heads = 8,", "heads = 12,"), "model.kv_heads": ("kv_heads = 4", "kv_heads = 3"),
        "model.head_dim": ("head_dim = 16", "head_dim = 15"), "model.vocab": ("vocab = 300", "vocab = 9"),
        "model.experts": ("experts = 8", "experts = 6"), "model.family": ("qwen3_moe", "mixtral"),
        "dataset.code.holdout": ("holdout = 5%", "holdout = 0%"),
        "dataset.more.holdout": ("holdout = 100%", "holdout = 3%"),
        "batch.sequence": ("sequence = 256", "sequence = 251"), "batch.micro": ("micro = 2", "micro = 3"),
        "batch.accumulate": ("accumulate = 4", "accumulate = 1"), "batch.rows": ("rows = rows", "rows = 77"),
        "scheduler.warmup": ("warmup = 10 steps", "warmup = 1k steps"),
        "scheduler.decay": ("decay = 20%", "decay = 100%"), "experiment.budget": ("1M tokens", "2 epochs"),
        "launch.nodes": ("nodes = 2", "nodes = 3"),
        "launch.ranks_per_node": ("ranks_per_node = 8", "ranks_per_node = 5"),
        "parallel.tp.size": ("tp 2", "tp 16"), "parallel.fsdp.size": ("fsdp 2", "fsdp 3"),
        "parallel.fsdp.replicate": ("replicate = 2", "replicate = 3"), "parallel.ep.size": ("ep 4", "ep 3"),
        "parallel.pp.size": ("pp 2", "pp 3"), "parallel.cp.size": ("cp 1", "cp 2"),
        "parallel.pp.schedule": ("schedule = interleaved_1f1b", "schedule = zbv"),
        "parallel.pp.stages_per_rank": ("stages_per_rank = 2", "stages_per_rank = 3"),
        "parallel.fsdp.reshard": ("reshard = auto", "reshard = true"),
        "activation.every": ("  every = 2", "  every = 9"),
        "activation.save": ("[matmul]", "[all_to_all]"), "compile.mode": ("mode = default", "mode = none"),
        "collate": ("flatten -> shift", "shift"),
    }  # fmt: skip
    for path, (before, after) in changes.items():
        assert RICH.count(before) == 1, before
        yield path, RICH.replace(before, after)


def verdicts(spec, unknown_settings=frozenset()):
    return {(d.code, d.message) for d in check_spec(spec, unknown_settings=unknown_settings)}


def test_what_a_setting_changes_is_not_said_while_it_is_unknown(tmp_path):
    """Whatever a rule says of one value of a setting but not of another rests on the setting."""
    path = tmp_path / "spec.xtrain"

    def loaded(text):
        path.write_text(text)
        return load_spec(path).require()

    specs = {name: loaded(text) for name, text in variants()}
    before = {name: verdicts(spec) for name, spec in specs.items()} | {"": verdicts(loaded(RICH))}

    @functools.cache
    def both(names):
        """A spec with the changes of two variants, and what is said of it."""
        first, *others = sorted(names - {""})
        spec = specs[first]
        for other in others:
            where = other.replace("dataset.", "datasets.")
            spec = replaced(spec, where, at(specs[other], where))
        return spec, verdicts(spec)

    for name, other in itertools.permutations((*specs, ""), 2):
        # A mesh that is wrong silences others.
        if not name or any(code == "X401" for code, _ in before[other]):
            continue
        spec, said = both(frozenset((name, other)))
        changed = said - before[other]
        assert not changed or not changed & verdicts(spec, frozenset({name})), (name, other, changed)
