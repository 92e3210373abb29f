"""Everything worth knowing about xtrain on one GPU, in one command, in the order of what matters most.

    python benchmarks/gpu_day.py                            # some 25 minutes on one GPU
    python benchmarks/gpu_day.py --parts right fast         # some parts
    python benchmarks/gpu_day.py --dry                      # each part at toy size on the CPU

| part | asks |
| --- | --- |
| runs | do the tests that need a GPU pass, and does each feature that one device can show train |
| right | does a run follow the CPU's from the same weights; is a resumed run the unbroken one, bit for bit |
| kernels | how fast are attention, experts, the head, quantised matrices and optimizers apart, and how exact |
| fast | tokens a second of models of 1 and 8 billion parameters, beside a loop over the same kernels |
| breaks | what a run says where memory does not suffice; that it goes on after SIGKILL; that Ctrl-C saves |

Every figure is written to --out as soon as it is there, so that who is cut off loses nothing. A trial is a
process with a time limit of its own (a wider one with --dry); one that fails or takes too long is noted with the end of
what it has said, and the next one begins.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attrs import define, field

HERE = Path(__file__).parent
SPEC = """
experiment gpu {{ seed = 1, budget = {steps} steps }}
model {model}
tokenizer bytes
dataset stdlib {{ source = python_stdlib(), holdout = 5% }}
batch {{ sequence = {sequence}, micro = 2, rows = 4 }}
optimizer adamw {{ lr = 1e-3 }}
launch {{ device = {device} }}
every 1 step log
{more}
"""
DENSE = "qwen3 { dim = 256, layers = 4, heads = 4, kv_heads = 2, ffn = 768, init_std = 0.05 }"
EXPERTS = (
    "qwen3_moe { dim = 256, layers = 4, heads = 4, kv_heads = 2, experts = 8, experts_per_token = 2, "
    "expert_ffn = 384, init_std = 0.05 }"
)
BF16 = "precision { params = fp32, compute = bf16 }"
FEATURES: dict[str, tuple[str, str]] = {
    "dense, bf16": (DENSE, BF16),
    "experts, bf16": (EXPERTS, BF16),
    "compiled": (DENSE, f"{BF16}\ncompile {{ mode = default }}"),
    "recomputed": (DENSE, f"{BF16}\nactivation full"),
    "recomputed in part": (DENSE, f"{BF16}\nactivation selective"),
    "recomputed, compiled": (DENSE, f"{BF16}\nactivation selective\ncompile {{ mode = default }}"),
    "averages": (DENSE, f"{BF16}\nema {{ decay = 0.9 }}"),
    "muon": (DENSE.replace("qwen3", "llama"), f"{BF16}\noptimizer muon {{ lr = 0.01 }}"),
    "8-bit states": (DENSE, f"{BF16}\noptimizer adamw8bit {{ lr = 1e-3 }}"),
    "bf16 parameters": (
        DENSE,
        "precision { params = bf16 }\noptimizer adamw { lr = 1e-3, stochastic_rounding = true }",
    ),
    "adapter on NF4": (
        DENSE,
        "precision { params = bf16, base nf4 { block = 64 } }\nadapter lora { rank = 8 }",
    ),
    "saved beside training": (DENSE, f"{BF16}\ncheckpoint {{ mode = async_pinned }}\nevery 4 steps checkpoint"),
    "profiled": (DENSE, f"{BF16}\nevery 5 steps profile {{ memory = true }}"),
    "texts": (
        DENSE,
        f'{BF16}\non finish eval stdlib {{ batches = 2 }} then generate {{ prompts = ["def "], tokens = 16 }}',
    ),
}


@define
class Day:
    """What has been found so far. until: seconds of the clock at which nothing more begins."""

    out: Path
    dry: bool
    until: float
    found: dict[str, Any] = field(factory=dict)

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def note(self, part: str, name: str, value: Any) -> None:
        self.found.setdefault(part, {})[name] = value
        self.out.write_text(json.dumps(self.found, indent=1) + "\n")
        print(f"{part} · {name}: {json.dumps(value)}"[:400], flush=True)

    def trial(self, part: str, name: str, limit: float, work: Callable[[float], Any]) -> None:
        """work: is given the seconds it may take."""
        left, limit = self.until - time.monotonic(), limit * (6 if self.dry else 1)
        if left < min(limit, 20):
            self.note(part, name, {"skipped": "no time is left"})
            return
        begin = time.monotonic()
        try:
            found = work(min(limit, left))
        except subprocess.TimeoutExpired:
            found = {"failed": f"not done within {min(limit, left):.0f} s"}
        except Failed as error:
            found = {"failed": str(error)[-2000:]}
        self.note(part, name, {**found, "seconds": round(time.monotonic() - begin, 1)})


class Failed(Exception):
    """A process that did not end as it should; the text is the end of what it has said."""


def said(command: list[str], limit: float, folder: Path | None = None, *, code: int = 0) -> str:
    """What a command prints; code: with which it has to end."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit)
    if done.returncode != code:
        raise Failed(f"exit code {done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def spec_text(model: str, more: str, *, steps: int, sequence: int, device: str) -> str:
    """The spec of a run. An optimizer in `more` takes the place of the usual one."""
    text = SPEC.format(steps=steps, model=model, sequence=sequence, device=device, more=more)
    if "\noptimizer" in f"\n{more}":
        text = text.replace("optimizer adamw { lr = 1e-3 }\n", "", 1)
    return text


def spec_in(
    folder: Path, day: Day, model: str = DENSE, more: str = BF16, *, steps: int = 10, name: str = "s"
) -> list[str]:
    """The command of a run."""
    text = spec_text(model, more, steps=steps, sequence=128 if day.dry else 512, device=day.device)
    (folder / f"{name}.xtrain").write_text(text)
    return [sys.executable, "-m", "xtrain", "run", f"{name}.xtrain", "--ui", "none"]


def metrics(folder: Path, run: str = "*") -> list[dict[str, Any]]:
    """The logged steps of a run in a folder."""
    (path,) = folder.glob(f"runs/*/{run}/metrics.jsonl")
    return [record for record in map(json.loads, path.read_text().splitlines()) if "loss" in record]


# ---- parts


def runs(day: Day) -> None:
    if not day.dry:
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-n", "0", "tests"]
        day.trial("runs", "pytest -m gpu", 240, lambda limit: {"said": said(command, limit, HERE.parent)[-300:]})
    for name, (model, more) in FEATURES.items():

        def feature(limit: float, model: str = model, more: str = more) -> dict[str, Any]:
            with tempfile.TemporaryDirectory() as made:
                folder = Path(made)
                said(spec_in(folder, day, model, more), limit, folder)
                rows = metrics(folder)
            return {"losses": [rows[0]["loss"], rows[-1]["loss"]], "memory_mib": rows[-1]["memory_bytes"] >> 20}

        day.trial("runs", name, 90, feature)


def right(day: Day) -> None:
    """Losses beside the CPU's from the same weights; a resumed run beside an unbroken one."""
    steps = 4 if day.dry else 50

    def beside_the_cpu(limit: float, more: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as made:
            folder, begin = Path(made), time.monotonic()
            first = spec_in(folder, day, more=more, steps=1, name="first")
            said([*first, "--set", "launch.device=cpu", "--set", "workspace.run=first"], limit, folder)
            (weights,) = folder.glob("runs/*/first/checkpoints/model-*")
            curves = {}
            for device in dict.fromkeys(("cpu", day.device)):
                command = spec_in(folder, day, more=f'{more}\ncheckpoint {{ pretrained = "{weights}" }}', steps=steps)
                command += ["--set", f"launch.device={device}", "--set", f"workspace.run={device}"]
                said(command, limit - (time.monotonic() - begin), folder)
                curves[device] = [row["loss"] for row in metrics(folder, device)]
        apart = [abs(a - b) for a, b in zip(curves["cpu"], curves[day.device], strict=True)]
        return {"steps": steps, "last": curves[day.device][-1], "first_apart": apart[0], "most_apart": max(apart)}

    for name, more in (("fp32", "precision { params = fp32, matmul = highest }"), ("bf16", BF16)):
        day.trial("right", f"beside the CPU, {name}", 150, lambda limit, more=more: beside_the_cpu(limit, more))

    def resumed(limit: float) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as made:
            folder, begin = Path(made), time.monotonic()
            command = spec_in(folder, day, more=f"{BF16}\nevery 3 steps checkpoint", steps=8)
            said([*command, "--set", "workspace.run=whole"], limit, folder)
            for code, stop in ((75, ["--set", "launch.stop_at=5 steps"]), (0, [])):
                left = limit - (time.monotonic() - begin)
                said([*command, "--set", "workspace.run=parts", *stop], left, folder, code=code)
            whole, parts = ([(row["step"], row["loss"]) for row in metrics(folder, run)] for run in ("whole", "parts"))
        return {"bit_for_bit": whole == parts, "steps": len(whole)}

    day.trial("right", "resumed", 120, resumed)


def kernels(day: Day) -> None:
    for name in KERNELS:
        command = [sys.executable, __file__, "--kernel", name, "--device", day.device, *(["--dry"] if day.dry else [])]
        day.trial("kernels", name, 90, lambda limit, command=command: json.loads(said(command, limit).splitlines()[-1]))


def fast(day: Day) -> None:
    if day.dry:
        cases = [("tiny", "none", "none"), ("tiny", "full", "none")]
    else:
        cases = [
            ("8b", "full", "default"),
            ("1b", "none", "default"),
            ("8b", "selective", "default"),
            ("1b", "none", "none"),
            ("1b", "full", "default"),
            ("8b", "full", "none"),
        ]
    for shape, activation, mode in cases:
        command = [sys.executable, str(HERE / "one_device.py"), "--shape", shape, "--activation", activation]
        command += ["--compile", mode, "--device", day.device]
        command += ["--steps", "1", "--turns", "1", "--sequence", "64"] if day.dry else ["--steps", "5", "--turns", "3"]
        command += [] if day.dry else ["--cluster", "h200"]
        name = f"{shape}, recomputation {activation}, compile {mode}"
        day.trial("fast", name, 200, lambda limit, command=command: json.loads(said(command, limit).splitlines()[-1]))


def breaks(day: Day) -> None:
    def too_large(limit: float) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as made:
            huge = "llama { dim = 8192, layers = 80, heads = 64, kv_heads = 8, ffn = 28672, vocab = 128256 }"
            command = spec_in(Path(made), day, huge)
            done = subprocess.run(command, cwd=made, capture_output=True, text=True, timeout=limit)
        return {"exit_code": done.returncode, "said": (done.stdout + done.stderr)[-1500:]}

    if not day.dry:  # a CPU's memory is not ours to fill
        day.trial("breaks", "a model that does not fit", 120, too_large)

    def signalled(limit: float, kind: signal.Signals) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as made:
            folder, begin = Path(made), time.monotonic()
            command = spec_in(folder, day, more=f"{BF16}\nevery 2 steps checkpoint", steps=12)
            process = subprocess.Popen(command, cwd=folder, start_new_session=True)
            try:
                while not any(folder.glob("runs/*/*/checkpoints/latest*")) and process.poll() is None:
                    if time.monotonic() - begin > limit:
                        raise subprocess.TimeoutExpired(command, limit)
                    time.sleep(0.2)
                if kind == signal.SIGKILL:
                    os.killpg(process.pid, kind)
                else:
                    process.send_signal(kind)
                code = process.wait(max(1.0, limit - (time.monotonic() - begin)))
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            said(command, max(1.0, limit - (time.monotonic() - begin)), folder)
            steps = [record["step"] for record in metrics(folder)]
        return {"exit_code": code, "every_step_once": steps == list(range(1, 13))}

    for kind in (signal.SIGKILL, signal.SIGINT):
        day.trial(
            "breaks", f"{kind.name}, and the same command again", 120, lambda limit, kind=kind: signalled(limit, kind)
        )


# ---- kernels, each in a process of its own


def timed(work: Callable[[], object], device: str, turns: int) -> float:
    """The least milliseconds of some turns."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    work()
    least = float("inf")
    for _ in range(turns):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        least = min(least, time.perf_counter() - begin)
    return round(least * 1e3, 4)


def attention(device: str, dry: bool) -> Iterator[tuple[str, Any]]:
    """Packed rows forward and backward, each kernel beside the one that masks."""
    import torch

    from xtrain.runtime.models.attention import KERNELS as ATTENTION
    from xtrain.runtime.models.attention import with_block_masks
    from xtrain.runtime.models.document_layout import DocumentLayout

    rows, sequence = (1, 256) if dry else (2, 4096)
    for width in (64, 128, 256):
        for dtype in (torch.float32, torch.bfloat16):
            random = torch.Generator(device).manual_seed(0)
            shape = {"device": device, "dtype": dtype, "generator": random}
            q, k, v = (torch.randn(rows, heads, sequence, width, **shape).requires_grad_() for heads in (8, 2, 2))
            cuts = [0, sequence // 3, sequence // 2, *range(sequence, rows * sequence + 1, sequence)]
            layout = DocumentLayout.from_lengths(
                torch.tensor(cuts, dtype=torch.int32), rows, sequence, torch.device(device)
            )
            exact = None
            for name in ("mask", "flex") if device == "cuda" else ("mask", "documents"):
                packing = with_block_masks(layout) if name == "flex" else layout
                kernel = torch.compile(ATTENTION[name]) if name == "flex" else ATTENTION[name]

                def work(kernel: Any = kernel, packing: Any = packing, given: Any = (q, k, v)) -> Any:
                    out = kernel(*given, packing)
                    return out.detach(), *torch.autograd.grad(out.float().square().sum(), given)

                found = work()
                exact = exact or found
                apart = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True)]
                label = f"{name} {width} {str(dtype).partition('.')[2]}"
                yield label, {"ms": timed(work, device, 3 if dry else 10), "apart": max(apart)}


def experts(device: str, dry: bool) -> Iterator[tuple[str, Any]]:
    """Grouped products beside a loop over experts, empty ones included."""
    import torch

    dim, wide, number, tokens = (32, 48, 8, 64) if dry else (2048, 1024, 64, 16384)
    random = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, dim, device=device, dtype=torch.bfloat16, generator=random)
    w = torch.randn(number, dim, wide, device=device, dtype=torch.bfloat16, generator=random) * dim**-0.5
    counts = torch.bincount(torch.randint(0, number - 1, (tokens,), generator=random, device=device), minlength=number)
    ends = counts.cumsum(0).to(torch.int32)
    lengths = counts.tolist()

    def loop() -> torch.Tensor:
        return torch.cat([part @ w[e] for e, part in enumerate(x.split(lengths))])

    def grouped() -> torch.Tensor:
        return torch._grouped_mm(x, w, offs=ends)

    apart = float((loop() - grouped()).float().abs().max())
    for name, work in (("loop", loop), ("grouped", grouped)):
        yield name, {"ms": timed(work, device, 3 if dry else 20), "apart": apart}


def head(device: str, dry: bool) -> Iterator[tuple[str, Any]]:
    """The loss in pieces beside whole logits, forward and backward."""
    import torch
    import torch.nn.functional as F

    from xtrain.runtime.models.loss import Head, token_losses

    tokens, dim, vocabulary = (64, 32, 1000) if dry else (8192, 4096, 128256)
    random = torch.Generator(device).manual_seed(0)
    shape = {"device": device, "dtype": torch.bfloat16, "generator": random}
    hidden = torch.randn(tokens, dim, **shape).requires_grad_()
    weight = (torch.randn(vocabulary, dim, **shape) * dim**-0.5).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device=device, generator=random)

    def whole() -> Any:
        loss = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    def pieces(chunk: int) -> Any:
        loss = token_losses(
            hidden, weight, labels, Head(vocabulary=vocabulary, z_weight=0.0, chunk_bytes=chunk)
        ).objective
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    exact = whole()
    for name, work in (
        ("whole", whole),
        *((f"{mib} MiB", lambda mib=mib: pieces(mib << 20)) for mib in (64, 256, 1024)),
    ):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        apart = [float((a - b).float().abs().max() / b.float().abs().max()) for a, b in zip(work(), exact, strict=True)]
        peak = (torch.cuda.max_memory_allocated() - before) >> 20 if device == "cuda" else None
        yield name, {"ms": timed(work, device, 2 if dry else 5), "peak_mib": peak, "apart": max(apart)}


def orthogonal(device: str, dry: bool) -> Iterator[tuple[str, Any]]:
    """Muon's orthogonalisation in bf16 beside fp64."""
    import torch

    from xtrain.components.optimizers.muon_torch import newton_schulz

    size = 32 if dry else 4096
    x = torch.randn(1, size, size, device=device, generator=torch.Generator(device).manual_seed(0))
    given = {"steps": 5, "coefficients": (3.4445, -4.775, 2.0315)}
    exact = newton_schulz(x.double(), **given)
    for dtype in (torch.bfloat16, torch.float32):
        found = newton_schulz(x.to(dtype), **given)
        apart = float((found.double() - exact).abs().max() / exact.abs().max())
        yield (
            str(dtype).partition(".")[2],
            {
                "ms": timed(lambda dtype=dtype: newton_schulz(x.to(dtype), **given), device, 3),
                "apart": apart,
            },
        )


KERNELS: dict[str, Callable[[str, bool], Iterator[tuple[str, Any]]]] = {
    each.__name__: each for each in (attention, experts, head, orthogonal)
}
PARTS: dict[str, Callable[[Day], None]] = {each.__name__: each for each in (runs, right, kernels, fast, breaks)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("gpu_day.json"))
    parser.add_argument("--minutes", type=float, default=28, help="nothing begins after so many")
    parser.add_argument("--dry", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--kernel", choices=KERNELS, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.kernel:
        print(json.dumps(dict(KERNELS[given.kernel](given.device, given.dry))))
        return 0
    day = Day(given.out, given.dry, time.monotonic() + 60 * given.minutes)
    import torch

    cuda = torch.cuda.is_available()
    if not cuda and not given.dry:
        print("there is no CUDA device; --dry tries everything on the CPU", file=sys.stderr)
        return 2
    about = {"device": torch.cuda.get_device_name() if cuda and not given.dry else "cpu", "torch": torch.__version__}
    day.note("about", "machine", {**about, "date": time.strftime("%Y-%m-%d")})
    for part in given.parts:
        PARTS[part](day)
    failed = [f"{part}: {name}" for part, all_ in day.found.items() for name, one in all_.items() if "failed" in one]
    print("\n".join(["failed:", *failed]) if failed else "all trials have ended as they should")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
