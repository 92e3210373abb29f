"""`xtrain solve`: the answer is that of trying everything, keeps the limits, and is the plan that it prints."""

import json
from pathlib import Path

import pytest
from attrs import evolve

from xtrain.cli.main import main
from xtrain.dsl.load import load_spec
from xtrain.planner.compile import compile_plan
from xtrain.planner.costs.run import startup_of
from xtrain.planner.load import plan_from_spec
from xtrain.planner.review import solve as module
from xtrain.planner.review.alternatives import any_layout, search
from xtrain.planner.review.solve import RunLimits, Unsolvable, machine_sets, solve
from xtrain.records.law import Coefficients, ScalingLaw

LAW = Coefficients(E=1.5, A=20.0, B=300.0, alpha=0.3, beta=0.3)
SPEC = """
experiment tiny { seed = 1, budget = 10 steps }
model qwen3 { layers = 2, dim = 64, heads = 4, kv_heads = 2, head_dim = 16, ffn = 128 }
tokenizer bytes
dataset web { source = synthetic() }
batch { sequence = 64, rows = 8 }
optimizer adamw { lr = 1e-3 }
cluster other {
  nodes = 2, devices = 2, memory = 200 MiB, flops = 0.01T, link = 1 GiB, network = 500 MiB, price = 3
  mtbf = 40 h, storage = 1 MiB, restart = 2 min
}
every 5 steps checkpoint
"""
OFFERS = """cluster, devices, nodes, price, memory, flops, link, network
other, 2, 2, 3, 200 MiB, 0.01T, 1 GiB, 500 MiB
other, 1, 2, 0.5, 200 MiB, 0.002T, 1 GiB, 500 MiB
"""
SIZES = ("model.layers=1", "model.layers=2", "model.dim=128,model.layers=3")


@pytest.fixture
def law() -> ScalingLaw:
    return ScalingLaw(
        metric="eval.web.loss", runs=9, fitted=LAW, samples=(LAW, evolve(LAW, E=1.6)), parameters=(1e4, 1e6),
        tokens=(1e5, 1e7), error=0.01,
    )  # fmt: skip


@pytest.fixture
def spec(tmp_path: Path, law: ScalingLaw, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    law.write(Path("law.json"))
    Path("offers.csv").write_text(OFFERS)
    path = Path("tiny.xtrain")
    path.write_text(SPEC)
    return path


def best_of_all(spec: Path, law: ScalingLaw, limits: RunLimits, offers: Path | None) -> tuple[float, tuple[str, ...]]:
    """Return the least loss, by trying every size on every number of nodes, and its settings."""
    found = []
    table = module._offers(load_spec(spec).require(), offers)
    for size in SIZES:
        for offer in table:
            for nodes in range(1, offer.nodes + 1):
                if nodes not in (1, 2, 4):
                    continue
                chosen = (*size.split(","), *machine_sets(offer, nodes))
                loaded = load_spec(spec, chosen).require()
                plain = compile_plan(any_layout(loaded)).plan
                assert plain is not None
                fit = search(loaded, plain)
                layout = min(fit.best, key=lambda each: each.seconds)
                plan = plan_from_spec(spec, (*chosen, *layout.sets)).plan
                assert plan is not None and plan.estimates.times is not None
                rate = (offer.price or 0) * nodes * offer.devices / 3600
                time = min(limits.money / rate if limits.money else 1e99, limits.seconds or 1e99)
                share = module.goodput_of(plan).best_share if plan.cluster.mtbf_seconds else 1.0  # type: ignore[union-attr]
                steps = int((time - startup_of(plan).seconds) * share / plan.estimates.times.step)
                if steps >= 1:
                    tokens = steps * plan.estimates.tokens_per_step
                    found.append((law.fitted.loss(plan.parameters.active, tokens), (*chosen, *layout.sets), steps))
    loss, sets, steps = min(found)
    return loss, (*sets, f"experiment.budget={steps} steps")


@pytest.mark.parametrize(
    ("money", "hours", "offers"),
    [(1.0, None, None), (5.0, 0.4, "offers.csv")],
)
def test_the_answer_is_that_of_trying_everything(
    spec: Path, law: ScalingLaw, money: float | None, hours: float | None, offers: str | None
):
    limits = RunLimits(money=money, seconds=None if hours is None else hours * 3600)
    table = None if offers is None else Path(offers)
    found = solve(spec, law, limits, sizes=SIZES, offers=table)
    best = found.best
    assert (best.loss, best.sets) == best_of_all(spec, law, limits, table)
    assert best.cost is not None and best.cost <= (money or 1e99) and best.seconds <= (limits.seconds or 1e99)
    plan = plan_from_spec(spec, best.sets).plan
    assert plan is not None and plan.id == found.plan.id
    assert (plan.timeline.steps, plan.timeline.tokens) == (best.steps, best.tokens)
    assert plan.parameters.active == best.point.size.parameters
    longer = evolve(best, steps=best.steps + 1)
    step = best.point.plan.estimates.times
    assert step is not None
    seconds = best.seconds + step.step / best.share
    assert longer.steps and (
        (limits.seconds is not None and seconds > limits.seconds)
        or (money is not None and seconds * best.point.offer.rate(best.point.nodes) > money)
    )


def test_a_combination_with_the_bound_of_the_best_is_searched(spec: Path, law: ScalingLaw):
    """Both offers have one bound, which their losses nearly reach, and the later one is better."""
    links = "".join(f"other, 2, 1, 3, 200 MiB, 0.01T, {link} MiB, 500 MiB\n" for link in (100, 1000))
    Path("links.csv").write_text(OFFERS.partition("\n")[0] + "\n" + links)
    found = solve(spec, law, RunLimits(money=300.0, seconds=None), sizes=SIZES[:1], offers=Path("links.csv"))
    slow, fast = sorted(found.outcomes, key=lambda each: -each.loss)
    assert found.best == fast and fast.point.offer.name == "other of line 3" and 0 < slow.loss - fast.loss < 0.01


def test_prices_are_losses_of_looser_limits(spec: Path, law: ScalingLaw):
    limits = RunLimits(money=2.0, seconds=1800.0)
    found = solve(spec, law, limits, sizes=SIZES)
    prices = {price.limit: price for price in found.prices}
    cheaper = solve(spec, law, limits, sizes=SIZES, sets=("cluster.price=2.7",)).best
    longer = solve(spec, law, evolve(limits, seconds=1980.0), sizes=SIZES).best
    for name, best in (("prices 10% lower", cheaper), ("10% more time", longer)):
        less = found.best.loss - best.loss
        assert prices[name].less == pytest.approx(less, abs=1e-12) and (less > 0) == (not prices[name].why)
    assert sum(not price.why for price in found.prices) >= 1


def test_sizes_without_any_given(spec: Path):
    sizes = {size.name: size.sets for size in module._ladder(load_spec(spec).require())}
    assert sizes["as declared"] == ()
    assert sizes["32 wide, 1 block"] == (
        "model.dim=32", "model.heads=2", "model.kv_heads=1", "model.ffn=64", "model.layers=1",
    )  # fmt: skip
    assert sizes["96 wide, 3 blocks"][1:3] == ("model.heads=6", "model.kv_heads=3")
    assert "16 wide, 1 block" not in sizes  # half a head
    for sets in sizes.values():
        assert plan_from_spec(spec, sets).plan is not None


def test_a_size_that_fits_nowhere_is_ruled_out(spec: Path, law: ScalingLaw):
    found = solve(
        spec,
        law,
        RunLimits(money=1.0, seconds=None),
        sizes=("model.dim=64", "model.dim=8192,model.ffn=16384", "model.heads=3"),
    )
    assert found.best.point.size.name == "model.dim=64"
    assert any(name == "model.heads=3" for name, _ in found.rejected)
    with pytest.raises(Unsolvable, match="no layout fits in memory"):
        solve(spec, law, RunLimits(money=1e6, seconds=None), sizes=("model.dim=8192,model.ffn=16384",))
    with pytest.raises(Unsolvable, match="the limits end before the first step"):
        solve(spec, law, RunLimits(money=None, seconds=1e-3), sizes=("model.dim=64",))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    try:
        code = main(["solve", "tiny.xtrain", "--law", "law.json", *arguments])
    except SystemExit as ended:  # of the parser of arguments
        code = int(str(ended.code))
    return code, "".join(capsys.readouterr())


def test_a_budget_beyond_all_steps_is_cut(spec: Path, law: ScalingLaw):
    found = solve(spec, law, RunLimits(money=1e300, seconds=None), sizes=SIZES[:1])
    assert found.best.steps == found.plan.timeline.steps == 2**63 - 1


def test_the_command(spec: Path, capsys: pytest.CaptureFixture[str]):
    code, text = shown(capsys, "--budget", "1", "--size", "model.dim=64", "--size", "model.dim=32")
    assert code == 0 and "eval.web.loss" in text and "--set 'experiment.budget=" in text and "LIMITS" in text
    code, text = shown(capsys, "--deadline", "30 min", "--size", "model.dim=64", "--json")
    found = json.loads(text)
    assert code == 0 and found["best"]["seconds"] <= 1800 and found["prices"][0]["limit"] == "10% more time"


def spec_of(before: str, after: str) -> dict[str, str]:
    return {"tiny.xtrain": SPEC.replace(before, after)}


def offers_of(text: str) -> dict[str, str]:
    return {"o.csv": f"cluster,devices,nodes,price\n{text}"}


BUDGET, OFFERED = ("--budget=1",), ("--budget=1", "--offers=o.csv")
WRONG: dict[str, tuple[dict[str, str], tuple[str, ...], str]] = {
    "no limit": ({}, (), "give --budget, --deadline or both"),
    "no time": ({}, ("--deadline=soon",), "`soon` is not a time; write it as in '3 d'"),
    "no law": ({"law.json": "{}"}, BUDGET, "is not a law"),
    "no spec": ({"tiny.xtrain": "experiment"}, BUDGET, "see `xtrain check`"),
    "no cluster": ({"tiny.xtrain": SPEC.partition("cluster")[0]}, BUDGET, "declare the machines"),
    "no number of nodes": (spec_of("nodes = 2, ", ""), BUDGET, "how many machines"),
    "no price": (spec_of(", price = 3", ""), BUDGET, "needs a price of other"),
    "steps that differ": (spec_of("rows = 8", "rows = 8, ramp_from = 4"), BUDGET, "with `ramp_from` differ in tokens"),
    "a size that is none": (
        {},
        (*BUDGET, "--size=model.layer=1"),
        "no size can be planned: model.layer=1: there is no",
    ),
    "an empty size": ({}, (*BUDGET, "--size="), "a size has no settings; write it as `model.dim=512,model.layers=8`"),
    "a phase after the end": (
        spec_of("budget = 10 steps }", "budget = 1B steps }\nphase late { from = 900M steps, lr_scale = 0.5 }"),
        (*BUDGET, "--size=model.layers=1"),
        "is refused: phase late begins at 900,000,000 steps",
    ),
    "no speed": (spec_of("flops = 0.01T, ", ""), BUDGET, "speed of other are unknown"),
    "no offers": ({}, OFFERED, "o.csv cannot be read: No such file"),
    "no price of an offer": ({"o.csv": "cluster,devices,nodes\nh100,8,1\n"}, OFFERED, "o.csv has no column price"),
    "no such cluster": (offers_of("h1000,8,1,2\n"), OFFERED, "o.csv:2: `h1000` is no cluster"),
    "no node": (offers_of("h100,8,0,2\n"), OFFERED, "o.csv:2: nodes is `0`"),
    "a free device": (offers_of("h100,8,1,0\n"), OFFERED, "o.csv:2: price is `0`"),
    "a short line": (offers_of("h100,8\n"), OFFERED, "o.csv:2: as many values as columns"),
    "only a head": (offers_of(""), OFFERED, "has no offers"),
    "no setting": ({"o.csv": "cluster,devices,nodes,price,colour\nh100,8,1,2,red\n"}, OFFERED, "colour"),
}


@pytest.mark.parametrize(("files", "arguments", "says"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong(
    spec: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], arguments: tuple[str, ...], says: str
):
    for name, text in files.items():
        Path(name).write_text(text)
    code, text = shown(capsys, *arguments)
    assert code == 2 and says in text, text
