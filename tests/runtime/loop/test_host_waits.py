"""How often the host asks for a number of a tensor in a step, and where: on a GPU each time it waits for what was
computed until then."""

import sys
import threading
from collections import Counter
from pathlib import Path

import attrs
import pytest
import torch

from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.setting import settings_of
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.loop.agreement import beside
from xtrain.runtime.loop.executor import Executor

ASKING = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__")
MODELS = {
    "dense": "llama { dim = 16, layers = 2, heads = 2 }",
    "experts": "qwen3_moe { dim = 16, layers = 2, heads = 2, experts = 4, experts_per_token = 2, expert_ffn = 8, "
    "router { aux_loss = 0.1, bias_speed = 0.01 } }",
}
SMALL = {
    "dim": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 32,
    "experts": 4,
    "experts_per_token": 2,
    "expert_ffn": 8,
    "window": 16,
}
SCALED = "rope { scaling = yarn, factor = 4, original = 64 }"
QUICK = ("llama", "gpt_oss")
ROOT = Path(sys.modules["xtrain"].__file__ or "").parent
# What passes a question on.
THROUGH = ("runtime/base/device.py",)
# Kernels of a CPU alone, which are shown where numbers lie in its memory.
OF_CPU = {("runtime/nn/fused.py", "numpy")}
# What lies in the memory of the host on any device, of a microbatch.
OF_HOST = {
    ("runtime/nn/batch.py", "tolist"): 1,
    ("runtime/feed/microbatch.py", "tolist"): 3,
}


def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """Counts (file of xtrain, what it asks) from now on, of this thread: numbers of tensors, and tensors of numbers,
    which on a GPU are copied while the host waits."""
    found, mine, make = Counter[tuple[str, str]](), threading.get_ident(), torch.tensor

    def made(*args, device=None, **kwargs):
        if device is not None and threading.get_ident() == mine and (file := _caller()):
            found[file, "tensor"] += 1
        return make(*args, device=device, **kwargs)

    monkeypatch.setattr(torch, "tensor", made)

    def counting(name: str):
        real = getattr(torch.Tensor, name)

        def ask(self, *args, **kwargs):
            if threading.get_ident() == mine and (file := _caller()):
                found[file, name] += 1
            return real(self, *args, **kwargs)

        return ask

    for name in ASKING:
        monkeypatch.setattr(torch.Tensor, name, counting(name))
    return found


def _caller() -> str:
    """The file of xtrain that asks; empty where torch asks itself, on behalf of nobody."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and str(name := path.relative_to(ROOT)) not in THROUGH:
            return str(name) if not str(name).startswith("tests") else ""
        frame = frame.f_back
    return ""


def asked_in(folder: Path, steps: int, model: str, clip: str, monkeypatch: pytest.MonkeyPatch) -> Counter:
    settings = [f"experiment.budget={steps} steps", f"optimizer.clip={clip}", "launch.device=cpu"]
    path = folder / f"{steps}.xtrain"
    path.write_text(SPEC.format(model=model))
    plan = plan_from_spec(path, settings).plan
    assert plan is not None
    with monkeypatch.context() as patch:
        found = asked(patch)
        assert Executor(plan, folder / f"run{steps}", rank=0).run() == "done"
    return found


SPEC = """
experiment asked {{ seed = 1 }}
model {model}
tokenizer bytes
dataset fake {{ source = synthetic(documents = 200, length = 40) }}
batch {{ sequence = 64, micro = 1, accumulate = 2 }}
optimizer adamw {{ lr = 1e-3 }}
every 1 step log
checkpoint {{ enabled = false }}
"""


def asked_each_step(folder: Path, model: str, clip: str, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Times a step, by file and by what is asked."""
    more, fewer = (asked_in(folder, steps, model, clip, monkeypatch) for steps in (6, 3))
    return {key: (more[key] - fewer[key]) / 3 for key in more | fewer if more[key] != fewer[key] and key not in OF_CPU}


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAMILIES])
def test_no_family_asks_more(family, tmp_path, monkeypatch):
    """Not for its rotation, scaled if it can be, and for its router not more than which rows experts have."""
    monkeypatch.chdir(tmp_path)
    known = settings_of(FAMILIES[family])
    given = {name: meta.example for name, (a, meta) in known.items() if a.default is attrs.NOTHING}
    given |= {name: value for name, value in SMALL.items() if name in known}
    model = f"{family} {{ {', '.join(f'{name} = {value}' for name, value in given.items())}, {SCALED} }}"
    each = asked_each_step(tmp_path, model, "1.0", monkeypatch)
    of_blocks = {key for key in each if key[0].startswith(("runtime/nn/", "components/"))} - set(OF_HOST)
    assert of_blocks <= {("runtime/nn/gradients.py", "tolist"), ("runtime/nn/moe.py", "tolist")}
    assert ("runtime/nn/moe.py", "tolist") not in of_blocks or "experts" in known


@pytest.mark.parametrize("clip", ["1.0", "none"])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_asks_its_device_once(model, clip, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    each = asked_each_step(tmp_path, MODELS[model], clip, monkeypatch)
    expected = {
        **{key: 2 * count for key, count in OF_HOST.items()},
        ("runtime/nn/gradients.py", "tolist"): 1,  # norm and loss, before the update
    }
    if model == "experts":
        expected |= {
            ("runtime/loop/metrics.py", "tolist"): 1,  # of a record
            ("runtime/nn/moe.py", "tolist"): 2 * 2,  # rows of each expert, which one kernel for all needs not
        }
    assert each == expected


@pytest.mark.gpu
@pytest.mark.parametrize("clip", ["1.0", "none"])
def test_a_gpu_is_waited_for_once_a_step(clip, tmp_path, monkeypatch):
    """By torch's own account: steps without a record, of a dense model."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "gpu.xtrain"
    model = MODELS["dense"].replace("dim = 16", "dim = 64")  # flex has no kernel for heads below 16
    path.write_text(SPEC.format(model=model).replace("every 1 step", "every 1000 steps"))
    waits = {}
    for steps in (6, 3):
        settings = [f"experiment.budget={steps} steps", f"optimizer.clip={clip}", "launch.device=cuda"]
        plan = plan_from_spec(path, settings).plan
        assert plan is not None
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with pytest.warns(UserWarning) as told:
                ended = Executor(plan, tmp_path / f"run{steps}", rank=0).run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert ended == "done"
        waits[steps] = sum("synchronizing CUDA operation" in str(each.message) for each in told)
    assert waits[6] - waits[3] == 3


def test_numbers_of_the_host_are_read_anywhere():
    with beside(torch.device("cpu")):
        assert torch.ones(2).tolist() == [1, 1]


@pytest.mark.gpu
def test_numbers_of_the_host_do_not_wait_for_what_is_computed():
    device = torch.device("cuda", 0)
    done = torch.cuda.Event()
    with beside(device):
        torch.ones(1, device=device).tolist()  # its stream, and memory
    torch.cuda._sleep(2_000_000_000)
    done.record()
    with beside(device):
        assert torch.tensor([1.0, 2.0], device=device).tolist() == [1, 2]
    assert not done.query()
    torch.cuda.synchronize()
