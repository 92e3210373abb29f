"""Greedy texts of a server, whose keys, values and states lie in pages: those of transformers and of one cache."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from served import served, server_plan
from small_generators import CONFIGS, beside

from xtrain.plan.graph import PAGE, STATES
from xtrain.plan.plan import Plan
from xtrain.runtime.nn.texts import Sampling
from xtrain.server.engine_interface import SampleQueue, SampleRequest

pytestmark = pytest.mark.distributed

PROMPTS = [[3, 17, 99, 4, 250], [int(each) for each in np.random.default_rng(0).integers(0, 256, 18)], [7]]
TP, PP, EP = ("parallel.tp=2",), ("parallel.pp=2",), ("parallel.ep=2",)
FSDP, ULYSSES = ("parallel.fsdp=2",), ("parallel.cp=2", "parallel.cp.ulysses=2")
SHARED = "two of three shared, scaled by yarn"
RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h", "granitemoehybrid", "falcon_h1")
CASES = [
    *(("deepseek_v32", name, ()) for name in CONFIGS["deepseek_v32"]),
    *(("glm_moe_dsa", name, ()) for name in CONFIGS["glm_moe_dsa"]),
    *(("deepseek_v32", "plain", layout) for layout in (TP, PP, FSDP, ULYSSES, (*TP, *EP), (*TP, *PP))),
    *(("glm_moe_dsa", SHARED, layout) for layout in (TP, ULYSSES, (*FSDP, *EP))),
    *((family, "plain", layout) for family in RECURRENT for layout in ((), TP)),
]
DEFAULT = ("deepseek_v32", "plain", ())


def greedy(engine: Any, folder: Path) -> dict[str, Any]:
    """Texts after all prompts together, and the likeliest tokens that one cache of a whole text gives for each."""
    first = SampleRequest(
        id="", weights=None, prompt=np.array([0], np.int32), count=1, most=32, temperature=0.0, top_k=None, top_p=1.0,
        seed=5, stop_tokens=frozenset(), stop_texts=(), stop_at_end=False, prompt_logprobs=False, prompt_top=0,
        sample_top=0,
    )  # fmt: skip

    def answered(prompts: list[list[int]], **more: Any) -> list[Any]:
        found: dict[str, Any] = {}
        asked = [
            evolve(first, id=str(number), prompt=np.array(prompt, np.int32), **more)
            for number, prompt in enumerate(prompts)
        ]
        queue = SampleQueue(requests=asked, arrived=list, finished=lambda one, result: found.update({one.id: result}))
        engine.sample(queue)
        return [found[each.id] for each in asked]

    texts = [each.samples[0].tokens.tolist() for each in answered(PROMPTS)]
    whole = [prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)]
    tops = answered(whole, most=1, prompt_top=1)
    kept = engine.call.__self__.slots.pages.of_window.values()
    return {
        "texts": texts,
        "likeliest": [each.prompt_top.tokens[-32:, 0].tolist() for each in tops],
        "bytes": sum(tensor.nbytes for pages in kept for tensors in pages.tensors.values() for tensor in tensors),
    }


def planned_bytes(plan: Plan) -> int:
    """Bytes of all pages in fp64 on a rank that has all layers."""
    arch, found = plan.architecture, 0
    for kind in arch.kinds:
        for layer in kind.block.layers():
            if layer.attends or layer.keeps_state:
                window, positions = (STATES, 1) if layer.keeps_state else (layer.window, PAGE)
                count = dict(plan.node("request.sample").args["pages"])[window]
                each = layer.cached(arch, plan.mesh.size("tp"), 1, {f"{layer.name}.kv_b_proj.weight"})
                found += len(kind.layers) * (count + 1) * positions * each * 8
    return found


@pytest.mark.parametrize(
    ("family", "name", "layout"),
    [pytest.param(*case, marks=() if case == DEFAULT else pytest.mark.matrix) for case in CASES],
)
def test_greedy_texts_are_those_of_transformers(family: str, name: str, layout: tuple[str, ...], tmp_path: Path):
    ours, theirs = beside(family, name, tmp_path / "model")
    experts = ours.model.whole.arch.is_moe
    settings = "router { aux_loss = 0 }" if experts else ""
    plan = server_plan(tmp_path, *layout, rank=0, model=f'"{tmp_path / "model"}" {{ {settings} }}')
    found = served(plan, greedy, tmp_path / "run")
    assert found["bytes"] == planned_bytes(plan) or PP[0] in layout
    for prompt, text, likeliest in zip(PROMPTS, found["texts"], found["likeliest"], strict=True):
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None)
        cached = list(zip(*ours.tokens([prompt], Sampling(temperature=0), len(prompt) + 31), strict=True))
        assert text == expected[0, len(prompt) :].tolist() == list(cached[0]) == likeliest
