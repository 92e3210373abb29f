"""What `gpu_day.py` does in one process, one thing after the other: `python gpu_pieces.py PIECE --to FILE`.

A piece gives (name, work) one after the other; each work's figures, or the error it raised, are a JSON line of the file
before the next begins. After an error that leaves the device unusable the process ends, and is begun anew behind it.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_kernels
import torch
from gpu_specs import BF16, DENSE, FEATURES, FP32, SMOKE, spec_text

Piece = Callable[[str, bool], Iterator[tuple[str, Callable[[], dict[str, Any]]]]]


def trained(
    folder: Path, name: str, model: str, more: str, *, steps: int, sequence: int, device: str
) -> list[dict[str, Any]]:
    """Run a spec in this process; its logged steps. Raises RuntimeError with what the run has said of its failure."""
    from xtrain.planner.load import plan_from_text
    from xtrain.runtime.loop.executor import Executor

    text = spec_text(model, more, steps=steps, sequence=sequence, device=device)
    compiled = plan_from_text(text, str(folder / "s.xtrain"), [], world=1)
    if compiled.plan is None:
        raise RuntimeError(compiled.diagnostics.render(color=False))
    run = folder / name
    status = Executor(compiled.plan, run, rank=0).run()
    if status not in ("done", "complete"):
        raise RuntimeError(f"{status}: {(run / 'events.jsonl').read_text()[-2000:]}")
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "loss" in record]


def smoke(device: str, dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """What must work before anything else is worth a look."""
    # Compiling for a CPU would take minutes, and says nothing of a GPU.
    specs = {name: (model, more.replace("mode = default", "mode = none")) for name, (model, more) in SMOKE.items()}
    return _train(specs if dry else SMOKE, device, dry)


def features(device: str, dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Each feature that one device can show trains."""
    return _train({name: spec for name, spec in FEATURES.items() if not (dry and name == "compiled")}, device, dry)


def _train(
    specs: dict[str, tuple[str, str]], device: str, dry: bool
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The first and the last loss of a run of each, and how often compiled code was left or compiled again."""
    import one_device

    for name, (model, more) in specs.items():

        def work(model: str = model, more: str = more) -> dict[str, Any]:
            with tempfile.TemporaryDirectory() as made:
                steps, sequence = (4, 64) if dry else (10, 512)
                rows = trained(Path(made), "run", model, more, steps=steps, sequence=sequence, device=device)
            first, last = rows[0]["loss"], rows[-1]["loss"]
            memory = rows[-1]["memory_bytes"] >> 20
            counts = one_device.compiling()
            return {"losses": [first, last], "falls": last < first, "memory_mib": memory, **counts}

        yield name, work


def beside_the_cpu(device: str, dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The losses of a run beside those of the CPU's from the same weights."""
    steps, sequence = (3, 64) if dry else (50, 512)
    for name, more in (("fp32", FP32), ("bf16", BF16)):

        def work(more: str = more) -> dict[str, Any]:
            with tempfile.TemporaryDirectory() as made:
                folder = Path(made)
                trained(folder, "first", DENSE, more, steps=1, sequence=sequence, device="cpu")
                (weights,) = (folder / "first/checkpoints").glob("model-*")
                from_there = f'{more}\ncheckpoint {{ pretrained = "{weights}" }}'
                cpu, own = (
                    [
                        row["loss"]
                        for row in trained(
                            folder, run, DENSE, from_there, steps=steps, sequence=sequence, device=run.split("-")[0]
                        )
                    ]
                    for run in ("cpu", f"{device}-own")
                )
            apart = [abs(a - b) for a, b in zip(cpu, own, strict=True)]
            return {"steps": steps, "last": own[-1], "first_apart": apart[0], "most_apart": max(apart)}

        yield name, work


MACHINES: dict[str, Any] = {}  # those that plans are for, as arguments of one_device.py
MEMORY: dict[str, dict[str, Any]] = {  # arguments of one_device.py that are not the usual ones
    "1b": {},
    "1b, recomputation full, two rows": {"activation": "full", "micro": 2},
    "1b, recomputation selective": {"activation": "selective"},
    "1b, head in pieces of 64 MiB": {"more": "loss cross_entropy { chunk = 64 MiB }"},
    "1b, fp32 parameters, bf16 products": {"params": "fp32, compute = bf16"},
    "1b, 8-bit states": {"optimizer": "adamw8bit { lr = 1e-5 }"},
}


def memory(device: str, dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Peak memory and what is held by category beside the plan's, of layouts that are not compiled."""
    import one_device

    for name, more in MEMORY.items():

        def work(more: dict[str, Any] = more) -> dict[str, Any]:
            given = {"shape": "tiny", "sequence": 64} if dry else {"shape": "1b"}
            usual = {"steps": 1 if dry else 2, "turns": 1, "compile": "none", "device": device}
            return one_device.measured(one_device.arguments_of(**{**usual, **more, **given, **MACHINES}))

        yield name, work


def transformers(device: str, dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """transformers' model at the 1b shape in the loop one would write first, with the best attention there is."""

    def missing() -> dict[str, Any]:
        return {"skipped": "transformers is not installed"}

    if importlib.util.find_spec("transformers") is None:
        yield "1b", missing
        return
    for compiled in (False, True):
        name = f"1b, {'compiled' if compiled else 'not compiled'}"
        if not (dry and compiled):
            yield name, lambda compiled=compiled: _transformers(device, dry, compiled)


def _transformers(device: str, dry: bool, compiled: bool) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    }
    if dry:
        sizes |= {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        sizes |= {"intermediate_size": 256, "vocab_size": 1024}
    sequence, steps = (64, 1) if dry else (4096, 5)
    attention = "flash_attention_2" if importlib.util.find_spec("flash_attn") and device == "cuda" else "sdpa"
    config = LlamaConfig(**sizes, max_position_embeddings=sequence, use_cache=False, attn_implementation=attention)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(0, sizes["vocab_size"], (1, sequence), device=device)
    call = torch.compile(model) if compiled else model

    def turn() -> float:
        gpu_kernels.wait(device)
        begin = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            call(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        gpu_kernels.wait(device)
        return (time.perf_counter() - begin) / steps

    turn()
    seconds = sorted(turn() for _ in range(3))[1]
    peak = round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None
    return {"attention": attention, "tokens_per_second": round(sequence / seconds), "peak_gib": peak}


PIECES: dict[str, Piece] = {each.__name__: each for each in (smoke, features, beside_the_cpu, memory, transformers)}
PIECES |= gpu_kernels.KERNELS


def found(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Its figures, or the end of its error, and the seconds it took."""
    begin = time.monotonic()
    try:
        figures = work()
        json.dumps(figures)
    except Exception:
        figures = {"failed": traceback.format_exc()[-2500:]}
    return {**figures, "seconds": round(time.monotonic() - begin, 1)}


def usable(device: str) -> bool:
    """Whether the device still computes, with its memory given back."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    gc.collect()
    if device == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        except Exception:
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=PIECES)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cluster", help="as of one_device.py")
    parser.add_argument("--flops", type=float)
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    MACHINES.update(cluster=given.cluster, flops=given.flops)
    with given.to.open("a") as out, tempfile.TemporaryDirectory() as made, contextlib.chdir(made):

        def tell(**line: Any) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        for name, work in PIECES[given.piece](given.device, given.dry):
            if name in given.skip:
                continue
            tell(begins=name)
            figures = found(work)
            del work
            tell(name=name, found=figures)
            if not usable(given.device):
                return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
