"""Runs of `benchmarks/gpu_specs.py` in this process, on the device of `second_device.py` or on the CPU, in the folder
that it is started in: `python second_device_runs.py DEVICE,… NAME…` prints {name: {device: losses}}. `sums of both`
is no run: tensors of a device next to those of the CPU."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from attrs import evolve

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu_specs import every_spec, spec_text
from second_device import NAME, register

from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_text
from xtrain.runtime.loop import bootstrap
from xtrain.runtime.loop.executor import Executor


def smaller(text: str) -> str:
    for wide, narrow in (("dim = 256", "dim = 64"), ("layers = 4", "layers = 2"), ("ffn = 768", "ffn = 128")):
        text = text.replace(wide, narrow)
    return text


def same_kernels(plan: Plan) -> Plan:
    """With the same kernels for all devices, which any has."""
    nodes = []
    for node in plan.nodes:
        for name, kernel in (("attention", "documents"), ("pointwise", "plain")):
            kernels: Any = node.args.get(name)
            if isinstance(kernels, dict):
                node = evolve(node, args={**node.args, name: dict.fromkeys((*kernels, NAME), kernel)})
        nodes.append(node)
    return evolve(plan, nodes=tuple(nodes))


def losses(name: str, device: torch.device) -> list[float]:
    model, more = every_spec()[name]
    text = smaller(spec_text(model, more, steps=3, sequence=64, device="auto"))
    compiled = plan_from_text(text, "s.xtrain", [], world=1)
    assert compiled.plan is not None, compiled.diagnostics.render(color=False)
    folder = Path(f"{device.type} {name}")
    with patch.object(bootstrap, "choose_device", lambda *_: device), patch.object(bootstrap, "check_device"):
        ended = Executor(same_kernels(compiled.plan), folder, rank=0).run()
    assert ended == "done", f"{name} on {device}: {ended}"
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def sums_of_both(there: torch.device) -> list[float]:
    """The sum of three ones of a device and as many of the CPU, where each is moved; an error if one is not."""
    ones = torch.ones(3, device=there)
    for mixed in (lambda: ones + torch.ones(3), lambda: torch.cat([ones, torch.ones(2)]), lambda: ones.numpy()):
        try:
            mixed()
        except (RuntimeError, TypeError):
            continue
        raise AssertionError("nothing was said")
    return [(ones.cpu() + ones.tolist()[0]).sum().item(), ones.sum().item()]


def found_on(name: str, device: torch.device) -> list[float]:
    return sums_of_both(device) if name == "sums of both" else losses(name, device)


if __name__ == "__main__":
    register()
    devices = [torch.device(each) for each in sys.argv[1].split(",")]
    print(json.dumps({name: {one.type: found_on(name, one) for one in devices} for name in sys.argv[2:]}))
