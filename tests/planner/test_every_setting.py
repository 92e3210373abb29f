"""No setting is without effect: each one, changed, gives another plan, and another experiment if it is about learning.

And nothing that it changes is forgotten where checkpoints are judged. The tests walk the schema, so that a new setting
which the planner ignores fails here.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from attrs import define, field
from every_setting import alternatives, at, places, replaced

from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.data import Batch, Dataset, Mixture, Phase
from xtrain.dsl.schema.setting import AUTO, Auto, Role
from xtrain.dsl.spec import Spec
from xtrain.plan.plan import Plan
from xtrain.planner import compile
from xtrain.planner.compile import compile_plan
from xtrain.planner.review.diff import compare_plans, render_diff
from xtrain.planner.review.resumable import resumable

from .conftest import spec_text

# Thousands of plans: minutes where other work has the cores.
pytestmark = pytest.mark.timeout(1200)

# Everything is on, so that every setting has something to act upon.
ALL_ON = {
    "model": "model qwen3_moe { dim = 64, layers = 8, heads = 8, kv_heads = 4, vocab = 300, experts = 8\n"
    'frozen = ["layers.0", "norm"]\n'
    "rope { scaling = yarn, factor = 4, original = 128 } }",
    "dataset": """dataset code { source = jsonl("a/*.jsonl"), holdout = 1% }
        dataset other { source = text("b/*.txt"), holdout = 100% }
        dataset chat {
          source = huggingface("org/name"), messages = "messages", train_on = last, template = "talk.jinja"
          tools = "tools", system = "system", message_train = "train", message_weight = "weight",
          template_arguments = { enable_thinking: false }, lost = error
        }
        dataset qa { source = parquet("q/*.parquet"), prompt = "question", response = "answer", template = "plain" }
        dataset ready { source = tokens("t/*.npy", dtype = uint16, separator = 0) }
        dataset fake { source = synthetic() }
        dataset asked { source = jsonl("c/*.jsonl"), choices = "choices", holdout = 100% }
        dataset liked {
          source = jsonl("l/*.jsonl"), prompt = "prompt", chosen = "chosen", rejected = "rejected", template = "plain"
          values = { margin: "margin" }, holdout = 100%
        }
        dataset rated {
          source = jsonl("r/*.jsonl"), prompt = "prompt", response = "answer", input = "input", label = "label"
          template = "plain", holdout = 100%
        }
        dataset drawn {
          source = jsonl("d/*.jsonl"), tokens = "tokens", mask = "mask", columns = { advantages: "advantages" }
          holdout = 100%
        }""",
    "mixture": "mixture { code = 0.5, chat = 0.2, qa = 0.1, ready = 0.1, fake = 0.1, temperature = 2 }\n"
    "phase early { from = 20 steps, mix = { code: 1 }, lr_scale = 0.5 }",
    "every": "every 25 steps eval code { batches = 2 } then health then log\n"
    "every 50 steps eval other then eval asked then checkpoint\n"
    "every 60 steps eval liked then eval rated then eval drawn\n"
    "every 30 steps profile { active = 2 } then memory_snapshot\n"
    'on finish generate { prompts = ["def "], chat = "plain" } then notify("./done.sh")\n'
    "on sigterm checkpoint then stop\n"
    "on nan(3) skip",
    "group": "group embed_tokens { lr_scale = 0.5, weight_decay = 0.01, optimizer sgd { lr = 1e-2 } }",
    "scheduler": "scheduler wsd { warmup = 5 steps }",
    "activation": "activation selective",
    "compile": "compile { mode = default }",
    "checkpoint": "checkpoint { mode = async }",
    "alerts": "alerts { stalled = 45 s, loss_above = 9 }",
    "ema": "ema { decay = 0.99 }",
    "log": 'log { wandb { project = "tests" } }',
    "launcher": 'launcher slurm { partition = "gpu", time = 4 h, warn = 10 min, cpus = 8, memory = 8 GiB }',
    "cluster": "cluster other { memory = 80 GiB, flops = 900T, efficiency = 40%, link = 4 GiB, network = 1 GiB }",
}
AXES = "tp 2, pp 2 { schedule = interleaved_1f1b }, cp 2, ep 2"
CHAIN = "collate = to_tensor -> flatten -> shift_tokens -> pack"
STATED = ALL_ON | {
    "parallel": f"parallel {{ {AXES}, fsdp 2 }}",
    "batch": "batch { sequence = 256, accumulate = 8 }",
    "collate": f"{CHAIN}(multipack)",
    "checkpoint": "checkpoint { mode = async, best = eval.code.loss }",
}
# The same ranks and rows, asked for from the other end, behind a ramp; with the alignment of documents, which else
# follows from the ring.
FREE = ALL_ON | {
    "collate": f"{CHAIN}(multipack, align = 16) -> shard",
    "parallel": f"parallel {{ {AXES}, fsdp auto }}",
    "launch": "launch { ranks_per_node = 16 }",
    "batch": "batch { sequence = 256, rows = 16, ramp_from = 8 }",
}
# Ranks that could as well be copies of the whole model; only some models can be exported.
COPIES = ALL_ON | {
    "parallel": "parallel { fsdp 1 { replicate = 2 } }",
    "every": ALL_ON["every"] + '\nevery 40 steps export { to = "models/{step}" }',
}
# One rank by itself.
ALONE = ALL_ON | {"parallel": "parallel { fsdp 1 }"}

DATASETS = ("code", "other", "chat", "qa", "ready", "fake", "asked", "liked", "rated", "drawn")
EXEMPT = {
    "datasets.asked.source": "sources of the other kinds give no questions: tests/planner/test_mixture.py",
    "ticks.1.actions.1.batches": "all questions are evaluated: tests/planner/test_no_effect.py",
    "events.0.actions.0.task": "of several adapters: tests/planner/test_tasks.py",
    "mixture.exact": "where shares of a step are whole rows: tests/planner/test_mixture.py",
    **dict.fromkeys(("loss.kind", "loss.weighted"), "of data that a loss reads: tests/planner/test_losses.py"),
    "optimizer.stochastic_rounding": "of weights in bf16 alone: tests/planner/test_stored_states.py",
    "activation.tile_mlp": "of blocks without experts: tests/planner/test_graph.py",
    **dict.fromkeys(("precision.fp8.recipe", "precision.fp8.rest", "precision.fp8.skip"),
        "of compute fp8: tests/planner/test_fp8.py"),
    **dict.fromkeys(("precision.fp16.scale", "precision.fp16.interval"),
        "of compute fp16: tests/planner/test_nonfinite.py"),
    **dict.fromkeys((f"precision.qat.{name}" for name in ("weights", "group", "activations", "skip")),
        "of quantization-aware training: tests/planner/test_qat.py"),
    "precision.batch_invariant": "of what is not compiled: tests/planner/test_rollout.py",
    "adapter": "in which nothing of the model is frozen: tests/planner/test_adapters.py",
    "parallel.deepspeed.stage": "of its stack alone: tests/planner/test_deepspeed.py",
    **dict.fromkeys(
        tuple(
            f"parallel.deepspeed.{name}" for name in ("offload_optimizer", "offload_param", "nvme_path", "pin_memory")
        ),
        "of its stack alone: tests/planner/test_deepspeed_offload.py",
    ),
    **dict.fromkeys(("parallel.torchft.replicas", "parallel.torchft.min", "parallel.torchft.heartbeat",
        "parallel.torchft.process_group", "parallel.torchft.timeout"),
        "of its stack alone: tests/planner/test_torchft.py"),
    "launcher.options": "a word that is no option is refused: tests/cli/test_launch.py",
    "launcher.mounts": "a word that is no pair of folders is refused: tests/cli/test_launch.py",
    "cluster.calibration": "a file with measured runs: tests/runtime/jobs/test_calibrate.py",
    "path": "where the spec lies is not part of the experiment",
    "origins": "nor is how it is written",
    "uses": "which files are read shows in the parts that are used",
    **dict.fromkeys(("model.folder", "model.weights"), "of a folder: tests/planner/test_model_folder.py"),
    **dict.fromkeys(("model.mtp", "model.mtp_weight", "phases.early.mtp_weight"),
        "of one stage alone: tests/planner/test_further_tokens.py"),
    **dict.fromkeys(("model.rope.low", "model.rope.high"), "of llama3: tests/planner/test_model_folder.py"),
    **dict.fromkeys(("model.rope.short", "model.rope.long", "model.rope.divisors"),
        "of longrope: tests/planner/test_model_folder.py"),
    "model.rope.share": "of proportional: tests/planner/test_model_folder.py",
    "model.coding": "of folders with codes: tests/runtime/store/test_round_trip.py",
    "parametrization": "of optimizers like Adam alone: tests/runtime/nn/test_parameter_groups.py",
    **dict.fromkeys(("rollout", "reward", "engine"), "of data that is sampled: tests/planner/test_rollout.py"),
    **dict.fromkeys(("step", "evaluation_step"), "a function of a module: tests/dsl/test_user_components.py"),
    "sweep": "of other runs: tests/planner/test_sweep.py",
    "serve": "in place of training: tests/planner/test_server.py",
    **{f"datasets.{name}.name": "the name is the key" for name in DATASETS},
}  # fmt: skip
OF_RECORDS = (
    "text", "messages", "prompt", "response", "train_on", "template", "choices", "question", "answer", "chosen",
    "rejected", "label", "tokens", "mask", "columns", "values", "input", "tools", "system", "drop_system",
    "message_train", "message_weight", "template_arguments", "lost",
)  # fmt: skip
OF_FORM = {
    "code": ("text",),
    "chat": ("messages", "train_on", "template", "tools", "system", "message_train", "message_weight",
        "template_arguments", "lost"),
    "qa": ("prompt", "response", "train_on", "template"),
    "asked": ("choices", "question", "answer"),
    "liked": ("prompt", "chosen", "rejected", "template", "values"),
    "rated": ("prompt", "response", "input", "label"),
    "drawn": ("tokens", "mask", "columns"),
}  # fmt: skip
EXEMPT |= {
    f"datasets.{name}.{field}": "another form of records has it, or a source with fields"
    for name in DATASETS
    for field in OF_RECORDS
    if field not in OF_FORM.get(name, ())
}


EXEMPT["datasets.chat.drop_system"] = "of conversations without `system`: tests/planner/test_answer_rules.py"
EXEMPT |= {
    "groups.embed_tokens.name": "the name is the key",
    "groups.embed_tokens.optimizer.stochastic_rounding": "as of the optimizer itself",
    **{
        f"groups.embed_tokens.optimizer.{name}": "the optimizer of a group has none"
        for name in ("clip", "clip_spikes", "clip_value", "scheduled_decay")
    },
}
EXEMPT |= dict.fromkeys(
    (
        f"ticks.{tick}.actions.{action}.{name}"
        for tick in range(4)
        for action in range(4)
        for name in ("answers", "environment")
    ),
    "of runs with rollouts: tests/planner/test_rollout.py",
)
EXEMPT["events.2.event"] = "what stands under nan stands nowhere else"
EXEMPT |= {f"events.{number}.count": "of nan alone, which is the last of them" for number in (0, 1)}
EXEMPT |= {f"datasets.{name}.{field}": "what is the same for all datasets is changed in two of them" for name in (
    "chat", "qa", "ready", "fake", "asked", "liked", "rated", "drawn",
) for field in ("holdout", "oversized", "bad_records")}  # fmt: skip


def compiled_variants(spec: Spec, path: str, attribute: attrs.Attribute, base: Plan | None = None) -> Iterator[Plan]:
    """Yield the plan with each other value.

    base: its costs, half of the time of planning, stand for those of a plan that differs from it anyway.
    """
    for new in alternatives(at(spec, path), attribute.type):
        variant = replaced(spec, path, new)
        if variant == spec:
            continue
        plan = None
        if base is not None and spec.serve is None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(compile, "estimate", lambda *_: base.estimates)
                plan = compile_plan(variant).plan
        if plan is None or base is None or not differs(plan, base):
            plan = compile_plan(variant).plan
        if plan is not None:
            yield plan


def compiled_from(load: Callable[..., Spec], blocks: dict[str, str]) -> tuple[Spec, Plan]:
    spec = load(**blocks)
    plan = compile_plan(spec).plan
    assert plan is not None
    return spec, plan


def at_if_there(spec: Spec, path: str) -> Any:
    try:
        return at(spec, path)
    except (AttributeError, LookupError):
        return None  # no setting has it


def differs(plan: Plan, base: Plan) -> bool:
    """Another id, and not only because it is called another experiment: something is done differently."""

    def doings(one: Plan) -> Plan:
        return attrs.evolve(one, id="", config_id="", config={}, provenance=(), checks=())

    return plan.id != base.id and doings(plan) != doings(base)


def done(plan: Plan) -> Plan:
    """What is done, without what it costs, where it is written and who said so."""
    aside = {"estimates": None, "cluster": None, "workspace": {}, "launch": {}, "timeline": None, "mesh": None}
    rest = {"provenance": (), "checks": (), "spec_text": "", "spec": "", "id": "", "config_id": "", "config": {}}
    return attrs.evolve(plan, **aside, **rest, nodes=tuple(attrs.evolve(node, does="") for node in plan.nodes))


def role_of(attribute: attrs.Attribute) -> Role | None:
    setting = attribute.metadata.get("setting")
    return setting.role if setting else None


@define
class Found:
    """What a walk over all settings has met: a line for each fault. judged: how many plans were held against theirs."""

    silent: list[str] = field(factory=list)
    of_other_roles: list[str] = field(factory=list)
    without_reason: list[str] = field(factory=list)
    too_wide: list[str] = field(factory=list)
    judged: int = 0

    def judge(self, path: str, base: Plan, plan: Plan) -> None:
        """Whether going on from `base` with `plan` says what is done differently, on a page that fits."""
        self.judged += 1
        reasons = resumable(base, plan).reasons
        if unknown := [each.path for each in (*reasons, *resumable(plan, base).reasons) if "unknown" in each.text]:
            self.without_reason.append(f"{path}: of {unknown} nobody knows what it means for a checkpoint")
        if not reasons and done(plan) != done(base):
            self.without_reason.append(f"{path}: nothing is said of what changes")
        page = render_diff(compare_plans(base, plan), ("a", "b"))
        self.too_wide += [f"{path}: {line}" for line in page.splitlines() if len(line) > 100]

    def sort(self, path: str, role: Role | None, changed: list[bool]) -> None:
        """Whether a setting changes the experiment if, and only if, it is about learning."""
        if role is Role.EXPERIMENT and changed and not any(changed):
            self.of_other_roles.append(f"{path} has no effect on the experiment")
        if role not in (None, Role.EXPERIMENT) and any(changed):
            self.of_other_roles.append(f"{path} must not change the experiment")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """One walk for all tests: every setting with the first other value that will do."""
    load = loader(tmp_path_factory.mktemp("spec"))
    with pytest.MonkeyPatch.context() as patch:
        # What a plan with tp is held against, anew for each (a third of the time): tests/planner/test_cost_rules.py.
        without = compile.appraise(load(**ALONE))
        patch.setattr(compile, "appraise", lambda *_: without)
        return walked(load)


def walked(load: Callable[..., Spec]) -> Found:
    found = Found()
    free, base = compiled_from(load, FREE)
    effective: set[str] = set()
    for path, attribute in places(free, exempt=EXEMPT):
        role = None if attribute.name == "accumulate" else role_of(attribute)
        changed: list[bool] = []
        for plan in compiled_variants(free, path, attribute, base):
            changed.append(plan.config_id != base.config_id)
            found.judge(path, base, plan)
            if differs(plan, base):
                effective.add(path)
                if changed[-1] or role is not Role.EXPERIMENT:
                    break
        found.sort(path, role, changed)
    for blocks in (STATED, COPIES, ALONE):
        spec, base = compiled_from(load, blocks)
        for path, attribute in places(spec, exempt=EXEMPT):
            # What stands alike in both is judged in both by the slow test below.
            if path in effective and (blocks is not STATED or at(spec, path) == at_if_there(free, path)):
                continue
            for plan in compiled_variants(spec, path, attribute, base):
                if blocks is not ALONE:
                    found.judge(path, base, plan)
                if path in effective:
                    break
                if differs(plan, base):
                    effective.add(path)
                    break
    spec = load(**STATED)
    found.silent = [
        path
        for path, attribute in places(spec, exempt=EXEMPT)
        if path not in effective and alternatives(at(spec, path), attribute.type)  # else a word without another choice
    ]
    return found


def loader(folder: Path) -> Callable[..., Spec]:
    def load(**blocks: str) -> Spec:
        (folder / "spec.xtrain").write_text(spec_text(**blocks))
        return load_spec(folder / "spec.xtrain").require()

    return load


def test_every_setting_changes_the_plan(found):
    assert found.silent == []


def test_settings_belong_to_the_experiment_by_their_role(found):
    assert found.of_other_roles == []


def test_every_setting_that_changes_what_is_done_is_a_reason(found):
    assert found.without_reason == [] and found.too_wide == []
    assert found.judged > 230


@pytest.mark.slow
def test_every_value_of_every_setting_that_changes_what_is_done_is_a_reason(load):
    found = Found()
    for blocks in (STATED, FREE, COPIES):
        spec, base = compiled_from(load, blocks)
        for path, attribute in places(spec, exempt=EXEMPT):
            changed = []
            for plan in compiled_variants(spec, path, attribute):
                found.judge(path, base, plan)
                changed.append(plan.config_id != base.config_id)
            if blocks is FREE and attribute.name != "accumulate":
                role = role_of(attribute)
                found.sort(path, None if role is Role.EXPERIMENT else role, changed)
    assert found.without_reason == [] and found.too_wide == [] and found.of_other_roles == []
    assert found.judged > 1000


def test_the_walk_sees_the_whole_schema(load):
    """Guards the tests above: were the walk to skip a block, they would pass."""
    seen = {path for path, _ in places(load(**STATED), exempt=EXEMPT)}
    assert len(seen) > 90
    for path in (
        "launch.stop_deadline",
        "cluster.price",
        "parallel.cp.fold",
        "model.router.z_loss",
        "datasets.code.source",
        "ticks.0.actions.0.batches",
        "events.0.actions.0.top_p",
        "tokenizer.source",
        "parallel.stack",
        "parallel.pp.layers",
        "activation.save",
        "compile.mode",
        "collate.3.align",
        "datasets.chat.source.config",
        "datasets.ready.source.dtype",
        "datasets.fake.source.seed",
        "mixture.weights.code",
        "phases.early.mix.code",
    ):
        assert path in seen
    for attribute in attrs.fields(Dataset):
        of_some = {f"datasets.{name}.{attribute.name}" for name in DATASETS}
        there = {path for path in seen if path in of_some or path.rpartition(".")[0] in of_some}
        assert attribute.name in ("name", "drop_system") or there, attribute.name
    assert {f"batch.{a.name}" for a in attrs.fields(Batch)} <= seen
    assert {f"phases.early.{a.name}" for a in attrs.fields(Phase)} - {"phases.early.mix", *EXEMPT} <= seen
    assert {f"mixture.{a.name}" for a in attrs.fields(Mixture)} - {"mixture.weights", "mixture.exact"} <= seen


def test_a_setting_without_effect_would_be_found(load, monkeypatch):
    """Break the planner on purpose: the walk must notice."""
    from xtrain.planner.graph import graph

    original = graph.Builder.add

    def forgetful(self, kind, op, does, **rest):
        if op == "setup.bootstrap":
            forgotten = ("matmul", "small_products")
            rest["args"] = {key: value for key, value in rest["args"].items() if key not in forgotten}
            does = re.sub("; products have[^;]*", "", does)
        return original(self, kind, op, does, **rest)

    monkeypatch.setattr(graph.Builder, "add", forgetful)
    spec = load(**STATED)
    base = compile_plan(spec).plan
    attribute = attrs.fields(type(spec.precision)).matmul
    assert base is not None
    assert not any(differs(plan, base) for plan in compiled_variants(spec, "precision.matmul", attribute))


@pytest.mark.parametrize("value", [AUTO, None])
def test_alternatives_exist_for_values_that_are_not_set(value):
    assert alternatives(value, int | Auto | None)
