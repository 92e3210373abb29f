"""No size that a spec can name makes a plan take long: it is planned, or refused, in seconds."""

import time
from cProfile import Profile
from pathlib import Path
from pstats import Stats
from typing import get_args

import pytest

from xtrain.cli.main import main
from xtrain.planner.load import plan_from_text
from xtrain.planner.review.capabilities import _settings
from xtrain.planner.review.page import render

BASE = {
    "experiment": "experiment tiny { seed = 1, budget = 1000 steps }",
    "model": "model mixtral { dim = 32, layers = 2, heads = 4, experts = 8 }",
    "tokenizer": "tokenizer bytes",
    "dataset": "dataset text { source = synthetic(documents = 1000, length = 64), holdout = 10% }",
    "batch": "batch { sequence = 64, micro = 2 }",
    "optimizer": "optimizer adamw { lr = 1e-3 }",
}
TWO = (
    "dataset a { source = synthetic(documents = 1000, length = 64) }\ndataset b { source = synthetic(documents = {n}) }"
)
# (lines that replace those of the same block or are added, the codes of its errors). n: a size beyond all reason.
SIZES: list[tuple[dict[str, str], list[str]]] = [
    ({"model": "model llama { dim = 32, layers = {n}, heads = 4 }"}, ["X304"]),
    ({"model": "model llama { dim = {n}, layers = 2, heads = {n}, head_dim = {n}, ffn = {n}, vocab = {n} }"}, []),
    ({"model": "model mixtral { dim = 32, layers = 2, heads = 4, experts = 8, shared_experts = {n} }"}, []),
    ({"model": "model mixtral { dim = 32, layers = 2, heads = 4, experts = {n} }"}, ["X304"]),
    ({"parallel": "parallel { pp {n} }"}, ["X304"]),
    ({"parallel": "parallel { pp 1000000 }"}, ["X404", "X411"]),
    ({"parallel": "parallel { tp {n} }"}, ["X304"]),
    ({"parallel": "parallel { tp 1000000 }"}, ["X402", "X405", "X420"]),
    ({"parallel": "parallel { cp 1000000 { ulysses = 1000000 } }"}, ["X402", "X405"]),
    ({"parallel": "parallel { ep 1000000, fsdp 1000000 }"}, ["X406"]),
    ({"parallel": "parallel { fsdp 1000000 { replicate = 1000000 } }"}, []),
    ({"parallel": "parallel { pp 2 { schedule = interleaved_1f1b, stages_per_rank = {n} } }"}, ["X404", "X411"]),
    ({"parallel": "parallel { pp 2 { layers = [{n}, 1] } }"}, ["X404", "X411"]),
    ({"parallel": "parallel { pp 2 }", "batch": "batch { sequence = 64, accumulate = {n} }"}, ["X411"]),
    ({"parallel": "parallel { pp 2 }", "batch": "batch { sequence = 64, rows = {n} }"}, ["X411"]),
    ({"batch": "batch { sequence = {n}, micro = {n}, accumulate = {n}, prefetch = {n} }"}, []),
    ({"batch": "batch { sequence = 512, workers = {n} }\nlaunch { threads = {n} }"}, ["X304"]),
    ({"launch": "launch { nodes = 999983, ranks_per_node = 999983 }"}, []),
    ({"batch": "batch { sequence = 64, rows = 720720 }", "fault": "fault_tolerance { elastic = 1..{n} }"}, ["X430"]),
    ({"experiment": "experiment tiny { budget = {n} epochs }", "dataset": TWO,
      "mixture": "mixture { a = {n}, b = 1 }"}, []),
    ({"experiment": "experiment tiny { budget = {n} steps }", "a": "phase a { from = 3 steps }\nphase b { from = 50% }",
      "every": "every 7 steps log\nevery 3 steps eval text { batches = {n} }\nevery {n} steps checkpoint"}, []),
    ({"cluster": "cluster h100 { nodes = {n}, devices = {n} }"}, []),
]  # fmt: skip


def _plan(lines: dict[str, str], *sets: str, world: int | None = None) -> list[str]:
    """The codes of the errors, in their order."""
    text = "\n".join((BASE | lines).values()).replace("{n}", str(10**12))
    begin = time.process_time()
    compiled = plan_from_text(text, "absurd.xtrain", sets, world)
    if compiled.plan is not None:
        render(compiled.plan)
    assert time.process_time() - begin < 5
    return sorted({error.code for error in compiled.diagnostics.errors})


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("lines", "codes"), SIZES)
def test_sizes_beyond_all_reason_are_planned_or_refused_in_seconds(lines, codes):
    assert _plan(lines) == codes


@pytest.mark.timeout(60)
def test_no_number_of_ranks_takes_long():
    for world in (10**6, 10**12):
        assert _plan({}, world=world) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_number_that_can_be_set_may_be_absurd():
    numbers = [path for path, attribute, _ in _settings() if {*get_args(attribute.type), attribute.type} & {int, float}]
    assert len(numbers) > 40
    for path in numbers:
        for value in (10**6, 10**12):
            _plan({}, f"{path}={value}")


# Lines of a spec by number, of which hundreds may stand in one.
MANY_LINES = {
    "every": lambda n: f"every {n + 2} steps " + ("log" if n % 2 else "eval a"),
    "checkpoint": lambda n: f"every {n + 2000} steps checkpoint then stop",
    "profile": lambda n: f"every {n + 2000} steps profile",
    "memory_snapshot": lambda n: f"every {50_000 + 5 * n} steps memory_snapshot",
    "notify": lambda n: f'every {n + 2} steps notify("echo {n}")',
    "finish": lambda n: f'on finish notify("echo {n}")',
    "loss_spike": lambda n: f'on loss_spike notify("echo {n}")',
    "phase": lambda n: f"phase p{n} {{ from = {n + 1} steps, lr_scale = 0.5 }}",
    "dataset": lambda n: f'dataset d{n} {{ source = text("*.txt"), holdout = 1% }}\nevery {n + 2} steps eval d{n}',
    "let": lambda n: f"let x{n + 1} = x{n} + 1",
    "param": lambda n: f"param x{n + 1} = {n}",
    "group": lambda n: f'group "layers.{n}.self_attn" {{ lr_scale = 0.5, optimizer adamw {{ lr = 1.0 }} }}',
    "hook": lambda n: f"hook h{n} {{ every = {n + 1} }}",
    "invalid": lambda n: f"every {n + 2} steps export",
    "unknown": lambda n: f"every {n + 2} steps eval b{n}",
}
HOOK = '@hook("before_step")\ndef h{0}(context, every: int = 1):\n    """Do nothing."""\n'


def calls_of_plan(path: Path, kind: str, count: int) -> dict[str, int]:
    """Function → calls in `xtrain plan` of a spec with so many lines of a kind."""
    lines = [MANY_LINES[kind](number) for number in range(count)]
    weights = ", ".join(f"d{number} = 1" for number in range(count)) if kind == "dataset" else "a = 1"
    hooks = map(HOOK.format, range(count if kind == "hook" else 1))
    path.with_name("parts.py").write_text("from xtrain import hook\n" + "".join(hooks))
    path.write_text(
        'experiment tiny { budget = 100000 steps }\ntokenizer bytes\nlet x0 = 1\nuse "parts.py"\n'
        f"model llama {{ dim = 16, layers = {count if kind == 'group' else 1}, heads = 2 }}\n"
        "batch { sequence = 16, micro = 4 }\noptimizer adamw { lr = 1.0 }\n"
        f'dataset a {{ source = text("*.txt"), holdout = 1% }}\nmixture {{ {weights} }}\n' + "\n".join(lines)
    )
    with Profile() as profile:
        main(["plan", str(path)])
    return {f"{key[0]}:{key[2]}": calls for key, (_, calls, *_) in Stats(profile).stats.items()}  # pyright: ignore


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in ("every", "phase", "dataset", "hook") else pytest.mark.slow)
        for kind in MANY_LINES],
)  # fmt: skip
def test_calls_of_planning_grow_with_the_lines_of_a_spec(tmp_path, kind):
    calls_of_plan(tmp_path / "spec.xtrain", kind, 2)  # what is loaded and built once
    few, many = (calls_of_plan(tmp_path / "spec.xtrain", kind, count) for count in (50, 200))
    assert {name: (few.get(name), calls) for name, calls in many.items() if calls > 1000 + 6 * few.get(name, 0)} == {}
