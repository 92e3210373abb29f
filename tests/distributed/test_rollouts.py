"""Rollouts on layouts: the same completions, rewards and updates as in one process, and after a resume."""

import pytest
from attrs import evolve
from forked_ranks import Mutation, Outcome, RanksFailed
from projects import events, records
from sweeps import LOSS, PARTS, REWARD, WORLD, episodes_trial, sampled_trial
from teachers import make_scorer, make_teacher
from topologies import SCHEDULES, Topology
from trials import TOLERANCE, Laboratory, gaps

LAYOUTS = {
    "fsdp": Topology(fsdp=2),
    "tp": Topology(tp=2),
    "fsdp and tp": Topology(fsdp=2, tp=2),
    "ddp": Topology(replicate=2, sets=("parallel.stack=ddp",)),
    "ring": Topology(ring=2),
    "ulysses": Topology(ulysses=2),
    "pp": Topology(pp=2),
    "pp, two stages a rank": Topology(pp=2, sets=SCHEDULES["zbv"]),
    "fsdp and ep": Topology(model="moe", fsdp=2, ep=2),
    "tp with experts": Topology(model="moe", tp=2),
    "pp with experts": Topology(model="moe", pp=2),
    "tp with Mamba-2": Topology(model="hybrid", tp=2),
    "fsdp and ep with Mamba-2": Topology(model="hybrid", fsdp=2, ep=2),
    "tp with delta nets": Topology(model="delta", tp=2),
    "fsdp and ep with delta nets": Topology(model="delta", fsdp=2, ep=2),
    "one rank, four microbatches": Topology(accumulate=4),
}
ORDINARY = ("tp",)
REPLAYED = ", replay_routing = true"
DISTILL = 'distill { teacher = "sampled-teacher", live = true, form = reverse_kl, chunk = 8 KiB }'
KEYS = ("rollout/", "policy/", "objective", "reward")


def measured(outcome: Outcome) -> list[dict[str, float]]:
    """What rollouts and the loss have measured in each step."""
    return [
        {name: value for name, value in record.items() if name.startswith(KEYS)}
        for record in records(outcome.directory, "metrics")
    ]


def samples(outcome: Outcome) -> list[list[dict[str, str]]]:
    return [event["samples"] for event in events(outcome.directory, "generate")]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ORDINARY else pytest.mark.matrix) for name in LAYOUTS]
)
def test_a_layout_samples_and_learns_what_one_process_does(lab: Laboratory, name: str):
    layout = LAYOUTS[name]
    trial = sampled_trial(lab, layout, more="" if layout.model == "dense" else REPLAYED)
    alone, outcome = lab.alone(trial), lab.run(trial, layout.layout, saves=False)
    assert samples(outcome) == samples(alone) and len({each["text"] for each in samples(alone)[0]}) > 1
    found, limit = gaps(outcome, alone), TOLERANCE["fp64"]
    assert found.loss < limit and found.norm < limit and found.eval < limit and found.routing < limit
    assert not {tensor: gap for tensor, gap in found.tensors.items() if not gap < limit}
    evaluated = [[event for event in events(each.directory, "eval") if "reward" in event] for each in (outcome, alone)]
    answered = [[event["reward"] for event in each] for each in evaluated]
    assert answered[0] == pytest.approx(answered[1], rel=limit) and len(answered[0]) == 1
    reference_kl: list[float] = []
    for ours, theirs in zip(measured(outcome), measured(alone), strict=True):
        # Log-probabilities of the sampler are fp32 numbers.
        limits = {key: 1e-7 if "gap" in key else limit for key in theirs}
        assert ours == {key: pytest.approx(each, rel=limit, abs=limits[key]) for key, each in theirs.items()}
        reference_kl.append(ours["policy/reference_kl"])
        assert ours["rollout/reward_std"] > 0 and 0 < ours["rollout/cut"] <= 1 and ours["rollout/no_signal"] < 1
        assert ours["rollout/logprob_gap"] <= ours["rollout/logprob_gap_max"] < 1e-6
        # Of the distribution at the temperature of the rollout, both of them.
        assert ours["policy/ratio"] == pytest.approx(1, abs=1e-6) and 0 < ours["rollout/left_out"] < 1
    assert reference_kl[0] < 1e-12 and min(reference_kl[1:]) > 1e-3


PROCESSED = {
    "grpo": LOSS,
    "gspo": "gspo { chunk = 8 KiB, kl = k3, kl_weight = 0.3, entropy_weight = 0.01 }",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "tp" else pytest.mark.matrix) for name in LAYOUTS]
)
@pytest.mark.parametrize("loss", ["grpo", pytest.param("gspo", marks=pytest.mark.matrix)])
def test_a_layout_learns_over_the_tokens_that_sampling_leaves(lab: Laboratory, name: str, loss: str):
    """And compares whole distributions; the reference is of the same tokens."""
    layout, limit = LAYOUTS[name], TOLERANCE["fp64"]
    more = ", logprobs = processed, compare = 20" + (REPLAYED if layout.model == "moe" else "")
    trial = sampled_trial(lab, layout, loss=PROCESSED[loss], more=more)
    trial = evolve(trial, settings=(*trial.settings, "rollout.top_k=60", "rollout.top_p=0.9"))
    alone, outcome = lab.alone(trial), lab.run(trial, layout.layout, saves=False)
    assert samples(outcome) == samples(alone)
    found = gaps(outcome, alone)
    assert found.loss < limit and found.norm < limit and found.routing < limit
    assert not {tensor: gap for tensor, gap in found.tensors.items() if not gap < limit}
    for ours, theirs in zip(measured(outcome), measured(alone), strict=True):
        limits = {key: 1e-7 if "gap" in key or "divergence" in key else limit for key in theirs}
        assert ours == {key: pytest.approx(each, rel=limit, abs=limits[key]) for key, each in theirs.items()}
        assert ours["policy/ratio"] == pytest.approx(1, abs=1e-6) and ours["rollout/left_out"] > 0.05
        assert ours["rollout/logprob_gap_max"] < 1e-6 and ours["rollout/divergence_max"] < 1e-10
    assert measured(alone)[0]["policy/reference_kl"] < 1e-12 < measured(alone)[1]["policy/reference_kl"]


@pytest.mark.parametrize(
    "name", ["fsdp", *(pytest.param(each, marks=pytest.mark.matrix) for each in LAYOUTS if each != "fsdp")]
)
@pytest.mark.parametrize("reward", ["", pytest.param(REWARD, marks=pytest.mark.matrix)], ids=["", "a reward"])
@pytest.mark.parametrize("form", ["reverse_kl", pytest.param("policy_gradient", marks=pytest.mark.matrix)])
def test_a_layout_is_taught_on_its_own_samples(here: Laboratory, name: str, reward: str, form: str):
    layout = LAYOUTS[name]
    make_teacher(here.folder / "sampled-teacher", 258, hidden_size=24)
    loss = DISTILL.replace("reverse_kl", form)
    trial = sampled_trial(here, layout, loss=loss, reward=reward)
    alone, outcome = here.alone(trial), here.run(trial, layout.layout, saves=False)
    assert samples(outcome) == samples(alone) and len({each["text"] for each in samples(alone)[0]}) > 1
    found, limit = gaps(outcome, alone), TOLERANCE["fp64"]
    assert found.loss < limit and found.norm < limit
    assert not {tensor: gap for tensor, gap in found.tensors.items() if not gap < limit}
    names = ("objective", "distill/divergence", "rollout/tokens", *(["reward"] if reward else []))
    for mine, other in zip(*(records(one.directory, "metrics") for one in (outcome, alone)), strict=True):
        assert [mine[each] for each in names] == pytest.approx([other[each] for each in names], rel=limit)
        assert ("reward" in other) == bool(reward) and other["distill/divergence"] > 0
        assert ("policy/ratio" in other) == ("rollout/logprob_gap" in other) == (form == "policy_gradient")
        if form == "policy_gradient":  # at the temperature of the rollout, both of them
            assert mine["policy/ratio"] == pytest.approx(1, abs=1e-6) and mine["rollout/logprob_gap_max"] < 1e-6


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["fsdp and ep", *(each for each in LAYOUTS if "with" in each)])
def test_experts_are_those_that_were_recorded_whatever_the_step_would_choose(lab: Laboratory, name: str):
    """Others than those that were chosen, on purpose: a layout that chooses by itself would not be like one process."""
    layout, fault = LAYOUTS[name], Mutation("other_experts")
    trial = sampled_trial(lab, layout, more=REPLAYED)
    alone, outcome = (lab.run(trial, sets, alone=not sets, mutation=fault, saves=False) for sets in ((), layout.layout))
    assert gaps(outcome, alone).worst < TOLERANCE["fp64"]
    differing = [[each["rollout/routing_differs"] for each in measured(found)] for found in (outcome, alone)]
    assert differing[0] == differing[1] and min(differing[0]) > 0.5


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["fsdp and tp", "pp"])
def test_a_reward_model_gives_a_layout_the_same_rewards(lab: Laboratory, name: str):
    layout, folder = LAYOUTS[name], make_scorer(lab.folder / "scorer", 258)
    trial = sampled_trial(lab, layout, reward=f'model {{ folder = "{folder}" }}')
    alone, outcome = lab.alone(trial), lab.run(trial, layout.layout, saves=False)
    assert gaps(outcome, alone).worst < TOLERANCE["fp64"]
    rewards = [[each["reward"] for each in measured(found)] for found in (outcome, alone)]
    assert rewards[0] == pytest.approx(rewards[1], rel=1e-12) and len(set(rewards[1])) == 2


@pytest.mark.matrix
@pytest.mark.timeout(700)
@pytest.mark.parametrize("more", ["", ", steps = 2, updates = 2"], ids=["", "several"])
@pytest.mark.parametrize("name", [*LAYOUTS])
def test_a_layout_has_the_episodes_of_one_process(lab: Laboratory, name: str, more: str):
    """Turns with tools and without, calls that end their episode, and evaluations.

    One process computes for half a minute, and its calls wait for processes that others keep waiting.
    """
    layout, timeout = LAYOUTS[name], 300.0
    trial = evolve(episodes_trial(lab, layout, more=more + (REPLAYED if layout.model == "moe" else "")), steps=4)
    alone = lab.alone(trial, timeout=timeout)
    outcome = lab.run(trial, layout.layout, saves=False, timeout=timeout)
    assert samples(outcome) == samples(alone) and len({each["text"] for each in samples(alone)[0]}) > 1
    found, limit = gaps(outcome, alone), TOLERANCE["fp64"]
    assert found.loss < limit and found.norm < limit and found.eval < limit
    assert not {tensor: gap for tensor, gap in found.tensors.items() if not gap < limit}
    for ours, theirs in zip(measured(outcome), measured(alone), strict=True):
        limits = {key: 1e-7 if "gap" in key else limit for key in theirs}
        assert ours == {key: pytest.approx(each, rel=limit, abs=limits[key]) for key, each in theirs.items()}
    known = measured(alone)
    assert max(each["rollout/turns"] for each in known) > 1 and max(each["rollout/lost"] for each in known) > 0
    evaluated = [[e["reward"] for e in events(each.directory, "eval") if "reward" in e] for each in (outcome, alone)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=limit) and len(evaluated[0]) == 1


INVARIANT = ("precision.batch_invariant=true", "batch.micro=2")
WITHOUT_GAP = {
    "one rank": Topology(),
    "fsdp": LAYOUTS["fsdp"],
    "tp": LAYOUTS["tp"],
    "pp": LAYOUTS["pp"],
    "experts": Topology(model="moe"),
    "fsdp and ep": LAYOUTS["fsdp and ep"],
    "tp with experts": LAYOUTS["tp with experts"],
}


def without_gap(lab: Laboratory, layout: Topology, *settings: str, mutation: Mutation | None = None) -> list[float]:
    """The largest distance of log-probabilities, or of distributions, in each of ten steps."""
    replayed = REPLAYED if layout.model == "moe" else ""
    trial = evolve(sampled_trial(lab, layout, more=replayed), steps=10, params="fp32")
    settings = (*layout.layout, "rollout.max_tokens=16", "rollout.compare=20", *settings)
    found = lab.run(trial, settings, saves=False, mutation=mutation, timeout=300.0)
    return [max(each["rollout/logprob_gap_max"], each["rollout/divergence_max"]) for each in measured(found)]


@pytest.mark.matrix
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", WITHOUT_GAP)
def test_sampler_and_step_compute_the_same_numbers(lab: Laboratory, name: str):
    """Bit for bit, with prompts of other lengths in the batch, and rows of other widths."""
    assert without_gap(lab, WITHOUT_GAP[name], *INVARIANT) == [0.0] * 10
    assert without_gap(lab, WITHOUT_GAP[name], *INVARIANT, "rollout.logprobs=processed") == [0.0] * 10
    assert max(without_gap(lab, WITHOUT_GAP[name], "batch.micro=2")) > 0


@pytest.mark.matrix
@pytest.mark.parametrize("fault", ["rows_at_once", "keys_of_the_row"])
def test_a_batch_that_is_split_otherwise_is_seen(lab: Laboratory, fault: str):
    """A product of all rows at once, and keys in places that they have in the row."""
    settings = (INVARIANT[0], "batch.micro=1")
    assert max(without_gap(lab, Topology(), *settings, mutation=Mutation(fault))) > 0


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["fsdp", "tp", "pp", "fsdp and ep", "one rank, four microbatches"])
def test_a_layout_replaces_the_groups_that_one_process_replaces(lab: Laboratory, name: str):
    """And punishes the same lengths; a run that goes on does so too."""
    layout = LAYOUTS[name]
    more = ", attempts = 3, overlong = 4" + (REPLAYED if layout.model == "moe" else "")
    trial = sampled_trial(lab, layout, more=more, loss=LOSS.replace("kl_weight", "entropy_weight = 0.1, kl_weight"))
    (lab.folder / "sampled.py").write_text(PARTS.replace("return each *", "return sum(map(ord, completion)) % 2 *"))
    alone, outcome = lab.alone(trial), lab.run(trial, layout.layout, saves=False)
    found, limit = gaps(outcome, alone), TOLERANCE["fp64"]
    assert found.loss < limit and found.norm < limit
    for ours, theirs in zip(measured(outcome), measured(alone), strict=True):
        limits = {key: 1e-7 if "gap" in key else limit for key in theirs}
        assert ours == {key: pytest.approx(each, rel=limit, abs=limits[key]) for key, each in theirs.items()}
        assert ours["rollout/replaced"] <= 2 and -1 <= ours["rollout/overlong"] < 0
    assert max(each["rollout/replaced"] for each in measured(alone)) > 0
    if name == "fsdp":
        whole, later = lab.resumed(evolve(trial, steps=3), layout.layout, "replaced", step=2)
        assert measured(later)[-1] == measured(whole)[-1]


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["fsdp", "tp", "pp", "fsdp and ep", "one rank, four microbatches"])
def test_a_layout_draws_the_prompts_that_one_process_draws(lab: Laboratory, name: str):
    """By their success; in a run that goes on too, on the same ranks or as one process."""
    layout, limit = LAYOUTS[name], TOLERANCE["fp64"]
    more = ", replay_prompts = 0.5, difficulty = learnable" + (REPLAYED if layout.model == "moe" else "")
    trial = evolve(sampled_trial(lab, layout, more=more), steps=4)
    (lab.folder / "sampled.py").write_text(PARTS.replace("return each *", "return sum(map(ord, completion)) % 2 #"))
    slug = f"drawn-{name.split(',')[0].replace(' ', '-')}"
    whole, later = lab.resumed(trial, layout.layout, slug, step=2)
    assert samples(later) == samples(whole)[2:] and measured(later)[1:] == measured(whole)[2:]
    saving = evolve(trial, more=f"every 2 steps eval lines {{ batches = 1 }} then checkpoint\n{trial.more}")
    one = lab.alone(saving)
    assert samples(whole) == samples(one) and gaps(whole, one).worst < limit
    for ours, theirs in zip(measured(whole), measured(one), strict=True):
        assert [ours[f"rollout/{each}"] for each in ("replayed", "solved")] == [
            theirs[f"rollout/{each}"] for each in ("replayed", "solved")
        ]
    drawn = [each["rollout/replayed"] for each in measured(whole)]
    assert drawn[0] == 0 and max(drawn) == 0.5
    plain = lab.alone(evolve(trial, more=trial.more.replace(", replay_prompts = 0.5, difficulty = learnable", "")))
    assert samples(plain)[0] == samples(one)[0] and samples(plain)[1:] != samples(one)[1:]
    lab.take_checkpoint(whole, 2, f"{slug}-alone")
    moved = lab.ranks.run(lab.plan(saving, (), alone=True), lab.folder, name=f"{slug}-alone")
    alike = evolve(moved, curve=whole.curve, evals=whole.evals, routing=whole.routing)
    assert samples(moved) == samples(whole)[2:] and gaps(alike, whole).worst < limit


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["reset", "step", "finish"])
@pytest.mark.parametrize("name", ["fsdp", "tp", "pp"])
def test_an_error_of_an_environment_on_one_rank_ends_all(lab: Laboratory, name: str, method: str):
    """While the others wait for it in a collective."""
    trial = evolve(episodes_trial(lab, LAYOUTS[name]), steps=1)
    begin = {
        "reset": "def reset(self, task, random, each: float = 0.5):\n",
        "step": "def step(self, text):\n",
        "finish": "def finish(self):\n",
    }[method]
    assert begin in WORLD
    (lab.folder / "world.py").write_text(WORLD.replace(begin, f"{begin}        assert os.environ['RANK'] != '0'\n"))
    with pytest.raises(RanksFailed) as failed:
        lab.run(trial, LAYOUTS[name].layout, saves=False)
    said = str(failed.value)
    assert said.startswith("failed (rank 0: exit code 1, rank 1: exit code") and "AssertionError" in said


@pytest.mark.parametrize("name", ["fsdp", pytest.param("pp", marks=pytest.mark.matrix)])
def test_a_run_goes_on_with_the_same_completions(lab: Laboratory, name: str):
    layout = LAYOUTS[name]
    trial = evolve(sampled_trial(lab, layout), steps=3)
    whole, later = lab.resumed(trial, layout.layout, f"rollouts-{name}", step=2)
    assert samples(later) == samples(whole)[2:] and len(samples(later)) == 1
    assert measured(later)[-1] == measured(whole)[-1]


SEVERAL = {
    "fsdp": ("fsdp", ""),
    "tp": ("tp", ""),
    "ring": ("ring", ""),
    "pp with experts": ("pp with experts", REPLAYED),
    "fsdp and ep": ("fsdp and ep", REPLAYED),
}
ADAPTED = {
    "fsdp": LOSS.replace("kl_weight", "kl_target = 0.01, kl_gain = 1, kl_weight"),
    "tp": "gspo { chunk = 8 KiB, kl = k1, kl_weight = 0.3, kl_target = 0.2, kl_gain = 1 }",
    "pp": "cispo { chunk = 8 KiB, kl = k3, kl_weight = 0.3, kl_target = 0.01, kl_gain = 1 }",
    "one rank, four microbatches": LOSS.replace("kl_weight", "kl_target = 0.01, kl_gain = 1, kl_weight"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", ADAPTED)
def test_a_layout_adapts_the_weight_of_the_divergence(lab: Laboratory, name: str):
    """By the published rule, as one process and a run that goes on."""
    layout, limit = LAYOUTS[name], TOLERANCE["fp64"]
    trial = evolve(sampled_trial(lab, layout, loss=ADAPTED[name]), steps=4)
    target = 0.2 if name == "tp" else 0.01
    alone, outcome = lab.alone(trial), lab.run(trial, layout.layout, saves=False)
    assert gaps(outcome, alone).worst < limit
    for found in (alone, outcome):
        weight = 0.3
        for each in measured(found):
            assert each["policy/kl_weight"] == pytest.approx(weight, rel=limit)
            weight *= 1 + max(-0.2, min(0.2, each["policy/reference_kl"] / target - 1))
    whole, later = lab.resumed(trial, layout.layout, f"adapted-{name.split(',')[0].replace(' ', '-')}", step=2)
    assert measured(later)[1:] == measured(whole)[2:]


AGAIN = {
    "tp": ("tp", "", LOSS),
    "fsdp": ("fsdp", "", LOSS),
    "pp with experts": ("pp with experts", REPLAYED, LOSS),
    "processed": ("fsdp", ", logprobs = processed, compare = 20", LOSS),
    "policy gradient": ("pp", "", DISTILL.replace("reverse_kl", "policy_gradient")),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", SEVERAL)
def test_completions_of_several_steps_are_sampled_by_the_weights_before_them(lab: Laboratory, name: str):
    """And a run that goes on between them, on the same ranks or as one process, learns from the same ones."""
    layout, more = LAYOUTS[SEVERAL[name][0]], SEVERAL[name][1]
    trial = evolve(sampled_trial(lab, layout, more=f"{more}, steps = 3"), steps=4)
    slug = name.replace(" ", "-")
    whole, later = lab.resumed(trial, layout.layout, f"several-{slug}", step=2)
    assert samples(later) == samples(whole)[2:] and measured(later)[1:] == measured(whole)[2:]
    saving = evolve(trial, more=f"every 2 steps eval lines {{ batches = 1 }} then checkpoint\n{trial.more}")
    one, limit = lab.alone(saving), TOLERANCE["fp64"]
    assert samples(whole) == samples(one) and gaps(whole, one).worst < limit
    # One rank goes on with what several have saved.
    plan = lab.plan(saving, (), alone=True)
    lab.take_checkpoint(whole, 2, f"several-{slug}-alone")
    moved = lab.ranks.run(plan, lab.folder, name=f"several-{slug}-alone")
    alike = evolve(moved, curve=whole.curve, evals=whole.evals, routing=whole.routing)
    assert samples(moved) == samples(whole)[2:] and gaps(alike, whole).worst < limit
    ratios = [each["policy/ratio"] for each in measured(whole)]
    # Steps 1 and 4 sample; 2 and 3 learn from completions of weights that have moved since.
    assert [abs(ratio - 1) < 1e-6 for ratio in ratios] == [True, False, False, True]
    assert ["rollout/logprob_gap" in each for each in measured(whole)] == [True, False, False, True]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "tp" else pytest.mark.matrix) for name in AGAIN]
)
def test_several_steps_learn_from_the_same_completions(here: Laboratory, name: str):
    """In a run that goes on between them too, on the same ranks or as one process."""
    layout, (more, loss) = LAYOUTS[AGAIN[name][0]], AGAIN[name][1:]
    make_teacher(here.folder / "sampled-teacher", 258, hidden_size=24)
    trial = evolve(sampled_trial(here, layout, loss=loss, more=f"{more}, steps = 2, updates = 2"), steps=5)
    slug = f"again-{name.replace(' ', '-')}"
    whole, later = here.resumed(trial, layout.layout, slug, step=3)
    assert samples(later) == samples(whole)[3:] and measured(later)[1:] == measured(whole)[3:]
    saving = evolve(trial, more=f"every 3 steps eval lines {{ batches = 1 }} then checkpoint\n{trial.more}")
    one, limit = here.alone(saving), TOLERANCE["fp64"]
    assert samples(whole) == samples(one) and gaps(whole, one).worst < limit
    shown = samples(whole)
    # Steps 1 and 2, then the same again; step 5 samples of new prompts.
    assert shown[0] == shown[2] != shown[1] == shown[3] and shown[4] not in shown[:4]
    rewards = [each["reward"] for each in measured(whole)]
    assert rewards[:2] == rewards[2:4] and len(set(rewards)) == 3
    ratios = [each["policy/ratio"] for each in measured(whole)]
    assert [abs(ratio - 1) < 1e-6 for ratio in ratios] == [True, False, False, False, True]
    here.take_checkpoint(whole, 3, f"{slug}-alone")
    moved = here.ranks.run(here.plan(saving, (), alone=True), here.folder, name=f"{slug}-alone")
    alike = evolve(moved, curve=whole.curve, evals=whole.evals, routing=whole.routing)
    assert samples(moved) == samples(whole)[3:] and gaps(alike, whole).worst < limit


@pytest.mark.matrix
def test_the_reference_is_the_model_that_the_run_begins_with(lab: Laboratory):
    """Under an adapter that adds nothing at first that is the model without it, which is computed another way."""
    trial = sampled_trial(lab, Topology())
    adapted = evolve(trial, more=f"{trial.more}adapter lora {{ rank = 4 }}\n")
    sets = [("loss.reference=initial",), ("loss.reference=adapter_off",)]
    first, second = (lab.alone(evolve(adapted, settings=(*adapted.settings, *each))) for each in sets)
    found = [[each["policy/reference_kl"] for each in measured(outcome)] for outcome in (first, second)]
    assert found[0] == pytest.approx(found[1], rel=1e-10, abs=1e-12) and found[0][-1] > 1e-6
    assert gaps(first, second).worst < TOLERANCE["fp64"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("fault", "name"),
    [("draws_of_a_rank", "fsdp"), ("unshared_scores", "tp")],
)
def test_a_fault_of_rollouts_is_noticed(lab: Laboratory, fault: str, name: str):
    layout = LAYOUTS[name]
    trial = sampled_trial(lab, layout)
    outcome = lab.run(trial, layout.layout, mutation=Mutation(fault), saves=False)
    assert gaps(outcome, lab.alone(trial)).worst > 1e3 * TOLERANCE["fp64"]
