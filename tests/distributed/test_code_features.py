"""What surrounds training, with models that transformers' own code computes: against native code, and on two ranks."""

import json
from pathlib import Path

import pytest
from attrs import evolve, frozen
from code_models import SIZES
from code_models import make as make_code
from forked_ranks import ForkedRanks, Mutation, Outcome, RanksFailed
from projects import events
from reference_models import CONFIGS
from reference_models import make as make_native
from trials import Laboratory, gaps

from xtrain.dsl.schema.model import expert_families
from xtrain.planner.compile import Compiled
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.base.json_lines import trim_after

SPEC = """experiment {name} {{ seed = 3, budget = 3 steps }}
model "{folder}" {{ {settings} }}
tokenizer bytes
batch {{ sequence = 64, rows = 4 }}
launch {{ device = cpu }}
precision {{ params = {params} }}
{feature}
"""
LINES = 'dataset lines { source = jsonl("data.jsonl"), holdout = 10% }'
PAIRS = 'dataset pairs { source = jsonl("pairs.jsonl"), holdout = 10%, prompt = "prompt", chosen = "chosen", ' \
    'rejected = "rejected", template = "plain" }'  # fmt: skip
SUMS = 'dataset sums { source = jsonl("sums.jsonl"), holdout = 20%, prompt = "question", response = "answer", ' \
    'template = "plain", oversized = skip }'  # fmt: skip
ADAMW = "optimizer adamw { lr = 1e-2, eps = 1e-3 }"
LORA = "adapter lora { rank = 3, alpha = 6 }"
ALONE = "to_tensor -> flatten -> shift_tokens -> pack(single)"
SINGLE = f"collate = {ALONE}"
ROLLOUT = f"{SUMS}\n{ADAMW}\n{SINGLE}\nrollout {{ group = 2, max_tokens = 6 }}\n" \
    "reward exact_answer { compare = number }"  # fmt: skip
FEATURES = {
    "sft": f"{LINES}\n{ADAMW}",
    "adapter": f"{LINES}\n{ADAMW}\n{LORA}",
    "checkpoints": f"{LINES}\n{ADAMW}\nevery 2 steps checkpoint\ncheckpoint {{ keep = none, model = false }}",
    "dpo": f"{PAIRS}\n{ADAMW}\nloss dpo {{ beta = 0.5, reference = initial }}\nevery 2 steps eval pairs {{ }}",
    "dpo of an adapter": f"{PAIRS}\n{ADAMW}\n{LORA}\nloss dpo {{ beta = 0.5, reference = adapter_off }}",
    "reward head": f"{PAIRS}\n{ADAMW}\nloss bradley_terry {{ centre = 0.01 }}\nevery 2 steps eval pairs {{ }}",
    "live teacher": f'{LINES}\n{ADAMW}\nloss distill {{ teacher = "other", live = true }}',
    "grpo": f"{ROLLOUT}\nloss grpo {{ kl = k3, kl_weight = 0.1 }}\nevery 2 steps eval sums {{ answers = greedy }}",
    "averages": f"{LINES}\n{ADAMW}\nema {{ decay = 0.9 }}\nevery 2 steps eval lines {{ }}",
    "muon": f"{LINES}\noptimizer muon {{ lr = 1e-2 }}",
    "nf4": f"{LINES}\n{ADAMW}\n{LORA}\nprecision {{ base nf4 {{ block = 32 }} }}",
    "int8": f"{LINES}\n{ADAMW}\n{LORA}\nprecision {{ base int8 {{ block = 32 }} }}",
    "dropout": f"{LINES}\n{ADAMW}\nadapter lora {{ rank = 3, dropout = 0.3 }}\nactivation full",
    "tasks": f"{LINES}\n{SUMS}\n{ADAMW}\nmixture {{ lines = 1, sums = 1, exact = true }}\n"
    "task lines { adapter lora { rank = 2 } }\ntask sums { adapter lora { rank = 3 } }",
    "texts": f'{LINES}\n{ADAMW}\non finish generate {{ prompts = ["line 1", "abc def ghi abc", "li"], tokens = 6 }}',
}
ORDINARY = ("dpo", "grpo")
IN_FP32 = ("glm4_moe", "deepseek_v3")  # transformers computes the scores of their routers in fp32
# Whose documents transformers' code does not keep apart in rows.
RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h", "granitemoehybrid", "falcon_h1")
FSDP, PP = ("parallel.fsdp=2",), ("parallel.pp=2", "batch.micro=1")


@frozen
class Bench:
    """A folder with data, and ranks that are forked."""

    folder: Path
    ranks: ForkedRanks

    def plan(self, model: Path, name: str, feature: str, *sets: str, settings: str, params: str = "fp64") -> Compiled:
        spec = self.folder / f"{name}.xtrain"
        text = FEATURES[feature].replace('"other"', f'"{self.folder / "other"}"')
        spec.write_text(SPEC.format(name=name, folder=model, settings=settings, params=params, feature=text))
        return plan_from_spec(spec, ("workspace.root=runs", *sets))

    def run(
        self, model: Path, name: str, feature: str, *sets: str, settings: str, mutation: Mutation | None = None
    ) -> Outcome:
        compiled = self.plan(model, name, feature, *sets, settings=settings)
        assert compiled.plan is not None, compiled.diagnostics.render()
        return self.ranks.run(compiled.plan, self.folder, name=name, mutation=mutation, saves=feature == "checkpoints")


pytestmark = pytest.mark.usefixtures("inspected_here")


@pytest.fixture(scope="module")
def bench(lab: Laboratory, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("features")
    words = [f"line {i} " + "abc def ghi "[: i % 13] * (1 + i % 5) for i in range(60)]
    pairs = [{"prompt": f"q{i} ", "chosen": word[:20], "rejected": word[5:30]} for i, word in enumerate(words)]
    sums = [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(40)]
    for name, records in (("data", [{"text": word} for word in words]), ("pairs", pairs), ("sums", sums)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    make_native("llama", "biased, scaled by yarn", folder / "own")
    make_native("llama", "every head its own", folder / "other")
    return Bench(folder, lab.ranks)


def label(*parts: str) -> str:
    return "_".join("".join(c if c.isalnum() else "_" for c in part) for part in parts)


def _of_plan(outcome: Outcome) -> Outcome:
    """Without buffers of transformers' modules."""
    return evolve(outcome, whole=[{n: t for n, t in own.items() if "rotary_emb" not in n} for own in outcome.whole])


@pytest.mark.parametrize(
    "feature", [*ORDINARY, *(pytest.param(each, marks=pytest.mark.matrix) for each in FEATURES if each not in ORDINARY)]
)
def test_a_feature_is_that_of_native_code(bench: Bench, feature: str):
    """But for norms and rotary positions, which transformers computes in fp32 whatever the format. Advantages of a
    group cancel in gradients, which leaves more of that: with grpo they are in fp64."""
    exact = Mutation("exact_llama") if feature == "grpo" else None
    native, code = (
        bench.run(bench.folder / "own", label(feature, kind), feature, settings=settings, mutation=mutation)
        for kind, settings, mutation in (("native", "", None), ("code", "code = transformers", exact))
    )
    assert not (beyond := gaps(_of_plan(code), native).beyond(1e-4)), beyond
    texts = [[each["samples"] for each in events(outcome.directory, "generate")] for outcome in (native, code)]
    assert texts[0] == texts[1] and bool(texts[0]) == (feature == "texts")


# Feature, type and layout.
TYPES = [
    ("adapter", "granite", ("parallel.tp=2", "parallel.tp.sequence=false")),
    ("adapter", "olmo3", (*PP, "activation=full")),
    ("grpo", "granite", FSDP),
    ("nf4", "glm4_moe", FSDP),
    ("muon", "glm4_moe", FSDP),
    ("dpo", "mamba", (*FSDP, f"collate={ALONE}")),
    ("reward head", "olmo3", FSDP),
    ("averages", "gpt2", FSDP),
]


@pytest.mark.parametrize(
    ("feature", "kind", "sets"),
    [pytest.param(*each, marks=pytest.mark.matrix if number else ()) for number, each in enumerate(TYPES)],
)
def test_a_feature_of_a_type_on_two_ranks(bench: Bench, feature: str, kind: str, sets: tuple[str, ...]):
    folder = bench.folder / kind
    if not folder.exists():
        make_code(kind, folder, vocab_size=264, **SIZES.get(kind, {}))
    alone = tuple(each for each in sets if each.startswith("collate"))
    one, two = (
        bench.run(folder, label(feature, kind, str(number)), feature, *each, settings="code = transformers")
        for number, each in enumerate((alone, sets))
    )
    assert not (beyond := gaps(two, one).beyond(1e-5 if kind in IN_FP32 else 1e-9)), beyond


# Dense, experts, latent attention, hybrid, Mamba: layouts on which a run is resumed after one rank.
MOVES = {
    "olmo3": (FSDP, PP),
    "glm4_moe": (FSDP, ("parallel.tp=2", "parallel.tp.sequence=false")),
    "deepseek_v3": (PP, FSDP),
    "bamba": (FSDP, PP),
    "mamba": (FSDP, PP),
}


@pytest.mark.parametrize(
    ("kind", "moves"),
    [("olmo3", MOVES["olmo3"][:1]), *(pytest.param(*each, marks=pytest.mark.slow) for each in MOVES.items())],
)
def test_a_killed_run_resumes_on_other_layouts(bench: Bench, kind: str, moves: tuple[tuple[str, ...], ...]):
    """All ranks are killed two steps after each checkpoint, and other layouts take the run on. Its curve, weights and
    optimizer states are those of one rank that was not disturbed."""
    folder = bench.folder / kind
    if not folder.exists():
        make_code(kind, folder, vocab_size=264, **SIZES.get(kind, {}))
    steps = 2 * len(moves) + 3
    common = (f"experiment.budget={steps} steps", *((f"collate={ALONE}",) if kind in ("bamba", "mamba") else ()))
    feature, name = "checkpoints", label("moved", kind, str(len(moves)))
    whole = bench.run(folder, f"{name}_whole", feature, *common, settings="code = transformers")
    directory, saves = bench.folder / "jobs" / name, [2 * number for number in range(1, len(moves) + 1)]
    for saved, sets in zip(saves, ((), *moves), strict=False):
        killed = Mutation("noted", die_in=saved + 2, saved=saved)
        with pytest.raises(RanksFailed, match="signal 9"):
            bench.run(folder, name, feature, *common, *sets, settings="code = transformers", mutation=killed)
        trim_after(directory / "metrics.jsonl", saved, directory / "logs" / "superseded.jsonl")
    ended = bench.run(folder, name, feature, *common, *moves[-1], settings="code = transformers")
    assert [event["step"] for event in events(directory, "resumed")] == saves
    assert [step for step, *_ in ended.curve] == list(range(1, steps + 1))
    assert not (beyond := gaps(ended, whole).beyond(1e-5 if kind in IN_FP32 else 1e-9)), beyond


@pytest.mark.matrix  # by default features do, over fewer steps
@pytest.mark.parametrize("family", CONFIGS)
def test_native_code_and_transformers_learn_the_same(bench: Bench, family: str):
    folder = bench.folder / f"native {family}"
    make_native(family, "plain", folder)
    sets = ("experiment.budget=20 steps", "optimizer.lr=1e-3")
    sets += (f"collate={ALONE}",) if family in RECURRENT else ()
    routed = family in expert_families()  # without losses of routers on either side
    native, code = (
        bench.run(folder, label(family, kind), "sft", *sets, settings=settings)
        for kind, settings in (
            ("native", "router { aux_loss = 0 }" if routed else ""),
            ("code", "code = transformers" + (", router_aux_loss = 0" if routed else "")),
        )
    )
    losses = [[loss for _, loss, _ in outcome.curve] for outcome in (native, code)]
    assert len(losses[0]) == 20 and losses[0] == pytest.approx(losses[1], rel=1e-5)
