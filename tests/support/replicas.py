"""Runs of replica groups as a user starts them, and what one process computes of the rows that took part."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from attrs import evolve, frozen
from checkpoints import tensors
from forked_ranks import Mutation, Outcome
from forking import ForkedCommand
from live_runs import gone
from projects import curve, events, records
from trials import TOLERANCE, Laboratory, Trial

TIMEOUT = 90.0
LIMIT = TOLERANCE["fp64"]
SMALL = ("batch.micro=1", "model.layers=2")
SAVES = "every 4 steps checkpoint\ncheckpoint { mode = sync, keep = none, model = false }"
# Runs in every rank: steps take a while, so that a group has time to come back; and a rank dies at a place of a step.
SITE = """
import os, signal, time
if "XTRAIN_GROUP" in os.environ:
    from xtrain.runtime.feed.setup import Feed
    from xtrain.runtime.base.ops import OPS, load_ops, op_named
    from attrs import evolve
    if os.environ["XTRAIN_GROUP_START"] != "0":
        time.sleep(float(os.environ.get("TEST_RETURNS", "0")))
    slow, original = float(os.environ.get("TEST_SLOW", "0")), Feed.microbatches
    def microbatches(self, step):
        time.sleep(slow)
        return original(self, step)
    Feed.microbatches = microbatches
    for each in filter(None, os.environ.get("TEST_DIES", "").split(";")):
        group, rank, start, step, place = each.split(":")
        own = os.environ["XTRAIN_GROUP"], os.environ["RANK"], os.environ["XTRAIN_GROUP_START"]
        if own == (group, rank, start):
            load_ops()
            if place == "in_sums":
                from xtrain.components.stacks.torchft_quorum_torch import Quorum
                whole = Quorum._sum_bucket
                def part(self, bucket):
                    if self.progress.step + 1 == int(step):
                        os.kill(os.getpid(), signal.SIGKILL)
                    return whole(self, bucket)
                Quorum._sum_bucket = part
                continue
            found = op_named(place)
            def factory(found=found, step=int(step), **given):
                call = found.function(**given)
                def run(now):
                    call(now)
                    if now.index + 1 == step:
                        os.kill(os.getpid(), signal.SIGKILL)
                return run
            import functools
            OPS[place] = evolve(found, function=functools.wraps(found.function)(factory))
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@frozen(kw_only=True, eq=False)
class GroupRun:
    """`xtrain run` of a trial in replica groups, under way or over."""

    lab: Laboratory
    trial: Trial
    replicas: int
    data_ranks: int
    directory: Path
    process: ForkedCommand
    others: list[ForkedCommand]
    """The launchers of further machines."""

    @classmethod
    def start(
        cls,
        lab: Laboratory,
        trial: Trial,
        name: str,
        *,
        replicas: int = 2,
        ranks: int = 1,
        data_ranks: int = 0,
        sets: tuple[str, ...] = (),
        slow: float = 0.0,
        dies: tuple[str, ...] = (),
        returns: float = 0.0,
        nodes: int = 1,
    ) -> "GroupRun":
        """ranks: of a group, of which `data_ranks`, all unless given, read rows. dies: `group:rank:start:step:op`: one
        is killed behind that op, in its group's start of that number. returns: seconds that a group which is started
        again waits first. nodes: machines, which are all this one."""
        site = lab.folder / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(SITE)
        (lab.folder / f"{name}.xtrain").write_text(trial.text(alone=False))
        settings = (
            f"precision.params={trial.params}",
            "workspace.root=runs",
            f"workspace.run={name}",
            "parallel.stack=torchft",
            f"parallel.torchft.replicas={replicas}",
            "parallel.torchft.heartbeat=1 s",
            f"launch.nodes={nodes}",
            f"launch.ranks_per_node={replicas * ranks // nodes}",
            *trial.settings,
            *sets,
        )
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        more = {
            "TEST_SLOW": str(slow),
            "TEST_DIES": ";".join(dies),
            "TEST_RETURNS": str(returns),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        environment = {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(site), **more}
        arguments = [each for text in settings for each in ("--set", text)]
        command = ["run", f"{name}.xtrain", *arguments, "--ui", "plain"]
        meet = f"127.0.0.1:{free_port()}"
        commands = [[*command, "--node", str(node), "--meet", meet] for node in range(nodes)]
        first, *others = (
            ForkedCommand(each, lab.folder, environment) for each in (commands if nodes > 1 else [command])
        )
        return cls(
            lab=lab,
            trial=trial,
            replicas=replicas,
            data_ranks=replicas * (data_ranks or ranks),
            directory=lab.folder / "runs" / "trial" / name,
            process=first,
            others=others,
        )

    def wait(self, found: Callable[[], bool]) -> None:
        """Until something is found."""
        deadline = time.monotonic() + TIMEOUT
        while not found():
            ended = self.process.poll() is not None
            assert not ended or found(), self.log()
            assert time.monotonic() < deadline, "not within time"
            time.sleep(0.02)

    def step(self) -> int:
        """The last that was recorded."""
        try:
            return len(curve(self.directory))
        except (OSError, json.JSONDecodeError):
            return 0

    def pid(self, rank: int) -> int:
        return int(json.loads((self.directory / "ranks" / f"{rank:05d}.beat").read_bytes())["pid"])

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(rank), number)

    def events(self, kind: str) -> list[dict]:
        try:
            return events(self.directory, kind)
        except (OSError, json.JSONDecodeError):
            return []

    def end(self, code: int = 0) -> None:
        codes = [each.wait(TIMEOUT) for each in (self.process, *self.others)]
        assert codes == [code] * len(codes), self.log()

    def come_back(self, node: int) -> None:
        """The launcher of a machine other than the first, which has ended, is started again."""
        before = self.others[node - 1]
        before.wait(TIMEOUT)
        self.others[node - 1] = ForkedCommand(before.arguments, self.lab.folder, before.environment)

    def log(self) -> str:
        said = [text for each in (self.process, *self.others) for text in each.communicate(TIMEOUT)]
        logs = sorted(self.directory.glob("logs/*/group*/*/*/stderr.log"))
        return "\n".join([*said, *(f"--- {path}\n{path.read_text()[-3000:]}" for path in logs)])

    # what came out --------------------------------------------------------------------------------------------------

    def taking_part(self) -> list[list[int]]:
        """Of each step."""
        lines = [line for line in records(self.directory, "metrics") if "loss" in line]
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        rows = [self.trial.rows * len(line["replicas"]) // self.replicas for line in lines]
        assert [line["replica_rows"] for line in lines] == rows
        return [line["replicas"] for line in lines]

    def replayed(self, name: str) -> Outcome:
        """What one process makes of the rows that took part."""
        plan = self.lab.plan(evolve(self.trial, settings=(*self.trial.settings, "batch.micro=1")), ())
        rows = {"run": str(self.directory), "replicas": self.replicas, "data_ranks": self.data_ranks}
        return self.lab.ranks.run(plan, self.lab.folder, name=name, mutation=Mutation("rows_of_groups", **rows))

    def hold_against(self, other: Outcome | Path, limit: float, *, first: int = 1) -> None:
        """Losses, norms and tokens of each step, evaluations, weights and moments in the end."""
        directory = other if isinstance(other, Path) else other.directory
        ours, theirs = (records(each, "metrics") for each in (self.directory, directory))
        ours, theirs = ([line for line in each if "loss" in line and line["step"] >= first] for each in (ours, theirs))
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        for key in ("loss", "grad_norm", "valid_tokens"):
            gaps = [abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(ours, theirs, strict=True)]
            assert max(gaps) <= limit, (key, gaps)
        last = [events(each, "eval")[-1]["loss"] for each in (self.directory, directory)]
        assert abs(last[0] - last[1]) <= limit * abs(last[1])
        saved, expected = (
            {k: v.numpy() for k, v in tensors(final(each)).items()} for each in (self.directory, directory)
        )
        for key, value in expected.items():
            if not key.startswith("rng."):
                assert np.abs(saved[key] - value).max() <= limit * max(np.abs(value).max(), 1e-30), key


def final(directory: Path) -> Path:
    return directory / "checkpoints" / (directory / "checkpoints" / "latest").read_text().strip()


def disturbed(steps: int, more: str = "") -> Trial:
    return Trial(settings=SMALL, steps=steps, more=more)


def hold_against_replay(ours: GroupRun, name: str) -> None:
    """The curve is that of the declared normalisation: what one process computes of the rows that took part."""
    assert len(ours.taking_part()) == ours.trial.steps
    ours.hold_against(ours.replayed(f"{name}_replayed"), LIMIT)
    (end,) = ours.events("run_end")
    assert end["status"] == "done"
    assert gone(ours.directory, 5)
