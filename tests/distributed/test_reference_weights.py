"""Which weights a reference has: those that transformers computes with, also where a run goes on without its cache."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import field, frozen
from forked_ranks import ForkedRanks, Mutation, Outcome, RanksFailed
from projects import events, records
from reference_models import make
from safetensors.torch import load_file, save_file
from trials import Laboratory

from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.feed.token_store import TokenStore, open_store

SPEC = """
experiment referred {{ seed = 3, budget = 4 steps }}
model {model}
tokenizer bytes
{data}
batch {{ sequence = 64, micro = 4, rows = 4 }}
optimizer adamw {{ lr = 1e-2, eps = 1e-3 }}
precision {{ params = fp64 }}
every 1 step log
every 2 steps checkpoint
{more}
"""
PAIRS = 'dataset lines { source = jsonl("pairs.jsonl"), chosen = "good", rejected = "bad" }'
POLICY = 'dataset lines {{ source = jsonl("{file}"), tokens = "ids", mask = "mask", columns = {{ {columns} }} }}'


@frozen
class Desk:
    """A folder with data and models, and ranks that are forked."""

    folder: Path
    ranks: ForkedRanks
    _plain: dict[str, np.ndarray] = field(factory=dict, init=False)

    def plan(self, more: str, *sets: str, model: str = '"one"', data: str = PAIRS, root: str = "runs") -> Plan:
        (self.folder / "referred.xtrain").write_text(SPEC.format(model=model, data=data, more=more))
        compiled = plan_from_spec(self.folder / "referred.xtrain", (f"workspace.root={root}", *sets))
        assert compiled.plan is not None, compiled.diagnostics.render()
        return compiled.plan

    def run(self, name: str, plan: Plan, *, saves: bool = False, mutation: str = "") -> Outcome:
        fault = Mutation(mutation) if mutation else None
        return self.ranks.run(plan, self.folder, name=name, saves=saves, mutation=fault)

    def column(self, outcome: Outcome, plan: Plan) -> np.ndarray:
        """What a run has read or written."""
        told = events(outcome.directory, "reference")[-1]
        path = self.folder / plan.workspace["root"] / "cache" / "reference" / told["key"] / "logprobs.bin"
        return np.fromfile(path, dtype=np.float64)

    def plain(self, model: str = '"one"') -> np.ndarray:
        """What the model says itself; computed once."""
        if model not in self._plain:
            plan = self.plan("loss dpo {}", model=model)
            self._plain[model] = self.column(self.run(f"plain-{len(self._plain)}", plan), plan)
        return self._plain[model]

    def store(self, root: str = "runs") -> TokenStore:
        (found,) = (path.parent for path in (self.folder / root / "cache" / "tokens").glob("*/meta.json"))
        store = open_store(found)
        assert store is not None
        return store


@pytest.fixture(scope="module")
def desk(lab: Laboratory, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    folder = tmp_path_factory.mktemp("references")
    answers = [(f"{i} + 5 = ", f"{i + 5}{'!' * (i % 4)}", f"{i + 6}{'?' * (i % 3)}") for i in range(30)]
    lines = [json.dumps({"good": prompt + good, "bad": prompt + bad}) for prompt, good, bad in answers]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    make("llama", "plain", folder / "one")
    make("mixtral", "plain", folder / "experts")
    other(folder, "one", "two")
    write_adapter(folder / "peft")
    return Desk(folder, lab.ranks)


@pytest.fixture(autouse=True)
def beside_the_data(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk.folder)


def other(folder: Path, one: str, two: str) -> None:
    """A model of the same architecture with other weights."""
    if not (folder / two).exists():
        shutil.copytree(folder / one, folder / two)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(folder / one / "model.safetensors")
    changed = {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in tensors.items()}
    save_file(changed, folder / two / "model.safetensors", {"format": "pt"})


def write_adapter(folder: Path) -> None:
    """As PEFT saves one, with a head of its own."""
    folder.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    config |= {"modules_to_save": ["lm_head"], "bias": "none", "base_model_name_or_path": "one"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator, before = torch.Generator().manual_seed(2), "base_model.model"
    shapes = {f"{before}.lm_head.weight": (263, 32)}
    for layer in range(2):
        path = f"{before}.model.layers.{layer}.self_attn.q_proj"
        shapes |= {f"{path}.lora_A.weight": (4, 32), f"{path}.lora_B.weight": (32, 4)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


def log_probabilities(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Of each token but the first, by transformers, in fp64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
    with torch.no_grad():
        found = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1].log_softmax(-1)
    return found.gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0].numpy()


@pytest.mark.parametrize(("reference", "folder"), [
    pytest.param("initial", "one", marks=pytest.mark.matrix), ('"two"', "two"),
])  # fmt: skip
def test_log_probabilities_are_those_of_transformers(desk: Desk, reference: str, folder: str):
    plan = desk.plan(f"loss dpo {{ reference = {reference} }}")
    outcome = desk.run(f"transformers-{folder}", plan)
    column, store = desk.column(outcome, plan), desk.store()
    assert store.firsts is not None and store.trained is not None
    for document in range(0, store.num_documents, 7):
        begin, end = store.offsets[document : document + 2].tolist()
        middle = begin + int(store.firsts[document])
        for first, last in ((begin, middle), (middle, end)):
            theirs = log_probabilities(desk.folder / folder, store.tokens[first:last])
            ours, labels = column[first + 1 : last], store.trained[first + 1 : last] > 0
            assert np.array_equal(~np.isnan(ours), labels) and 0 < labels.sum() < len(labels)
            assert np.abs(ours / theirs - 1)[labels].max() < 1e-6  # its norms are computed in fp32
    # The run itself has the weights of its own model.
    loss = outcome.curve[0][1]
    assert loss == desk.run("own", desk.plan("loss simpo {}")).curve[0][1]


@pytest.mark.parametrize("reference", ["initial", "adapter_off"])
def test_an_adapter_that_begins_with_a_part_of_the_matrices_is_no_other_model(desk: Desk, reference: str):
    """PiSSA: with its first values in it, and with the matrices still whole, the model would have that part twice."""
    adapter = f"adapter lora {{ rank = 4, init = pissa }}\nloss dpo {{ reference = {reference} }}"
    plan = desk.plan(adapter)
    ours = desk.run(f"pissa-{reference}", plan)
    assert np.array_equal(desk.column(ours, plan), desk.plain(), equal_nan=True)
    first = json.loads((ours.directory / "metrics.jsonl").read_text().splitlines()[0])
    assert first["objective"] == pytest.approx(np.log(2), abs=1e-6)  # the policy begins as its reference


def test_a_computed_reference_gives_the_losses_of_one_that_data_bring(desk: Desk):
    """A policy that is held near a reference: log-probabilities from a file, and of the same weights."""
    random = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for _ in range(20):
        ids = random.integers(1, 250, size=int(random.integers(9, 30)))
        reference = [0.0, *log_probabilities(desk.folder / "two", ids)]
        mask = [0] * 3 + [1] * (len(ids) - 3)
        numbers = {"old": [-2.0] * len(ids), "gain": random.normal(size=len(ids)).tolist(), "ref": list(reference)}
        rows.append({"ids": ids.tolist(), "mask": mask, **numbers})
    (desk.folder / "policy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"logprobs": "old", "advantages": "gain"}
    loss = "loss grpo {{ kl = k3, kl_weight = 0.3, reference = {reference} }}"
    curves = []
    for reference, more in (("precomputed", {"ref_logprobs": "ref"}), ('"two"', {}), ("initial", {})):
        columns = ", ".join(f'{name}: "{field}"' for name, field in {**given, **more}.items())
        data = POLICY.format(file="policy.jsonl", columns=columns)
        skip = "dataset.lines.oversized=skip"
        plan = desk.plan(loss.format(reference=reference), skip, data=data, root="policies")
        outcome = desk.run(f"policy-{len(curves)}", plan)
        keys = ("objective", "policy/reference_kl")
        curves.append([[record[key] for key in keys] for record in records(outcome.directory, "metrics")])
    by_hand, computed, of_itself = map(np.array, curves)
    assert len(by_hand) == 4 and np.abs(computed / by_hand - 1).max() < 1e-6
    assert abs(of_itself[0, 1]) < 1e-12 < 1e-2 < by_hand[0, 1]


ADAPTERS = {
    "lora": ("one", "adapter lora { rank = 4, init = orthogonal }"),
    "dora": ("one", "adapter lora { rank = 4, init = orthogonal, dora = true }"),
    "experts": ("experts", 'adapter lora { rank = 4, init = orthogonal, targets = ["q_proj", "experts"] }'),
    "beside": ("one", 'adapter lora { rank = 4, init = orthogonal, targets = ["q_proj"], train = ["lm_head"] }'),
    "of a folder": ("one", 'adapter lora { from = "peft" }'),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "of a folder" else pytest.mark.matrix) for name in ADAPTERS],
)
def test_without_its_adapter_a_model_is_the_one_under_it(desk: Desk, name: str):
    folder, adapter = ADAPTERS[name]
    model = f'"{folder}"'
    found = {"plain": desk.plain(model)}
    for label, more in {
        "off": f"loss dpo {{ reference = adapter_off }}\n{adapter}",
        "on": f"loss dpo {{ reference = initial }}\n{adapter}",
    }.items():
        plan = desk.plan(more, model=model)
        found[label] = desk.column(desk.run(f"adapter-{name}-{label}", plan), plan)
    assert np.array_equal(found["plain"], found["off"], equal_nan=True)
    # The product of matrices that are drawn orthogonal is 0 but for rounding.
    assert np.nanmax(np.abs(found["plain"] - found["on"])) > (1e-2 if name == "of a folder" else 1e-9)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(("parallel.fsdp=2", "batch.micro=2"), id="fsdp"),
        pytest.param(("parallel.tp=2",), id="tp", marks=pytest.mark.matrix)],
)  # fmt: skip
def test_ranks_have_their_own_weights_again_behind_those_of_a_folder(desk: Desk, layout: tuple[str, ...]):
    found = []
    for name, sets in (("alone", ()), ("ranks", layout)):
        root = f"again-{name}"
        shutil.rmtree(desk.folder / root, ignore_errors=True)
        plan = desk.plan('loss dpo { reference = "two" }', *sets, root=root)
        outcome = desk.run(f"{root}-{len(list(desk.folder.glob('jobs/*')))}", plan)
        found.append((outcome.curve, desk.column(outcome, plan)))
    (curve, column), (others, pieces) = found
    assert np.array(others) == pytest.approx(np.array(curve), rel=1e-10)
    np.testing.assert_allclose(pieces, column, rtol=1e-12)


# A run goes on --------------------------------------------------------------------------------------------------------

ADAPTER = ADAPTERS["beside"][1]
RESUMED = {
    "initial": "loss dpo {}",
    "folder": 'loss dpo { reference = "two" }',
    "adapter": f"loss dpo {{ reference = adapter_off }}\n{ADAPTER}",
    "peft": 'loss dpo {}\nadapter lora { from = "peft" }',
    "under peft": 'loss dpo { reference = adapter_off }\nadapter lora { from = "peft" }',
}


def resumed(desk: Desk, name: str, *, keeps: bool, mutation: str = "") -> tuple[Outcome, Outcome]:
    """A run of four steps, and one from the checkpoint of its second on. keeps: the cache."""
    root = f"resumed-{name}"
    shutil.rmtree(desk.folder / root, ignore_errors=True)
    label = f"{root}-{keeps}-{mutation}"
    plan = desk.plan(RESUMED[name], root=root)
    whole = desk.run(f"{label}-whole", plan, saves=True)
    Laboratory(folder=desk.folder, ranks=desk.ranks).take_checkpoint(whole, 2, f"{label}-again")
    if not keeps:
        shutil.rmtree(desk.folder / root / "cache" / "reference")
    return whole, desk.run(f"{label}-again", plan, saves=True, mutation=mutation)


@pytest.mark.parametrize(
    ("name", "keeps"),
    [
        ("initial", False),
        pytest.param("initial", True, marks=pytest.mark.matrix),
        *(pytest.param(n, False, marks=pytest.mark.matrix) for n in ("folder", "adapter", "peft", "under peft")),
    ],
)
def test_a_run_goes_on_as_if_it_had_not_stopped(desk: Desk, name: str, keeps: bool):
    whole, again = resumed(desk, name, keeps=keeps)
    assert again.curve == whole.curve[1:]
    assert not [each for each in whole.tensors if not np.array_equal(again.tensors[each], whole.tensors[each])]
    first, second = (events(each.directory, "reference")[-1] for each in (whole, again))
    assert first["key"] == second["key"] and first["computed"] and second["computed"] is not keeps


def test_weights_of_later_steps_are_noticed(desk: Desk):
    try:
        whole, again = resumed(desk, "initial", keeps=False, mutation="trained_reference")
    except RanksFailed as failure:
        assert "nan" in str(failure)
    else:
        assert again.curve != whole.curve[1:]


def test_a_run_that_keeps_the_weights_of_its_reference_is_noticed(desk: Desk):
    plan = desk.plan(RESUMED["folder"], root="kept")
    curves = []
    for fault in ("", "trained_reference"):
        shutil.rmtree(desk.folder / "kept", ignore_errors=True)
        curves.append(desk.run(f"kept-{fault}", plan, mutation=fault).curve)
    assert abs(curves[0][0][1] / curves[1][0][1] - 1) > 1e-3


def test_a_run_remembers_what_it_began_with(desk: Desk):
    """It goes on when the run whose weights it has taken is gone, and not with other weights in their place."""
    first = desk.run("tuned", desk.plan("loss simpo {}", root="tuned"), saves=True)
    more = f'loss dpo {{}}\ncheckpoint {{ pretrained = "{first.directory.relative_to(desk.folder)}" }}'
    plan = desk.plan(more, root="preferred")
    whole = desk.run("preferred", plan, saves=True)
    assert abs(whole.curve[0][1] / first.curve[0][1] - 1) > 1e-3
    trials = Laboratory(folder=desk.folder, ranks=desk.ranks)
    trials.take_checkpoint(whole, 2, "preferred-again")
    first.directory.rename(desk.folder / "gone")
    assert desk.run("preferred-again", plan, saves=True).curve == whole.curve[1:]
    desk.run("tuned", desk.plan("loss simpo { gamma = 2 }", root="tuned"), saves=True)
    shutil.rmtree(desk.folder / "preferred" / "cache" / "reference")
    trials.take_checkpoint(whole, 2, "preferred-refused")
    with pytest.raises(RanksFailed, match="whose weights have changed"):
        desk.run("preferred-refused", plan, saves=True)


# The cache ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_is_never_computed_twice(desk: Desk):
    """Nor by another run, or another layout; and with other weights, documents or formats it is another entry."""
    told: list[dict[str, Any]] = []

    def see(name: str, more: str = "loss dpo {}", *sets: str, model: str = '"one"') -> dict[str, Any]:
        outcome = desk.run(
            f"cache-{name}", desk.plan(more, "experiment.budget=1 steps", *sets, model=model, root="once")
        )
        told.append(events(outcome.directory, "reference")[-1])
        return told[-1]

    first = see("first")
    for name, more, sets in (
        ("again", "loss dpo {}", ()),
        ("other loss", "loss dpo { beta = 0.3, form = hinge }", ()),
        ("fsdp", "loss dpo {}", ("parallel.fsdp=2", "batch.micro=2")),
        ("pp", "loss dpo {}", ("parallel.pp=2", "batch.micro=2")),
        ("rows", "loss dpo {}", ("batch.rows=8",)),
    ):
        found = see(name, more, *sets)
        assert (found["key"], found["computed"]) == (first["key"], False), name
    changed = {
        "longer rows": ("loss dpo {}", ("batch.sequence=96",), '"one"'),
        "other format": ("loss dpo {}", ("precision.params=fp32",), '"one"'),
        "held out": ("loss dpo {}", ("dataset.lines.holdout=20%",), '"one"'),
        "template": ("loss dpo {}", ("dataset.lines.template=plain",), '"one"'),
        "other base": ("loss dpo {}", (), '"two"'),
        "drawn": ("loss dpo {}", (), '"one" { weights = none }'),
        "other seed": ("loss dpo {}", ("experiment.seed=4",), '"one" { weights = none }'),
    }
    for name, (more, sets, model) in changed.items():
        assert see(name, more, *sets, model=model)["computed"], name
    assert see("folder", 'loss dpo { reference = "two" }')["computed"]
    other(desk.folder, "two", "one")  # other weights in files of the same names and sizes
    found = see("content")
    assert found["computed"] and found["key"] != first["key"]
    assert len({each["key"] for each in told}) == len(changed) + 3
