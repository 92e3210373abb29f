"""Everything worth knowing about xtrain on one GPU, in two commands, in the order of what matters most.

    python benchmarks/gpu_day.py first                      # 9 minutes on one GPU
    python benchmarks/gpu_day.py second                     # 4 minutes
    python benchmarks/gpu_day.py first --parts goal fp8     # some parts, in this order
    python benchmarks/gpu_day.py all --dry                  # each part at toy size on the CPU, 5 minutes

Nothing is downloaded. Parts follow each other in this order; what no time is left for is noted as skipped.

    part       seconds  limit  asks
    first
      smoke         40     40  do runs work: not compiled, compiled, selective, experts, fp8 (one process)
      goal         150    150  8 billion parameters, selective recomputation, 4 rows x 2: tokens a second beside a loop
                               over the same kernels, memory beside the plan's, three steps traced
      full          90     90  the same with full recomputation, as other trainers publish it
      fp8           90     90  the same as `goal`, in fp8 with a scale a row
      attention     60     40  kernels at 32 heads of 128 on 8, rows of one document and of several apart; products
      updates       60     40  the head, updates of 8 bits, Muon's matrices
    second
      right         90     90  does a run follow the CPU's from the same weights; is a resumed run the unbroken one
      breaks        50     40  a loss that is not finite, a full disk, too little memory, Ctrl-C, SIGKILL
      tests         40     60  do the tests that need a GPU pass
      memory        60     30  memory by category and its peak beside the plan's, of six layouts (one process)
    more                       features, experts and NF4 apart, transformers' model, `goal` with several documents a row
                               and not compiled: where time is left

`seconds` is an estimate of the part, `limit` that of each trial in it. Rows of a figure are all of one kind: a document
each, unless its name says otherwise. Graph breaks and recompiles of what is compiled stand beside each figure.

Every figure is written to --out as soon as it is there, so that who is cut off loses nothing. A trial that fails or
takes too long is noted with the end of what it has said, and the next one begins. `goal` leaves its trace beside
--out. With --dry limits are six times as long. `docs/performance.md` says how to read the figures.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
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


def smoke(day: Day) -> None:
    day.pieces("smoke", 40, "smoke")


def goal(day: Day) -> None:
    of_cases(day, "goal", [("8b", "selective", "default", BF16_ALONE, "single")], 150, trace=True)


def full(day: Day) -> None:
    of_cases(day, "full", [("8b", "full", "default", BF16_ALONE, "single")], 90)


def fp8(day: Day) -> None:
    of_cases(day, "fp8", [("8b", "selective", "default", FP8, "single")], 90)


def updates(day: Day) -> None:
    day.pieces("updates", 40, "head", "optimizers", "orthogonal")


def more(day: Day) -> None:
    cases = [
        ("8b", "selective", "default", BF16_ALONE, "packed"),
        ("8b", "selective", "none", BF16_ALONE, "single"),
        ("1b", "none", "default", BF16_ALONE, "single"),
    ]
    of_cases(day, "more", cases, 120)
    day.pieces("more", 60, "features", "experts", "nf4", "transformers")


def right(day: Day) -> None:
    day.pieces("right", 90, "beside_the_cpu")

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

    day.trial("right", "resumed", 90, resumed)


def attention(day: Day) -> None:
    day.pieces("attention", 40, "products", "attention")


def memory(day: Day) -> None:
    day.pieces("memory", 30, "memory")


def breaks(day: Day) -> None:
    cases: list[tuple[str, str, str, int | None]] = [
        ("a loss that is not finite", DENSE, NOT_FINITE, None),
        ("a full disk", DENSE, FULL_DISK, 4_000_000),
    ]
    if not day.dry:  # a CPU's memory is not ours to fill
        cases.append(("a model that does not fit", TOO_LARGE, BF16, None))
    for name, *case in cases:
        day.trial("breaks", name, 40, lambda limit, case=case: fails(day, limit, *case))
    for kind in (signal.SIGINT, signal.SIGKILL):
        name = f"{kind.name}, and the same command again"
        day.trial("breaks", name, 40, lambda limit, kind=kind: signalled(day, limit, kind))


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

    day.trial("tests", "pytest -m gpu", 60, work)


# ---- trials


BF16_ALONE, FP8 = "bf16", "bf16, compute = fp8 { recipe = rowwise }"


def of_cases(
    day: Day, part: str, cases: list[tuple[str, str, str, str, str]], limit: float, *, trace: bool = False
) -> None:
    """Runs of one_device.py: (shape, recomputation, compile, number formats, rows)."""
    for shape, activation, mode, params, rows in cases:
        command = [sys.executable, str(HERE / "one_device.py"), "--device", day.device, *day.cluster]
        command += ["--activation", activation, "--params", params, "--rows", rows]
        if day.dry:
            command += ["--shape", "tiny", "--compile", "none", "--steps", "1", "--turns", "1", "--sequence", "64"]
            command += ["--accumulate", "2"]
        else:
            # At 8b a turn is 4 x 2 rows of 4,096 tokens twice: steps of 32,768 tokens, as published figures have.
            sizes = ("4", "2", "2", "2") if shape == "8b" else ("4", "1", "5", "3")
            names = ("--micro", "--accumulate", "--steps", "--turns")
            command += ["--shape", shape, "--compile", mode]
            command += [each for pair in zip(names, sizes, strict=True) for each in pair]
        if trace:
            command += ["--profile", str(day.out.resolve().with_name(f"{day.out.stem}-{shape}.trace.json"))]
        name = f"{shape}, recomputation {activation}, {'fp8' if params == FP8 else 'bf16'}, {rows}, compile {mode}"
        day.trial(part, name, limit, lambda limit, command=command: figures(command, limit))
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
        for part in ("goal", "full", "more")
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


COMMANDS: dict[str, tuple[Callable[[Day], None], ...]] = {
    "first": (smoke, goal, full, fp8, attention, updates),
    "second": (right, breaks, tests, memory),
}
MINUTES = {"first": 9.0, "second": 4.0, "all": 13.0}
PARTS = {each.__name__: each for each in (*COMMANDS["first"], *COMMANDS["second"], more)}


def missing() -> list[str]:
    """The packages that xtrain needs and this machine lacks, whose wheels must be brought along."""
    wanted = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    found = []
    for requirement in wanted:
        name = re.split(r"[<>=!~ ;\[]", requirement)[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append(requirement)
    return found


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
    parser.add_argument("command", choices=MINUTES)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="instead of those of the command")
    parser.add_argument("--out", type=Path, default=Path("gpu_day.json"))
    parser.add_argument("--minutes", type=float, help="all has ended after so many: 9, 4, or 13 of both")
    parser.add_argument("--dry", action="store_true", help="toy sizes on the CPU")
    given = parser.parse_args()
    if lacking := missing():
        print(f"bring wheels of these packages along: {', '.join(lacking)}", file=sys.stderr)
        return 2
    minutes = given.minutes or MINUTES[given.command]
    day = Day(given.out, given.dry, time.monotonic() + 60 * minutes)
    both = [each.__name__ for each in (*COMMANDS["first"], *COMMANDS["second"])]
    usual = [each.__name__ for each in COMMANDS[given.command]] if given.command in COMMANDS else [*both, "more"]
    if not given.dry:
        import torch

        if not torch.cuda.is_available():
            print("there is no CUDA device; --dry tries everything on the CPU", file=sys.stderr)
            return 2
    about, day.cluster = machine(given.dry)
    day.note("about", "machine", about)
    for part in given.parts or usual:
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
