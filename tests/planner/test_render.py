"""The page a person decides by: it fits, it holds the numbers that matter with their units, and it guesses nothing."""

import io
import re
from itertools import combinations
from pathlib import Path
from shlex import quote

import pytest
from attrs import evolve

from xtrain.dsl.diagnostics.diagnostic import shows_color
from xtrain.plan.estimates import Memory, Remedy, Times, Traffic
from xtrain.plan.findings import Findings
from xtrain.plan.plan import Check, Traced
from xtrain.plan.views import headroom
from xtrain.planner.compile import resolve
from xtrain.planner.costs.run import disk_of
from xtrain.planner.load import plan_from_spec
from xtrain.planner.review import page as render_head
from xtrain.planner.review.page import PARTS, render, render_summary
from xtrain.planner.review.training import breakpoints
from xtrain.planner.rules.costs import changes_of
from xtrain.planner.rules.validate import validate
from xtrain.text.page import LONGEST, Page, shorten
from xtrain.text.units import WIDTH, bytes_text, count_text, flops_text, plural, rate_text, seconds_text

SPECS = sorted((Path(__file__).parents[2] / "specs").glob("*.xtrain"))
ESCAPE = re.compile(r"\x1b\[\d+m")
GIB = 2**30
MOE = "model qwen3_moe { dim = 64, layers = 4, heads = 8, kv_heads = 4, experts = 8 }"
H100 = "cluster h100 { price = 2 }"


def plan_of(path):
    compiled = plan_from_spec(path)
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


def words(text):
    return re.sub(r"\s+", " ", text)


def part(plan, name, **options):
    """A part of the page without the header, blanks as one."""
    return words(render(plan, parts=[name], **options).partition("\n\n")[2])


def with_memory(plan, *sizes):
    """The plan with these totals, in GiB, on the ranks of each pipeline coordinate."""
    classes = [
        evolve(one, memory=Memory(parameters=0, gradients=0, optimizer=0, activations=int(size * GIB)))
        for one, size in zip(plan.estimates.classes, sizes, strict=True)
    ]
    return evolve(plan, estimates=evolve(plan.estimates, classes=tuple(classes)))


def with_traffic(plan, *traffic):
    classes = tuple(evolve(one, traffic=traffic) for one in plan.estimates.classes)
    return evolve(plan, estimates=evolve(plan.estimates, classes=classes))


def with_times(plan, **changes):
    times = Times(computing=2.0, exposed=0.5, step=4.0, fast=3.0, slow=6.0, tokens_per_second=1e6, mfu=0.3)
    return evolve(plan, estimates=evolve(plan.estimates, bubble=0.2, times=evolve(times, **changes)))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_the_page_of_every_spec_fits(path):
    plan = plan_of(path)
    lines = render(plan).splitlines()
    assert len(lines) <= LONGEST
    assert max(map(len, lines)) <= 100
    assert all(line == line.rstrip() for line in lines)
    colored = render(plan, color=True)
    assert ESCAPE.search(colored)
    assert [line.rstrip() for line in ESCAPE.sub("", colored).splitlines()] == lines
    full = render(plan, full=True)
    assert len(full.splitlines()) > len(lines) and max(map(len, full.splitlines())) <= 100


def test_a_page_with_much_to_say_gives_way(make_plan):
    """Every warning stands in full; tables and descriptions become shorter for it."""
    wordy = make_plan(parallel="parallel { pp 2, fsdp 2 }")
    checks = tuple(
        Check(id=f"rule.{n}", status="warn", code=f"W{900 + n}", evidence=f"{n}: " + "so it is " * 30)
        for n in range(10)
    )
    lines = render(evolve(wordy, checks=(*wordy.checks, *checks))).splitlines()
    assert len(lines) <= LONGEST
    assert all(any(f"warn W{900 + n}: {n}: so it is" in line for line in lines) for n in range(10))
    assert words(" ".join(lines)).count("so it is") == 10 * 30


def test_what_decides_stands_first(make_plan):
    exact = {"precision": "precision { compute = fp32 }", "compile": "compile { mode = none }"}  # as chosen: no warning
    text = render(with_times(with_memory(make_plan(parallel="parallel { fsdp 2 }", cluster=H100, **exact), 40)))
    head = text.partition("MODEL")[0]
    for line in (
        "tiny: 100 steps on 2 ranks, cuda",
        "cluster h100: 1 node × 2 devices · 80.0 GiB, 67 TFLOP/s each · link 450 GB/s · network 50 GB/s",
        "  memory  fits: 40.0 GiB of 80.0 GiB (50%) on every rank, 40.0 GiB free",
        "  step    4.00 s (3.00 s to 6.00 s) · 1.00M tokens/s · MFU 30% (20% to 40%)",
        "  run     6.67 min · 0.222 device-hours · cost 0.444 · 100 steps, 205k tokens",
    ):
        assert line in head, line
    assert re.search(r"  checks  \d+ pass", head)


@pytest.mark.parametrize(
    ("size", "verdict"), [(10, "fits"), (73.5, "fits"), (73.7, "tight"), (80, "tight"), (80.1, "does not fit")]
)
def test_the_verdict_on_memory(make_plan, size, verdict):
    full = with_memory(make_plan(parallel="parallel { pp 2 }", cluster=H100), 1, size)
    room = headroom(full)
    assert (room.verdict, room.worst.pp) == (verdict, 1)
    assert f"  memory  {verdict}: " in render(full)
    assert ("too much" in room.text) == (verdict == "does not fit")
    assert "on pp 1 (rank 1)" in room.text


def test_what_nobody_knows_is_unknown(make_plan):
    text = render(make_plan(parallel="parallel { fsdp 2 }"))
    assert "  memory  unknown: " in text and "device unknown" in text
    assert "  step    unknown: no `cluster` is given; 2.05k tokens a step" in text
    assert words("wall time unknown no `cluster` is given") in words(text)
    assert "cluster unknown: add `cluster here`" in text
    other = make_plan(cluster="cluster other { memory = 16 GiB, link = 1 GiB }")
    assert "unknown: cluster has no flops; " in render(other)
    epochs = make_plan(experiment="experiment tiny { budget = 2 epochs }")
    assert "  run     2 epochs; steps are unknown until the data is counted" in render(epochs)
    assert "steps unknown 2 epochs of data that has not been counted yet" in part(epochs, "training")


def test_values_that_were_derived_or_come_from_elsewhere(make_plan):
    shown = part(make_plan(parallel="parallel { fsdp 2 }", more="let n = 7"), "values")
    assert "model.head_dim 8 (derived = dim 64 / heads 8)" in shown
    assert "model.dim 64 (text, " in shown  # in full every value stands there
    named = make_plan(more="let rate = 1e-3", optimizer="optimizer adamw { lr = rate }")
    assert re.search(r"optimizer.lr +0.001 +let ", render(named))
    assert re.search(r"optimizer.lr 0.001 \(let, /", part(named, "values"))
    assert "model.dim " not in render(named)


def test_axes_and_what_they_send_over(make_plan):
    far = make_plan(
        model=MOE, parallel="parallel { fsdp 8, tp 2, ep 4 }", cluster="cluster h100 { nodes = 2, devices = 8 }"
    )
    shown = part(far, "mesh")
    assert "16 ranks, 8 on each of 2 nodes" in shown
    assert "fsdp 8 2 2 network 50 GB/s parameters sharded, different rows" in shown
    assert "tp 2 1 8 link 450 GB/s matrices split" in shown
    assert "ep 4 1 4 link 450 GB/s experts spread" in shown
    assert "ep_fsdp 4 4 4 network 50 GB/s" in shown
    dense = part(make_plan(parallel="parallel { fsdp 2, tp 2 }"), "mesh")
    assert "ep_fsdp" not in dense and "link matrices" in dense


def test_large_and_small_grids(make_plan):
    assert "each rank as fsdp.tp" in render(make_plan(parallel="parallel { fsdp 4, tp 2 }"))
    assert "rank r is fsdp r" in render(make_plan(parallel="parallel { fsdp 4 }"))
    spread = render(make_plan(parallel="parallel { fsdp 4, tp 2 }", launch="launch { nodes = 2 }"))
    assert "| 2.0" in spread
    large = render(make_plan(parallel="parallel { fsdp 64, tp 2 }", launch="launch { nodes = 16 }"))
    grid = large[large.index("ranks 0 to 15 as fsdp.tp") :].splitlines()
    assert grid[1].split() == ["0", "0.0", "0.1", "1.0", "1.1", "2.0", "2.1", "3.0", "3.1"]
    assert grid[2].split() == ["8", "|", "4.0", "4.1", "5.0", "5.1", "6.0", "6.1", "7.0", "7.1"]
    assert not grid[3].startswith("    16")


def test_stages_and_how_even_they_are(make_plan):
    assert "STAGES" not in render(make_plan(parallel="parallel { fsdp 2 }"))
    even = part(make_plan(parallel="parallel { pp 2 { head_cost = 0 } }"), "stages")
    assert "0 0 (rank 0) 0 to 1 115k 2 layers, embedding" in even
    assert "1 1 (rank 1) 2 to 3 115k 2 layers, last norm, head" in even
    assert "the loss is computed on pp 1, summed over all ranks, and recorded by rank 0" in even
    plan = make_plan(parallel="parallel { pp 2 }")
    for work, said in (
        ((30, 10), "pp 0 computes 50% more than the mean"),
        ((7, 7), "every stage computes the same"),
    ):
        classes = tuple(evolve(one, flops=size) for one, size in zip(plan.estimates.classes, work, strict=True))
        assert f"2 stages, 1f1b; {said}" in part(
            evolve(plan, estimates=evolve(plan.estimates, classes=classes)), "stages"
        )
    zbv = part(make_plan(parallel="parallel { pp 2 { schedule = zbv } }"), "stages")
    assert "the loss is computed on pp 0" in zbv and "1 to 2 1 (rank 1) 1 to 2" in zbv
    tied = "model llama { dim = 64, layers = 4, heads = 8, kv_heads = 4, tie_embeddings = true }"
    assert "head, a copy of the embedding" in part(make_plan(model=tied, parallel="parallel { pp 2 }"), "stages")


def test_the_order_counts_what_rules_match(make_plan):
    shown = part(make_plan(parallel="parallel { tp 2, fsdp 2, pp 2 }"), "order")
    assert "parallel.tp 30 modules split 30 matrices over tp=2" in shown
    assert "parallel.fsdp 4 modules shard 4 blocks" in shown
    assert [
        shown.index(f" {name} ") for name in ("build_model", "parallel.tp", "parallel.fsdp", "parallel.pp")
    ] == sorted(shown.index(f" {name} ") for name in ("build_model", "parallel.tp", "parallel.fsdp", "parallel.pp"))
    page = words(render(make_plan(parallel="parallel { fsdp 2 }")))
    assert "fetch → agree → zero_gradients → forward_backward → clip" in page
    assert "1 step.fetch take 8 rows" not in page
    assert "1 step.fetch take" in part(make_plan(), "step")


def test_memory_by_category(make_plan):
    plan = make_plan(parallel="parallel { pp 4, fsdp 2 }", cluster=H100)
    memories = [
        Memory(parameters=GIB, gradients=GIB, optimizer=2 * GIB, unsharded=3 * GIB, activations=size * GIB, reserve=GIB)
        for size in (40, 10, 10, 20)
    ]
    classes = tuple(evolve(one, memory=m) for one, m in zip(plan.estimates.classes, memories, strict=True))
    full = evolve(plan, estimates=evolve(plan.estimates, classes=classes))
    shown = part(full, "memory")
    assert "GiB on a rank at the peak of a step params grads optim. unsharded activ. reserve total" in shown
    assert "pp 0 1.00 1.00 2.00 3.00 40.0 1.00 48.0" in shown
    assert "pp 1 to 2 1.00 1.00 2.00 3.00 10.0 1.00 18.0" in shown
    assert "fits: 48.0 GiB of 80.0 GiB (60%) on pp 0 (ranks 0 to 1), 32.0 GiB free" in shown
    assert "unreduced" not in shown.partition("fits")[0]  # nobody needs a column of noughts
    offloaded = tuple(evolve(one, memory=evolve(one.memory, offloaded=True)) for one in classes)
    host = part(evolve(full, estimates=evolve(full.estimates, classes=offloaded)), "memory")
    assert "params, grads, optim. in host memory, not in total" in host and "40.0 1.00 44.0" in host


def test_what_would_help_stands_below_the_memory(make_plan):
    plan = with_times(with_memory(make_plan(cluster=H100), 90))
    helps = (
        Remedy(sets=("activation.mode=full",), memory_bytes=40 * GIB, seconds=5.0),
        Remedy(sets=("batch.micro=1", "batch.accumulate=8"), memory_bytes=60 * GIB, seconds=None),
    )
    shown = words(render(evolve(plan, estimates=evolve(plan.estimates, remedies=helps))))
    assert "memory does not fit: 90.0 GiB of 80.0 GiB (112%) on the only rank, 10.0 GiB too much" in shown
    first = "--set activation.mode=full 40.0 GiB (50%) a step takes 5.00 s, +25%"
    assert (
        f"the fullest rank would hold less with {first} --set batch.micro=1 --set batch.accumulate=8 60.0 GiB (75%)"
        in shown
    )
    assert "step time unknown" in shown
    lack = Check(id="memory.device", status="warn", code="W423", evidence="it does not fit; use activation.mode=full")
    full = evolve(plan, estimates=evolve(plan.estimates, remedies=helps), checks=(lack,))
    assert "warn W423: it does not fit; for settings that would help see MEMORY" in words(render(full))
    assert "it does not fit; use activation.mode=full" in words(render_summary(full))


def test_no_remedy_is_wider_than_the_page(make_plan, load):
    """Two changes together, each of several settings, with the widest of figures beside them."""
    blocks = {
        "cluster": H100,
        "loss": "loss cross_entropy { chunk = 1 GiB }",
        "batch": "batch { sequence = 256, micro = 4, accumulate = 262144 }",
        "parallel": "parallel { fsdp 8192 { replicate = 8 } }",
    }
    spec = load(**blocks)
    valid = validate(spec, None, Findings(spec))
    assert valid is not None
    changes = list(changes_of(resolve(spec, valid)))
    pairs = [a + b for a, b in combinations(changes, 2)]
    widest = max(sum(len(f"--set {text} ") for text in change.sets) for change in pairs)
    assert widest > WIDTH, "else this shows nothing"
    plan = with_times(with_memory(make_plan(), 90))
    for change in (*changes, *pairs):
        helps = (Remedy(sets=change.sets, memory_bytes=1000 * GIB, seconds=9999.0),)
        estimates = evolve(plan.estimates, remedies=helps)
        page = render(evolve(plan, estimates=estimates, cluster=evolve(plan.cluster, memory_bytes=2**24)))
        assert max(map(len, page.splitlines())) <= WIDTH
        shown = words(page)
        assert "6400000%" in shown
        for text in change.sets:
            assert f"--set {quote(text)} " in shown, "whole, and as a shell takes it"


def test_of_many_kinds_of_ranks_the_worst_is_shown(make_plan):
    deep = "model llama { dim = 64, layers = 16, heads = 8, kv_heads = 4 }"
    plan = make_plan(model=deep, parallel="parallel { pp 16 }", batch="batch { sequence = 256, accumulate = 16 }")
    page = render(with_memory(plan, *range(1, 10), 99, *range(10, 16)))
    table = page[page.index("MEMORY") :].splitlines()[2:8]
    assert [line.split("  ")[1] for line in table] == ["pp 0", "pp 1", "pp 2", "pp 3", "pp 9", "pp 15"]
    assert "  and 10 more: --part memory" in page
    assert part(with_memory(plan, *range(1, 10), 99, *range(10, 16)), "memory").count("pp ") >= 16


SENT = (
    Traffic(axis="fsdp", op="all_gather", node="setup.parallel.fsdp", count=64, bytes=8 * GIB, exposed=False,
        seconds=0.2),
    Traffic(axis="fsdp", op="all_gather", node="setup.parallel.root_fsdp", count=1, bytes=GIB, exposed=False,
        seconds=0.03),
    Traffic(axis="tp", op="all_reduce", node="setup.parallel.tp", count=128, bytes=2 * GIB, exposed=True, seconds=0.01),
)  # fmt: skip


def test_communication_by_axis_and_collective(make_plan):
    plan = make_plan(parallel="parallel { fsdp 8, tp 2 }", cluster="cluster h100 { nodes = 2, devices = 8 }")
    shown = part(with_traffic(plan, *SENT), "communication")
    first = "tp all_reduce 128 2.00 GiB 10.0 ms exposed link tp"
    assert f"{first} fsdp all_gather 65 9.00 GiB 230 ms overlapped network fsdp, root_fsdp" in shown
    assert "all: 11.0 GiB in 193 calls, 240 ms, of which exposed 10.0 ms" in shown
    unknown = part(with_traffic(plan, *(evolve(each, seconds=None) for each in SENT)), "communication")
    assert "9.00 GiB unknown overlapped" in unknown and "time unknown: not estimated" in unknown
    assert "COMMUNICATION" not in render(make_plan())


def test_compute_says_what_it_rests_on(make_plan):
    plan = with_times(make_plan(parallel="parallel { pp 2 }", cluster=H100))
    shown = part(plan, "compute")
    assert "a step takes 4.00 s computing 2.00 s + exposed communication 500 ms + bubble 20% of the step" in shown
    assert "3.00 s to 6.00 s, devices at 40% to 60% of their peak, an assumption" in shown
    assert "tokens/s 1.00M 500k a device; MFU 30%, 20% to 40%" in shown
    assert "flops_per_token 6 · parameters in matrix products" in shown  # where each formula comes from
    peak = 2 * 67e12
    assert (
        f"at best {seconds_text(plan.estimates.flops_per_step / peak)} a step, if every device reached 67 TFLOP/s"
        in shown
    )
    sure = with_times(make_plan(cluster="cluster h100 { efficiency = 45% }"), fast=4.0, slow=4.0)
    shown = part(sure, "compute")
    assert "devices at 45% of their peak, from cluster.efficiency" in shown and "bubble 20%" not in shown
    still = make_plan(parallel="parallel { pp 2 }")
    share = f"{still.estimates.bubble:.0%}"
    assert f"bubble {share} of a step: pipeline bubble on the busiest rank" in part(still, "compute")
    again = evolve(plan.estimates.classes[0], flops=100, hardware_flops=130)
    shown = part(evolve(plan, estimates=evolve(plan.estimates, classes=(again, again))), "compute")
    assert "30% more is recomputed" in shown


def test_the_arithmetic_of_a_run(make_plan):
    plan = with_times(
        make_plan(experiment="experiment tiny { budget = 1M tokens }", parallel="parallel { fsdp 2 }", cluster=H100,
            every="every 100 steps checkpoint", checkpoint="checkpoint { keep = 2 }"),
        step=3600.0,
        fast=1800.0,
        slow=7200.0,
    )  # fmt: skip
    shown = part(plan, "training")
    assert "tokens a step 2,048 8 rows of 256; 256 a microbatch · 4 · 2 data ranks" in shown
    assert "steps 489 1.00M tokens / 2,048 a step, rounded up" in shown
    size, disk = plan.estimates.checkpoint_bytes, disk_of(plan, 5)
    assert disk is not None and disk.rest > 2 * size and disk.most == disk.rest + disk.full
    said = f"5 written, 2 kept: {bytes_text(disk.rest)} on disk, at most {bytes_text(disk.most)}; one every 4.17 d"
    assert f"checkpoint {bytes_text(size)} {said}" in shown
    assert "wall time 20.4 d 10.2 d to 40.8 d; without" in shown
    assert "device-hours 978 cost 1,956 at 2 an hour" in shown
    assert (
        "every 100 steps checkpoint 4 times" in shown
        and "on sigint, sigterm, sigusr1 checkpoint then stop default" in shown
    )
    free = with_times(make_plan(cluster="cluster h100"))
    assert "cost unknown: no cluster.price" in part(free, "training")


@pytest.mark.parametrize(("scheduler", "expected"), [
    ("cosine { warmup = 10 steps, floor = 10% }", "warm-up over 10 steps, cosine to 0.0001 at step 100"),
    ("linear", "linear to 0 at step 100"),
    ("constant", "constant"),
    ("constant { warmup = 1% }", "warm-up over 1 step, then constant"),
    ("wsd { warmup = 10%, decay = 20%, shape = sqrt }",
        "warm-up over 10 steps, constant to step 80, sqrt to 0 at step 100"),
])  # fmt: skip
def test_break_points_of_the_learning_rate(make_plan, scheduler, expected):
    args = make_plan(scheduler=f"scheduler {scheduler}").node("setup.scheduler").args
    assert ", ".join(breakpoints(args)) == expected


def test_break_points_of_a_budget_nobody_has_counted(make_plan):
    plan = make_plan(
        experiment="experiment tiny { budget = 2 epochs }", scheduler="scheduler wsd { warmup = 1%, decay = 12.5% }"
    )
    shown = ", ".join(breakpoints(plan.node("setup.scheduler").args))
    assert shown == "warm-up over 1%, constant to the last 12.5%, linear to 0 at the end"


def test_a_checkpoint_of_the_last_step_is_written_once(make_plan):
    assert "4 written" in part(make_plan(every="every 25 steps checkpoint"), "training")
    assert "4 written" in part(make_plan(every="every 30 steps checkpoint"), "training")  # three, and the last
    assert "depends on the clock" in part(make_plan(every="every 10 min checkpoint"), "training")
    plan = make_plan(every="every 25 steps checkpoint", checkpoint="checkpoint { keep = none }")
    disk = disk_of(plan, 4)
    assert (
        disk is not None
        and 4 * plan.estimates.checkpoint_bytes < disk.rest == disk.most == 4 * disk.full + disk.weights
    )
    assert f"4 written, all are kept: {bytes_text(disk.rest)} on disk" in part(plan, "training")
    best = make_plan(every="every 5 steps eval code then checkpoint", checkpoint="checkpoint { best = eval.code.loss }")
    assert "20 written, 3 + best kept: " in part(best, "training")


def test_data_and_what_each_link_hands_on(make_plan):
    shown = part(make_plan(every="every 10 steps eval code", parallel="parallel { cp 2 }"), "data")
    assert "code trained on, 1% held out: Python's standard library" in shown
    chain = "rows → [to_tensor] → rows of token tensors → [flatten] → token samples → [shift_tokens] → labelled samples"
    assert f"{chain} → [pack] → microbatch → [shard] → part of a microbatch → [microbatches]" in shown


def test_checks_that_did_not_pass_stand_in_full(make_plan):
    plan = make_plan()
    bad = (
        Check(id="memory.fits", status="fail", code="X999", evidence="it does not fit", place="a.xtrain:1:2"),
        Check(id="data.count", status="unknown", evidence="nobody has counted"),
    )
    both = evolve(plan, checks=(*plan.checks, *bad))
    page = render(both)
    assert "  fail X999: it does not fit (a.xtrain:1:2)" in page
    assert "  unknown data.count: nobody has counted" in page
    assert page.index("fail X999") < page.index("unknown data.count")
    count = len(plan.checks)
    assert f"{count} of {count + 2} pass" in page
    assert plan.checks[0].evidence not in page and words(plan.checks[0].evidence) in part(both, "checks")


def test_every_part_can_be_asked_for(make_plan):
    plan = with_traffic(make_plan(parallel="parallel { pp 2, fsdp 2 }"), *SENT)
    for name in (each for each in PARTS if each != "requests"):  # a server's
        shown = render(plan, parts=[name])
        assert shown.startswith("tiny: 100 steps on 4 ranks") and f"\n{name.upper()}" in shown
        assert len(shown.splitlines()) > 6


def test_a_trace_stands_beside_the_closed_form(make_plan):
    plan = with_traffic(with_memory(make_plan(parallel="parallel { fsdp 2 }", cluster=H100), 4), *SENT[:2])
    memory = Memory(parameters=0, gradients=0, optimizer=0, activations=3 * GIB)
    seen = evolve(SENT[0], count=65, bytes=9 * GIB)
    traced = evolve(plan, traced=(Traced(rank=0, pp=0, memory=memory, traffic=(seen,), seconds=1.0),))
    assert "every rank 4.00 4.00 traced 3.00 3.00" in part(traced, "memory")
    assert "network" not in part(traced, "communication")
    assert re.search(r"overlapped link the same", part(traced, "communication"))
    other = evolve(traced.traced[0], traffic=(evolve(seen, count=66),))
    assert "66 calls, 9.00 GiB" in part(evolve(traced, traced=(other,)), "communication")


def test_the_summary_is_short(make_plan):
    lines = render_summary(make_plan(parallel="parallel { fsdp 2 }")).splitlines()
    assert 3 <= len(lines) <= 5 and max(map(len, lines)) <= 100
    assert "fsdp 2" in lines[2]


def test_colour_is_for_terminals(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert shows_color(Terminal()) and not shows_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not shows_color(Terminal())


def test_tables_give_way_in_the_last_column():
    page = Page()
    page.table([("name", "x" * 200), ("longer name", "y")])
    first, second = str(page).splitlines()
    assert len(first) == 100 and first.endswith("…")
    assert second == "  longer name  y"


def test_texts_are_cut_at_a_word():
    assert shorten("one two three", 13) == "one two three"
    assert shorten("one two three", 12) == "one two…"
    assert shorten("one two, three", 13) == "one two…"
    assert shorten("onetwothree", 5) == "onet…"


@pytest.mark.parametrize(("text", "expected"), [
    (bytes_text(0), "0 B"),
    (bytes_text(1536), "1.50 KiB"),
    (bytes_text(130 * 2**20), "130 MiB"),
    (bytes_text(2**40 - 2**28), "1.00 TiB"),
    (count_text(8_030_261_248), "8.03B"),
    (count_text(999), "999"),
    (count_text(999_700), "1.00M"),
    (flops_text(51.47e9), "51.5 GF"),
    (plural(1, "batch"), "1 batch"),
    (plural(2000, "matrix"), "2,000 matrices"),
    (seconds_text(0), "0 s"),
    (seconds_text(2.5e-5), "25.0 µs"),
    (seconds_text(0.0734), "73.4 ms"),
    (seconds_text(119), "119 s"),
    (seconds_text(121), "2.02 min"),
    (seconds_text(86_400), "24.0 h"),
    (seconds_text(1e6), "11.6 d"),
    (rate_text(989e12, "FLOP/s"), "989 TFLOP/s"),
    (rate_text(2.25e15, "FLOP/s"), "2.25 PFLOP/s"),
    (rate_text(450e9, "B/s"), "450 GB/s"),
])  # fmt: skip
def test_numbers_as_people_read_them(text, expected):
    assert text == expected


MIXED = {
    "dataset": "dataset web { source = synthetic(), holdout = 1% }\ndataset code { source = python_stdlib() }",
    "mixture": "mixture { web = 3, code = 1 }\nphase late { from = 80%, mix = { web: 0 }, lr_scale = 0.5 }",
    "scheduler": "scheduler linear { warmup = 10 steps }",
}


def test_phases_with_shares_rows_and_rates(make_plan):
    """100 steps of 4 rows of 256: 80 of them with three quarters of web, 20 with code alone at half the rate."""
    shown = part(make_plan(**MIXED), "phases")
    assert shown.startswith("PHASES 2 phases, 2 datasets, shares of rows phase steps learning rate")
    assert "train 1 to 80 0.0001 → 0.000222 web 75.0% 240 61.4k code 25.0% 80 20.5k" in shown
    assert "late 81 to 100 0.000106 → 0 (× 0.5) code 100.0% 80 20.5k" in shown
    assert "all 100 web 60.0% 240 61.4k code 40.0% 160 41.0k" in shown


def test_phases_are_no_part_of_a_page_with_one_dataset_in_one_phase(make_plan):
    assert "PHASES" not in render(make_plan()) and "PHASES" in render(make_plan(**MIXED))
    assert "train 1 to 100" in part(make_plan(), "phases")  # who asks for it gets it


def test_phases_of_a_budget_that_is_not_counted_yet(make_plan):
    cool = "phase cool { from = 75%, lr_scale = 0.1 }"
    shown = part(make_plan(experiment="experiment tiny { budget = 2 epochs }", phase=cool), "phases")
    assert "train from step 1: code 100%" in shown
    assert "cool from 0.75 of the budget: code 100%, learning rate × 0.1" in shown


def test_many_datasets_give_way(make_plan):
    names = [f"d{number}" for number in range(40)]
    blocks = {
        "dataset": "\n".join(f"dataset {name} {{ source = synthetic() }}" for name in names),
        "mixture": f"mixture {{ {', '.join(f'{name} = 1' for name in names)} }}",
    }
    text = render(make_plan(**blocks))
    assert text.count("\n") <= LONGEST and "more: --part phases" in text and "more: --part data" in text
    assert part(make_plan(**blocks), "phases").count("2.5%") == 40


@pytest.mark.parametrize(("dataset", "expected"), [
    ('source = text("a/*.txt")', "text a/*.txt"),
    ('source = huggingface("o/n", config = "en", split = "train[:1%]")', "huggingface o/n · en · train[:1%]"),
    ("source = synthetic(documents = 20k, length = 64)", "20,000 synthetic documents of about 64 tokens"),
    ('source = tokens("a.npy", dtype = uint16)', "tokens a.npy"),
    ('source = parquet("a"), messages = "m", template = "plain", train_on = last',
        "parquet a; conversations in `m` by template plain, trained on the assistant's last turn"),
    ('source = jsonl("a"), prompt = "q", response = "r", template = "chatml", train_on = all',
        "jsonl a; pairs of `q` and `r` by template chatml, trained on everything"),
])  # fmt: skip
def test_where_documents_come_from(make_plan, dataset, expected):
    plan = make_plan(dataset=f"dataset code {{ {dataset} }}")
    assert f"code trained on: {expected}" in part(plan, "data")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [("prefetch = 2", "by a thread of each rank, 2 steps ahead"),
        ("prefetch = 1, workers = 4", "by 4 processes of each rank, 1 step ahead"),
        ("prefetch = 0", "by a thread of each rank when a step asks for them: nothing is read ahead")],
)  # fmt: skip
def test_how_rows_are_read(make_plan, settings, expected):
    plan = make_plan(batch=f"batch {{ sequence = 256, accumulate = 4, {settings} }}")
    assert f"reading {expected}" in part(plan, "data")


def test_a_long_reason_why_memory_does_not_fit_takes_two_lines(make_plan, monkeypatch):
    plan = make_plan()
    text = "16.0 MiB of 16.0 MiB (100%) on pp 1 (ranks 1,024 to 2,047), 34.5 KiB too much"
    room = evolve(headroom(plan), verdict="does not fit", text=text)
    monkeypatch.setattr(render_head, "headroom", lambda plan: room)
    lines = render(plan).splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("  memory  does not fit: "))
    assert " ".join(" ".join(lines[first : first + 2]).split()) == f"memory does not fit: {text}"
    assert max(map(len, lines)) <= WIDTH


@pytest.mark.parametrize(("launcher", "says"), [
    ("", "none"),
    ("launcher slurm {}", "launcher slurm: the default partition, up to 100 requeues"),
    ('launcher slurm { partition = "gpu", time = 4 h, requeues = 1 }',
        "launcher slurm: partition gpu, 4.00 h, up to 1 requeue"),
    ("launcher slurm { requeues = 0 }", "launcher slurm: the default partition, no requeues"),
    ('launcher kubernetes { image = "i", volumes = ["v:/work"], manifest = job }',
        "launcher kubernetes: job, image i, no restarts"),
    ('launcher kubernetes { image = "i", volumes = ["v:/work"], restarts = 2, queue = "q" }',
        "launcher kubernetes: jobset, image i, queue q, up to 2 restarts"),
])  # fmt: skip
def test_where_the_machines_come_from(make_plan, launcher, says):
    assert render_head.launcher_text(make_plan(more=launcher)) == says


@pytest.mark.parametrize(("every", "says"), [
    # Of 12 steps checkpoints in 2, 3, 4, 6, 8, 9, 10 and 12.
    ("every 2 steps checkpoint\nevery 3 steps checkpoint", "in all checkpoint 8"),
    ("every 2 steps checkpoint\nevery 4 steps eval code", ""),
])  # fmt: skip
def test_what_two_ticks_do_in_all(make_plan, every, says):
    plan = make_plan(every=every, experiment="experiment tiny { budget = 12 steps }")
    found = [line for line in render(plan, full=True).splitlines() if "in all" in line]
    assert bool(found) == bool(says) and says in " ".join(found)


def test_what_was_said_is_not_repeated_at_the_start_of_a_run(compiled):
    found = compiled(every="every 90 epochs log\nevery 9000000 steps checkpoint")
    warned = [each for each in found.diagnostics if each.code == "W601"]
    assert warned and "W601" in render_summary(found.plan)
    assert "W601" not in render_summary(found.plan, said=tuple(found.diagnostics))
