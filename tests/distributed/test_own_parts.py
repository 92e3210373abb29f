"""Sources and collators of the user's own: whatever the layout, and after a resume, the same is learned."""

import re
from pathlib import Path

import pytest
from projects import records, worst

from xtrain.planner.load import plan_from_path

ROOT = Path(__file__).parents[2]
PARTS = '''
import torch
from attrs import evolve
from xtrain import IGNORE_INDEX, collator, source

@source
def lines(count=300):
    for number in range(count):
        yield {"text": f"line {number} " + "abc def ghi "[: number % 13] * (1 + number % 9)}

@collator(takes="labelled samples")
def drop(samples, least, share, *, generator):
    """Leave out what is short, and some of the rest."""
    for sample in samples:
        if len(sample.tokens) >= least and generator.random() > share:
            yield sample

@collator(takes="rows of token arrays")
def cut(row, longest):
    """Segments no longer than that."""
    return evolve(row, segments=[each[:longest] for each in row.segments])

@collator(takes="rows of token tensors")
def swap(row, one, other):
    """Another token wherever a certain one stands."""
    return evolve(row, segments=[torch.where(each == one, other, each) for each in row.segments])

@collator(takes="token samples")
def turn(samples):
    return reversed(samples)

@collator(takes="part of a microbatch")
def hide(batch, every):
    """No loss at some positions, by what stands there: the same whichever rank holds them."""
    labels = torch.where(batch.input_ids_BS % every == 0, IGNORE_INDEX, batch.labels_BS)
    return evolve(batch, labels_BS=labels)

@collator(takes="microbatch")
def forget(batch, share, generator):
    hidden = torch.from_numpy(generator.random(tuple(batch.labels_BS.shape)) < share)
    return evolve(batch, labels_BS=torch.where(hidden, IGNORE_INDEX, batch.labels_BS))
'''
SPEC = """
use "parts.py"
experiment own { seed = 3, budget = 4 steps }
model llama { dim = 32, layers = 3, heads = 4, kv_heads = 4, ffn = 48, init_std = 0.2 }
tokenizer bytes
dataset made { source = lines(), holdout = 10% }
batch { sequence = 64, micro = 2, rows = 8 }
collate = to_tensor -> flatten -> shift_tokens -> drop(12, share = 0.2) -> pack -> forget(share = 0.3) -> forget(0.1)
optimizer adamw { lr = 1e-2, eps = 1e-3 }
precision { params = fp64 }
every 1 step log
on finish eval made { batches = none }
"""
# One of every kind, before and behind each built-in link.
EVERY_KIND = (
    "collate=cut(40) -> to_tensor -> swap(97, 98) -> flatten -> turn -> shift_tokens -> drop(8, share = 0.2) -> pack "
    "-> forget(share = 0.3) -> shard -> hide(5)"
)
LAYOUTS = {
    "fsdp 2": ("parallel.fsdp=2",),
    "cp 2": ("parallel.cp=2",),
    "pp 2": ("parallel.pp=2",),
    "pp 3": ("parallel.pp=3",),
    "micro 4": ("batch.micro=4", "batch.prefetch=0"),
    "workers 1": ("batch.workers=1",),
}


@pytest.fixture(scope="module")
def train(lab, tmp_path_factory):
    """Train under `--set` texts as the job `name`."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "parts.py").write_text(PARTS)
    (folder / "own.xtrain").write_text(SPEC)

    def run(name, *sets, saves=False):
        compiled = plan_from_path(folder / "own.xtrain", sets)
        assert compiled.plan is not None, compiled.diagnostics.render()
        return lab.ranks.run(compiled.plan, folder, name=name, saves=saves)

    return run


@pytest.fixture(scope="module")
def alone(train):
    return train("alone")


# Of stages and of two data ranks other tests of this file see the same, of reading processes test_references.py.
@pytest.mark.matrix
@pytest.mark.parametrize("layout", [pytest.param(
    n,
    marks=pytest.mark.matrix if n in ("fsdp 2", "pp 2", "pp 3", "workers 1") else (),
) for n in LAYOUTS])  # fmt: skip
def test_every_layout_learns_the_same(train, alone, layout):
    found = train(layout.replace(" ", ""), *LAYOUTS[layout])
    assert len(found.curve) == 4
    assert max(worst(found.curve, alone.curve)) < 1e-10
    (ours,), (theirs,) = found.evals, alone.evals
    assert ours["tokens"] == theirs["tokens"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-10)


@pytest.mark.slow
def test_stages_between_the_ends_of_a_pipeline_take_every_kind_of_collator(train):
    """They read no tokens, and learn from another stage where documents lie in rows that are collated there."""
    alone, found = train("kinds", EVERY_KIND), train("kinds-pp3", EVERY_KIND, "parallel.pp=3")
    assert max(worst(found.curve, alone.curve)) < 1e-10
    assert found.evals[0]["tokens"] == alone.evals[0]["tokens"]
    assert found.evals[0]["loss"] == pytest.approx(alone.evals[0]["loss"], rel=1e-10)


@pytest.mark.slow
def test_a_run_that_goes_on_with_fewer_ranks_draws_the_same_numbers(train, alone):
    first = train("moved", "parallel.fsdp=2", "experiment.budget=2 steps", saves=True)
    assert [step for step, *_ in first.curve] == [1, 2]
    second = train("moved")
    assert max(worst(second.curve, alone.curve)) < 1e-10


def test_other_code_does_learn_something_else(train, alone):
    plain = train("plain", "collate=to_tensor -> flatten -> shift_tokens -> drop(12, share = 0.2) -> pack")
    assert min(worst(plain.curve, alone.curve)) > 1e-4


OWN_METRICS = {
    "measuring.xtrain": {"action/norms_of/norm"},
    "stepping.xtrain": {"step/noisy/moved"},
    "watching.xtrain": {"hook/largest/gradient"},
}


def test_the_examples_of_the_documentation_run(lab, tmp_path):
    text = (ROOT / "docs" / "own_parts.md").read_text()
    blocks = dict(re.findall(r"```(?:python)?\n# (\S+)\n(.*?)```", text, re.DOTALL))
    specs = [name for name in blocks if name.endswith(".xtrain")]
    assert {"squares.xtrain", "focal.xtrain", "learning.xtrain", "modelling.xtrain"} <= {*specs}
    for name, block in blocks.items():
        (tmp_path / name).write_text(block)
    for spec in specs:
        few = ("dataset.made.source=synthetic(documents = 100)",) if "synthetic()" in blocks[spec] else ()
        compiled = plan_from_path(tmp_path / spec, few)
        assert compiled.plan is not None, compiled.diagnostics.render()
        found = lab.ranks.run(compiled.plan, tmp_path, name=spec.partition(".")[0], saves=False)
        steps = int(re.search(r"budget = (\d+) steps", blocks[spec])[1])
        assert [step for step, *_ in found.curve] == [*range(1, steps + 1)]
        assert bool(found.evals) == (" eval " in blocks[spec])
        own = {key for r in records(found.directory, "metrics") for key in r}
        own = {key for key in own if key.startswith(("action/", "hook/", "step/"))}
        assert own == OWN_METRICS.get(spec, set())
