"""What starting the ranks of a run is made of, part by part: the figures in planner/costs/run.py are from here.

    OMP_NUM_THREADS=1 python benchmarks/startup.py [imports plan store mesh gloo]

Processor time, which a busy machine disturbs less than the clock. `imports`: what a rank loads before its first node.
`plan`: reading the plan of 16,384 ranks. `store`: what the process that has the store in which ranks meet spends on
one request of another, and that one in all. `mesh`: what one of so many ranks does to make its groups, over a backend
that sends nothing. `gloo`: requests of a store by all ranks of a group, and the time of all in one process, connected
at once and as ranks first need each other. JSON lines.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
REQUESTS: Final = 5_000
LAYOUT: Final = """
experiment meeting {{ budget = 2 steps }}
cluster h100 {{ nodes = {nodes}, devices = 8 }}
parallel {{ pp 8, fsdp {fsdp}, tp 8 }}
model llama {{ dim = 512, layers = 8, heads = 8, vocab = 264 }}
tokenizer bytes
dataset made {{ source = synthetic(documents = 10) }}
batch {{ sequence = 512, accumulate = 8 }}
optimizer adamw {{ lr = 3e-4 }}
"""
LONG: Final = timedelta(minutes=10)
PROGRAM: Final = (
    "from xtrain.runtime.loop import executor, worker; from xtrain.runtime.base.ops import load_ops; load_ops()"
)


def imports() -> Iterator[dict[str, Any]]:
    for name, code in (("torch", "import torch"), ("a rank", PROGRAM)):
        used = of_child(lambda code=code: os.execv(sys.executable, [sys.executable, "-c", code]))
        yield {"what": name, "processor_seconds": used}


def of_child(act: Callable[[], object]) -> float:
    """Seconds of the processor that a child needs for it."""
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(0)
    _, _, used = os.wait4(child, 0)
    return used.ru_utime + used.ru_stime


def plan() -> Iterator[dict[str, Any]]:
    from xtrain.plan.serialise import from_json, to_json
    from xtrain.planner.load import plan_from_spec

    found = plan_from_spec(str(ROOT / "specs/moe_16k.xtrain")).plan
    assert found is not None
    text = json.dumps(to_json(found))
    began = time.process_time()
    from_json(json.loads(text))
    yield {"megabytes": len(text) / 1e6, "processor_seconds": time.process_time() - began}


def store() -> Iterator[dict[str, Any]]:
    from torch.distributed import TCPStore

    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = host.port

    def asks(count: int, ask: Callable[[TCPStore], object]) -> Callable[[], None]:
        def act() -> None:
            other = TCPStore("127.0.0.1", port, is_master=False)
            for _ in range(count):
                ask(other)

        return act

    host.set("short", b"x" * 150)
    kinds: dict[str, Callable[[TCPStore], object]] = {
        "get": lambda other: other.get("short"),
        "add": lambda other: other.add("number", 1),
        "set": lambda other: other.set("own", "x" * 150),
    }
    for name, ask in kinds.items():
        began, clock = time.process_time(), time.perf_counter()
        used = of_child(asks(REQUESTS, ask))
        here, wall = time.process_time() - began, time.perf_counter() - clock
        yield {"request": name, "host_microseconds": here / REQUESTS * 1e6, "both": (here + used) / REQUESTS * 1e6,
               "clock": wall / REQUESTS * 1e6}  # fmt: skip

    def connects() -> None:
        for _ in range(300):
            TCPStore("127.0.0.1", port, is_master=False)

    began = time.process_time()
    of_child(connects)
    yield {"request": "connect", "host_microseconds": (time.process_time() - began) / 300 * 1e6}


def mesh() -> Iterator[dict[str, Any]]:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from xtrain.planner.load import plan_from_text
    from xtrain.runtime.base.mesh import build_meshes
    from xtrain.runtime.base.state import Rank

    for world in (1024, 8192, 65536):
        found = plan_from_text(LAYOUT.format(nodes=world // 8, fsdp=world // 64), "layout.xtrain").plan
        assert found is not None
        place = found.mesh.coordinates(0)
        rank = Rank(
            rank=0, local_rank=0, world_size=world, data_rank=0, data_ranks=world // 64, device=torch.device("cpu"),
            pipeline_ranks=8, coordinates=place,
        )  # fmt: skip
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        began = time.process_time()
        build_meshes(found, rank, **found.node("setup.mesh").args)
        yield {"ranks": world, "processor_seconds": time.process_time() - began}
        dist.destroy_process_group()


def gloo() -> Iterator[dict[str, Any]]:
    for lazily in (False, True):
        os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazily))
        for ranks in (4, 16, 64):
            began = time.process_time()
            asked = requests_of_gloo(ranks)
            yield {
                "ranks": ranks,
                "lazily": lazily,
                "requests": asked,
                "processor_seconds": time.process_time() - began,
            }


def requests_of_gloo(ranks: int) -> dict[str, int]:
    """What so many ranks, threads of this process, ask of a store to make one group."""
    import torch.distributed as dist

    asked: Counter[str] = Counter()
    lock = Lock()
    inner = dist.HashStore()

    class Counted(dist.Store):
        """A store that counts."""

        def set(self, key: str, value: Any) -> None:
            note("set")
            inner.set(key, value)

        def get(self, key: str) -> bytes:
            note("get")
            return inner.get(key)

        def wait(self, keys: list[str], timeout: timedelta = LONG) -> None:
            note("wait")
            inner.wait(keys, timeout)

    def note(what: str) -> None:
        with lock:
            asked[what] += 1

    counted = Counted()
    groups: list[Any] = [None] * ranks

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(counted, rank, ranks, LONG)

    threads = [Thread(target=join, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in groups
    return dict(asked)


PARTS: Final = {each.__name__: each for each in (imports, plan, store, mesh, gloo)}


def main() -> None:
    parser = argparse.ArgumentParser(description="What starting the ranks of a run is made of.")
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    for name in parser.parse_args().parts:
        for found in PARTS[name]():
            print(json.dumps({"part": name, **found}), flush=True)


if __name__ == "__main__":
    main()
