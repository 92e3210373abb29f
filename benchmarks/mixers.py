"""One mixer of a block beside transformers' own layer: processor time and memory of a forward and backward.

    OMP_NUM_THREADS=1 python benchmarks/mixers.py                # all rows
    OMP_NUM_THREADS=1 python benchmarks/mixers.py DSA --turns 9

Both layers have the same weights and take the same input, a row of one document in fp32. Times are the least of several
turns, which alternate; memory is the peak of what a forward and backward allocate. Prints a row of the table in
docs/performance.md for each mixer.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import reference_models
from code_models import built, inspected, rows
from small_runs import plan_of

from xtrain.dsl.checking import model_code
from xtrain.dsl.schema.model import expert_families

POSITIONS, DIM = 2048, 512
LATENT = {
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 384, "kv_lora_rank": 256,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
DELTA = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
PARALLEL = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "mamba_n_heads": 16, "mamba_d_ssm": 1024,
    "mamba_n_groups": 2, "mamba_d_state": 128,
}  # fmt: skip
MAMBA = {"mamba_num_heads": 16, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 128}
# Name → family, config keys, and the mixer's path in a block of xtrain and of transformers.
MIXERS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "gated delta net": ("qwen3_next", DELTA, "0.linear_attn", "0.linear_attn"),
    "Mamba-2": ("nemotron_h", MAMBA, "0.mamba", "0.mixer"),
    "gated attention": ("qwen3_next", DELTA, "1.self_attn", "1.self_attn"),
    "MLA": ("deepseek_v3", LATENT, "0.self_attn", "0.self_attn"),
    "DSA": (
        "deepseek_v32", {**LATENT, "index_n_heads": 16, "index_head_dim": 128, "index_topk": 512}, "0.self_attn",
        "0.self_attn",
    ),
    "block of Falcon-H1": ("falcon_h1", PARALLEL, "0", "0"),  # attention and Mamba-2 in parallel, norms, a small FFN
}  # fmt: skip


def called(layer: nn.Module, run: Callable[[], object]) -> Callable[[Tensor], Tensor]:
    """The call of a layer inside of `run`, as a function of its input."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: found.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        run()
    hook.remove()
    args, kwargs = found[0]

    def call(x: Tensor) -> Tensor:
        if "hidden_states" in kwargs:
            out = layer(*args, **{**kwargs, "hidden_states": x})
        else:
            out = layer(x, *args[1:], **kwargs)
        return out[0] if isinstance(out, tuple) else out

    return call


def run_once(call: Callable[[Tensor], Tensor], x: Tensor, seed: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    out = call(x)
    out.backward(seed)
    return out.detach()


def mebibytes(call: Callable[[Tensor], Tensor], x: Tensor, seed: Tensor) -> float:
    """Peak of the bytes that a forward and backward allocate."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run_once(call, x, seed)
    live, peak = 0, 0
    for event in profiled.profiler.kineto_results.events():  # pyright: ignore[reportOptionalMemberAccess]
        if event.name() == "[memory]":
            live += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
            peak = max(peak, live)
    return peak / 2**20


def layers(name: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """The calls of both layers."""
    family, keys, native, own = MIXERS[name]
    sizes = {"hidden_size": DIM, "max_position_embeddings": POSITIONS, **keys}
    config = {family: {"plain": {**reference_models.CONFIGS[family]["plain"], **sizes}}}
    batch = rows(263, (POSITIONS,))
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(reference_models, "CONFIGS", config),
        patch.object(model_code, "_inspected", inspected),
    ):
        other = reference_models.make(family, "plain", Path(folder)).train()
        other.set_attn_implementation("sdpa")  # as transformers loads it by default
        routed = "router { aux_loss = 0 }" * (family in expert_families())
        more = f"batch {{ sequence = {POSITIONS} }}"
        model = built(plan_of(f'"{folder}" {{ {routed} }}', more=more)).whole
    ours = model.get_submodule(f"layers.{native}")
    theirs = other.model.get_submodule(f"layers.{own}")
    ids = batch.input_ids_BS
    return called(ours, lambda: model(None, batch)), called(theirs, lambda: other.model(ids, use_cache=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mixers", nargs="*", default=[*MIXERS])
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| mixer | xtrain, s | transformers, s | ratio | xtrain, MiB | transformers, MiB |")
    print("| --- | --: | --: | --: | --: | --: |")
    for name in args.mixers:
        calls = layers(name)
        generator = torch.Generator().manual_seed(1)
        x, seed = (torch.randn(1, POSITIONS, DIM, generator=generator) for _ in range(2))
        one, other = (run_once(call, x, seed) for call in calls)
        gap = ((one - other).abs().max() / other.abs().max()).item()
        assert gap < 1e-4, gap
        taken: list[list[float]] = [[], []]
        for _ in range(args.turns):
            for call, times in zip(calls, taken, strict=True):
                begin = time.process_time()
                run_once(call, x, seed)
                times.append(time.process_time() - begin)
        ours, theirs = map(min, taken)
        peaks = [mebibytes(call, x, seed) for call in calls]
        print(
            f"| {name} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} | {peaks[0]:,.0f} | {peaks[1]:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
