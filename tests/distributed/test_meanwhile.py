"""Shared experts that are computed while tokens are on their way: nothing else is computed, exchanges are as many."""

import pytest
import torch
import torch.distributed as dist
from agreement import hold_against_the_trace
from topologies import SCHEDULES, Topology
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from traces import plan_of
from trials import Laboratory

from xtrain.planner.load import plan_from_spec
from xtrain.runtime.base.collectives import Exchange

SHARED = ("model.shared_experts=1",)
ORDINARY = [Topology(fsdp=2, ep=2, shared=SHARED, model="latent", note="meanwhile")]
MORE = [
    Topology(fsdp=2, ep=2, shared=SHARED, sets=("activation=full",), model="latent", note="meanwhile, full"),
    Topology(fsdp=2, ep=2, shared=SHARED, sets=("activation=selective",), model="latent", note="meanwhile, selective"),
    Topology(tp=2, ep=2, shared=SHARED, model="latent", note="meanwhile"),
    Topology(fsdp=2, tp=2, ep=4, shared=SHARED, sets=("parallel.tp.sequence=false",), model="latent",
             note="meanwhile, without sequence"),
    Topology(pp=2, fsdp=2, ep=2, shared=SHARED, model="latent", note="meanwhile"),
    Topology(pp=2, fsdp=2, ep=2, shared=SHARED, sets=SCHEDULES["zero_bubble"], model="latent", note="meanwhile, zb"),
]  # fmt: skip


@pytest.mark.parametrize(
    "topology",
    [*ORDINARY, *(pytest.param(each, marks=pytest.mark.matrix) for each in MORE)],
    ids=lambda topology: topology.name,
)
def test_a_layout_computes_what_one_process_computes(lab: Laboratory, topology: Topology, tmp_path):
    lab.same_as_one_process(topology.trial("fp64", shallow=True), topology.layout)
    plan = plan_of(tmp_path, topology, params="fp32")
    assert plan.node("setup.parallel.ep").args["meanwhile"] == "shared"
    hold_against_the_trace(plan)


class Log(TorchDispatchMode):
    """Names of operators in the order in which they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (name := func.overloadpacket.__name__) in ("all_to_all_single", "wait_tensor", "mm"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_rows_are_on_their_way_while_something_is_computed():
    """In the forward, and their gradients in the backward."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        group = dist.group.WORLD
        assert group is not None
        x, other = torch.ones(4, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
        with Log() as log:
            halves = Exchange(group, [2, 3], [2, 2])
            rows = halves.begun(x)
            more = other @ torch.ones(3, 3)
            rows = halves.ended(rows)
            assert log.names == ["all_to_all_single", "mm", "wait_tensor"] and rows.shape == (5, 3)
            log.names.clear()
            (more.sum() + rows.sum()).backward()
            assert log.names == ["all_to_all_single", "mm", "wait_tensor"]
    finally:
        dist.destroy_process_group()
    assert x.grad is not None and x.grad.shape == x.shape


def test_times_count_what_is_computed_meanwhile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')

    def made(model: str, *more: str):
        topology = Topology(fsdp=8, ep=8, model=model)
        path = topology.trial("fp32").write(tmp_path, alone=False)
        path.write_text(path.read_text().replace("cluster other { flops = 1e9 }", "cluster h100"))
        compiled = plan_from_spec(path, (*topology.layout, *more), topology.world)
        assert compiled.plan is not None and compiled.plan.estimates.times is not None
        calls = [each for each in compiled.plan.estimates.classes[0].traffic if each.op == "all_to_all"]
        return compiled.plan, {each.exposed: each for each in calls}

    plan, calls = made("latent", "model.shared_experts=1", "model.expert_ffn=1024")
    layers = plan.architecture.layers
    assert calls[False].count == 2 * layers  # there, and gradients back
    assert calls[True].count == 3 * layers  # with the rows of each expert
    shared = 6 * 3 * 32 * 1024 * 64  # of a microbatch of 64 tokens
    assert calls[False].meanwhile == layers * shared
    # As much of it as lasts longer than that is waited for; here there is less to compute than a call takes.
    cluster, times = plan.cluster, plan.estimates.times
    speed = cluster.flops * sum(cluster.efficiency) / 2
    waited = calls[False].seconds - calls[False].meanwhile / speed
    assert waited > 0
    exposed = sum(each.seconds for each in plan.estimates.classes[0].traffic if each.exposed)
    hidden = [each for each in plan.estimates.classes[0].traffic if not each.exposed and not each.meanwhile]
    left = times.computing - calls[False].meanwhile / speed  # which nothing of that is hidden behind
    beside = max(0.0, sum(each.seconds for each in hidden) - left)
    assert times.exposed == pytest.approx(exposed + beside + waited)
    _, plain = made("moe")
    assert set(plain) == {True} and plain[True].count == 5 * layers
