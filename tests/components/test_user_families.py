"""Families in a module that `use` names: what is read of them is what ranks build and run."""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from agreement import hold_against_the_trace

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import block_of, pieces
from xtrain.blocks.layer_reader import FUNCTIONAL, METHODS
from xtrain.blocks.user_layer import is_reserved
from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.load import load_spec
from xtrain.dsl.reference.text import own_functions
from xtrain.plan.checkpoints import checkpoint_contents, weight_mismatches
from xtrain.plan.data import own_modules
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import dumps, from_json
from xtrain.planner.compile import compile_plan
from xtrain.planner.load import check_from_spec
from xtrain.planner.review.page import render
from xtrain.runtime.base.user_parts import PartChanged, PartFailed, UserPart
from xtrain.runtime.nn.attention import KERNELS
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.block import DecoderBlock
from xtrain.runtime.nn.layers import OwnLayer, OwnModule
from xtrain.runtime.nn.mixer import OwnMixer

OWN = Path(__file__).parents[1] / "support" / "own_families" / "parts.py"
SIZES = {"dim": 64, "layers": 2, "heads": 8, "kv_heads": 4}
LAYOUTS = {
    "one rank": "",
    "tp 2 · fsdp 2": "parallel { tp 2, fsdp 2 }",
    "tp 2, whole sequences, selective": "parallel { tp 2 { sequence = false } }\nactivation selective {}",
    "ring 2 · ulysses 2, full": "parallel { cp 4 { ring = 2, ulysses = 2 } }\nactivation full {}",
    "ddp": "parallel { stack = ddp, fsdp 1 { replicate = 2 } }",
    "pp 2": "parallel { pp 2 }",
}
OWN_FAMILIES = ("squared", "gated", "routed")
BY_DEFAULT = (("squared", "tp 2, whole sequences, selective"),)


@pytest.fixture
def plan_of(tmp_path, monkeypatch):
    """The plan of a small experiment with a model of a family; `parts`: the text of the module."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, more: str = "", parts: str = "", **settings) -> Plan:
        Path("parts.py").write_text(parts or OWN.read_text())
        sizes = {**SIZES, **({"experts": 8} if name in ("routed", "mixtral") else {}), **settings}
        text = ", ".join(f"{each} = {value}" for each, value in sizes.items())
        Path("spec.xtrain").write_text(SPEC.format(model=f"{name} {{ {text} }}", more=more))
        loaded = load_spec("spec.xtrain")
        assert loaded.spec is not None, loaded.diagnostics.render()
        compiled = compile_plan(loaded.spec)
        assert compiled.plan is not None, compiled.diagnostics.render()
        return compiled.plan

    return run


HEAD = """import torch
import torch.nn.functional as F
from typing import Annotated
import xtrain as x
from xtrain import AttentionLayer, Chain, ExpertsLayer, NormLayer, Residual, SwiGLULayer, Sum
from xtrain import at_least, between, family, layer, pre_norm, rms_norm, weight

raise SystemExit("this file was run")
"""
ATTENTION = 'AttentionLayer("attn")'
FAMILY = f'@family\ndef own(arch):\n    return pre_norm({ATTENTION}, mine("mlp"))\n'
TWO = '@layer\ndef mine(x, up=weight("ffn", "dim"), down=weight("dim", "ffn")):\n    '
CUT = '@layer\ndef mine(x, up=weight("ffn", "dim", cut="column"), down=weight("dim", "ffn", cut="row")):\n    '


def body(text):
    return f"@family\ndef own(arch, depth: int = 1):\n    {text}\n"


def block(text):
    return body(f'return pre_norm(AttentionLayer("attn"), {text})')


def calling(depth, times=2):
    """Functions each of which calls the next one, once or more often."""
    calls = [f"{'_{next}(' * times}a{')' * times}".format(next=n + 1) for n in range(depth)]
    return "".join(f"\ndef _{n}(a):\n    return {call}" for n, call in enumerate([*calls, "a"]))


# (text behind the imports, code, part of the message, part of the hint, what the line it points at contains)
WRONG = [
    # the declaration
    ("@family\ndef own(): ...", "X223", "`own` has no parameter for its input", "def own(arch)", "def own"),
    ("@family\ndef own(arch, dim=3): ...", "X223", "cannot be named `dim`", "`arch` has the settings", "def own"),
    ("@family\ndef own(arch, a=len('')): ...", "X223", "known only when the code is run", "plain value", "def own"),
    ("@family(3)\ndef own(arch): ...", "X223", "takes no arguments", "@family", "@family"),
    ("@family\ndef none(arch): ...", "X224", "`none` is already a word", "another name", "def none"),
    ("@family\ndef größe(arch): ...", "X223", "a spec cannot contain the name `größe`", "letters a-z", "def größe"),
    ("@len\n@family\ndef own(arch): ...", "X223", "`own` has another decorator", "remove it", "@len"),
    ("@layer\n@torch.no_grad()\ndef mine(x): ...", "X223", "`mine` has another decorator", "remove it", "no_grad"),
    ("@family\ndef llama(arch): ...", "X224", "`llama` is already a word", "another name", "def llama"),
    ("@family\ndef own(arch, a: Annotated[int, at_least(2)] = 1): ...", "X223", "default of `a` must be at least 2", "",
        "a:"),
    ("@family\ndef own(arch, a: Annotated[int, len]): ...", "X223", "`len` is not a bound", "at_least(1)", "a:"),
    ("@family\ndef own(arch, a: Annotated[str, at_least(2)]): ...", "X223", "not a number and cannot", "", "a:"),
    ("@family\ndef own(arch, a: Annotated[int, between(2)]): ...", "X223", "is not a bound", "between(0, 1)", "a:"),
    ("@layer\ndef mine(): ...", "X223", "no parameter for its input", "def mine(x)", "def mine"),
    ("@layer\ndef mine(x, up=weight(1, 2, 3)): ...", "X223", "one or two extents", "weight(", "weight"),
    ("@layer\ndef mine(x, up=weight(0)): ...", "X223", "one or two extents", "weight(", "weight"),
    ("@layer\ndef mine(x, up=weight('dim', std=1)): ...", "X223", "no argument `std`", "weight(", "weight"),
    ("@layer\ndef mine(x, up=weight('dim', cut='rows')): ...", "X223", "no `cut` `rows`", "column, row",
        "weight"),
    ("@layer\ndef mine(x, up=weight('dim', cut='row')): ...", "X223", "a vector has none", "column", "weight"),
    ("@layer\ndef mine(x, up=weight('dim', initial='one')): ...", "X223", "no `initial` `one`", "ones",
        "weight"),
    # the block
    (body("return 3"), "X223", "`own` returns no piece", "return the decoder block", "def own"),
    (body("pass"), "X223", "returns nothing", "return pieces", "def own"),
    (body("for i in range(3): pass"), "X223", "statement cannot be read", "assignments, `if` and `return`", "for i"),
    (body("return [ATT]"), "X223", "cannot be read without running", "pieces of a block", "[ATT]"),
    (body("return missing"), "X223", "`missing` is not defined here", "", "missing"),
    (body("return open('x')"), "X223", "`open` cannot be called here", "`AttentionLayer`", "open"),
    (body("return torch.load('x')"), "X223", "`torch.load` cannot be called here", "", "torch.load"),
    (body("return x.AttentonLayer('a')"), "X223", "cannot be called", "did you mean `AttentionLayer`", "Attenton"),
    (block("SwiGLULayer()"), "X223", "missing a required argument: 'name'", "it takes name", "SwiGLULayer()"),
    (block('SwiGLULayer("mlp", width=3)'), "X223", "unexpected keyword argument 'width'", "takes name", "width=3"),
    (block("SwiGLULayer(3)"), "X223", "`name` must be a text", "", "SwiGLULayer(3)"),
    (block('SwiGLULayer("attn")'), "X223", "two layers of the block are called `attn`", "", 'SwiGLULayer("attn")'),
    (block('SwiGLULayer("train")'), "X223", "cannot be called `train`", "another", "train"),
    (block('SwiGLULayer("_modules")'), "X223", "cannot be called `_modules`", "another", "_modules"),
    (block('Layer("mlp")') + "\nfrom xtrain.blocks.block import Layer", "X223", "`Layer` cannot be called", "", "mlp"),
    *(
        (block(f'x.{call}("mlp")'), "X223", f"`x.{call}` cannot be called", "", call)
        for call in ("Layer", "UserFunction", "UserLayer", "UserMixer", "CodeLayer", "JoinLayer",
            "AdaptedBlock", "further_block")
    ),
    (block('AttentionLayer("b", rotary=3)'), "X223", "`rotary` is 3, and must be even", "", "rotary=3"),
    (body('return Residual.of(x.AttentionLayer("b", rotary=16))'), "X223", "a head has 8 numbers", "", "rotary=16"),
    *(
        (body(f'return Residual.of(x.DeltaNetLayer(name="b", {sizes}))'), "X223", message, "", sizes)
        for sizes, message in (
            ("key_heads=0, value_heads=1, key_dim=8, value_dim=8, kernel=4", "`key_heads` is 0, and must be above 0"),
            ("key_heads=2, value_heads=3, key_dim=8, value_dim=8, kernel=4", "which `key_heads` 2 does not divide"),
            ("key_heads=2, value_heads=2, key_dim=8, value_dim=8, kernel=0", "`kernel` is 0, and must be above 0"),
            ("key_heads=2, value_heads=2, key_dim='8', value_dim=8, kernel=4", "`key_dim` must be"),
        )
    ),
    *(
        (body(f'return Residual.of(x.Mamba2Layer(name="b", head_dim=8, state_dim=8, {sizes}))'), "X223", why, "", sizes)
        for sizes, why in (
            ("groups=0, heads=2, kernel=4", "`groups` is 0, and must be above 0"),
            ("groups=2, heads=3, kernel=4", "which `groups` 2 does not divide"),
            ("groups=1, heads=2, kernel=4, least_step=-1", "`least_step` -1 is below 0 or above `most_step`"),
        )
    ),
    *(
        (body(f'return Residual.of(x.LatentAttentionLayer(name="b", q_rank=None, scale=0.3, {sizes}))'),
            "X223", message, "", sizes)
        for sizes, message in (
            ("kv_rank=0, nope_dim=4, rope_dim=4, value_dim=8", "`kv_rank` is 0, and must be above 0"),
            ("kv_rank=8, nope_dim=4, rope_dim=3, value_dim=8", "`rope_dim` is 3, and must be even"),
            ("kv_rank=8, nope_dim=8, rope_dim=8, value_dim=8", "heads of `b` have 16 numbers, and `head_dim` is 8"),
        )
    ),
    (block("mine()") + "\n@layer\ndef mine(x, up=weight(0)): ...", "X223", "one or two extents", "weight(", "weight"),
    (block('_0("a")') + calling(10), "X223", "more than 1000 calls", "fewer calls", "return _"),
    (block('_0("a")') + calling(400, 1), "X223", "function calls are nested too deeply", "fewer", "return _"),
    (block(f"SwiGLULayer({'+'.join('1' * 400)})"), "X223", "nested too deeply", "several statements", "return"),
    (block('_0("a")') + f"\ndef _0(a):\n    return {'-' * 400}1", "X223", "too deeply", "several", "return -"),
    ("class x: pass\n" + body('return x.AttentionLayer("a")'), "X223",
        "`x` is a class defined in line 9, which", "it replaces the import of `xtrain`", "return x."),
    ("N = 3\n" + body("return N"), "X223", "`N` is a value defined in line 9", "numbers and settings",
        "return N"),
    (block("_same()") + "\n@len\ndef _same(): ...", "X223", "`_same` has a decorator", "remove it", "_same()"),
    (block("_same()") + "\ndef _same(): ...\n_same = len", "X223", "`_same` cannot be called here", "", "_same()"),
    (block("pre_norm()") + "\ndef pre_norm(a): ...", "X223", "`pre_norm` takes a", "", "pre_norm()"),
    (block('SwiGLULayer("a b")'), "X223", "cannot be called `a b`", "another", "a b"),
    (block("SwiGLULayer"), "X223", "`SwiGLULayer` is not a value here", "call it", "SwiGLULayer"),
    (block("Residual.of()"), "X223", "`Residual.of` has no pieces", "", "Residual.of()"),
    (block("Residual.of(3)"), "X223", "`pieces` is a piece of a block", "", "Residual.of(3)"),
    (block('SwiGLULayer("m" if arch.wide else "n")'), "X223", "`arch` has no setting `wide`", "", "arch.wide"),
    (block('SwiGLULayer("m" if 1 / (depth - 1) else "n")'), "X223", "division by zero", "", "depth - 1"),
    (block('SwiGLULayer("m" if 9 ** 9 ** 9 else "n")'), "X223", "cannot be read", "", "9 ** 9"),
    (block('SwiGLULayer(**{"name": "m"})'), "X223", "`*` and `**` cannot be read", "", "**"),
    (block('AttentionLayer("b", qk_norm=3)'), "X223", "`qk_norm` must be True or False", "", "qk_norm=3"),
    (block('AttentionLayer("b", window=0)'), "X223", "`window` is 0, and must be above 0", "", "window=0"),
    (block('AttentionLayer("b", window="a")'), "X223", "`window` must be of another type", "", "window="),
    (block('AttentionLayer("b")'), "X223", "one attention layer, and the block of `own` has 2", "", "def own"),
    (body('return AttentionLayer("a", takes="b")'), "X223", "but all blocks are this one", "remove `gives`", "takes"),
    (body('return SwiGLULayer("mlp")'), "X223", "one attention layer, and the block of `own` has 0", "", "def own"),
    (block('_same("a")') + "\ndef _same(a):\n    return _same(a)", "X223", "`_same` calls itself", "", "return _same"),
    (block("_same()") + "\ndef _same(a):\n    return a", "X223", "`_same` takes a", "", "_same()"),
    # the call of a layer
    (TWO + "return F.linear(F.linear(x, up), down)\n" + block("mine()"), "X223", "takes its name", 'mine("mlp")',
        "mine()"),
    (TWO + "return F.linear(F.linear(x, up), down)\n" + block("mine('a', b=1)"), "X223", "no setting `b`", "none",
        "b=1"),
    ("@layer\ndef mine(x, g=weight('dim'), *, a: int):\n    return x * g\n" + FAMILY, "X223", "`mine` needs `a`", "a=",
        "return pre_norm"),
    ("@layer\ndef mine(x, g=weight('dim'), a: int = 1):\n    return x * g\n" + block("mine('m', a=0.5)"), "X223",
        "whole number", "", "a=0.5"),
    ("@layer\ndef mine(x, g=weight('dim'), a: Annotated[int, at_least(1)] = 1):\n    return x * g\n" + block(
            "mine('m', a=0)"), "X223", "`a` must be at least 1", "", "a=0"),
    # what a layer computes
    ("@layer\ndef mine(x):\n    return x * 2\n" + FAMILY, "X223", "`mine` has no weight", "weight(", "def mine"),
    ("@layer\ndef mine(x, g=weight('dmi')):\n    return x * g\n" + FAMILY, "X223", "`dmi` is not defined", "`dim`",
        "def mine"),
    ("@layer\ndef mine(x, g=weight('dim / 3')):\n    return x * g\n" + FAMILY, "X223", "valid size", "//", "def mine"),
    ("@layer\ndef mine(x, g=weight('dim +')):\n    return x * g\n" + FAMILY, "X223", "is not an expression", "",
        "def mine"),
    ("@layer\ndef mine(x, train=weight('dim')):\n    return x * train\n" + FAMILY, "X223", "cannot be named `train`",
        "", "def mine"),
    ("@layer\ndef mine(x, g=weight('dim'), b=weight('dim')):\n    return x * g\n" + FAMILY, "X223",
        "weight `b` is not used", "", "def mine"),
    ("@layer\ndef mine(x, g=weight('ffn')):\n    return x * g\n" + FAMILY, "X223", "widths of", "", "x * g"),
    ("@layer\ndef mine(x, g=weight('dim')):\n    h = x * 2\n    return x * g\n" + FAMILY, "X223", "is not used",
        "remove", "x * 2"),
    (TWO + "h = F.linear(F.linear(x, up), down)\n    return F.linear(F.linear(h, up), down)\n" + FAMILY, "X223",
        "`up` is used twice", "another weight", "return"),
    ("@layer\ndef mine(x, g=weight('dim')):\n    return x\n" + FAMILY, "X223", "does not return the result", "",
        "def mine"),
    (TWO + "return F.linear(x, up)\n" + FAMILY, "X223", "returns 192 numbers for each position", "`dim`", "def mine"),
    (TWO + "return F.linear(x, down)\n" + FAMILY, "X223", "`down` takes 192 numbers", "second extent",
        "F.linear(x, down)"),
    (TWO + "return torch.cumsum(x, 1)\n" + FAMILY, "X223", "`torch.cumsum` cannot be called", "`linear`", "cumsum"),
    (TWO + "return x.view(-1)\n" + FAMILY, "X223", "`x.view` cannot be called", "", "x.view"),
    (TWO + "return x @ up\n" + FAMILY, "X223", "`x @ up` cannot be read", "activations, vectors and numbers", "x @ up"),
    (TWO + "return x.T\n" + FAMILY, "X223", "`.T` is known only in a run", "", "x.T"),
    (TWO + "h = F.linear(x, up)\n    return h if x > 0 else h\n" + FAMILY, "X223", "known only in a run", "by settings",
        "if x > 0"),
    (TWO + "return F.softmax(F.linear(x, up), 0)\n" + FAMILY, "X223", "all of the last dimension", "", "softmax"),
    (TWO + "return rms_norm(x, up, 1e-6)\n" + FAMILY, "X223", "`rms_norm` takes activations, a vector", "",
        "rms_norm(x"),
    *(
        (TWO + f"return F.linear({call}, down)\n" + FAMILY, "X223", message, "", call)
        for call, message in (
            ("F.linear(x, up).pow()", "`pow` needs `exponent`"),
            ("torch.pow(F.linear(x, up), None)", "`exponent` of `pow` must be a number"),
            ("F.linear(x, up).pow(2, 3)", "this takes input, exponent"),
            ("F.relu(F.linear(x, up), foo=3)", "this takes input, inplace"),
            ("F.relu(F.linear(x, up), input=x)", "this takes input, inplace"),
            ("F.relu(F.linear(x, up), True)", "`inplace` of `relu` must be False"),
            ("torch.relu(F.linear(x, up), inplace=False)", "this takes input"),
            ("torch.exp(F.linear(x, up), out=None)", "this takes input"),
            ("F.softplus(F.linear(x, up), beta=0)", "`beta` of `softplus` must be a number other than 0"),
            ("F.softplus(F.linear(x, up), 1, True)", "`threshold` of `softplus` must be a number"),
            ("F.leaky_relu(F.linear(x, up), '0.1')", "`negative_slope` of `leaky_relu` must be a number"),
            ("F.gelu(F.linear(x, up), 'tanh')", "this takes input, approximate"),
            ("F.gelu(F.linear(x, up), approximate='roughly')", '"none" or "tanh"'),
            ("torch.softmax(F.linear(x, up))", "`softmax` needs `dim`"),
            ("F.linear(x, up, weight=up)", "this takes input, weight, bias"),
            ("F.relu()", "`relu` takes activations"),
        )
    ),
    # tensor parallelism
    (CUT + "return F.linear(x, up) * 2\n" + FAMILY, "X223", "returns 192 numbers", "", "def mine"),
    (CUT + "return F.relu(F.linear(F.linear(x, up), down))\n" + FAMILY, "X223", "a summand on each rank", "row",
        "F.relu"),
    (CUT + "return x + F.linear(F.linear(x, up), down)\n" + FAMILY, "X223", "whole and summand", "the same cut",
        "x + F"),
    (CUT + "return F.linear(F.softmax(F.linear(x, up), -1), down)\n" + FAMILY, "X223", "all of the last dimension", "",
        "softmax"),
    (CUT.replace('down=weight("dim", "ffn", cut="row")',
            'down=weight("dim", "ffn")') + "return F.linear(F.linear(x, up), down)\n" + FAMILY, "X223",
        "`down` (not cut) cannot take a value that is cut", "follows", "F.linear(F.linear"),
    ('@layer\ndef mine(x, up=weight("dim", "dim", cut="column")):\n    return F.linear(x, up)\n' + FAMILY, "X223",
        "would return a value that is cut", 'cut="row"', "def mine"),
]  # fmt: skip


SPEC = """
use "parts.py"
experiment tiny {{ seed = 1, budget = 100 steps }}
model {model}
tokenizer bytes
dataset code {{ source = python_stdlib() }}
batch {{ sequence = 64, micro = 2, accumulate = 2 }}
optimizer adamw {{ lr = 1e-3 }}
{more}
"""


def diagnosed(text, model="own { dim = 64, layers = 2, heads = 8 }", more=""):
    Path("parts.py").write_text(HEAD + text)
    Path("spec.xtrain").write_text(SPEC.format(model=model, more=more))
    return [each for each in check_from_spec("spec.xtrain") if each.severity == "error"]


@pytest.mark.parametrize(("text", "code", "message", "hint", "line"), WRONG)
def test_a_wrong_declaration_is_diagnosed_with_its_line(tmp_path, monkeypatch, text, code, message, hint, line):
    monkeypatch.chdir(tmp_path)
    found, *others = diagnosed(text)
    assert not others and found.code == code and found.span.source.path == "parts.py"
    assert message in found.message, found.message
    assert hint in (found.hint or ""), found.hint
    assert line in (HEAD + text).splitlines()[found.span.line - 1]


@pytest.mark.parametrize(("options", "message"), [
    ("groups=0", "`groups` is 0, and must be above 0"),
    ("groups_per_token=2", "`groups_per_token` 2 exceeds `groups` 1"),
    ("gated_ffn=-1", "`gated_ffn` is -1, and must be at least 0"),
    ("groups=3", "`groups` of `m` is 3, which does not divide 4 experts"),
    ("groups=4", "`m` sends a token to 2 experts, of 1 in its groups"),
])  # fmt: skip
def test_experts_that_do_not_fit_are_diagnosed(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    model = "own { dim = 64, layers = 2, heads = 8, experts = 4, experts_per_token = 2 }"
    (error,) = diagnosed(block(f'ExpertsLayer("m", {options})'), model)
    assert error.code == "X223" and message in error.message


def test_a_block_without_a_matrix_is_diagnosed_in_a_pipeline_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (error,) = diagnosed(body('return Residual.of(NormLayer("norm"))'), more="parallel { pp 2 }")
    assert error.code == "X223"
    (error,) = diagnosed(f"{TWO}return nothing(x)\n\n\n{FAMILY}", more="parallel { pp 2 }")
    assert "nothing" in error.message


def test_functions_that_call_one_another_are_read_however_deep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert diagnosed(block('SwiGLULayer(_0("a"))') + calling(60, 1)) == []
    assert diagnosed(block('SwiGLULayer(_0("a"))') + calling(8)) == []


# (settings of the model, other lines of the spec, code, part of the message, part of the hint)
CHOSEN = [
    ("gatd { dim = 64, layers = 2, heads = 8 }", "", "X305", "no family `gatd`", "`gated`"),
    ("relu_squared { dim = 64, layers = 2, heads = 8 }", "", "X219", "`relu_squared` is a layer", "in a function"),
    ("squared { dim = 64, layers = 2, heads = 8, factor = 0 }", "", "X304", "`factor` must be at least 1", None),
    ("squared { dim = 64, layers = 2, heads = 8, factor = 1.5 }", "", "X306", "must be a whole number", None),
    ("squared { dim = 64, layers = 2, heads = 8, facto = 2 }", "", "X203", "unknown setting `facto`", "`factor`"),
    ("squared { dim = 64, layers = 2, heads = 8, experts = 4 }", "", "X203", "unknown setting `experts`", None),
    ("routed { dim = 64, layers = 2, heads = 8 }", "", "X204", "needs `experts`", None),
    ("gated { dim = 64, layers = 2, heads = 8, ffn = 66 }", "parallel { tp 2 }", "X420", "the 33 outputs of mlp.up",
        "divisible by 2"),
    ("gated { dim = 64, layers = 2, heads = 8 }", "parallel { fsdp 2, ep 2 }", "X409", "a gated model has no",
        "use ep 1"),
    ("squared { dim = 64, layers = 2, heads = 8, ffn = 8 }", "", "W401", "the block of squared does not read it", None),
]  # fmt: skip


@pytest.mark.parametrize(("model", "more", "code", "message", "hint"), CHOSEN)
def test_its_settings_are_checked_as_those_of_any_family(tmp_path, monkeypatch, model, more, code, message, hint):
    monkeypatch.chdir(tmp_path)
    Path("parts.py").write_text(OWN.read_text())
    Path("spec.xtrain").write_text(SPEC.format(model=model, more=more))
    (found,) = check_from_spec("spec.xtrain")
    assert found.code == code, found
    assert message in found.message
    assert hint is None or hint in f"{found.hint}"


def test_no_text_of_a_body_brings_the_reader_down(tmp_path, monkeypatch):
    """Every declaration of the others with a word left out or doubled."""
    monkeypatch.chdir(tmp_path)
    text = OWN.read_text()
    words = [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]
    assert len(words) > 400
    for start, end in words[::13]:
        for other in (text[:start] + text[end:], text[:end] + " " + text[start:]):
            Path("parts.py").write_text(other)
            Path("spec.xtrain").write_text(SPEC.format(model="gated { dim = 64, layers = 2, heads = 8 }", more=""))
            for found in check_from_spec("spec.xtrain"):
                assert found.code[0] in "XW" and found.message


@pytest.mark.parametrize(("name", "layout"), [pytest.param(name, layout, marks=() if (
    name, layout,
) in BY_DEFAULT else pytest.mark.matrix) for name in OWN_FAMILIES for layout in LAYOUTS])  # fmt: skip
def test_it_costs_what_its_plan_says(plan_of, name: str, layout: str):
    one_bucket = layout == "ddp" and name == "routed"  # as of registered families with experts
    hold_against_the_trace(plan_of(name, LAYOUTS[layout]), traffic=not one_bucket)


CPU, SELECTIVE = "launch { device = cpu }", "activation selective { every = 2 }"
# What a rank keeps of attention block by block, written out under a mask, and as flex does it.
SCORES = {
    "windows and sinks": ("sunk", CPU, {}),
    "windows and sinks, ring 2 · ulysses 2": ("sunk", LAYOUTS["ring 2 · ulysses 2, full"], {}),
    "windows and sinks, tp 2": ("sunk", f"parallel {{ tp 2 }}\n{CPU}", {}),
    "windows and sinks, written out": ("sunk", CPU, {"attention": "mask"}),
    "windows and sinks, flex": ("sunk", "cluster h100", {}),
    "windows and sinks, flex, bf16": ("sunk", "cluster h100\nprecision { compute = bf16 }", {}),
    "capped": ("capped", CPU, {}),
    "capped, ring 2": ("capped", f"parallel {{ cp 2 {{ ring = 2 }} }}\n{CPU}", {}),
    "capped, written out": ("capped", CPU, {"attention": "mask"}),
    "windows and sinks, selective": ("sunk", f"{SELECTIVE}\n{CPU}", {}),
    "windows and sinks, written out, selective": ("sunk", f"{SELECTIVE}\n{CPU}", {"attention": "mask"}),
    "windows and sinks, ring 2, selective": ("sunk", f"parallel {{ cp 2 {{ ring = 2 }} }}\n{SELECTIVE}\n{CPU}", {}),
    "capped, written out, selective": ("capped", f"{SELECTIVE}\n{CPU}", {"attention": "mask"}),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", SCORES)
def test_attention_costs_what_its_plan_says(plan_of, name: str):
    family, more, settings = SCORES[name]
    hold_against_the_trace(plan_of(family, more, **settings))


def test_a_plan_has_its_block_and_place(plan_of):
    plan = plan_of("squared", factor=2)
    assert from_json(json.loads(dumps(plan))) == plan
    (line,) = [n for n, text in enumerate(OWN.read_text().splitlines(), 1) if text.startswith("def squared(")]
    assert plan.node("setup.build_model").does.startswith(f"squared of parts.py:{line}: 2 blocks")
    assert f"squared of parts.py:{line}" in render(plan)
    user = plan.architecture.own["user"]
    assert plan.architecture.own["factor"] == 2 and own_modules(plan)["parts.py"] == user["digest"]
    names = {tensor.name: tensor.shape for tensor in plan.parameters.tensors}
    assert names["layers.1.mlp.up.weight"] == (128, 64) and names["layers.0.mlp.scale.weight"] == (64,)
    spec = load_spec("spec.xtrain").spec
    assert spec is not None and spec.used == ["parts.py"]
    listed = own_functions("parts.py", Diagnostics())
    assert "factor  whole number, at least 1; default 3  width of the layer" in listed
    assert "up  weight width × dim, cut by column, normal" in listed


def test_a_checkpoint_fits_what_computes_the_same(plan_of):
    """Comments and other functions of the module may change, and what is built in may be put together again."""
    contents = checkpoint_contents(plan_of("squared"))
    text = OWN.read_text()
    other = checkpoint_contents(plan_of("squared", parts=text.replace("    hidden =", "    # squared\n    hidden =")))
    assert other["model"] != contents["model"] and weight_mismatches(contents, other) == []
    cubed = checkpoint_contents(plan_of("squared", parts=text.replace("** 2", "** 3")))
    (mismatch,) = weight_mismatches(contents, cubed)
    assert mismatch.text == "squared computes something else: the same weights would give other results"
    (mismatch,) = weight_mismatches(contents, checkpoint_contents(plan_of("squared", factor=4)))
    assert mismatch.path == "model.factor" and mismatch.text.startswith("3 → 4: layers.0.mlp.up.weight is 192 × 64")
    plain, llama = (checkpoint_contents(plan_of(name)) for name in ("plain", "llama"))
    assert weight_mismatches(plain, llama) == weight_mismatches(llama, plain) == []
    assert weight_mismatches(llama, checkpoint_contents(plan_of("qwen3"))) != []


def test_what_a_layer_does_wrong_in_a_run_is_reported_with_its_line(plan_of):
    """What cannot be read off its text, as what the code makes of names when it is run."""
    layer = TWO + "return F.linear(F.gelu(F.linear(x, up)), down)\n"
    plan = plan_of("own", parts=f"{HEAD.replace('raise', '#')}\nglobals()['F'] = None\n{layer}{FAMILY}")
    block = DecoderBlock(plan.architecture, 0, KERNELS["documents"], Axes(), rows=4)
    with pytest.raises(PartFailed, match="'NoneType' object has no attribute 'linear'") as caught:
        block.mlp(torch.zeros(1, 4, 64))
    assert caught.value.path == Path("parts.py")
    assert "F.gelu" in Path("parts.py").read_text().splitlines()[caught.value.line - 1]
    block.mlp.function = lambda x, **weights: x.float()[:, :2]
    wanted = r"gave torch.float32 of shape \(1, 2, 64\) for torch.float64 of shape \(1, 4, 64\)"
    with pytest.raises(PartFailed, match=wanted):
        block.mlp(torch.zeros(1, 4, 64, dtype=torch.float64))
    Path("elsewhere").mkdir()  # so that it is not the module that has been loaded
    Path("parts.py").write_text("# changed\n" + Path("parts.py").read_text())
    with pytest.raises(PartChanged, match="has changed since the plan was made"):
        UserPart("layer", "parts.py", "mine", plan.architecture.own["user"]["digest"], {}, Path("elsewhere/..")).load()


def test_operations_take_what_they_take_in_torch():
    values = {"inplace": False, "approximate": "tanh", "dim": -1}
    x = torch.tensor([0.5, 2.0])
    calls = [(getattr(torch.nn.functional, name), takes) for name, takes in FUNCTIONAL.items()]
    for name, takes in METHODS.items():
        calls += [(getattr(torch, name), takes), (getattr(torch.Tensor, name), takes)]
    for function, takes in calls:
        given = {name: values.get(name, 2.0) for name in takes}
        assert all(takes[name].fits(value) for name, value in given.items())
        placed = [value for name, value in given.items() if not takes[name].named]
        by_place = function(x, *placed, **{name: given[name] for name in takes if takes[name].named})
        torch.testing.assert_close(function(x, **given), by_place)
        for name, argument in takes.items():
            without = {each: value for each, value in given.items() if each != name}
            if argument.named:
                with pytest.raises(TypeError):
                    function(x, *given.values())
            if not argument.required:
                function(x, **without)


def test_names_that_modules_of_torch_have_are_refused():
    own = {*dir(DecoderBlock), *dir(OwnLayer), *dir(OwnMixer), *vars(torch.nn.Module())}
    # transformers gives all modules one more, where it is loaded.
    assert {name for name in own if not is_reserved(name)} <= {"smart_apply"}
    kept = [
        node.attr
        for cls in (OwnModule, OwnLayer, OwnMixer)
        for node in ast.walk(ast.parse(inspect.getsource(cls)))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    ]
    assert "is_cut" in kept and all(map(is_reserved, kept))


def test_all_pieces_are_documented_with_their_options():
    rows = (Path(__file__).parents[2] / "docs" / "own_parts.md").read_text().splitlines()
    for name, made_by in pieces().items():
        (head,) = (row.split("|")[1] for row in rows if row.startswith((f"| `{name}(", f"| `{name}.of(")))
        if ".of(" not in head:
            options = [each.name for each in inspect.signature(made_by).parameters.values()]
            options = [each for each in options if each not in ("name", "attention", "feed_forward")]
            assert [each for each in options if f"{each}=…" not in head] == [], name


BESIDE = body("""mixer = x.Mamba2Layer(name="m", groups=2, heads=4, head_dim=8, state_dim=8, kernel=4, norm="first")
    attention = x.ScaledChain.of(AttentionLayer("attn"), before=2.0, after=0.5)
    return pre_norm(Sum.of(mixer, attention), SwiGLULayer("mlp"))""")


@pytest.mark.parametrize("costs", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_a_block_may_have_attention_next_to_a_mixer(plan_of, costs: bool):
    plan = plan_of("own", "parallel { cp 2 { ring = 2, ulysses = 1 } }", parts=HEAD + BESIDE)
    assert plan.node("setup.parallel.cp").args["matches"] == [2 * plan.architecture.layers]
    block = block_of(plan.architecture.kinds[0])
    assert block.angles(plan.architecture) == AttentionLayer("attn").angles(plan.architecture)
    if costs:
        hold_against_the_trace(plan)


@pytest.mark.matrix
def test_operations_cost_what_is_said_of_them(plan_of):
    """All functions of single numbers that a layer may use, one after the other."""
    functions = [f"F.{name}" for name in FUNCTIONAL if name != "softmax"]
    functions += [f"torch.{name}" for name in ("exp", "sin", "cos", "abs", "square")]
    lines = [f"    x = F.linear({name}(F.linear(x, a{i})), b{i})" for i, name in enumerate(functions)]
    lines += ["    x = torch.softmax(x, -1) / (x ** 2 + 1) - 0.5 * x", "    return -x + c"]
    weights = [f"a{i}=weight(96, 'dim'), b{i}=weight('dim', 96), " for i in range(len(functions))]
    text = f"@layer\ndef mine(x, {''.join(weights)}c=weight('dim')):\n" + "\n".join(lines)
    plan = plan_of("own", "activation none {}", parts=f"{HEAD.replace('raise', '#')}\n{text}\n{FAMILY}")
    hold_against_the_trace(plan)
