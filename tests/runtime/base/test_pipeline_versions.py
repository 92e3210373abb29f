"""Schedules that split the backward, and versions of torch that do it wrongly."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from xtrain.runtime.base import packages
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.packages import check_schedule, package_faults


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1"])
def test_an_old_torch_splits_no_backward(schedule, version):
    with pytest.raises(EnvironmentFault, match=f"torch {version.replace('+', '.')}.*; install torch 2.13") as fault:
        check_schedule(schedule, version)
    assert fault.value.code == "X715"
    check_schedule("interleaved_1f1b", version)


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.14.0a0+git1234", "3.0"])
def test_a_newer_one_does(version):
    check_schedule("zbv", version)


def test_it_is_told_before_ranks_start(monkeypatch):
    node = SimpleNamespace(op="setup.parallel.pp", args={"schedule": "zbv"})
    plan = cast("Any", SimpleNamespace(nodes=[node], spec_text=""))
    monkeypatch.setattr(packages, "version", lambda name: "2.11.0")
    assert [fault.code for fault in package_faults(plan)] == ["X715"]
    monkeypatch.setattr(packages, "version", lambda name: "2.13.0")
    assert not [*package_faults(plan)]
