"""Plans of runs that sample what they learn from: their nodes, what they cost, and what does not fit them."""

from pathlib import Path

import pytest
from attrs import evolve, fields
from every_setting import alternatives
from teachers import make_teacher

from xtrain.dsl.schema.policy import Rollout
from xtrain.dsl.schema.setting import Role
from xtrain.dsl.values import Quantity
from xtrain.plan.timeline import counted_arithmetic, epoch_rows
from xtrain.planner.compile import compile_plan
from xtrain.planner.load import plan_from_spec
from xtrain.planner.review.page import render
from xtrain.planner.review.resumable import resumable
from xtrain.text.units import bytes_text, seconds_text

BLOCKS = {
    "dataset": 'dataset code { source = jsonl("a/*.jsonl"), prompt = "q", response = "a", template = "plain"\n'
    "oversized = skip }",
    "batch": "batch { sequence = 256, micro = 2, rows = 8 }",
    "collate": "collate = to_tensor -> flatten -> shift_tokens -> pack(single)",
    "loss": "loss grpo { }",
    "rollout": "rollout { group = 4, max_tokens = 20 }",
    "reward": "reward exact_answer { }",
}
ENGINE = 'engine vllm { url = "http://gpu2:8000" }'
SAMPLED = {"reward": f"{BLOCKS['reward']}\n{ENGINE}"}
DISTILL = 'loss distill { teacher = "t", live = true }'
EXPERTS = """model qwen3_moe {
  dim = 64, layers = 3, heads = 8, kv_heads = 4, experts = 4, experts_per_token = 2, expert_ffn = 32
}"""
ORDER = ("step.fetch", "rollout.generate", "rollout.score", "rollout.advantages", "step.agree")


@pytest.fixture
def plan(make_plan):
    return make_plan(**BLOCKS)


def test_a_step_samples_before_ranks_agree_on_it_and_compares_behind_its_forward(plan):
    ids = [node.id for node in plan.nodes if node.kind == "step"]
    assert tuple(ids[: len(ORDER)]) == ORDER
    assert ids[ids.index("step.forward_backward") + 1] == "rollout.compare"
    assert plan.node("step.forward_backward").args["each"] is True
    assert plan.node("setup.prompts").args == {"positions": 64, "max_tokens": 20}
    assert "at most 45 tokens" in plan.node("setup.prompts").does
    assert plan.node("setup.data.code").args["method"] == "single"
    assert plan.node("collate.pack").args["columns"] == ["logprobs", "advantages"]
    sampled = plan.node("rollout.generate").does
    assert "4 completions of each of 8 prompts" in sampled and "key-value cache" in sampled


def test_a_run_without_rollouts_knows_nothing_of_them(make_plan):
    plain = make_plan()
    assert not [node.id for node in plain.nodes if node.id.startswith(("rollout.", "setup.prompts"))]
    assert "each" not in plain.node("step.forward_backward").args


def test_the_cache_and_the_logits_of_completions_are_part_of_the_memory(make_plan):
    blocks = BLOCKS | {
        "model": "model llama { dim = 64, layers = 1, heads = 8, kv_heads = 4, vocab = 50000 }",
        "batch": "batch { sequence = 8, micro = 64, rows = 64 }",
        "rollout": "rollout { group = 8, max_tokens = 1 }",
    }
    memory = make_plan(**blocks).estimates.classes[0].memory
    # Of 512 completions keys and values of a position, 4 heads of 8 each, and four copies of their logits; all in fp32.
    sampling = 4 * 512 * (2 * 4 * 8 + 4 * 50_000)
    assert memory.total_bytes == memory.parameters + memory.gradients + memory.optimizer + sampling
    # An engine has its own.
    other = make_plan(**blocks | SAMPLED).estimates.classes[0].memory
    assert other.total_bytes < memory.total_bytes and other.parameters == memory.parameters


def test_how_long_sampling_takes_is_said_where_the_machines_are_known(make_plan, plan):
    alone = make_plan(**BLOCKS, cluster="cluster h100 { efficiency = 50% }")
    # 8 completions at once, a token after the other, four times: all weights are read from memory for each token.
    weights = 4 * alone.parameters.total / 3.35e12
    assert alone.cluster.flops is not None
    products = 8 * alone.estimates.flops_per_token / 3 / (0.5 * alone.cluster.flops)
    assert weights > products
    said = f"about {seconds_text(4 * 20 * weights)} at full length"
    assert said in alone.node("rollout.generate").does and "at full length" not in plan.node("rollout.generate").does
    # Two ranks take half of them each, and half of the weights comes from the other one.
    both = make_plan(**BLOCKS, cluster="cluster h100 { efficiency = 50% }", world=2)
    seconds = 2 * 20 * (weights + 4 * alone.parameters.total / 2 / 450e9)
    assert f"about {seconds_text(seconds)} at full length" in both.node("rollout.generate").does


def test_the_forward_of_a_reference_is_part_of_the_operations_and_seconds_of_a_step(make_plan):
    cluster = {"cluster": "cluster h100 { efficiency = 50% }"}
    alone, compared = (
        make_plan(**BLOCKS | cluster | {"loss": f"loss grpo {{ {kl} }}"}) for kl in ("", "kl = k3, kl_weight = 0.1")
    )
    forward = alone.estimates.flops_per_step // 3
    costs = [each.estimates.classes[0] for each in (alone, compared)]
    assert costs[1].flops == costs[0].flops and costs[1].hardware_flops == costs[0].hardware_flops + forward
    times = [each.estimates.times for each in (alone, compared)]
    assert times[0] is not None and times[1] is not None and alone.cluster.flops is not None
    assert times[1].step - times[0].step == pytest.approx(forward / (0.5 * alone.cluster.flops), rel=1e-6)
    # What runs measure as hfu counts it too.
    again = compared.estimates.work.position_again - alone.estimates.work.position_again
    assert again == pytest.approx(alone.estimates.work.position / 3, rel=1e-6)
    assert "33% more is recomputed, or computed by other models" in render(compared, parts=["compute"])


def test_completions_of_several_steps_are_sampled_at_once(make_plan, plan):
    blocks = BLOCKS | {"cluster": "cluster h100 { efficiency = 50% }"}
    one = make_plan(**blocks)
    several = make_plan(**blocks | {"rollout": "rollout { group = 4, max_tokens = 20, steps = 3 }"})
    assert "steps" not in plan.node("rollout.generate").args and several.node("rollout.generate").args["steps"] == 3
    assert "of each of 24 prompts" in several.node("rollout.generate").does
    assert "of each of 8 prompts" in one.node("rollout.generate").does
    seconds = [float(each.node("rollout.generate").does.rsplit("about ")[1].split()[0]) for each in (several, one)]
    assert seconds[0] == pytest.approx(3 * seconds[1], rel=0.02)
    kept = several.node("setup.completions")
    # Two steps of eight prompts with four completions of 20 tokens, 16 bytes each.
    assert kept.args == {"steps": 3} and bytes_text(2 * 8 * 4 * 20 * 16) in kept.does
    edges = {(edge.before, edge.after) for edge in several.edges}
    assert {("setup.loader", kept.id), (kept.id, "setup.resume")} < edges
    assert not [node for node in plan.nodes if node.op == "setup.completions"]


def test_prompts_come_again_where_several_steps_learn_from_completions(make_plan, plan):
    again = make_plan(**BLOCKS | {"rollout": "rollout { group = 4, max_tokens = 20, steps = 3, updates = 2 }"})
    assert again.node("setup.loader").args["again"] == {"steps": 3, "turns": 2}
    assert "the rows of 3 steps are used 2 times" in again.node("setup.loader").does
    assert "again" not in plan.node("setup.loader").args and "updates" not in plan.node("rollout.generate").args
    sampled = again.node("rollout.generate")
    assert sampled.args["updates"] == 2 and "rank, for 3 steps at once, every 6 steps, at most" in sampled.does
    # All three steps' completions are learned from again behind the first step.
    assert bytes_text(3 * 8 * 4 * 20 * 16) in again.node("setup.completions").does
    alone = make_plan(**BLOCKS | {"rollout": "rollout { group = 4, max_tokens = 20, updates = 2 }"})
    assert alone.node("setup.completions").args == {"steps": 1, "updates": 2}
    assert "on each data rank, every 2 steps, at most" in alone.node("rollout.generate").does
    # An epoch takes each prompt twice.
    for one, rows in ((plan, 24), (again, 48)):
        assert epoch_rows(one, {"code": 24}) == counted_arithmetic(one, {"code": 24}).epoch_rows == rows


def test_experts_of_sampled_tokens_are_a_column_of_the_step(make_plan):
    blocks = BLOCKS | {"model": EXPERTS}
    chosen = make_plan(**blocks)
    replayed = make_plan(**blocks | {"rollout": "rollout { group = 4, max_tokens = 20, replay_routing = true }"})
    assert replayed.node("collate.pack").args["wide"] == {"experts": {"width": 6, "format": "int32"}}
    assert replayed.node("rollout.generate").args["replay_routing"] is True
    assert replayed.node("rollout.compare").args == {"replay_routing": True}
    assert "wide" not in chosen.node("collate.pack").args and chosen.config_id != replayed.config_id
    totals = [each.estimates.classes[0].memory.total_bytes for each in (replayed, chosen)]
    assert totals[0] == totals[1] + 2 * 256 * 6 * 4


def test_an_evaluation_may_let_held_out_prompts_be_answered(make_plan):
    held_out = BLOCKS["dataset"].replace("oversized", "holdout = 10%, oversized")
    asked = make_plan(**BLOCKS | {"dataset": held_out}, every="every 2 steps eval code { answers = greedy }")
    node = asked.node("tick.eval.code")
    assert node.args["answers"] == "greedy" and "a greedy completion of each prompt" in node.does
    assert ("setup.prompts", node.id) in {(edge.before, edge.after) for edge in asked.edges}
    plain = make_plan(**BLOCKS | {"dataset": held_out}, every="every 2 steps eval code")
    assert "answers" not in plain.node("tick.eval.code").args and plain.config_id == asked.config_id


def test_answers_are_of_prompts(compiled):
    more = "dataset prose { source = python_stdlib(), holdout = 10% }\nmixture { code = 1, prose = 0 }"
    ticks = "every 2 steps eval prose { answers = greedy }"
    found = compiled(**BLOCKS | {"dataset": f"{BLOCKS['dataset']}\n{more}"}, every=ticks)
    assert [each.code for each in found.diagnostics.errors if "a prompt and an answer" in each.message] == ["X528"]


def test_answers_without_rollouts_are_idle(compiled):
    data = (
        'dataset code { source = jsonl("a/*.jsonl"), prompt = "q", response = "a", template = "plain", holdout = 10% }'
    )
    found = compiled(dataset=data, every="every 2 steps eval code { answers = greedy }")
    assert any(each.code == "W401" and "there is no `rollout`" in each.message for each in found.diagnostics.warnings)


def test_a_reference_is_kept_beside_the_model_and_computed_in_each_step(make_plan, plan):
    compared = make_plan(**BLOCKS | {"loss": "loss grpo { kl = k3, kl_weight = 0.1 }"})
    kept = compared.node("setup.rollout_reference").args
    assert kept == {"reference": "initial", "bytes": compared.estimates.classes[0].memory.parameters}
    ids = [node.id for node in compared.nodes if node.kind == "step"]
    assert ids[ids.index("rollout.advantages") + 1] == "rollout.reference"
    assert not [node.id for node in compared.nodes if node.id.startswith("setup.reference")]
    totals = [each.estimates.classes[0].memory.total_bytes for each in (compared, plan)]
    assert totals[0] >= totals[1] + kept["bytes"]
    off = "loss grpo { kl = k3, kl_weight = 0.1, reference = adapter_off }"
    adapted = make_plan(**BLOCKS | {"loss": off + "\nadapter lora { rank = 4 }"})
    assert adapted.node("setup.rollout_reference").args == {"reference": "adapter_off", "bytes": 0}


OF_EPISODES = ("environment", "turns")


@pytest.mark.parametrize(
    "attribute", [each for each in fields(Rollout) if each.name not in OF_EPISODES], ids=lambda each: each.name
)
def test_every_setting_is_in_the_plan_and_said_of_a_resume(load, attribute):
    replays = {"rollout": "rollout { group = 4, max_tokens = 20, replay_prompts = 0.5 }"}
    kept = {"rollout": "rollout { group = 4, max_tokens = 20, top_k = 9 }"}
    of_one = {
        "replay_routing": {"model": EXPERTS}, "stale": SAMPLED, "difficulty": replays, "solved": replays,
        "logprobs": kept,
    }  # fmt: skip
    spec = load(**BLOCKS | of_one.get(attribute.name, {}))
    plan = compile_plan(spec).plan
    assert plan is not None
    assert spec.rollout is not None
    role = attribute.metadata["setting"].role
    given = [Quantity(3, "steps")] if attribute.name == "show" else [3, 2]
    given = [] if isinstance(getattr(spec.rollout, attribute.name), str) else given
    for value in [*given, *alternatives(getattr(spec.rollout, attribute.name), attribute.type)]:
        other = compile_plan(evolve(spec, rollout=evolve(spec.rollout, **{attribute.name: value}))).plan
        if other is not None and other.id != plan.id:
            break
    else:
        pytest.fail("no other value makes another plan")
    assert (other.config_id != plan.config_id) == (role is Role.EXPERIMENT)
    verdict = resumable(plan, other)
    assert verdict.kind == "safe" and f"rollout.{attribute.name}" in {reason.path for reason in verdict.reasons}


def test_a_reward_is_a_node_and_part_of_the_experiment(make_plan, plan, tmp_path: Path):
    other = make_plan(**BLOCKS | {"reward": r'reward exact_answer { pattern = "#### (.+)", compare = number }'})
    assert plan.node("rollout.score").args == {"kind": "exact_answer", "pattern": None, "compare": "text"}
    assert other.node("rollout.score").args == {"kind": "exact_answer", "pattern": "#### (.+)", "compare": "number"}
    assert other.config_id != plan.config_id
    verdict = resumable(plan, other)
    assert verdict.kind == "safe" and {each.path for each in verdict.reasons} == {"reward.pattern", "reward.compare"}
    (tmp_path / "mine.py").write_text(
        "from xtrain import reward\n@reward\ndef short(prompt, completion, record, most: int = 5):\n    return 1.0\n"
    )
    own = make_plan(**BLOCKS | {"reward": 'use "mine.py"\nreward short { most = 7 }'})
    user = own.node("rollout.score").args["user"]
    assert (user["module"], user["function"], user["arguments"]) == ("mine.py", "short", {"most": 7})
    assert own.config_id != plan.config_id


def test_a_teacher_scores_what_the_model_samples(make_plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    make_teacher(tmp_path / "t", 258)
    blocks = BLOCKS | {
        "loss": DISTILL,
        "reward": "",
        "rollout": "rollout { group = 1, max_tokens = 20, temperature = 2 }",
    }
    plan = make_plan(**blocks)
    ids = [node.id for node in plan.nodes]
    assert ids[ids.index("rollout.generate") + 1 :][:2] == ["rollout.rows", "step.agree"]
    assert not {"rollout.score", "rollout.compare", "setup.temperature"} & {*ids}  # the divergence has its own
    assert "a forward of t" in plan.node("step.forward_backward").does
    assert "each" not in plan.node("step.forward_backward").args and "columns" not in plan.node("collate.pack").args
    measured = make_plan(**blocks | {"reward": BLOCKS["reward"]})
    assert "rollout.score" in [node.id for node in measured.nodes] and measured.config_id != plan.config_id


def test_a_loss_without_the_samplers_log_probabilities_learns_from_what_it_has_just_sampled(compiled, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from xtrain import loss\n@loss(columns=['advantages'])\ndef plain(logprob_T, advantages):\n"
        "    return -logprob_T * advantages\n"
    )
    blocks = BLOCKS | {"loss": 'use "mine.py"\nloss plain { }'}
    plan = compiled(**blocks).plan
    assert plan is not None and "rollout.compare" not in [node.id for node in plan.nodes]  # it has nothing to compare
    found = compiled(**blocks | {"rollout": "rollout { group = 4, max_tokens = 20, steps = 2 }"})
    (error,) = found.diagnostics.errors
    assert error.code == "X528" and "does not read `logprobs`" in error.message and "steps = 1" in error.hint
    found = compiled(**blocks | {"rollout": "rollout { group = 4, max_tokens = 20, updates = 2 }"})
    (error,) = found.diagnostics.errors
    assert error.code == "X528" and "updates = 1" in error.hint


def test_batch_invariance_is_a_node_with_kernels_of_its_own(make_plan, plan):
    other = make_plan(**BLOCKS, precision="precision { batch_invariant = true }")
    node = other.node("setup.batch_invariant")
    assert "products of 32 rows at a time" in node.does and "more than twice as long" in node.does
    kernels = [{n.args["attention"]["cpu"] for n in each.nodes if "attention" in n.args} for each in (other, plan)]
    assert kernels[0] == {"tiles"} and "tiles" not in kernels[1] and other.config_id != plan.config_id
    verdict = resumable(plan, other)
    assert verdict.kind == "safe" and "precision.batch_invariant" in {reason.path for reason in verdict.reasons}


VARIANT = {
    "compiled": ({"compile": "compile {}"}, "compiled kernels"),
    "fp8": ({"precision": "precision { batch_invariant = true, compute = fp8 }"}, "scales of fp8"),
    "a kernel": ({"model": "model llama { dim = 64, layers = 2, heads = 8, attention = mask }"}, "attention mask"),
    "states": ({"model": "model qwen3_5 { dim = 64, layers = 4, heads = 4, kv_heads = 2, ffn = 96 }"}, "with states"),
    "cp": ({"parallel": "parallel { cp 2 }"}, "ranks of cp"),
    "tp": ({"parallel": "parallel { tp 4 }"}, "more than two ranks"),
}


@pytest.mark.parametrize("name", VARIANT)
def test_what_depends_on_the_batch_is_refused(compiled, name):
    blocks, message = VARIANT[name]
    blocks = {"precision": "precision { batch_invariant = true }", **blocks}
    found = compiled(**BLOCKS | blocks, world=4 if name == "tp" else 2)
    assert any(each.code == "X448" and message in each.message for each in found.diagnostics.errors)


# (blocks, setting, part of the message, part of the hint)
WRONG = {
    "no reward": ({"reward": ""}, "nothing says how good", "reward exact_answer"),
    "no rollout": ({"rollout": ""}, "there is none", "rollout {"),
    "a group of one": ({"rollout": "rollout { group = 1, max_tokens = 9 }"}, "would be 0", "group = 8"),
    "no room": ({"rollout": "rollout { group = 8, max_tokens = 60 }"}, "take 480 positions", "sequence = 960"),
    "cross-entropy": ({"loss": ""}, "does not read `advantages`", "loss grpo"),
    "a column": ({"loss": "loss grpo { kl = k3, kl_weight = 0.1, reference = precomputed }"}, "no data has numbers",
        "reference = initial"),
    "no experts": ({"rollout": "rollout { group = 4, max_tokens = 9, replay_routing = true }"}, "no experts", "remove"),
    "a decomposed model": ({"loss": "loss grpo { kl = k3, kl_weight = 0.1 }\nadapter lora { rank = 4, init = pissa }"},
        "could not restore", "kl = none"),
    "other rows": ({"collate": ""}, "a row of its own", "pack(single)"),
    "plain text": ({"dataset": "dataset code { source = python_stdlib() }"}, "a prompt and an answer", "prompt ="),
    "cut documents": ({"dataset": BLOCKS["dataset"].replace("skip", "truncate")}, "that is cut", "oversized = skip"),
    "all tokens": ({"dataset": BLOCKS["dataset"].replace("oversized", "train_on = all, oversized")}, "train_on = all",
        "remove"),
    "prompts of two again": ({"rollout": "rollout { group = 4, max_tokens = 20, updates = 2 }",
            "mixture": "mixture { code = 1, more = 2 }",
            "dataset": BLOCKS["dataset"] + BLOCKS["dataset"].replace("dataset code", "\ndataset more")},
        "several datasets (code, more)", "updates = 1"),
    "a ramp again": ({"rollout": "rollout { group = 4, max_tokens = 20, updates = 2 }",
            "batch": "batch { sequence = 256, micro = 2, rows = 8, ramp_from = 2, ramp = 10 steps }"},
        "unequal numbers", "ramp_from"),
    "stored distributions": ({"loss": 'loss distill { teacher = "t" }', "reward": ""}, "nothing that t holds probable",
        "live = true"),
    "its own labels": ({"loss": DISTILL.replace("live", "mix = 0.1, live")}, "teaches it nothing", "remove it"),
    "a divergence of earlier samples": ({"loss": DISTILL,
            "rollout": "rollout { group = 4, max_tokens = 20, steps = 2 }"}, "sampled earlier", "steps = 1"),
    "rewards that are not there": ({"loss": DISTILL, "reward": "",
            "rollout": "rollout { group = 4, max_tokens = 20, scale_rewards = none }"}, "no rewards", "reward"),
    "answers without a reward": ({"loss": DISTILL, "reward": "",
            "dataset": BLOCKS["dataset"].replace("oversized", "holdout = 10%, oversized"),
            "more": "every 2 steps eval code { answers = greedy }"}, "scores the `answers`", "exact_answer"),
    "lengths beyond": ({"rollout": "rollout { group = 4, max_tokens = 20, overlong = 21 }"}, "at most 20 tokens",
        "overlong = 5"),
    "lengths without rewards": ({"loss": DISTILL,
            "rollout": "rollout { group = 4, max_tokens = 20, overlong = 4 }"}, "learns from no rewards", "loss grpo"),
    "groups of other weights": ({"rollout": "rollout { group = 4, max_tokens = 20, attempts = 2, steps = 2 }"},
        "completions of other weights", "steps = 1"),
    "groups of other phases": ({"rollout": "rollout { group = 4, max_tokens = 20, attempts = 2 }",
            "more": "phase late { from = 50%, mix = { code: 1 } }"}, "last phase alone",
        "attempts = 1"),
    "a sampler without rollouts": ({"rollout": "", "reward": ENGINE}, "there is none", "rollout {"),
    "ahead of the ranks": ({"rollout": "rollout { group = 4, max_tokens = 20, stale = 1 }"}, "in turn", "engine vllm"),
    "tokens left by an engine": ({"rollout": "rollout { group = 4, max_tokens = 20, top_k = 9 }", **SAMPLED},
        "of the tokens that `top_k` leaves", "remove"),
    "experts of an engine": ({"model": EXPERTS, **SAMPLED,
            "rollout": "rollout { group = 4, max_tokens = 20, replay_routing = true }"}, "to which experts", "remove"),
    "codes for an engine": ({"rollout": BLOCKS["rollout"], **SAMPLED, "precision": "precision { base int8 }"},
        "an engine does not take", "adapter"),
    "ahead and several steps": ({**SAMPLED,
            "rollout": "rollout { group = 4, max_tokens = 20, stale = 1, steps = 2 }"},
        "by their own rule", "steps = 1"),
    "ahead without a ratio": ({"loss": DISTILL, **SAMPLED,
            "rollout": "rollout { group = 4, max_tokens = 20, stale = 1 }"},
        "by how much the weights have moved", "cispo"),
    "other weights": ({"optimizer": "optimizer schedule_free { lr = 1e-3 }"}, "weights other than", "adamw"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "adapter", "format", "size"),
    [("vllm", "adapter lora { rank = 4 }", "fp32", None), ("vllm", "", "bf16", 2), ("server", "", "fp32", 4)],
)
def test_an_engine_is_a_node_and_is_given_the_weights(
    make_plan, engine: str, adapter: str, format: str, size: int | None
):
    own = make_plan(**BLOCKS)
    named = f'{BLOCKS["reward"]}\nengine {engine} {{ url = "http://gpu2:8000", key = "KEY" }}\n{adapter}'
    blocks = BLOCKS | {"reward": named, "precision": "precision { compute = bf16 }"}
    plan = make_plan(**blocks | {"rollout": "rollout { group = 4, max_tokens = 20, stale = 2 }"})
    steps = [node.id for node in plan.nodes if node.kind == "step"]
    assert steps.index("rollout.weights") + 1 == steps.index("rollout.generate")
    args = {"kind": engine, "url": "http://gpu2:8000", "patience": 600, "key": "KEY"}
    assert plan.node("setup.engine").args == args | {"rank_of_adapter": 4 if adapter else 0}
    trained = sum(each.size for each in plan.parameters.tensors if each.trained)
    weights = plan.node("rollout.weights")
    assert weights.args == {"dtype": format, "stale": 2}
    assert bytes_text(trained * (size or 4)) in weights.does and f" in {format}, " in weights.does
    assert ("by the weights before are awaited" in weights.does) == (engine == "vllm" and not adapter)
    assert "asked for 2 steps ahead" in plan.node("rollout.generate").does
    assert plan.node("setup.completions").args == {"steps": 1, "stale": 2}
    assert "key-value cache" in own.node("rollout.generate").does
    assert "key-value cache" not in plan.node("rollout.generate").does
    # Another engine is the same experiment.
    if not adapter:
        others = [make_plan(**blocks), make_plan(**blocks | {"reward": BLOCKS["reward"]})]
        assert others[0].config_id == others[1].config_id != plan.config_id
        assert resumable(*others).kind == resumable(*others[::-1]).kind == "safe"


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_said(compiled, name):
    blocks, message, hint = WRONG[name]
    found = compiled(**BLOCKS | blocks)
    assert found.plan is None
    mine = [each for each in found.diagnostics.errors if each.code == "X528"]
    if name == "no rollout":  # and what it makes is read of data then
        assert any(each.code == "X527" for each in found.diagnostics.errors)
    (error,) = mine
    assert message in error.message and hint in error.hint


def test_losses_of_rows_are_of_rows_of_datasets(compiled):
    every = "every 5 steps row_losses"
    plan, without = compiled(every=every).plan, compiled().plan
    order = [node.id for node in plan.nodes if node.kind == "step"]
    assert order.index("step.row_losses") + 1 == order.index("step.optimizer")
    assert plan.node("step.forward_backward").args["each"] and "each" not in without.node("step.forward_backward").args
    assert plan.config_id == without.config_id
    (found,) = compiled(**BLOCKS, every=every).diagnostics.errors
    assert found.code == "X431" and "sampled completions" in found.message
    (found,) = compiled(every="on finish row_losses").diagnostics.errors
    assert "is measured in a step" in found.message


WORLD = """
from typing import Annotated, Literal
from xtrain import at_least, environment, source, tool

@source
def made():
    yield {"q": "1+1", "a": "2"}

@environment
class one:
    \"\"\"A world.\"\"\"
    def reset(self, task, random, most: int = 5):
        return "go"
    @tool
    def go(self, to: Literal["n", "s"], far: Annotated[int, at_least(1), "steps"] = 1) -> str:
        \"\"\"Walk.

        Far.\"\"\"
        return to
    def step(self, text):
        return None

"""
EPISODES = """use "world.py"
experiment e { seed = 1, budget = 4 steps }
model llama { dim = 32, layers = 1, heads = 4, ffn = 48 }
tokenizer bytes
dataset d {
  source = made(), prompt = "q", response = "a", oversized = skip
  template = "{% for m in messages %}{{ m.content }}{{ tools }}{{ eos_token }}{% endfor %}"
}
batch { sequence = 256, rows = 4, micro = 2 }
collate = to_tensor -> flatten -> shift_tokens -> pack(single)
loss grpo { }
environment one { most = 7 }
rollout { environment = one, group = 4, turns = 3, max_tokens = 20 }
optimizer adamw { lr = 1e-3 }
"""


def test_a_plan_shows_the_environment_and_what_episodes_cost_at_most(tmp_path: Path):
    def planned(spec: str = EPISODES, world: str = WORLD):
        (tmp_path / "world.py").write_text(world)
        (tmp_path / "e.xtrain").write_text(spec)
        compiled = plan_from_spec(tmp_path / "e.xtrain")
        assert compiled.plan is not None, [str(each) for each in compiled.diagnostics]
        return compiled.plan

    plan = planned()
    (node,) = (each for each in plan.nodes if each.op == "setup.environment")
    assert node.id == "setup.environment.one" and node.args["user"]["arguments"] == {"most": 7}
    assert {name: node.args[name] for name in ("seconds", "wait", "memory")} == {
        "seconds": 5, "wait": 60, "memory": 1 << 29
    }  # fmt: skip
    assert node.args["tools"] == [{"type": "function", "function": {
        "name": "go", "description": "Walk.", "parameters": {
            "type": "object", "required": ["to"], "properties": {
                "to": {"type": "string", "enum": ["n", "s"]},
                "far": {"type": "integer", "minimum": 1, "description": "steps"}}}}}]  # fmt: skip
    assert "go(to: string, far: integer = …)" in node.does and node.args["user"]["digest"][:8] in node.does
    sampled = plan.node("rollout.generate")
    assert {name: sampled.args[name] for name in OF_EPISODES} == {"environment": "one", "turns": 3}
    # 4 rows, 4 episodes, 3 turns: of 20 tokens each, in 64 positions and one token more
    assert "at most 960 tokens are sampled and 3,120 read" in sampled.does
    # The time of sampling, and of reading 16 episodes in two microbatches before each of three turns.
    timed = planned(EPISODES + "cluster h100 { efficiency = 50% }\n")
    assert timed.cluster.flops is not None
    read = 8 * 64 * timed.estimates.flops_per_token / 3 / (0.5 * timed.cluster.flops)
    seconds = 2 * 3 * (20 * 4 * timed.parameters.total / 3.35e12 + read)
    assert f"about {seconds_text(seconds)} at full length" in timed.node("rollout.generate").does
    assert [each.op for each in plan.nodes if each.op.startswith("rollout.")][:2] == [
        "rollout.generate", "rollout.advantages"
    ]  # fmt: skip
    changed = {
        "rollout.turns": planned(EPISODES.replace("turns = 3", "turns = 2")),
        "environment": planned(EPISODES.replace("most = 7", "most = 7, seconds = 3 s")),
        "environment ": planned(world=WORLD.replace('return "go"', 'return "come"')),
    }
    for path, other in changed.items():
        assert other.id != plan.id and other.config_id != plan.config_id
        verdict = resumable(plan, other)
        assert verdict.kind == "safe" or path == "environment "  # whose file has the source too
        assert path.strip() in {reason.path for reason in verdict.reasons}


@pytest.mark.parametrize(("old", "new", "said"), [
    ("def step", "def stop", "`one` has no `step`"),
    ('Literal["n", "s"]', "object", "the type of `to` of the tool `go` has no JSON schema"),
])  # fmt: skip
def test_a_mistake_in_the_class_of_an_environment_is_said(tmp_path: Path, old, new, said):
    (tmp_path / "world.py").write_text(WORLD.replace(old, new))
    (tmp_path / "e.xtrain").write_text(EPISODES)
    compiled = plan_from_spec(tmp_path / "e.xtrain")
    assert compiled.plan is None and said in [each.message for each in compiled.diagnostics.errors]
