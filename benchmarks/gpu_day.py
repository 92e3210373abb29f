"""Everything worth knowing about xtrain on one GPU, in one command, in the order of what matters most.

    python benchmarks/gpu_day.py                            # 13 minutes on one GPU
    python benchmarks/gpu_day.py --parts right fast         # some parts, in this order
    python benchmarks/gpu_day.py --dry                      # each part at toy size on the CPU

Nothing is downloaded. Parts follow each other in this order; what no time is left for is noted as skipped.

    part       seconds  limit  asks
    features        90     60  does each feature that one device can show train (one process)
    right          110    120  does a run follow the CPU's from the same weights; is a resumed run the unbroken one
    attention       60     40  kernels over packed rows, varlen where torch has it: how fast, how exact (one process)
    fast           190    180  8 billion parameters with full recomputation, and 1 billion, compiled: tokens a second
                               beside a loop over the same kernels, memory beside the plan's, three steps traced
    memory          60     45  memory by category and its peak beside the plan's, of several layouts (one process)
    breaks          90     60  a loss that is not finite, a full disk, too little memory, Ctrl-C, SIGKILL
    peer            40     60  transformers' model at 1 billion (one process)
    kernels         60     40  the head, experts, NF4, 8-bit states, Muon's matrices apart (a process each)
    more           250    180  the models of `fast` with other recomputation, and not compiled
    tests          120    200  do the tests that need a GPU pass

`seconds` is an estimate of the part, `limit` that of each trial in it.

Every figure is written to --out as soon as it is there, so that who is cut off loses nothing. A trial that fails or
takes too long is noted with the end of what it has said, and the next one begins. `fast` leaves its traces beside
--out. With --dry limits are six times as long. `docs/performance.md` says how to read the figures.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from attrs import define, field
from gpu_process import LEAST, TAIL, Failed, ended, in_pieces, said
from gpu_specs import BF16, DENSE, FULL_DISK, NOT_FINITE, SAVING, TOO_LARGE, spec_text

HERE = Path(__file__).resolve().parent
SLOWER = 6  # than a GPU at full size is a CPU at toy size


@define
class Day:
    """What has been found so far. until: seconds of the clock at which all has ended. cluster: arguments of
    one_device.py that say which machines the plan is for."""

    out: Path
    dry: bool
    until: float
    cluster: list[str] = field(factory=list)
    found: dict[str, Any] = field(factory=dict)

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def note(self, part: str, name: str, value: Any) -> None:
        """Keep a figure; a file that cannot be written now is written with the next one."""
        self.found.setdefault(part, {})[name] = value
        print(f"{part} · {name}: {json.dumps(value)}"[:400], flush=True)
        try:
            beside = self.out.with_name(f"{self.out.name}.partial")
            beside.write_text(json.dumps(self.found, indent=1) + "\n")
            beside.replace(self.out)
        except OSError as error:
            print(f"{self.out}: {error}", file=sys.stderr)

    def limit(self, seconds: float) -> float:
        """What a trial may take; 0 where no time is left for it."""
        left = self.until - time.monotonic()
        return min(left, seconds * (SLOWER if self.dry else 1)) if left >= LEAST else 0.0

    def trial(self, part: str, name: str, seconds: float, work: Callable[[float], dict[str, Any]]) -> None:
        """work: is given the seconds it may take."""
        limit = self.limit(seconds)
        if not limit:
            self.note(part, name, {"skipped": "no time is left"})
            return
        begin = time.monotonic()
        try:
            found = work(limit)
            json.dumps(found)
        except Failed as error:
            found = {**error.found, "failed": str(error)[-TAIL:]}
        except Exception:
            found = {"failed": traceback.format_exc()[-TAIL:]}
        self.note(part, name, {**found, "seconds": round(time.monotonic() - begin, 1)})

    def pieces(self, part: str, each: float, *pieces: str) -> None:
        """One process for each of the pieces of `gpu_pieces.py`; what it finds is noted one by one."""
        for piece in pieces:
            limit = self.limit(each)
            if not limit:
                self.note(part, piece, {"skipped": "no time is left"})
                continue
            command = [sys.executable, str(HERE / "gpu_pieces.py"), piece, "--device", self.device]
            command += [*self.cluster, *(["--dry"] if self.dry else [])]

            def note(name: str, found: dict[str, Any], piece: str = piece) -> None:
                self.note(part, name if piece == part else f"{piece}: {name}", found)

            try:
                in_pieces(command, each * (SLOWER if self.dry else 1), self.until, note)
            except Exception as error:
                text = str(error) if isinstance(error, Failed) else traceback.format_exc()
                self.note(part, piece, {"failed": text[-TAIL:]})


def spec_in(
    folder: Path, day: Day, model: str = DENSE, more: str = BF16, *, steps: int = 10, ui: str = "none"
) -> list[str]:
    """The command of a run."""
    text = spec_text(model, more, steps=steps, sequence=64 if day.dry else 512, device=day.device)
    (folder / "s.xtrain").write_text(text)
    return [sys.executable, "-m", "xtrain", "run", "s.xtrain", "--ui", ui]


def metrics(folder: Path, run: str = "*") -> list[dict[str, Any]]:
    """The logged steps of the run in a folder. Raises Failed unless there is one."""
    paths = [*folder.glob(f"runs/*/{run}/metrics.jsonl")]
    if len(paths) != 1:
        raise Failed(f"{len(paths)} runs have left records")
    return [record for record in map(json.loads, paths[0].read_text().splitlines()) if "loss" in record]


# ---- parts


def features(day: Day) -> None:
    day.pieces("features", 60, "features")


def right(day: Day) -> None:
    day.pieces("right", 120, "beside_the_cpu")

    def resumed(limit: float) -> dict[str, Any]:
        """Beside an unbroken run; and that one beside itself, which `deterministic` must make the same."""
        with tempfile.TemporaryDirectory() as made:
            folder, begin = Path(made), time.monotonic()
            command = spec_in(folder, day, more=f"{BF16}\nevery 3 steps checkpoint", steps=8)
            same = ["precision.deterministic=true"]
            starts = [("whole", 0, []), ("parts", 75, ["launch.stop_at=5 steps"]), ("parts", 0, []), ("again", 0, [])]
            for run, code, stop in starts:
                sets = [each for one in (f"workspace.run={run}", *same, *stop) for each in ("--set", one)]
                said([*command, *sets], limit - (time.monotonic() - begin), folder, code=code)
            curves = {
                run: [(row["step"], row["loss"]) for row in metrics(folder, run)] for run in ("whole", "parts", "again")
            }
        whole = curves["whole"]
        return {"bit_for_bit": curves["parts"] == whole, "repeats": curves["again"] == whole, "steps": len(whole)}

    day.trial("right", "resumed", 120, resumed)


def attention(day: Day) -> None:
    day.pieces("attention", 40, "attention")


def fast(day: Day) -> None:
    of_cases(day, "fast", [("8b", "full", "default"), ("1b", "none", "default")], trace=True)


def memory(day: Day) -> None:
    day.pieces("memory", 45, "memory")


def breaks(day: Day) -> None:
    cases: list[tuple[str, str, str, int | None]] = [
        ("a loss that is not finite", DENSE, NOT_FINITE, None),
        ("a full disk", DENSE, FULL_DISK, 4_000_000),
    ]
    if not day.dry:  # a CPU's memory is not ours to fill
        cases.append(("a model that does not fit", TOO_LARGE, BF16, None))
    for name, *case in cases:
        day.trial("breaks", name, 60, lambda limit, case=case: fails(day, limit, *case))
    for kind in (signal.SIGINT, signal.SIGKILL):
        name = f"{kind.name}, and the same command again"
        day.trial("breaks", name, 60, lambda limit, kind=kind: signalled(day, limit, kind))


def peer(day: Day) -> None:
    day.pieces("peer", 60, "transformers")


def kernels(day: Day) -> None:
    day.pieces("kernels", 40, "head", "experts", "nf4", "optimizers", "orthogonal")


def more(day: Day) -> None:
    cases = [("8b", "selective", "default"), ("1b", "none", "none"), ("1b", "full", "default"), ("8b", "full", "none")]
    of_cases(day, "more", cases, trace=False)


def tests(day: Day) -> None:
    """The files that have such tests, so that no others are loaded."""
    folder = HERE.parent / "tests"
    files = [str(path) for path in sorted(folder.rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-n", "0", *files]
    if day.dry:  # there is no GPU
        command += ["--collect-only"]

    def work(limit: float) -> dict[str, Any]:
        code, text = ended(command, limit, HERE.parent)
        if code:
            raise Failed(f"exit code {code}\n{text[-TAIL:]}")
        return {"said": text[-400:]} if code == 0 else {"failed": f"not done within {limit:.0f} s\n{text[-TAIL:]}"}

    day.trial("tests", "pytest -m gpu", 200, work)


# ---- trials


def of_cases(day: Day, part: str, cases: list[tuple[str, str, str]], *, trace: bool) -> None:
    """Runs of one_device.py: (shape, recomputation, compile)."""
    for shape, activation, mode in cases:
        command = [sys.executable, str(HERE / "one_device.py"), "--device", day.device, *day.cluster]
        command += ["--activation", activation]
        if day.dry:
            command += ["--shape", "tiny", "--compile", "none", "--steps", "1", "--turns", "1", "--sequence", "64"]
        else:
            command += ["--shape", shape, "--compile", mode, "--steps", "5", "--turns", "3"]
        if trace:
            command += ["--profile", str(day.out.resolve().with_name(f"{day.out.stem}-{shape}.trace.json"))]
        name = f"{shape}, recomputation {activation}, compile {mode}"
        day.trial(part, name, 180, lambda limit, command=command: figures(command, limit))
    if text := calibrated(day):
        day.note("calibration", "cluster", text)


def figures(command: list[str], limit: float) -> dict[str, Any]:
    """What a process has printed as lines of JSON, one figure beside the other, also where it fails later on."""
    code, text = ended(command, limit)
    found: dict[str, Any] = {}
    for line in objects(text):
        found |= line
    if code != 0:
        raise Failed(f"{'out of time' if code is None else f'exit code {code}'}\n{text[-TAIL:]}", found)
    return found or {"failed": f"no figures\n{text[-TAIL:]}"}


def objects(text: str) -> Iterator[dict[str, Any]]:
    """The lines that are JSON objects."""
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                yield json.loads(line)
            except ValueError:
                continue


def calibrated(day: Day) -> str:
    """What was measured as a block of a spec, of the compiled runs; empty where there is nothing yet."""
    trials = [
        trial
        for part in ("fast", "more")
        for name, trial in day.found.get(part, {}).items()
        if name.endswith("default") and isinstance(trial, dict)
    ]
    shares = sorted(trial["efficiency"] for trial in trials if trial.get("efficiency"))
    if not shares or not day.cluster:
        return ""
    about = day.found["about"]["machine"]
    where = f"{about['device']}, torch {about['torch']}, {about['date']}"
    return (
        f"# measured: {where}; {len(shares)} runs of one_device.py, {shares[0]:.1%} to {shares[-1]:.1%}\n"
        f"cluster {day.cluster[1]} {{ efficiency = {100 * median(shares):.1f}% }}"
    )


def fails(day: Day, limit: float, model: str, more: str, small: int | None) -> dict[str, Any]:
    """What a run says that cannot end well. small: bytes that files may have, once tokens are cached."""
    with tempfile.TemporaryDirectory() as made:
        folder, begin = Path(made), time.monotonic()
        command = spec_in(folder, day, model, more, ui="plain")
        if small is not None:
            said([*command, "--set", "workspace.run=first", "--set", "experiment.budget=1 step"], limit, folder)
        code, text = ended(command, limit - (time.monotonic() - begin), folder, small_files=small)
    found = {"exit_code": code, "said": text[-1500:]}
    if code is None or "Traceback" in text:
        raise Failed("no end within its limit" if code is None else "a traceback", found)
    if code == 0:
        raise Failed("it has ended well", found)
    return found


def signalled(day: Day, limit: float, kind: signal.Signals) -> dict[str, Any]:
    """A run that gets a signal behind its first checkpoint, and is started again."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder, steps = Path(made), 12
        command = spec_in(folder, day, more=SAVING, steps=steps)
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
            try:
                while not any(folder.glob("runs/*/*/checkpoints/latest*")) and process.poll() is None:
                    if time.monotonic() - begin > limit:
                        raise Failed(f"no checkpoint within {limit:.0f} s\n{(folder / 'log').read_text()[-TAIL:]}")
                    time.sleep(0.05)
                if kind == signal.SIGKILL:
                    os.killpg(process.pid, kind)
                else:
                    process.send_signal(kind)
                try:
                    code = process.wait(max(1.0, limit - (time.monotonic() - begin)))
                except subprocess.TimeoutExpired:
                    raise Failed(f"it does not end\n{(folder / 'log').read_text()[-TAIL:]}") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        said(command, max(1.0, limit - (time.monotonic() - begin)), folder)
        found = [record["step"] for record in metrics(folder)]
    return {"exit_code": code, "every_step_once": found == [*range(1, steps + 1)]}


PARTS: dict[str, Callable[[Day], None]] = {
    each.__name__: each for each in (features, right, attention, fast, memory, breaks, peer, kernels, more, tests)
}


def machine(dry: bool) -> tuple[dict[str, Any], list[str]]:
    """What is measured on, and the arguments that name its cluster. Imports torch."""
    import torch

    from xtrain.components import clusters  # noqa: F401
    from xtrain.dsl.schema.cluster import CLUSTERS

    about: dict[str, Any] = {"device": "cpu", "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    about["python"], about["cuda"] = sys.version.split()[0], torch.version.cuda
    # Without both nothing compiles for a GPU, and flex is compiled.
    about["c_compiler"] = os.environ.get("CC") or next(filter(None, map(shutil.which, ("gcc", "clang"))), None)
    about["python_headers"] = (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
    for name in ("triton", "transformers", "flash-attn", "torchao"):
        try:
            about[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            about[name] = None
    if dry:  # so that what is predicted is tried as well
        return about, ["--cluster", "cpu", "--flops", "1e11"]
    about["device"] = torch.cuda.get_device_name()
    about["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    name = about["device"]
    presets = [key for key, each in CLUSTERS.items() if each.sheet is not None and each.fits("cuda", name)]
    return about, ["--cluster", presets[0]] if presets else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("gpu_day.json"))
    parser.add_argument("--minutes", type=float, default=13, help="all has ended after so many")
    parser.add_argument("--dry", action="store_true", help="toy sizes on the CPU")
    given = parser.parse_args()
    day = Day(given.out, given.dry, time.monotonic() + 60 * given.minutes)
    if not given.dry:
        import torch

        if not torch.cuda.is_available():
            print("there is no CUDA device; --dry tries everything on the CPU", file=sys.stderr)
            return 2
    about, day.cluster = machine(given.dry)
    day.note("about", "machine", about)
    for part in given.parts:
        try:
            PARTS[part](day)
        except Exception:
            day.note(part, "all of it", {"failed": traceback.format_exc()[-TAIL:]})
    trials = [(part, name, one) for part, all_ in day.found.items() for name, one in all_.items()]
    failed = [f"{part}: {name}" for part, name, one in trials if isinstance(one, dict) and "failed" in one]
    print("\n".join(["failed:", *failed]) if failed else "all trials have ended as they should")
    print(day.found.get("calibration", {}).get("cluster", ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
