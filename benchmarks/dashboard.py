"""What the dashboard costs: to open a run of a million logged steps, in memory, processor time, and training beside it.

    python benchmarks/dashboard.py                       # a made run of 1,000,000 steps is opened and watched
    python benchmarks/dashboard.py --steps 100000
    python benchmarks/dashboard.py --overhead --pairs 7  # the quickstart with dashboard and observation, and without

The terminal is a pseudo terminal of 120 × 40. The run that is watched goes on, with four records a second. Prints one
JSON line for each figure.
"""

import argparse
import fcntl
import json
import os
import pty
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from made_runs import MadeRun, long_run

ROOT = Path(__file__).parents[1]
SIZE = (40, 120)
WATCH_SECONDS = 30.0
NO_ALERTS = ", ".join(f"{name} = none" for name in ("loss_spike", "slow", "starvation", "memory", "disk", "stalled"))
TICK = os.sysconf("SC_CLK_TCK")
CODES = re.compile(r"\x1b(?:\[[0-9;?<>=]*[a-zA-Z]|[PX^_\]].*?(?:\x1b\\|\x07)|.)", re.DOTALL)


class Watched:
    """`xtrain watch` on a pseudo terminal; `text` is what it has drawn, without colours."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.began = time.monotonic()
        self.pid, self._terminal = pty.fork()
        if not self.pid:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", *SIZE, 0, 0))
            os.environ.update(TERM="xterm-256color", COLORTERM="truecolor", LANG="C.UTF-8", OMP_NUM_THREADS="1")
            os.execv(sys.executable, [sys.executable, "-m", "xtrain", "watch", str(directory), *arguments])
        self._drawn: list[bytes] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(OSError):
            while block := os.read(self._terminal, 1 << 16):
                self._drawn.append(block)

    @property
    def text(self) -> str:
        return CODES.sub("", b"".join(self._drawn).decode("utf-8", "replace"))

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._drawn))

    def until(self, holds: Callable[[str], bool], patience: float = 120.0) -> float:
        """Seconds from the beginning until what is drawn holds."""
        while not holds(self.text):
            if time.monotonic() - self.began > patience:
                raise SystemExit(f"never drawn; the end of what was: {self.text[-2000:]!r}")
            time.sleep(0.01)
        return time.monotonic() - self.began

    def memory(self) -> tuple[float, float]:
        """Resident MiB, now and at most so far."""
        lines = Path(f"/proc/{self.pid}/status").read_text()
        now, most = (re.search(rf"{name}:\s+(\d+) kB", lines) for name in ("VmRSS", "VmHWM"))
        assert now and most
        return int(now[1]) / 1024, int(most[1]) / 1024

    def processor_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def bytes_read(self) -> int:
        found = re.search(r"rchar: (\d+)", Path(f"/proc/{self.pid}/io").read_text())
        return int(found[1]) if found else 0

    def close(self) -> None:
        with suppress(OSError):
            os.write(self._terminal, b"q")
        for _ in range(100):
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                break
            time.sleep(0.05)
        else:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        os.close(self._terminal)


@contextmanager
def going_on(run: MadeRun) -> Iterator[None]:
    """The run is live: four records a second from every rank, and a line of progress every second."""
    done = threading.Event()

    def go_on() -> None:
        while not done.wait(0.25):
            run.log(run.step + 1, run.step + 1)
            if run.step % 4 == 0:
                run.beat()

    run.start = time.time() - 10 - 0.5 * run.step
    thread = threading.Thread(target=go_on)
    with run.alive():
        run.beat()
        thread.start()
        yield
        done.set()
        thread.join()


def say(what: str, **figures: object) -> None:
    print(json.dumps({"what": what} | {name: _rounded(value) for name, value in figures.items()}), flush=True)


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


def opening_and_watching(steps: int, screens: list[str], warm: int = 3) -> None:
    """A long run is opened, read whole, and watched."""
    with tempfile.TemporaryDirectory() as name:
        run = long_run(Path(name) / "runs" / "long" / "one", steps)
        say("run", steps=steps, metrics_mib=(run.directory / "metrics.jsonl").stat().st_size / 2**20)
        newest = f"{run.step:,}"
        for _ in range(warm):
            watched = Watched(run.directory)
            seconds = watched.until(lambda text: newest in text and f"{last_loss(run):.4f}" in text)
            say("opening", seconds=seconds)
            watched.close()
        for screen in screens:
            with going_on(run):
                watched = Watched(run.directory, "--screen", screen)
                watched.until(lambda text: f"{run.step // 1000:,}" in text)
                whole = _settled(watched, run.directory / "metrics.jsonl")
                before, drawn, began = watched.processor_seconds(), watched.num_bytes, time.monotonic()
                time.sleep(WATCH_SECONDS)
                share = (watched.processor_seconds() - before) / (time.monotonic() - began)
                now, most = watched.memory()
                say(
                    "watching", screen=screen, read_whole_after_s=whole, processor_share=share, memory_mib=now,
                    most_memory_mib=most, drawn_kib_a_second=(watched.num_bytes - drawn) / 1024 / WATCH_SECONDS,
                )  # fmt: skip
                watched.close()


def last_loss(run: MadeRun) -> float:
    return run.metrics(run.step)["loss"]


def _settled(watched: Watched, metrics: Path) -> float:
    """Seconds from the beginning until all of a file has been read, and some more until it is quiet."""
    while watched.bytes_read() < metrics.stat().st_size:
        if time.monotonic() - watched.began > 300:
            raise SystemExit("the run was not read in five minutes")
        time.sleep(0.1)
    seconds = time.monotonic() - watched.began
    time.sleep(3.0)
    return seconds


def overhead(pairs: int, steps: int) -> None:
    """The quickstart in pairs: with the dashboard attached and all observation on, and with neither.

    A pair is trained in one go, every other one in the other order. What counts is the time from the end of set-up to
    the last logged step, so that evaluations and saves at the end are in neither.
    """
    shares = []
    with tempfile.TemporaryDirectory() as name:
        _trained(Path(name), "warm-up", steps, watched=False)
        for pair in range(pairs):
            order = (True, False) if pair % 2 else (False, True)
            seconds = {watched: _trained(Path(name), f"{pair}-{watched}", steps, watched) for watched in order}
            shares.append(seconds[True] / seconds[False] - 1)
            say("pair", number=pair + 1, with_dashboard_s=seconds[True], without_s=seconds[False], share=shares[-1])
    say("overhead", pairs=pairs, steps=steps, median_share=statistics.median(shares))


def _trained(folder: Path, name: str, steps: int, watched: bool) -> float:
    """Seconds of training. With observation every step is logged, to TensorBoard too, and looked at for alerts; without
    there is one record, that of the last step, and no alert."""
    sets = [f"experiment.budget={steps} steps", f"workspace.root={folder}/runs", f"workspace.run={name}"]
    spec = (ROOT / "specs" / "quickstart.xtrain").read_text()
    spec = re.sub(r"every 100 steps (eval|checkpoint).*\n", "", spec)
    spec = re.sub(r"on finish .*\n", "", spec)
    if watched:
        spec += "\nlog { tensorboard = true }\n"
    else:
        spec = spec.replace("every 1 step log", f"every {steps} steps log") + f"\nalerts {{ {NO_ALERTS} }}\n"
    path = folder / f"{name}.xtrain"
    path.write_text(spec)
    command = [sys.executable, "-m", "xtrain", "run", str(path), "--ui", "none"]
    process = subprocess.Popen([*command, *(part for text in sets for part in ("--set", text))])
    directory = folder / "runs" / "quickstart" / name
    dashboard = None
    try:
        if watched:
            while not (directory / "events.jsonl").exists() and process.poll() is None:
                time.sleep(0.05)
            dashboard = Watched(directory)
        if process.wait():
            raise SystemExit(f"the run {name} has failed")
    finally:
        process.kill()
        if dashboard is not None:
            dashboard.close()
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    begin = next(event["time"] for event in events if event["event"] == "setup_done")
    last = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == steps
    return last["time"] - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="of the run (default: 1,000,000; with --overhead 300)")
    parser.add_argument("--screens", nargs="+", default=["overview", "plan", "ranks", "events", "compare"])
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.overhead:
        overhead(arguments.pairs, arguments.steps or 300)
    else:
        opening_and_watching(arguments.steps or 1_000_000, arguments.screens)


if __name__ == "__main__":
    main()
