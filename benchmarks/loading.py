"""What it takes to load a model folder on several ranks: bytes read, host memory, seconds.

    python benchmarks/loading.py                                # 1.1 GB, 8 ranks on the CPU
    python benchmarks/loading.py --only "xtrain fsdp 8" transformers

A llama with random weights in bf16 is saved by transformers into a temporary folder, in files of 200 MB, and loaded by
gloo ranks under each layout; before every case the files are dropped from the page cache. The cases:

* xtrain: the node `setup.read_weights` of a plan, into parameters in fp32, the default.
* transformers: `from_pretrained` in fp32, which builds the model too: in one process, as ranks that have no
  `distributed_config` do it; and with one, which needs accelerate.
* torchtitan, if it is installed, with triton: its Llama 3, sharded and in memory, and what its checkpointer calls to
  load a folder: the adapter, torch's `load` with `HuggingFaceStorageReader`, the adapter.

For each case a JSON line, of its figures the most of all ranks. read: bytes of weights as xtrain's reader counts them;
`system_calls`: all that the process reads meanwhile by calls, from /proc/self/io, the headers of the files too; the
others map files into memory. `over_share`: read, divided by the rank's pieces of all tensors, as they are stored.
`from_disk`: what all ranks together have fetched. memory: the peak of resident memory less that before loading, and
less the parameters that loading itself has made; pages of files that are mapped are part of it. `over_piece`: divided
by the rank's largest piece of a tensor, as it is stored. Fails if xtrain reads more than 1.1 × its share or needs more
than twice its largest piece.
"""

import argparse
import ctypes
import gc
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

SIZES = {"dim": 2048, "layers": 10, "heads": 16, "kv_heads": 8, "ffn": 5632, "vocab": 16384}
STORED: Final = 2  # bytes of a number in the files
SPEC = """
experiment loading {{ seed = 1, budget = 1 steps }}
model "{folder}" {{}}
tokenizer bytes
dataset made {{ source = synthetic(documents = 10) }}
batch {{ sequence = 32 }}
optimizer adamw {{ lr = 1e-3 }}
parallel {{ {parallel} }}
"""


@frozen
class Loaded:
    """Of one rank, in bytes and seconds. read: of weights, as the reader counts them; None: it does not."""

    share: int
    piece: int
    system_calls: int
    memory: int
    seconds: float
    read: int | None = None


class Meter:
    """What the process does from now to `end`."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory begins anew
        self._status, self._io, self._begun = _status(), _io(), time.perf_counter()

    def end(self, pieces: Iterable[Tensor], *, allocated: int = 0) -> Loaded:
        """pieces: this rank's, of all parameters. allocated: bytes of those that were not there at the beginning."""
        pieces = list(pieces)
        seconds, calls, status = time.perf_counter() - self._begun, _io()["rchar"] - self._io["rchar"], _status()
        assert all(bool(piece.any()) for piece in pieces), "a parameter that was not read"
        sizes = [piece.numel() * STORED for piece in pieces]
        return Loaded(
            share=sum(sizes),
            piece=max(sizes),
            system_calls=calls,
            memory=status["VmHWM"] - self._status["VmRSS"] - allocated,
            seconds=seconds,
        )


def _status() -> dict[str, int]:
    """Sizes of this process's memory, in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1] == "kB"}


def _io() -> dict[str, int]:
    """Bytes that this process has read and written: `rchar` by calls, `read_bytes` from the disk."""
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(value) for name, value in lines}


def of_xtrain(folder: Path, scratch: Path, parallel: str) -> Loaded:
    from xtrain.planner.load import plan_from_text
    from xtrain.runtime.base.ops import load_ops
    from xtrain.runtime.loop.executor import Executor
    from xtrain.runtime.loop.node_calls import topological

    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    plan = plan_from_text(SPEC.format(folder=folder, parallel=parallel), "loading.xtrain", world=world).plan
    assert plan is not None
    executor = Executor(plan, scratch, rank=rank)
    load_ops()
    order = [node for node in topological(plan) if node.kind == "setup"]
    reading = next(place for place, node in enumerate(order) if node.id == "setup.read_weights")
    for node in order[:reading]:
        executor._execute(node)
    with torch.no_grad():
        pieces = [_own(parameter).zero_() for parameter in executor.resources["model"].parameters()]
    meter = Meter()
    executor._execute(order[reading])
    found = meter.end(pieces)
    dist.barrier()
    events = [json.loads(line) for line in (scratch / "events.jsonl").read_text().splitlines()]
    (read,) = (each["rank_bytes"] for each in events if each["event"] == "weights" and each["rank_bytes"])
    return evolve(found, read=read[rank])


def of_transformers(folder: Path, scratch: Path, **sizes: Any) -> Loaded:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    layout = {}
    if sizes:
        dist.init_process_group("gloo")
        layout = {"distributed_config": DistributedConfig(**sizes)}
    meter = Meter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **layout)
    pieces = [_own(parameter) for parameter in model.parameters()]
    return meter.end(pieces, allocated=sum(piece.nbytes for piece in pieces))


def of_torchtitan(folder: Path, scratch: Path) -> Loaded:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    dist.init_process_group("gloo")
    dim, vocab = SIZES["dim"], SIZES["vocab"]
    config = llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=vocab,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim),
        norm=RMSNorm.Config(normalized_shape=dim),
        lm_head=Linear.Config(in_features=dim, out_features=vocab),
        layers=llama3._build_llama3_layers(
            n_layers=SIZES["layers"],
            dim=dim,
            n_heads=SIZES["heads"],
            n_kv_heads=SIZES["kv_heads"],
            hidden_dim=SIZES["ffn"],
            rope=ComplexRoPE.Config(dim=dim // SIZES["heads"], max_seq_len=2048),
            fuse_qkv=False,
            attn_backend="flex",
        ),
    )
    with torch.device("meta"):
        model = config.build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    apply_fsdp_to_decoder(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, pp_enabled=False)
    model.to_empty(device="cpu")
    with torch.no_grad():
        pieces = [_own(parameter).zero_() for parameter in model.parameters()]
    adapter = Llama3StateDictAdapter(config, str(folder))
    meter = Meter()
    state = adapter.to_hf(model.state_dict())
    load(state, storage_reader=adapter.get_hf_storage_reader(str(folder)))
    model.load_state_dict(adapter.from_hf(state), strict=False)
    return meter.end(pieces)


def _own(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@frozen
class Case:
    """needs: packages that the case needs beside those that xtrain is tested with."""

    ranks: int
    load: Callable[[Path, Path], Loaded]
    needs: tuple[str, ...] = ()


CASES: Final = {
    "xtrain fsdp 8": Case(8, partial(of_xtrain, parallel="fsdp 8")),
    "xtrain tp 2 · fsdp 4": Case(8, partial(of_xtrain, parallel="tp 2, fsdp 4")),
    "transformers": Case(1, of_transformers),
    "transformers fsdp 8": Case(8, partial(of_transformers, fsdp_size=8), ("accelerate",)),
    "transformers tp 2 · fsdp 4": Case(8, partial(of_transformers, tp_size=2, fsdp_size=4), ("accelerate",)),
    "torchtitan fsdp 8": Case(8, of_torchtitan, ("torchtitan", "triton")),
}
READ, MEMORY = 1.1, 2.0  # what xtrain must keep to: `over_share`, `over_piece`


def _rank(name: str, rank: int, port: int, folder: Path, scratch: Path, results: "SimpleQueue[tuple[Loaded, int]]"):
    world = CASES[name].ranks
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {key: str(value) for key, value in {**place, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items()}
    before = _io()["read_bytes"]
    found = CASES[name].load(folder, scratch)
    results.put((found, _io()["read_bytes"] - before))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def measure(name: str, folder: Path) -> dict[str, Any]:
    """A line of figures."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    world, context = CASES[name].ranks, get_context("forkserver")
    context.set_forkserver_preload(["torch", "xtrain.runtime.loop.executor"])
    results, port = context.SimpleQueue(), _free_port()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [(name, rank, port, folder, Path(scratch), results) for rank in range(world)]
        processes = [context.Process(target=_rank, args=each) for each in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        sys.exit(f"{name}: a rank has failed")
    found, fetched = zip(*(results.get() for _ in range(world)), strict=True)
    counted = [each.read for each in found if each.read is not None]
    return {
        "case": name,
        "ranks": world,
        "share_mb": _mb(max(each.share for each in found)),
        "read_mb": _mb(max(counted)) if counted else None,
        "over_share": round(max(each.read / each.share for each in found), 4) if counted else None,
        "system_calls_mb": _mb(max(each.system_calls for each in found)),
        "from_disk_mb": _mb(sum(fetched)),
        "piece_mb": _mb(max(each.piece for each in found)),
        "memory_mb": _mb(max(each.memory for each in found)),
        "over_piece": round(max(each.memory / each.piece for each in found), 2),
        "seconds": round(max(each.seconds for each in found), 2),
    }


def _mb(size: int) -> float:
    return round(size / 1e6, 1)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


def make(folder: Path) -> None:
    """Save the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=SIZES["dim"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"],
        intermediate_size=SIZES["ffn"],
        vocab_size=SIZES["vocab"],
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="200MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--folder", type=Path, help="where the model is made, and left")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        if not (folder / "config.json").is_file():
            making = get_context("spawn").Process(target=make, args=(folder,))
            making.start()
            making.join()
        sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
        print(json.dumps({"files": len(sizes), "mb": _mb(sum(sizes))}), flush=True)
        missed = []
        for case in arguments.only:
            missing = [package for package in CASES[case].needs if find_spec(package) is None]
            if missing:
                print(json.dumps({"case": case, "not_installed": missing}, ensure_ascii=False), flush=True)
                continue
            line = measure(case, folder)
            print(json.dumps(line, ensure_ascii=False), flush=True)
            if case.startswith("xtrain") and (line["over_share"] > READ or line["over_piece"] > MEMORY):
                missed.append(case)
        if missed:
            sys.exit(f"{', '.join(missed)}: more than {READ:g} × the share read, or {MEMORY:g} × the piece in memory")


if __name__ == "__main__":
    main()
