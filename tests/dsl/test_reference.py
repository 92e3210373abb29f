"""`xtrain docs`: what a word leads to, and that every example in the reference is one."""

import re
from pathlib import Path

import attrs
import pytest
from examples import each

from xtrain.dsl.load import load_spec
from xtrain.dsl.reference import text as topics
from xtrain.dsl.reference.reference import Field, ReferencePage, every_page
from xtrain.dsl.reference.text import ReferenceText, TopicWord, find, near, words
from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.setting import (
    Range,
    at_least,
    between,
    momentum_pair,
    not_negative,
    positive,
    proper_fraction,
    settings_of,
    share,
)

BASE = (Path(__file__).parent / "data" / "quickstart.xtrain").read_text(encoding="utf-8")
SERVER = (
    "experiment served\nmodel qwen3 { dim = 64, layers = 2, heads = 4 }\ntokenizer bytes\nadapter lora\nserve { }\n"
)
FIELDS = [field for page in every_page() for field in (*((page.label,) if page.label else ()), *page.fields)]
PLAIN = ReferenceText(width=80)


# Blocks whose label names a function or class of the user's own.
OF_USERS = ("hook.name", "step.name", "evaluation_step.name", "train.name", "epoch.name")
OF_USERS += tuple(f"environment.{name}" for name in ("name", "seconds", "wait", "memory"))


def wrong(text, *sets, without=""):
    """The codes of syntax, names and types in a text that includes a good spec. without: a kind of block of components,
    which that spec then does not have; of a server, that spec is one."""
    base = SERVER if without == "serve" else BASE
    if without in ("optimizer", "scheduler"):
        base = re.sub(rf"^{without} .*\n", "", BASE, flags=re.MULTILINE)
        assert base != BASE
    family = re.search(r"^model (\w+)", text)
    if family and family[1] in FAMILIES and "kv_heads" not in settings_of(FAMILIES[family[1]]):
        base = base.replace(", kv_heads = 2", "")
        assert base != BASE
    found = load_spec("s", sets, {"s": f'include "base"\n{text}', "base": base}).diagnostics
    return [d.code for d in found.errors if d.code[1] in "123"]


def needed(family):
    """What a family must be given that the good spec does not have."""
    required = {name: meta for name, (a, meta) in settings_of(FAMILIES[family]).items() if a.default is attrs.NOTHING}
    return ", ".join(f"{name} = {meta.example}" for name, meta in required.items() if f"{name} = " not in BASE)


def filled(text):
    return text.replace("NAME", "stdlib").replace("… ->", "to_tensor -> flatten -> shift_tokens ->")


def test_every_example_is_one():
    each(((f"{field.group} {field.path}", (field,)) for field in FIELDS), is_an_example)


def is_an_example(field):
    sparse = "model qwen3_moe { experts = 8 }\n" if "qwen3_moe" in field.usage else ""
    unknown = ["X219"] if field.path in OF_USERS else []  # a function that is nowhere
    assert wrong(sparse + filled(field.usage), without=field.path.partition(".")[0]) == unknown
    assert field.name in field.usage or field.is_label or field.path == "on.count"  # the n of nan(n)


def test_every_set_is_one():
    each(((field.path, (field,)) for field in FIELDS if field.group == "block"), is_a_set)


def is_a_set(field):
    shown = PLAIN.field(field)
    found = re.search(r"--set (.*)$", shown, re.MULTILINE)
    unset = ("dataset.name", "phase.name", "group.name", "group.optimizer", "hook.name", "environment.name")
    if field.path in (*unset, "task.name", "task.adapter", "task.optimizer"):
        assert found is None
        return
    family = ""
    if field.only and field.path.startswith("model"):
        family = f"model {field.only[-1]} {{ {needed(field.only[-1])} }}"
    kind = field.path.partition(".")[0]
    component = kind in ("optimizer", "scheduler", "loss")
    given = {
        "optimizer": "{ lr = 1 }",
        "sweep": "first = 2 steps" if field.only[:1] == ("asha",) else "",
        "loss": '{ teacher = "models/teacher" }' if field.only[:1] == ("distill",) else "",
    }
    family = f"{kind} {field.only[0]} {given.get(kind, '')}" if component and field.only else family
    family = "model mixtral { experts = 8 }" if field.path.startswith("model.router") else family
    family = "phase stdlib { from = 50% }" if field.path.startswith("phase.") else family
    family = "group stdlib { }" if field.path.startswith("group.") else family
    family = "task stdlib { adapter lora }" if field.path.startswith("task.") else family
    family = "cluster h100" if field.path.startswith("cluster.") and not field.is_label else family
    if kind == "launcher" and not field.is_label:
        needs = '{ image = "xtrain", volumes = ["runs:/work"] }' if "kubernetes" in field.only[:1] else ""
        family = f"launcher {field.only[0]} {needs}"
    family = "adapter lora" if kind == "adapter" and not field.is_label else family
    reward = 'model { folder = "models/reward" }' if field.only[:1] == ("model",) else "exact_answer"
    family = f"reward {reward}" if kind == "reward" and not field.is_label else family
    family = 'engine vllm { url = "http://a" }' if kind == "engine" and not field.is_label else family
    family = "parametrization { base_width = 64 }" if kind == "parametrization" else family
    family = "precision { base nf4 }" if field.path.startswith("precision.base.") and not field.is_label else family
    method = f"method {field.only[0]} {{ {given.get(kind, '')} }}" if kind == "sweep" and field.only else ""
    family = f"sweep {{ lr in [1, 2], objective = eval.stdlib.loss, {method} }}" if kind == "sweep" else family
    others = kind if (component and (field.only or field.is_label)) or kind == "serve" else ""
    family = family or ("optimizer adamw { lr = 1 }" if others == "optimizer" else "")
    expected = ["X219"] if field.path in OF_USERS else []
    expected = ["X204"] if field.path == "engine.kind" else expected  # it needs a `url`
    expected = ["X217"] if field.path.startswith("environment.") else expected  # there is none to set
    assert wrong(family, filled(found[1].strip("'")), without=others) == expected


@pytest.mark.parametrize(("topic", "leads_to"), [
    ("parallel", ["ReferencePage parallel", "Field sweep.parallel"]),
    ("fsdp", ["ReferencePage parallel.fsdp"]),
    ("parallel.fsdp", ["ReferencePage parallel.fsdp"]),
    ("parallel.fsdp.reduce", ["Field parallel.fsdp.reduce"]),
    ("reduce", ["Field parallel.fsdp.reduce"]),
    ("fsdp.reduce", ["Field parallel.fsdp.reduce"]),
    ("tp.size", ["Field parallel.tp.size"]),
    ("sequence", ["Field batch.sequence", "Field parallel.tp.sequence", "choice loss.normalise"]),
    ("dataset.web.holdout", ["Field dataset.holdout"]),
    ("phase.anneal.from", ["Field phase.from"]),
    ("mixture", ["ReferencePage mixture"]),
    ("mixture.web", ["Field mixture.NAME"]),
    ("mixture.temperature", ["Field mixture.temperature"]),
    ("checkpoint", ["ReferencePage checkpoint", "ReferencePage checkpoint"]),
    ("every", ["ReferencePage every", "Field ema.every", "Field activation.every"]),
    ("pack", ["ReferencePage pack"]),
    ("text", ["ReferencePage text", "Field dataset.text"]),
    ("1f1b", ["choice parallel.pp.schedule"]),
    ("fp64", [f"choice {path}" for path in
        ("precision.params", "precision.compute", "precision.fp8.rest", "parallel.fsdp.reduce", "export.dtype")]),
    ("adamw", ["choice optimizer.kind"]),
    ("min", ["function min(a, b, …)", "unit 10 min", "Field parallel.torchft.min"]),
    ("steps", ["unit 10 steps", "Field rollout.steps"]),
    ("%", ["unit 10%"]),
    ("Ki", ["multiplier 8Ki"]),
    ("let", ["statement let name = expression"]),
    ("sigterm", ["event on sigterm …"]),
    ("ema", ["ReferencePage ema"]),
    ("`batch`", ["ReferencePage batch"]),
    ("nonsense", []),
    ("parallel.nonsense", []),
    ("", []),
    (".", []),
    ("..", []),
])  # fmt: skip
def test_topics(topic, leads_to):
    found = []
    for place in find(topic):
        kind = place.kind if isinstance(place, TopicWord) else type(place).__name__
        found.append(f"{kind} {place.written if isinstance(place, TopicWord) else place.path}")
    assert found == leads_to


@pytest.mark.parametrize(
    ("topic", "meant"),
    [("paralel", "parallel"), ("parallel.fsdp.redcue", "parallel.fsdp.reduce"), ("hidden_size", "dim"),
     ("redcue", "reduce"), ("stpes", "steps"), ("1f1", "1f1b"), ("zzzzzzzz", None)],
)  # fmt: skip
def test_near(topic, meant):
    assert near(topic) == meant


def test_every_path_leads_to_one_field(monkeypatch):
    pages = tuple(every_page())
    monkeypatch.setattr(topics, "every_page", lambda: pages)  # which stay the same for all paths
    for field in FIELDS:
        assert field in find(field.path)
    for word in words():
        assert any(isinstance(each, TopicWord) and each.name == word.name for each in find(word.name))


@pytest.mark.parametrize("width", [10, 40, 80, 500])
def test_lines_fit(width):
    text = ReferenceText(width=width)
    shown = [text.overview(), *(text.topics([each]) for each in (*every_page(), *FIELDS, *words()))]
    fixed = ("--set", "write", "default", "xtrain docs")  # what is to be copied is never broken
    limit = max(40, min(width, 100))
    for line in "\n".join(shown).splitlines():
        copied = any(word in line for word in fixed) or "; " in line or " " not in line.strip()
        assert len(line) <= limit or copied or len(max(line.split(), key=len)) > limit // 2, line


def test_colors():
    assert "\x1b[1mparallel.fsdp.reduce\x1b[0m" in ReferenceText(color=True).topics(find("reduce"))
    assert "\x1b" not in PLAIN.overview() + PLAIN.topics(find("reduce"))


def test_a_setting_says_all_that_is_known_of_it():
    shown = PLAIN.topics(find("scheduler.shape"))
    for part in ("linear", "cosine", "sqrt", "default   linear", "only for  wsd", "--set scheduler.shape=cosine"):
        assert part in shown
    assert "must be given" in PLAIN.topics(find("optimizer.lr")) and "above 0" in PLAIN.topics(find("optimizer.lr"))


def test_pages_and_fields_are_of_the_schema():
    assert {type(each) for each in (*every_page(), *FIELDS)} == {ReferencePage, Field}
    assert len(FIELDS) > 90


@pytest.mark.parametrize(("values", "inside", "outside", "said"), [
    (positive, (1, 0.1), (0, -1), "above 0"),
    (not_negative, (0, 2), (-0.1,), "not negative"),
    (at_least(2), (2, 9), (1,), "at least 2"),
    (between(0.01, 1), (0.01, 1), (0, 1.1), "between 0.01 and 1"),
    (share, (0, 100, 5000), (-1,), "0% to 100%"),
    (proper_fraction, (0.5, 0.999), (0, 1), "above 0 and below 1"),
    (momentum_pair, ((0, 0.9),), ((0.9,), (0.9, 1), (-0.1, 0.5), (0.1, 0.2, 0.3)), "two numbers from 0 up to, but"),
], ids=lambda x: x.words if isinstance(x, Range) else "")  # fmt: skip
def test_ranges(values, inside, outside, said):
    assert values.words.startswith(said)
    assert all(values(each) is None for each in inside)
    assert all((values(each) or "").startswith("must ") for each in outside)
