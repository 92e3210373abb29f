"""The same texts on every layout: prompts of different lengths in one batch, drawn with a seed and without chance."""

from functools import partial

import pytest
from attrs import evolve
from projects import events
from topologies import SCHEDULES, Topology
from trials import Laboratory

PROMPTS = '["line 1", "abc def ghi abc", "", "li"]'
MORE = f"""
on finish generate {{ prompts = {PROMPTS}, tokens = 10, temperature = 0 }}
on finish generate {{ prompts = {PROMPTS}, tokens = 10, top_k = 20, top_p = 0.9, min_p = 0.01, stop = ["e"] }}
checkpoint {{ enabled = false }}
"""
# Documents are laid into rows alike everywhere: a ring of two wants them at multiples of four.
ALIGN = "collate=to_tensor -> flatten -> shift_tokens -> pack(sequential, align = 4)"
moe, oss, latent = (partial(Topology, model=model) for model in ("moe", "oss", "latent"))
# Of those that are not here test_resharding.py has some, with checkpoints that move between them.
LAYOUTS = {
    "tp": Topology(tp=2),
    "tp, whole sequences": Topology(tp=2, sets=("parallel.tp.sequence=false",)),
    "fsdp and ep": moe(fsdp=2, ep=2),
    "tp and ep": moe(tp=2, ep=2),
    "ring": Topology(ring=2),
    "ring, without fsdp": Topology(ring=2, sets=("parallel.cp.fold=none",)),
    "ulysses": Topology(ulysses=2),
    "pp": Topology(pp=2),
    "pp, two stages a rank": moe(pp=2, sets=SCHEDULES["zbv"]),
    "ddp": Topology(replicate=2, sets=("parallel.stack=ddp",)),
    "fsdp, recomputed": Topology(fsdp=2, sets=("activation.mode=full",)),
    "tp, windows and capped logits": Topology(tp=2, model="gemma3"),
    "pp, windows and capped logits": Topology(pp=2, model="gemma3"),
    "sinks and windows, tp and ep": oss(tp=2, ep=2),
    "sinks and windows, ring": oss(ring=2),
    "sinks and windows, pp": oss(pp=2),
    "latent attention, tp and ep": latent(tp=2, ep=2),
    "latent attention, whole sequences": latent(tp=2, sets=("parallel.tp.sequence=false",)),
    "latent attention, ring and pp": latent(ring=2, pp=2),
    "latent attention, fsdp": latent(fsdp=2),
}
ORDINARY = ("ring",)


def texts(lab: Laboratory, layout: Topology, *, alone: bool = False) -> list[list[dict[str, str]]]:
    trial = evolve(layout.trial("fp64"), steps=1, more=MORE, align=1, settings=(ALIGN,))
    run = lab.run(trial, () if alone else layout.layout, alone=alone, saves=False)
    return [event["samples"] for event in events(run.directory, "generate")]


@pytest.fixture(scope="module")
def expected(lab: Laboratory):
    """By model: the texts of one process."""
    known: dict[str, list[list[dict[str, str]]]] = {}

    def of(model: str) -> list[list[dict[str, str]]]:
        if model not in known:
            known[model] = texts(lab, Topology(model=model), alone=True)
        return known[model]

    return of


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ORDINARY else pytest.mark.matrix) for name in LAYOUTS]
)
def test_texts_do_not_depend_on_the_layout(lab: Laboratory, expected, name: str):
    layout = LAYOUTS[name]
    found = texts(lab, layout)
    assert found == expected(layout.model)
    greedy, drawn = found
    assert len({each["text"] for each in greedy}) > 1 and greedy != drawn
    assert not any("e" in each["text"] for each in drawn)
