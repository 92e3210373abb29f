"""Disks that are full or cannot be written, for someone who gives the command: what is said, and what is kept."""

import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest
from checkpoints import folder, steps
from projects import Project, curve, events

pytestmark = pytest.mark.slow

SPEC = "every 2 steps checkpoint\ncheckpoint {{ mode = {mode}, keep = none, failures = 2 }}"
NAMED = ("--set", "workspace.run=mine", "--world", "2", "--ui", "plain")
STEPS = 16
Cause = Callable[[Path], AbstractContextManager[None]]


@contextmanager
def small_files(checkpoints: Path) -> Iterator[None]:
    """No file may grow beyond what everything but tensors needs: as a quota does it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def full(place: Path, left: int = 40_000) -> Iterator[None]:
    """There is no room but for a few small files."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while (free := shutil.disk_usage(place).free - left) > 0:
            file.write(bytes(free))
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def read_only(checkpoints: Path) -> Iterator[None]:
    """As a file system is remounted after an error of its device."""
    mount("-o", "remount,ro", str(checkpoints))
    try:
        yield
    finally:
        mount("-o", "remount,rw", str(checkpoints))


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A folder that is a disk of its own; skips the test where this process may not mount one."""
    place.mkdir(parents=True)
    try:
        mount("-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place))
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("this process may not mount a disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def disk(project: Project) -> Iterator[Path]:
    """The folder of checkpoints of a run."""
    with small_disk(project.folder / "runs" / "tiny" / "mine" / "checkpoints") as place:
        yield place


@pytest.fixture
def home(project: Project) -> Iterator[Path]:
    """The run directory."""
    with small_disk(project.folder / "runs" / "tiny" / "mine") as place:
        yield place


REASONS = {small_files: "File too large", full: "No space left on device", read_only: "Read-only file system"}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("cause", list(REASONS), ids=lambda cause: cause.__name__)
def test_a_disk_that_fails_ends_the_run_and_costs_nothing_that_was_saved(project, disk, cause: Cause, mode: str):
    spec = project.spec(steps=STEPS, more=SPEC.format(mode=mode))
    directory = disk.parent
    project.run(spec, *NAMED, "--set", "launch.stop_after=4 steps", expect=75)
    assert steps(directory) == [2, 4]

    with cause(disk):
        # A forked command has the limits of the process that it is forked from.
        process = project.start(spec, *NAMED, fresh=True)
        out, err = process.communicate(timeout=240)
    assert process.returncode == 3, out + err
    assert "Traceback" not in out + err
    (failure,) = events(directory, "failure")
    assert failure["code"] == "X721" and REASONS[cause] in failure["error"]
    assert "X721" in out + err and REASONS[cause] in out + err
    warnings = [event["message"] for event in events(directory, "warning") if event.get("code") == "X721"]
    assert all("the last checkpoint is of step 4" in message for message in warnings) and len(warnings) == 2
    assert steps(directory) == [2, 4] and folder(directory).named() == "ckpt-s000000000004"
    assert folder(directory).latest().flaws(content=True) == []

    project.run(spec, *NAMED)
    assert events(directory, "resumed")[-1]["step"] == 4
    assert [step for step, *_ in curve(directory)] == list(range(1, STEPS + 1))
    assert folder(directory).remains() == []


def test_a_disk_without_room_for_a_line_is_reported_and_the_run_goes_on_when_there_is(project, home):
    spec = project.spec(steps=STEPS, more=SPEC.format(mode="async"))
    project.run(spec, *NAMED, "--set", "launch.stop_after=4 steps", expect=75)
    process = project.start(spec, *NAMED, "--set", "experiment.budget=4000 steps")
    while process.poll() is None and len(curve(home)) < 8:
        time.sleep(0.02)
    with full(home, 0):
        out, err = process.communicate(timeout=240)
    assert process.returncode == 3, out + err
    assert "No space left on device" in out + err and "X7" in out + err
    assert "Traceback" not in out + err
    latest = folder(home).pointed("latest")
    assert latest is not None and latest.flaws(content=True) == []

    begun = latest.step
    project.run(spec, *NAMED, "--set", f"experiment.budget={begun + 4} steps")
    assert events(home, "resumed")[-1]["step"] == begun
    assert [step for step, *_ in curve(home)] == list(range(1, begun + 5))
