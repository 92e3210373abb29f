"""The process that ranks of short jobs are forked from: torch is imported once, and every rank starts fresh.

    python -m xtrain.runtime.inspect.rank_forker PARENT_PID

Importing torch costs a core seconds, a fork some milliseconds; and a rank that was never used before carries nothing
over from another job: no signal handler, no group, no cache. Reads jobs from stdin, a JSON object a line, and answers
each with one line on stdout: exit status by rank (negative: a signal), whether time ran out, and what could not be done
once for all ranks.
"""

import ctypes
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from xtrain.plan.plan import Plan

# Imported by a rank on its way through a plan; here it is done once.
PRELOADED: Final = (
    "xtrain.components.sources.jsonl_run",
    "xtrain.components.tokenizers.bytes_run",
    "xtrain.plan.serialise",
    "xtrain.runtime.feed.chat.messages",
    "xtrain.runtime.feed.row_kernels",
    "xtrain.runtime.feed.sources.fields",
    "xtrain.runtime.feed.sources.files",
    "xtrain.runtime.inspect.held_state",
    "xtrain.runtime.loop.executor",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.nn.attention.flex_attention",
    "torch.profiler._cupti_monitor",
    "torch.utils.checkpoint",
)
MISSED: Final[list[str]] = []
"""Tracebacks of what was to be done once for all ranks."""
GRACE: Final = 3.0  # seconds the others have after the first failure to report what they saw
LAST_WORDS: Final = 1.0  # seconds a rank has to write down where it hangs


def die_with(parent: int) -> None:
    """Ask the kernel for a SIGKILL when the parent dies, so that no rank outlives the tests."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def fork(work: Callable[[], int]) -> int:
    """Run `work` in a child, whose exit code it returns; the child's process id."""
    forker = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        die_with(forker)
        code = work()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class StoreKeeper:
    """A process that holds a store for process groups, as torchrun's agent does: a new one for every job."""

    def __init__(self) -> None:
        (asked, self._asking), (self._ports, answering) = os.pipe(), os.pipe()

        def work() -> int:
            from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

            store = None
            while os.read(asked, 1):
                del store  # of the job before
                store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                os.write(answering, f"{store.port}\n".encode())
            return 0

        fork(work)
        os.close(asked)
        os.close(answering)

    def new_store(self) -> int:
        """Return the port of a new store."""
        os.write(self._asking, b"+")
        return int(os.read(self._ports, 16))


def serve(job: dict[str, Any], keeper: StoreKeeper) -> dict[str, Any]:
    """Fork the ranks of a job, and wait until all have ended, one has failed or time is out.

    `entry` of the job is `module:function`, which a rank calls with job, plan and rank. rehearsal: file of a
    plan of which this process takes a step first.
    """
    from xtrain.plan.serialise import from_json

    module, _, function = job["entry"].partition(":")
    run = getattr(importlib.import_module(module), function)
    world, directory = job["world"], Path(job["directory"])
    plan = from_json(json.loads((directory / "plan.json").read_text()))
    if "code" in plan.architecture.own:  # each rank would spend seconds on importing transformers
        importlib.import_module("xtrain.runtime.inspect.rank_imports")
    if "rehearsal" in job:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a process that has used a device must not be forked
        with _told_if_missed():
            load_kernels()
            rehearse(from_json(json.loads(Path(job["rehearsal"]).read_text())))
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    port = keeper.new_store() if world > 1 else 0
    ranks = {}
    for rank in range(world):

        def work(rank: int = rank) -> int:
            become_rank(rank, world, port, directory / "logs" / f"{rank}.log")
            return run(job, plan, rank)

        ranks[fork(work)] = rank
    deadline = time.monotonic() + job["timeout"]
    codes, timed_out = _wait(ranks, deadline)
    left = {child: rank for child, rank in ranks.items() if rank not in codes}
    if left:
        for child in left:
            os.kill(child, signal.SIGQUIT)  # each writes its stack into its log
        time.sleep(LAST_WORDS)
        for child in left:
            os.kill(child, signal.SIGKILL)
        codes |= _wait(left, time.monotonic() + 30)[0]
    return {"codes": [codes.get(rank) for rank in range(world)], "timed_out": timed_out, "missed": MISSED}


def _wait(ranks: dict[int, int], deadline: float) -> tuple[dict[int, int], bool]:
    """Exit codes by rank of those that ended in time; the first failure shortens the time for all."""
    watched = {os.pidfd_open(child): child for child in ranks}
    codes: dict[int, int] = {}
    shortened = False
    while watched:
        ready, _, _ = select.select(list(watched), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for handle in ready:
            child = watched.pop(handle)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os.close(handle)
            codes[ranks[child]] = code
            if code and not shortened:
                shortened, deadline = True, min(deadline, time.monotonic() + GRACE)
    for handle in watched:
        os.close(handle)
    return codes, bool(watched) and not shortened


def become_rank(rank: int, world: int, port: int, log: Path) -> None:
    """Give this process the streams and the environment of a rank under torchrun; alone: of a plain process."""
    import faulthandler

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)  # gloo ends a process with SIGABRT
    faulthandler.register(signal.SIGQUIT, sys.stderr)  # a run takes SIGUSR1 for a request to stop
    if world > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already
        }


def preload(*more: str, once: Callable[[], None] = lambda: None) -> None:
    """Import the modules of ranks, and do what each of them would do. more: further modules; once: further work."""
    from xtrain.runtime.observe.provenance import versions

    gc.disable()  # until all is there: hardly any of it is garbage
    for module in (*PRELOADED, *more):
        with suppress(ModuleNotFoundError):  # some are of later versions of torch alone
            importlib.import_module(module)
    with _told_if_missed():
        load_for_ranks()
        once()
    versions()  # a digest of all sources, which a rank writes into its checkpoints
    # What is here stays: no rank has to look through it for garbage, and to copy the pages on which it lies.
    gc.collect()
    gc.freeze()
    gc.enable()


@contextmanager
def _told_if_missed() -> Iterator[None]:
    try:
        yield
    except Exception:  # every rank does it again, and reports what is wrong
        import traceback

        MISSED.append(traceback.format_exc())


def load_for_ranks() -> None:
    """Load what every rank loads on its way to the first step, and what it finds out of its processor."""
    import torch

    from xtrain.runtime.base.ops import load_ops
    from xtrain.runtime.loop.bootstrap import set_matmul

    load_ops()
    load_components()
    set_matmul("auto", torch.device("cpu"))
    torch.set_float32_matmul_precision("highest")


def load_components() -> None:
    """Import the components that plans may name, except readers of sources."""
    from xtrain.dsl.schema.component import Registry

    components = importlib.import_module("xtrain.components")  # a room above this one
    for found in pkgutil.walk_packages(components.__path__, f"{components.__name__}."):
        if not found.name.endswith("_run"):
            importlib.import_module(found.name)
    schemas = [module for name, module in sys.modules.items() if name.startswith("xtrain.dsl.schema.")]
    for registry in (each for module in schemas for each in vars(module).values() if isinstance(each, Registry)):
        len(registry)


def load_kernels() -> None:
    """Compute with the fused kernels in both of their formats: numba takes milliseconds to read each of them."""
    import torch

    from xtrain.dsl.schema.rope import Rope
    from xtrain.plan.architecture import RotaryAngles
    from xtrain.runtime.nn.fused import normed_and_turned, rms_norm, silu_times, turned
    from xtrain.runtime.nn.layers import Rotation

    for dtype in (torch.float32, torch.float64):
        x_BSHA, weight_A = (torch.ones(shape, dtype=dtype, requires_grad=True) for shape in ((1, 2, 2, 4), (4,)))
        angles = RotaryAngles(width=4, theta=100.0, rope=Rope())
        rotate = Rotation.of(torch.arange(2)[None], angles, dtype)
        heads = turned(normed_and_turned(x_BSHA, weight_A, 1e-6, rotate), rotate)
        silu_times(rms_norm(heads, weight_A, 1e-6, fused=True), heads).sum().backward()


def rehearse(plan: Plan) -> None:
    """Take a step of a plan as its only rank, so that torch learns its operators once and not in every rank.

    What ranks are not to find is put back: process groups, random numbers, and what DTensor remembers of meshes.
    """
    import torch
    from torch.distributed.tensor import DTensor

    from xtrain.runtime.inspect.trace import Program, fake_world

    class RealProgram(Program):
        """Its tensors have values."""

        def _watching(self) -> ExitStack:
            return ExitStack()

    with torch.random.fork_rng(devices=[]), fake_world(plan, 0) as rank:
        program = RealProgram(plan, rank)
        program.set_up()
        program.step(repeats=False)  # which are found of tensors without values
        for parameter in program.model.parameters():
            if isinstance(parameter, DTensor):
                DTensor.full_tensor(parameter.detach())  # pyright: ignore[reportArgumentType]


def answer_jobs() -> None:
    """Answer the jobs on stdin until it is closed; this process ends then."""
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads must not be forked"
    keeper = StoreKeeper()
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line), keeper)), flush=True)
    os._exit(0)  # taking torch down takes a second


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored below nohup
    die_with(int(sys.argv[1]))
    os.nice(10)  # many ranks leave the process that waits for them a core for what it does meanwhile
    preload()
    answer_jobs()
