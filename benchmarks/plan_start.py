"""Cold start of `xtrain plan`, beside `import torch` and beside what a peer needs to read and check a configuration.

    python benchmarks/plan_start.py [--peer CHECKOUT_OF_TORCHTITAN] [--turns 7] [--interpreter PYTHON]

Whole processes, in turns, so that a busy machine is busy for all of them, with bytecode that a first turn has compiled.
Per command: median wall and processor seconds, the latter over those of `import torch`, and the largest resident set.
`--interpreter` is the Python of the peer, if it is installed elsewhere. The peer's step is `ConfigManager.parse_args`,
which builds and checks the configuration of a debug model. JSON lines.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
SPECS = ROOT / "specs"
PEER = """
from torchtitan.config import ConfigManager
ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel"])
"""


def measure(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Seconds and MiB of one run of a command, by a child of its own, whose children are this command alone."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        began = time.perf_counter()
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        wall = time.perf_counter() - began
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = {
            "wall": wall,
            "cpu": used.ru_utime + used.ru_stime,
            "MiB": used.ru_maxrss / 1024,
            "status": done.returncode,
            "said": done.stderr.decode()[-300:] if done.returncode else "",
        }
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        found = json.loads(pipe.read())
    os.waitpid(child, 0)
    if found["status"]:
        sys.exit(f"{' '.join(command)} ended with {found['status']}: {found['said']}")
    return found


def commands(peer: Path | None, interpreter: str, bytecode: str) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Name → command and environment."""
    here = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    here["PYTHONPYCACHEPREFIX"] = bytecode
    xtrain = [sys.executable, "-m", "xtrain"]
    found = {
        "python": ([sys.executable, "-c", "pass"], here),
        "xtrain check, quickstart": ([*xtrain, "check", str(SPECS / "quickstart.xtrain")], here),
        "xtrain plan, quickstart": ([*xtrain, "plan", str(SPECS / "quickstart.xtrain")], here),
        "xtrain plan, 16,384 ranks": ([*xtrain, "plan", str(SPECS / "llama_405b_16k.xtrain")], here),
        "xtrain plan, 16,384 ranks, all axes": (
            [*xtrain, "plan", str(SPECS / "moe_16k.xtrain")],
            here,
        ),
        "import torch": ([sys.executable, "-c", "import torch"], here),
    }
    if peer is not None:
        found["torchtitan parse_args"] = ([interpreter, "-c", PEER], {**here, "PYTHONPATH": str(peer)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Cold start of `xtrain plan` and of a peer's check.")
    parser.add_argument("--peer", type=Path, help="a checkout of torchtitan, whose packages are installed")
    parser.add_argument("--interpreter", default=sys.executable, help="the Python that has the peer's packages")
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as bytecode:
        table = commands(arguments.peer, arguments.interpreter, bytecode)
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in table}
        for turn in range(arguments.turns + 1):
            for name, (command, environment) in table.items():
                measured = measure(command, environment)
                if turn:
                    seen[name].append(measured)
    torch_cpu = median(each["cpu"] for each in seen["import torch"])
    for name, runs in seen.items():
        cpu = median(each["cpu"] for each in runs)
        figures = {
            "wall_seconds": round(median(each["wall"] for each in runs), 3),
            "cpu_seconds": round(cpu, 3),
            "peak_MiB": round(max(each["MiB"] for each in runs), 1),
            "of_import_torch": round(cpu / torch_cpu, 3),
        }
        print(json.dumps({"command": name, **figures}))


if __name__ == "__main__":
    main()
