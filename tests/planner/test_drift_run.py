"""`xtrain run plan.json` looks for drift before anything starts; the machine is held against the plan after that."""

import os
from types import SimpleNamespace

import pytest
from attrs import evolve

import xtrain.cli.run as verb
from xtrain.cli.main import main
from xtrain.plan.serialise import dumps, load_plan, signed
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.loop.preflight import Devices, check_devices, check_world, find_devices

GIB = 2**30


@pytest.fixture
def started(tmp_path, load, monkeypatch):
    """The plans that were handed on to be run; a spec and its plan lie in the working folder."""
    monkeypatch.chdir(tmp_path)
    load()
    plan = plan_from_spec("spec.xtrain").plan
    assert plan is not None
    (tmp_path / "plan.json").write_text(dumps(signed(plan, (), None)))
    plans = []
    monkeypatch.setattr(verb, "_run_launcher", lambda compiled, *_, **__: plans.append(compiled.plan) or 0)
    monkeypatch.setattr(verb.signal, "signal", lambda *_: None)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    return plans


def change_the_spec(tmp_path):
    spec = tmp_path / "spec.xtrain"
    spec.write_text(spec.read_text().replace("lr = 1e-3", "lr = 2e-3"))


def test_a_plan_without_drift_is_run_as_it_is(started, capsys):
    assert main(["run", "plan.json"]) == 0
    assert started == [load_plan("plan.json")]
    assert capsys.readouterr().err == ""


def test_drift_is_refused(started, tmp_path, capsys):
    change_the_spec(tmp_path)
    assert main(["run", "plan.json"]) == 2
    assert started == []
    assert "error[X710]" in capsys.readouterr().err


def test_drift_can_be_accepted(started, tmp_path, capsys):
    change_the_spec(tmp_path)
    assert main(["run", "plan.json", "--accept-drift"]) == 0
    assert started == [load_plan("plan.json")]
    assert "warning[W706]" in capsys.readouterr().err
    assert main(["run", "spec.xtrain", "--accept-drift"]) == 2
    assert "is for a saved plan" in capsys.readouterr().err


def test_a_spec_is_run_with_a_note_of_how_it_was_planned(started):
    assert main(["run", "spec.xtrain", "--world", "2", "--set", "optimizer.lr=5e-4"]) == 0
    (plan,) = started
    assert plan.origin is not None
    assert (plan.origin.sets, plan.origin.world) == (("optimizer.lr=5e-4",), 2)


@pytest.mark.parametrize("more", [(), ("--ui", "tui")], ids=["", "tui"])
def test_of_several_ranks_one_compiles_and_prints(started, capsys, monkeypatch, more):
    """Any other rank that a launcher has started takes the plan from the first one."""

    def compiled(*given, **named):
        raise AssertionError("only the first rank compiles")

    joined = []
    monkeypatch.setattr("xtrain.planner.load.plan_from_path", compiled)
    monkeypatch.setattr("xtrain.cli.started.join", lambda: joined.append(os.environ["RANK"]) or 0)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "plan.json", *more]) == 0
    assert joined == ["3"] and started == []
    assert capsys.readouterr() == ("", "")
    # The first rank, alone so that it meets nobody, shows that this is the way of compiling.
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(AssertionError, match="only the first rank"):
        main(["run", "plan.json"])


# the machine ----------------------------------------------------------------------------------------------------------


def devices(gib: float, name: str = "NVIDIA H100 80GB HBM3") -> Devices:
    return Devices(kind="cuda", name=name, memory=int(gib * GIB))


@pytest.fixture
def h100(make_plan):
    return make_plan(cluster="cluster h100 { nodes = 1 }")


def test_a_device_as_planned_passes(h100):
    assert check_devices(h100, devices(79.1)) == [], "a driver reports a little less than the data sheet"
    assert check_devices(h100, devices(139.8, "NVIDIA H200")) != []


def test_a_device_with_less_memory_than_planned_is_refused(h100):
    with pytest.raises(EnvironmentFault) as refused:
        check_devices(h100, devices(40))
    assert refused.value.code == "X712"
    assert "assumes 80.0 GiB" in str(refused.value) and "has 40.0 GiB" in str(refused.value)
    assert "cluster.memory='40960 MiB'" in str(refused.value)


def test_another_device_with_enough_memory_is_worth_a_word(h100):
    (remark,) = check_devices(h100, devices(180, "NVIDIA B200"))
    assert "for h100" in remark and "NVIDIA B200" in remark


def test_states_that_cannot_be_held_are_refused_whatever_the_cluster(make_plan):
    plan = make_plan()
    states = plan.estimates.classes[0].memory.states
    assert plan.cluster.memory_bytes is None
    with pytest.raises(EnvironmentFault) as refused:
        check_devices(plan, devices((states - 1) / GIB))
    assert refused.value.code == "X712"
    offloaded = evolve(plan.estimates.classes[0], memory=evolve(plan.estimates.classes[0].memory, offloaded=True))
    plan = evolve(plan, estimates=evolve(plan.estimates, classes=(offloaded,)))
    check_devices(plan, devices((states - 1) / GIB))


def test_an_estimate_that_does_not_fit_is_worth_a_word(make_plan):
    plan = make_plan()
    (ranks,) = plan.estimates.classes
    full = evolve(ranks, memory=evolve(ranks.memory, activations=90 * GIB))
    plan = evolve(plan, estimates=evolve(plan.estimates, classes=(full,)))
    (remark,) = check_devices(plan, devices(79.1))
    assert remark.startswith("the planned memory of a rank is 90.")


def test_the_least_device_of_a_machine_counts(make_plan, monkeypatch):
    import torch

    sizes = [80 * GIB, 40 * GIB, 10 * GIB]
    properties = [SimpleNamespace(name=f"device {i}", total_memory=size) for i, size in enumerate(sizes)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    plan = make_plan()
    assert find_devices(plan, 2) == Devices(kind="cuda", name="device 1", memory=40 * GIB)
    with pytest.raises(EnvironmentFault) as refused:
        find_devices(plan, 4)
    assert refused.value.code == "X702"
    assert str(refused.value).startswith("this run needs 4 CUDA devices; this machine has 3; use --world 3, or ")
    for ranks, needed in ((1, "1 CUDA device"), (8, "8 CUDA devices")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(EnvironmentFault, match=f"needs {needed}; this machine has none; use launch"):
            find_devices(plan, ranks)
    cpu = find_devices(make_plan(launch="launch { device = cpu }"), 2)
    assert (cpu.kind, cpu.memory) == ("cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


def test_ranks_on_other_machines_than_planned_are_refused(make_plan):
    plan = make_plan(4, launch="launch { nodes = 2 }", parallel="parallel { fsdp auto }")
    check_world(plan, 4)
    check_world(plan, 4, 2)
    with pytest.raises(EnvironmentFault) as refused:
        check_world(plan, 4, 4)
    assert refused.value.code == "X703" and "puts 2 ranks on a machine, but 4 were started" in str(refused.value)
    with pytest.raises(EnvironmentFault, match="4 ranks, but 8 were started"):
        check_world(plan, 8, 4)
