"""Models of a folder: xtrain computes what transformers computes with the files that it has saved, on every layout."""

import json
import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from code_models import SIZES
from code_models import make as make_code
from forked_ranks import ForkedRanks, Outcome, RanksFailed
from projects import events
from reference_models import CONFIGS, coded, gradients, make
from safetensors.torch import load_file, save_file
from trials import Laboratory

from xtrain.planner.load import plan_from_spec

# The gradients and the rows of the first step, of each rank: shards are put together.
HOOK = '''
import numpy as np
from torch.distributed.tensor import DTensor
from xtrain import RunContext, hook


@hook("after_backward")
def write_gradients(context: RunContext):
    """What the first step has come to."""
    found = {}
    for number, rows in enumerate(context.rows):
        if rows.labels_BS is not None:
            found[f"labels.{number}"] = rows.labels_BS.numpy()
        if rows.input_ids_BS is not None:
            found[f"ids.{number}"] = rows.input_ids_BS.numpy()
        found[f"bounds.{number}"] = rows.cumulative_lengths.numpy()
    for name, parameter in context.model.trained():
        value = parameter.grad
        found[f"gradient.{name}"] = (value.full_tensor() if isinstance(value, DTensor) else value).numpy()
    np.savez(f"{context.plan.name}.{context.rank.rank}.npz", **found)
'''
SPEC = """
use "{parts}"
experiment {name} {{ seed = 3, budget = 1 steps }}
model "{folder}" {{ {model} }}
tokenizer bytes
dataset lines {{ source = jsonl("data.jsonl") }}
batch {{ sequence = 64, micro = 2, rows = 4 }}
collate = to_tensor -> flatten -> shift_tokens -> pack(align = {align})
optimizer adamw {{ lr = 1e-2, eps = 1e-3, clip = none }}
precision {{ params = {params} }}
hook write_gradients
every 1 step log
"""


@frozen(kw_only=True)
class Seen:
    """The first step of a run: `rows` of the first rank, as `reference_models.gradients` takes them."""

    loss: float
    gradients: dict[str, np.ndarray]
    rows: list[dict[str, np.ndarray]]
    outcome: Outcome


@pytest.fixture(scope="module")
def desk(lab: Laboratory, tmp_path_factory: pytest.TempPathFactory):
    words = [f"line {i} " + "abc def ghi "[: i % 13] * (1 + i % 5) for i in range(150)]
    return Desk.of(tmp_path_factory.mktemp("folders"), lab, words)


@frozen
class Desk:
    """A folder with data, and ranks that are forked."""

    folder: Path
    ranks: ForkedRanks

    @classmethod
    def of(cls, folder: Path, lab: Laboratory, words: Sequence[str]) -> "Desk":
        (folder / "data.jsonl").write_text("".join(json.dumps({"text": w}) + "\n" for w in words))
        (folder / "parts.py").write_text(HOOK)
        return cls(folder, lab.ranks)

    def run(
        self,
        model: Path,
        name: str,
        *sets: str,
        params: str = "fp32",
        settings: str = "",
        more: str = "",
        align: int = 4,
    ) -> Seen:
        spec = self.folder / f"{name}.xtrain"
        parts = self.folder / "parts.py"
        text = SPEC.format(parts=parts, name=name, folder=model, model=settings, params=params, align=align)
        if more.startswith("optimizer"):
            text = "\n".join(line for line in text.split("\n") if not line.startswith("optimizer"))
        spec.write_text(text + more)
        compiled = plan_from_spec(spec, ("workspace.root=runs", *sets))
        assert compiled.plan is not None, compiled.diagnostics.render()
        world = compiled.plan.mesh.world_size
        outcome = self.ranks.run(compiled.plan, self.folder, name=name, saves=False)
        found = [dict(np.load(self.folder / f"{name}.{rank}.npz")) for rank in range(world)]
        gradients = {
            key.removeprefix("gradient."): value
            for each in reversed(found)
            for key, value in each.items()
            if key.startswith("gradient.")
        }
        count = sum(key.startswith("bounds.") for key in found[0])
        kinds = [kind for kind in ("ids", "labels", "bounds") if f"{kind}.0" in found[0]]
        rows = [{kind: found[0][f"{kind}.{number}"] for kind in kinds} for number in range(count)]
        return Seen(loss=outcome.curve[0][1], gradients=gradients, rows=rows, outcome=outcome)


def check(ours: Seen, loss: float, theirs: dict[str, np.ndarray], limit: float) -> None:
    """Losses relative to each other, gradients to the largest element of each, unless they are rounding alone, as those
    of a bias of keys."""
    assert abs(ours.loss - loss) < limit * abs(loss)
    assert ours.gradients.keys() == theirs.keys()
    most = {name: max(np.abs(theirs[name]).max(), np.abs(ours.gradients[name]).max()) for name in theirs}
    names = [name for name in theirs if most[name] > 1e-13 * max(most.values())]
    gaps = {name: np.abs(ours.gradients[name] - theirs[name]).max() / np.abs(theirs[name]).max() for name in names}
    assert not {name: gap for name, gap in gaps.items() if not gap < limit}


# Beside the model: the loss of routers, which transformers does not add unless it is asked.
EXPERTS = (
    *("deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_5_moe", "qwen3_moe"),
    *(
        "qwen3_next",
        "minimax_m2",
        "gemma4_moe",
        "olmoe",
        "dots1",
        "nemotron_h",
        "granitemoehybrid",
        "deepseek_v32",
        "glm_moe_dsa",
    ),
)
INDEXED = ("deepseek_v32", "glm_moe_dsa")  # with indexers, which take no ring
SETTINGS: dict[str, str] = dict.fromkeys(EXPERTS, "router { aux_loss = 0 }")


def in_fp64(reference: Any, family: str) -> Any:
    """A model of transformers."""
    if family in EXPERTS:
        reference.set_experts_implementation("eager")  # grouped products know no fp64
    return reference.double()


CASES = [(family, name) for family, each in CONFIGS.items() for name in each]
# Beside those that layouts are compared with below.
ODD = (
    ("llama", "scaled as llama3"),
    ("smollm3", "odd heads"),
    ("deepseek_v3", "one group"),
    ("gemma3", "odd heads, scaled positions"),
    ("gemma4", "one shared block, odd heads"),
    ("glm4_moe", "odd heads, tied"),
    ("falcon_h1", "odd heads, tied"),
)


@pytest.mark.parametrize(
    ("family", "name"), [pytest.param(*case, marks=() if case in ODD else pytest.mark.matrix) for case in CASES]
)
def test_loss_and_gradients_are_those_of_transformers(desk: Desk, family: str, name: str):
    """In fp32, of rows in which several documents are packed, against each document by itself in fp64: in fp32
    transformers' own roundings are as large as the limit."""
    folder = desk.folder / f"{family} {name}"
    reference = in_fp64(make(family, name, folder), family)
    ours = desk.run(folder, f"{family}_{CASES.index((family, name))}", settings=SETTINGS.get(family, ""))
    assert sum(len(each["bounds"]) - 1 for each in ours.rows) > 4 * len(ours.rows)
    loss, theirs = gradients(reference, ours.rows)
    check(ours, loss, theirs, 1e-5)


IN_TURN = (("tp", "wide heads, tied"),)
TP, FSDP, PP, EP = ("parallel.tp=2",), ("parallel.fsdp=2",), ("parallel.pp=2", "batch.micro=1"), ("parallel.ep=2",)
RING = ("parallel.cp=2", "parallel.cp.ring=2", "parallel.cp.ulysses=1")
ULYSSES = ("parallel.cp=2", "parallel.cp.ring=1", "parallel.cp.ulysses=2")
WHOLE = (*TP, "parallel.tp.sequence=false")
PER_LAYER = "per-layer inputs, shared keys"
SHARDS: dict[str, Any] = {"max_shard_size": "20KB"}
STACKED: dict[str, Any] = {"save_original_format": False}
# Every axis of two ranks, every form of the files, and families that have something of their own.
ORDINARY = (
    ("llama", "odd heads, tied", PP, SHARDS),
    ("qwen3_moe", "plain", (*TP, *EP), STACKED),
    ("gpt_oss", "plain", (*RING, *EP), SHARDS),
)
# Every layout of every family, the forms of the files in turns.
MORE = [
    (family, "plain", layout, ({}, STACKED if family in SETTINGS else SHARDS)[(place + number) % 2])
    for place, family in enumerate(CONFIGS)
    for number, layout in enumerate((TP, FSDP, PP, RING, ULYSSES, *([(*FSDP, *EP)] if family in SETTINGS else [])))
    if layout != RING or family not in INDEXED
]
MORE += [
    ("qwen3", "wide heads, tied", TP, SHARDS),
    ("deepseek_v3", "biased, scaled by yarn", (*TP, *EP), STACKED),
    ("qwen3_5", "scaled by yarn", RING, {}),
    ("qwen2", "windows", RING, {}),
    ("olmo3", "odd heads, tied", RING, {}),
    ("seed_oss", "every bias", (*TP, *FSDP), {}),
    ("granite", "every bias", (*TP, *FSDP), {}),
    ("minimax_m2", "all rotated, scaled by yarn", (*TP, *FSDP, *EP), STACKED),
    ("minimax_m2", "odd heads, tied", (*PP, *FSDP), {}),
    ("gemma4", "plain", (*RING, *FSDP, "activation.mode=full"), SHARDS),
    ("gemma4", "no window", (*TP, *RING), {}),
    *(("gemma4", PER_LAYER, layout, {}) for layout in (RING, ULYSSES, WHOLE, (*TP, *FSDP))),
    ("gemma4", PER_LAYER, (*FSDP, "activation.mode=full"), SHARDS),
    ("gemma4", PER_LAYER, (*TP, *RING, "activation.mode=selective"), {}),
    ("gemma4", "one shared block, odd heads", FSDP, {}),
    ("gemma4", "per-layer inputs alone, no window", (*TP, *FSDP, "activation.mode=selective"), {}),
    ("gemma4_moe", "plain", WHOLE, {}),
    ("gemma4_moe", "plain", (*PP, *EP, *FSDP), SHARDS),
    ("gemma4_moe", "odd heads", (*PP, *FSDP), {}),
    ("gemma4_moe", "all experts a token, tied", (*TP, *FSDP), {}),
    ("phi3", "short, in part", (*TP, *FSDP), {}),
    ("phi3", "odd heads, tied", (*PP, *FSDP), SHARDS),
    ("glm4", "no bias, scaled", (*RING, *TP), {}),
    ("glm4", "odd heads, tied", (*PP, *FSDP), SHARDS),
    ("ministral3", "plain", (*RING, *TP), {}),
    ("ministral3", "odd heads, tied", (*PP, *FSDP), {}),
    ("glm4_moe_lite", "biased, scaled by yarn", (*TP, *FSDP, *EP), {}),
    ("glm4_moe_lite", "odd heads, tied", (*PP, *FSDP), STACKED),
    ("granite", "odd heads, tied", (*PP, *FSDP), {}),
    ("glm4_moe", "normed, scaled by yarn", (*TP, *FSDP, *EP), {}),
    ("glm4_moe", "odd heads, tied", (*PP, *FSDP), STACKED),
    ("glm4_moe", "normed, scaled by yarn", WHOLE, {}),
    ("smollm3", "windows", ULYSSES, {}),
    ("gemma3", "wide heads, capped logits", TP, SHARDS),
    ("llama", "biased, scaled by yarn", (*TP, *FSDP), {}),
    ("qwen2_moe", "dense between, tied", (*FSDP, *EP), {}),
    ("olmo2", "plain", TP, {}),
    ("mistral", "plain", ULYSSES, {}),
    ("mixtral", "plain", (*FSDP, *EP), {}),
    ("qwen3", "wide heads, tied", (*TP, *FSDP), SHARDS),
    ("mistral", "plain", (*ULYSSES, *TP), {}),
    ("llama", "biased, scaled by yarn", WHOLE, {}),
    ("llama", "biased, scaled by yarn", RING, {}),
    ("gemma3", "wide heads, capped logits", WHOLE, {}),
    ("gemma3", "wide heads, capped logits", (*PP, *FSDP), {}),
    ("gemma3", "wide heads, capped logits", (*RING, *TP), {}),
    ("gemma3", "wide heads, capped logits", (*TP, "parallel.tp.loss=false"), {}),
    ("qwen3_moe", "dense between", (*TP, *EP), {}),
    ("qwen3_moe", "dense between", (*PP, *EP, *FSDP), {}),
    ("gpt_oss", "plain", (*TP, *EP), {}),
    ("gpt_oss", "no bias, tied", (*PP, *EP, *FSDP), {}),
    ("gpt_oss", "odd heads", FSDP, {}),  # experts that are not divided evenly
    ("deepseek_v3", "plain", (*TP, *FSDP, *EP), {}),
    ("deepseek_v3", "biased, scaled by yarn", WHOLE, {}),
    ("deepseek_v3", "one group", (*PP, *EP, *TP), STACKED),
    ("deepseek_v3", "one group", (*RING, *TP), {}),
    ("deepseek_v32", "biased, scaled by yarn", (*TP, *EP), STACKED),
    ("deepseek_v32", "plain", (*WHOLE, *FSDP, "activation.mode=selective"), {}),
    ("deepseek_v32", "plain", (*TP, *ULYSSES, "activation.mode=full"), {}),
    ("glm_moe_dsa", "two of three shared, scaled by yarn", (*TP, *FSDP, *EP), {}),
    ("glm_moe_dsa", "plain", (*ULYSSES, "activation.mode=full"), {}),
    ("qwen3_5", "four key heads", (*TP, *RING), {}),
    ("qwen3_5", "four key heads", ("parallel.cp=4", "parallel.cp.ring=2", "parallel.cp.ulysses=2"), {}),
    ("nemotron_h", "bounded steps", (*TP, *FSDP, *EP), STACKED),
    ("nemotron_h", "plain", (*PP, *FSDP, *EP, "activation.mode=full"), {}),
    ("nemotron_h", "bounded steps", (*RING, *TP, "activation.mode=selective"), {}),
    ("nemotron_h", "bounded steps", ("parallel.cp=4", "parallel.cp.ring=2", "parallel.cp.ulysses=2"), {}),
    ("falcon_h1", "gated norm", (*TP, *PP, *FSDP), {}),
    ("falcon_h1", "gated norm", (*TP, *RING, *FSDP, "activation.mode=full"), {}),
    ("falcon_h1", "gated norm", (*ULYSSES, "activation.mode=selective"), {}),
    ("falcon_h1", "odd heads, tied", FSDP, SHARDS),
    ("gpt_oss", "plain", (*FSDP, *EP, "activation.mode=full"), {}),
    ("gpt_oss", "plain", (*RING, *EP, "activation.mode=selective"), {}),
]
# Three axes together, of families without such rows above.
RECENT = (
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "glm4_moe", "glm4", "glm4_moe_lite", "nemotron_h", "gemma4"),
    *("gemma4_moe", "minimax_m2", "deepseek_v32", "glm_moe_dsa", "olmo3", "ministral3", "phi3", "granite"),
    *("granitemoehybrid", "seed_oss", "falcon_h1"),
)
MORE += [
    (family, "plain", layout, {})
    for family in RECENT
    for layout in (
        ((*TP, *FSDP, *EP), (*PP, *FSDP, *EP), (*TP, *(ULYSSES if family in INDEXED else RING), *EP))
        if family in SETTINGS
        else ((*TP, *PP, *FSDP), (*TP, *RING, *FSDP))
    )
    if not any(family == row[0] and set(layout) == set(row[2]) for row in MORE)
]


@pytest.mark.parametrize(
    ("family", "name", "layout", "saving"),
    [*ORDINARY, *(pytest.param(*each, marks=pytest.mark.matrix) for each in MORE)],
)
def test_a_layout_reads_and_computes_what_one_process_does(
    desk: Desk, family: str, name: str, layout: tuple[str, ...], saving: dict[str, Any]
):
    """In fp64; each rank reads the bytes of its own pieces, which are half of what is cut, and no more."""
    folder = desk.folder / f"{family} {name} {layout} {bool(saving)}"
    reference = make(family, name, folder, **saving)
    label = f"{family}_{len(list((desk.folder / 'jobs').iterdir()))}" if (desk.folder / "jobs").exists() else family
    more = {"params": "fp64", "settings": SETTINGS.get(family, "")}
    alone = desk.run(folder, f"{label}_alone", **more)
    loss, theirs = gradients(in_fp64(reference, family), alone.rows)
    check(alone, loss, theirs, 1e-5)  # transformers computes the angles of positions in fp32
    cut = desk.run(folder, f"{label}_cut", *layout, **more)
    check(cut, alone.loss, alone.gradients, 1e-10)
    (whole,) = read_bytes(alone)
    ends = ("correction_bias", "layer_scalar")
    biases = {name: len(each) for name, each in reference.named_buffers() if name.endswith(ends)}
    frozen = sum(each.numel() for each in reference.parameters() if each.grad is None)
    stored = 4 * (sum(gradient.size for gradient in alone.gradients.values()) + frozen)
    assert whole == stored + 4 * sum(biases.values())
    for read, shapes in zip(read_bytes(cut), cut.outcome.shapes, strict=True):
        own = [size for name, size in biases.items() if name.split(".")[2] in {each.split(".")[1] for each in shapes}]
        assert read == 4 * sum(own) + sum(4 * prod(shape) for shape in shapes.values())


RING4 = ("parallel.cp=4", "parallel.cp.ring=4", "parallel.cp.ulysses=1")
BOTH = ("parallel.cp=4", "parallel.cp.ring=2", "parallel.cp.ulysses=2")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "name", "layout"),
    [
        ("qwen3_5", "four key heads", RING4),
        ("qwen3_5", "four key heads", (*TP, *RING)),
        ("qwen3_5", "four key heads", (*BOTH, "activation.mode=selective")),
        ("qwen3_next", "plain", (*RING, *FSDP, "activation.mode=full")),
        ("nemotron_h", "bounded steps", RING4),
        ("nemotron_h", "bounded steps", (*RING, *TP, "activation.mode=selective")),
        ("nemotron_h", "bounded steps", BOTH),
        ("granitemoehybrid", "odd heads, tied", RING4),  # three groups
        ("falcon_h1", "odd heads, tied", RING4),
        ("falcon_h1", "gated norm", (*RING, *TP, "activation.mode=selective")),
    ],
)
def test_a_ring_passes_states_of_long_documents(
    lab: Laboratory, tmp_path: Path, family: str, name: str, layout: tuple[str, ...]
):
    desk = Desk.of(tmp_path, lab, [f"line {i} " + "abc def ghi " * (40 + 9 * (i % 5)) for i in range(40)])
    make(family, name, tmp_path / "model")
    more: dict[str, Any] = {"params": "fp64", "settings": SETTINGS.get(family, ""), "align": 8}
    long = ("batch.sequence=2048", "batch.micro=1", "batch.rows=2")
    alone = desk.run(tmp_path / "model", "alone", *long, **more)
    cut = desk.run(tmp_path / "model", "cut", *long, *layout, **more)
    check(cut, alone.loss, alone.gradients, 1e-10)
    compiled = plan_from_spec(tmp_path / "cut.xtrain", ("workspace.root=runs", *long, *layout))
    assert compiled.plan is not None, compiled.diagnostics.render()
    does = compiled.plan.node("setup.parallel.cp").does
    most = [int(found) for found in re.findall(r"with more than (\d+)", does)] or [99]
    assert ("for each document" in does) == (name == "odd heads, tied")
    documents = [len(each["bounds"]) - 1 for each in cut.rows]
    assert 1 < min(documents) <= max(documents) <= most[0]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "name", "coding", "layout"),
    [
        ("gpt_oss", "in blocks", "mxfp4", (*FSDP, *EP)),
        ("gpt_oss", "in blocks", "mxfp4", (*TP, *FSDP)),
        ("deepseek_v3", "plain", "fp8", (*TP, *FSDP, *EP)),
        ("qwen3", "plain", "fp8", (*PP, *FSDP)),
    ],
)
def test_a_layout_reads_the_codes_that_one_process_does(
    desk: Desk, family: str, name: str, coding: str, layout: tuple[str, ...]
):
    folder = desk.folder / f"{family} in {coding} {layout}"
    make(family, name, folder)
    coded(folder, coding)
    label, more = f"{family}_{coding}_{len(layout)}", {"params": "fp64", "settings": SETTINGS.get(family, "")}
    alone = desk.run(folder, f"{label}_alone", **more)
    check(desk.run(folder, f"{label}_cut", *layout, **more), alone.loss, alone.gradients, 1e-10)


@pytest.mark.parametrize(
    ("layout", "name"),
    [pytest.param(layout, name, id=f"{axis}-{name}", marks=() if (axis, name) in IN_TURN else pytest.mark.matrix)
        for name in ("plain", "wide heads, tied") for axis, layout in (("tp", TP), ("fsdp", FSDP), ("pp", PP))],
)  # fmt: skip
def test_rows_that_a_folder_does_not_have_begin_as_the_mean_of_the_others(
    desk: Desk, name: str, layout: tuple[str, ...]
):
    folder = desk.folder / f"grown {name} {layout}"
    reference = make("qwen3", name, folder)
    reference.resize_token_embeddings(251, mean_resizing=False)
    reference.save_pretrained(folder)
    reference = reference.double()
    means = [
        each.weight.mean(0).detach() for each in (reference.get_input_embeddings(), reference.get_output_embeddings())
    ]
    reference.resize_token_embeddings(258, mean_resizing=False)
    for each, mean in zip((reference.get_input_embeddings(), reference.get_output_embeddings()), means, strict=True):
        each.weight.data[251:] = mean
    label = f"grown_{name[:4]}_{layout[0][9:11]}"
    more = {"params": "fp64", "settings": "vocab = tokenizer"}
    alone = desk.run(folder, f"{label}_alone", **more)
    loss, theirs = gradients(reference, alone.rows)
    check(alone, loss, theirs, 1e-5)
    cut = desk.run(folder, f"{label}_cut", *layout, **more)
    check(cut, alone.loss, alone.gradients, 1e-10)
    assert {len(value) for key, value in alone.gradients.items() if "embed_tokens" in key or "lm_head" in key} == {258}


def read_bytes(seen: Seen) -> list[int]:
    """What each rank has read."""
    (event,) = (each for each in events(seen.outcome.directory, "weights") if each["rank_bytes"])
    return event["rank_bytes"]


def test_a_run_says_which_tensor_is_wrong_before_any_step(desk: Desk):
    """A value that is NaN, and a head that is not the embedding it is tied to."""
    folder = desk.folder / "damaged"
    make("qwen3", "wide heads, tied", folder)
    file, name = folder / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(file)

    def refused(label: str, changed: dict[str, torch.Tensor], *words: str) -> None:
        save_file(changed, file)
        with pytest.raises(RanksFailed):
            desk.run(folder, label, *TP)
        directory = desk.folder / "jobs" / label
        failures = events(directory, "failure")
        assert {each["exit_code"] for each in failures} == {3} and not (directory / "metrics.jsonl").exists()
        assert all(word in each["error"] for each in failures for word in words), failures

    damaged = tensors[name].clone()
    damaged[3, -1] = float("nan")  # which the second rank reads
    refused("with_nan", {**tensors, name: damaged}, "model.safetensors", name, "NaN")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, file)
    assert desk.run(folder, "tied_twice").loss > 0
    head[-1, 0] += 1
    refused("no_tie", {**tensors, "lm_head.weight": head}, "lm_head.weight", "differs from the embedding")


def test_a_run_that_goes_on_needs_no_folder_and_one_that_begins_needs_that_of_the_plan(desk: Desk):
    folder, name = desk.folder / "for a while", "goes_on"
    make("llama", "plain", folder)
    spec = desk.folder / f"{name}.xtrain"
    text = SPEC.format(parts=desk.folder / "parts.py", name=name, folder=folder, model="", params="fp32", align=4)
    spec.write_text(text.replace("budget = 1 steps", "budget = 2 steps"))
    plans = [plan_from_spec(spec, ("workspace.root=runs", *sets)).plan for sets in (("launch.stop_at=1 steps",), ())]
    stops, ends = plans
    assert stops is not None and ends is not None
    whole = desk.ranks.run(ends, desk.folder, name="at_once", saves=False)
    with pytest.raises(RanksFailed, match="rank 0: stopped"):  # as planned
        desk.ranks.run(stops, desk.folder, name=name)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").unlink()
    assert desk.ranks.run(ends, desk.folder, name=name).curve == whole.curve
    with pytest.raises(RanksFailed):
        desk.ranks.run(ends, desk.folder, name="too_late", saves=False)
    (failure,) = events(desk.folder / "jobs" / "too_late", "failure")
    assert failure["exit_code"] == 3 and "has no weights" in failure["error"]


ALONE = "collate=to_tensor -> flatten -> shift_tokens -> pack(single)"
# Type of a model that transformers computes, and its layout.
CODE = [
    ("qwen3_moe", (*FSDP, "activation=full")),
    ("olmo3", ULYSSES),
]
MORE_CODE = [
    ("gemma2", RING),  # windows, capped scores
    ("phi3", (*WHOLE, "activation=full")),  # matrices whose outputs are gathered
    ("olmoe", (*FSDP, *EP, "activation=full")),
    ("llama", (*FSDP, "activation=full")),
    ("llama", PP),
    ("gpt2", PP),  # a table of positions before the layers
    ("qwen3", WHOLE),  # norms of heads
    ("opt", WHOLE),  # without a plan of transformers, with whole heads
    ("qwen3_moe", (*PP, "activation=full")),
    ("olmo3", (*PP, *RING)),
    ("gpt_oss", RING),  # sinks
    ("gpt_oss", ULYSSES),
    ("glm4_moe", (*RING, "activation=selective")),
    ("deepseek_v3", ULYSSES),
    ("cohere", (*PP, *FSDP)),
    ("phi3", (*ULYSSES, "activation=full")),
    ("codegen", PP),
    ("phi", PP),
    ("olmo3", (*WHOLE, *FSDP)),
    ("glm4_moe", (*WHOLE, *PP)),
    ("deepseek_v3", WHOLE),
    ("cohere", (*WHOLE, "parallel.tp.loss=false")),  # tied
    ("gemma2", (*WHOLE, *ULYSSES)),  # embedding of its own class
    ("granite", (*WHOLE, "activation=selective")),
    ("qwen2", WHOLE),  # biases
    ("glm4_moe", (*WHOLE, *EP)),
    ("glm4_moe", (*PP, *EP, *FSDP)),
    ("mixtral", (*FSDP, *EP)),
    ("mixtral", (*RING, *EP, "activation=full")),
    ("qwen3_moe", (*FSDP, *EP, "activation=selective")),
    ("deepseek_v3", (*FSDP, *EP, "activation=full")),
    ("granitemoe", (*FSDP, *EP)),
    ("gpt_oss", (*RING, *EP)),  # stacks of another orientation, with biases
    ("nemotron_h", (*FSDP, *EP, ALONE)),  # without gates
    ("deepseek_v3", (*WHOLE, *FSDP, *EP)),
    ("minimax_m2", (*ULYSSES, *EP, "activation=selective")),
    ("jamba", (*FSDP, *EP, ALONE)),
    ("hunyuan_v1_moe", FSDP),
    ("gpt_oss", (*WHOLE, *FSDP, *EP)),  # sinks that are cut
    ("bert", (*WHOLE, *FSDP)),  # a tied head with a bias
    ("codegen", (*WHOLE, *FSDP)),  # a head with a bias
    ("codegen", (*WHOLE, "parallel.tp.loss=false")),
    ("apertus", WHOLE),  # parameters of an activation
    ("stablelm", WHOLE),
    ("roberta", (*FSDP, ALONE)),  # modules around the layers have parameters
    ("hrm_text", (*FSDP, ALONE, "activation=full")),
]
IN_FP32 = ("gemma2", "cohere", "glm4_moe", "deepseek_v3")  # sums gradients of norms or routers in fp32


@pytest.mark.parametrize(
    ("kind", "layout"), [*CODE, *(pytest.param(*each, marks=pytest.mark.matrix) for each in MORE_CODE)]
)
@pytest.mark.usefixtures("inspected_here")
def test_code_of_transformers_on_two_ranks(desk: Desk, kind: str, layout: tuple[str, ...]):
    folder = desk.folder / f"code of {kind}"
    make_code(kind, folder, **SIZES.get(kind, {}))
    label = "_".join((kind, *(each for each in layout if each != ALONE))).translate(str.maketrans(". =", "___"))
    rows = tuple(each for each in layout if each == ALONE)
    one, two = (
        desk.run(folder, f"{label}_{number}", *sets, params="fp64", settings="code = transformers")
        for number, sets in enumerate((rows, layout))
    )
    check(two, one.loss, one.gradients, 1e-6 if kind in IN_FP32 else 1e-10)


TRAINED = {
    "lora": "adapter lora { rank = 4, init = orthogonal }",
    "muon": "optimizer muon { lr = 1e-2, clip = none }",
}


@pytest.mark.parametrize("how", TRAINED)
@pytest.mark.parametrize(
    ("family", "name", "layout"),
    [
        *(("gemma4", name, layout) for name in ("plain", PER_LAYER) for layout in ((*TP, *FSDP), RING)),
        *(
            (family, "plain", layout)
            for family in ("gemma4_moe", "qwen3_5_moe", "nemotron_h")
            for layout in ((*FSDP, *EP), (*TP, *EP))
        ),
        *(("falcon_h1", "gated norm", layout) for layout in ((*TP, *FSDP), RING)),
    ],
)
@pytest.mark.matrix
def test_layouts_train_as_one_process_does(desk: Desk, family: str, name: str, layout: tuple[str, ...], how: str):
    """Losses of three steps, and the gradients of the last."""
    folder = desk.folder / f"{family} {name} {how} {layout}"
    label = f"{family}_{len(name)}_{how}_{'_'.join(layout)}"
    make(family, name, folder)
    more = {"params": "fp64", "settings": SETTINGS.get(family, ""), "more": TRAINED[how]}
    label = label.translate(str.maketrans(". =", "___"))
    one, two = (
        desk.run(folder, f"{label}_{len(sets)}", "experiment.budget=3 steps", *sets, **more) for sets in ((), layout)
    )
    check(two, one.loss, one.gradients, 1e-8)  # updates of the first two steps are in between
    losses = [[point[1] for point in seen.outcome.curve] for seen in (one, two)]
    assert len(losses[0]) == 3 and losses[0][0] != losses[0][2]
    assert np.allclose(*losses, rtol=1e-10, atol=0)


LORA = 'adapter lora {{ rank = 4, targets = ["experts", "{}"], init = orthogonal }}'
NF4 = ("precision.base.kind=nf4", "precision.base.block=32")


@pytest.mark.parametrize(
    ("kind", "layout", "matrix"),
    [
        ("qwen3_moe", (*FSDP, *EP), "q_proj"),
        pytest.param("glm4_moe", (*WHOLE, *EP), "v_proj", marks=pytest.mark.matrix),
        pytest.param("gpt_oss", (*PP, *FSDP, *EP), "q_proj", marks=pytest.mark.matrix),
        pytest.param("olmoe", (*FSDP, *EP, *NF4), "o_proj", marks=pytest.mark.matrix),
        pytest.param("mixtral", (*FSDP, *EP, *NF4), "q_proj", marks=pytest.mark.matrix),
        pytest.param("granitemoe", (*PP, *NF4), "q_proj", marks=pytest.mark.matrix),
    ],
)
@pytest.mark.usefixtures("inspected_here")
def test_adapters_of_experts_of_code_of_transformers(desk: Desk, kind: str, layout: tuple[str, ...], matrix: str):
    """On two ranks against one, and on a base in codes."""
    folder = desk.folder / f"adapted code of {kind}"
    make_code(kind, folder, **SIZES.get(kind, {}))
    label = "_".join(("adapted", kind, str(len(layout))))
    base = NF4 if set(NF4) <= set(layout) else ()
    more = {"params": "fp64", "settings": "code = transformers", "more": LORA.format(matrix)}
    one, two = (desk.run(folder, f"{label}_{number}", *sets, **more) for number, sets in enumerate((base, layout)))
    assert any("experts" in name for name in one.gradients)
    check(two, one.loss, one.gradients, 1e-6 if kind in IN_FP32 else 1e-10)


# Family → matrices that have adapters.
RECURRENT = {
    "nemotron_h": ("x_proj", "b_proj", "out_proj", "experts"),
    "qwen3_5_moe": ("z_proj", "b_proj", "out_proj", "experts"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [(*TP, *EP), (*PP, *FSDP), (*RING, *EP)])
@pytest.mark.parametrize("base", [(), NF4])
@pytest.mark.parametrize("family", RECURRENT)
def test_adapters_of_recurrent_mixers_on_layouts(
    desk: Desk, layout: tuple[str, ...], base: tuple[str, ...], family: str
):
    folder = desk.folder / f"adapted mixers of {family} {layout} {bool(base)}"
    make(family, "in blocks", folder)
    words = ", ".join(f'"{each}"' for each in RECURRENT[family])
    adapter = f"adapter lora {{ rank = 4, targets = [{words}], init = orthogonal }}"
    more = {"params": "fp64", "settings": SETTINGS[family], "more": adapter}
    label = f"{family}_mixers_{len(base)}_{layout[0].split('.')[1][:2]}_{len(layout)}"
    one, two = (desk.run(folder, f"{label}_{n}", *base, *sets, **more) for n, sets in enumerate(((), layout)))
    assert all(any(f".{each}" in name for name in one.gradients) for each in RECURRENT[family])
    check(two, one.loss, one.gradients, 1e-10)


PROMPTS = '["line 1", "abc def ghi abc", "li"]'
GENERATE = f"on finish generate {{ prompts = {PROMPTS}, tokens = 6, temperature = 0 }}"


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "layout"), [
    ("olmo3", PP), ("gpt2", PP), ("gemma2", RING), ("qwen3", WHOLE), ("olmoe", (*FSDP, *EP)), ("opt", WHOLE),
])  # fmt: skip
@pytest.mark.usefixtures("inspected_here")
def test_texts_of_code_of_transformers_on_two_ranks(desk: Desk, kind: str, layout: tuple[str, ...]):
    folder = desk.folder / f"texts of {kind} {layout[0]}"
    make_code(kind, folder, vocab_size=264)
    label = "_".join(("texts", kind, *layout)).translate(str.maketrans(". =", "___"))
    one, two = (
        desk.run(folder, f"{label}_{number}", *sets, params="fp64", settings="code = transformers", more=GENERATE)
        for number, sets in enumerate(((), layout))
    )
    alone, cut = (events(each.outcome.directory, "generate")[0]["samples"] for each in (one, two))
    assert cut == alone and len({each["text"] for each in alone}) > 1
