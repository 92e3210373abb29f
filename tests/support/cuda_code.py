"""Code that torch makes for a plan on an H200, on a machine without one.

One step of a rank's real program runs on fake tensors (`xtrain.runtime.inspect.trace`), with its blocks compiled:
Dynamo traces them as on the device, and Inductor writes its CUDA code, whose kernels and bytes are counted.
"""

import hashlib
import importlib
import importlib.util
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import torch
import torch._dynamo
import torch.nn.attention.flex_attention as flex_attention
from attrs import define, evolve, field, frozen
from torch import Tensor, fx
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from xtrain.plan.plan import Node, Plan
from xtrain.runtime.base.device import FakeDevice
from xtrain.runtime.base.ops import load_ops, op_of
from xtrain.runtime.feed.microbatch import Microbatch
from xtrain.runtime.inspect import trace
from xtrain.runtime.inspect.observer import joined_pieces
from xtrain.runtime.inspect.trace import Program, fake_world, shortened
from xtrain.runtime.nn import attention, fused, number_formats, recompute
from xtrain.runtime.nn.batch import ModelBatch
from xtrain.runtime.nn.block import DecoderBlock

# Variants that one block is known to have, as torch reports why it compiles another one.
KNOWN: Final = {
    "documents": r"packing\.single|block_masks",  # rows of one document, and of several
    "rows": r"\bB == \d+",  # the mask of a smaller last batch
    "frozen": r"requires_grad",  # what the first block takes from a frozen embedding
    "grad mode": r"GRAD_MODE|grad_mode|inference_mode",
    "layers": r"window|rotate|___check_obj_id|___check_type_id|len\(|size mismatch|stride mismatch|kernel|scores",
}
H200: Final = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, total_memory=150_754_820_096, multi_processor_count=132,
    regs_per_multiprocessor=65_536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    shared_memory_per_block=49_152, shared_memory_per_block_optin=232_448, shared_memory_per_multiprocessor=233_472,
    L2_cache_size=62_914_560, uuid="0", gcnArchName="", is_integrated=False, pci_bus_id=0, clock_rate=1_980_000,
    memory_clock_rate=3_201_000, memory_bus_width=6144,
)  # fmt: skip


FLEX: Final = (flex_attention.flex_attention, flex_attention.create_block_mask)


@frozen(kw_only=True)
class Graph:
    """Code of one compiled graph.

    calls: of kernels by kind: `triton`, `flex`, or the name of another one. moved: bytes that Triton kernels read and
    write. kept: bytes of what a forward keeps for its backward. sources: of its Triton kernels, by name.
    """

    backward: bool
    calls: Counter[str]
    moved: int
    sources: dict[str, str]


@define
class Found:
    """What compiling a program did. graphs: number of operations of each graph that Dynamo made. kept: bytes that each
    block keeps for its backward, without parameters. recompiles: why."""

    graphs: list[int] = field(factory=list)
    kept: list[int] = field(factory=list)
    breaks: list[str] = field(factory=list)
    recompiles: list[str] = field(factory=list)
    code: list[Graph] = field(factory=list)

    @property
    def unknown(self) -> list[str]:
        """Recompiles for other reasons than the known ones."""
        return [why for why in self.recompiles if not any(re.search(known, why) for known in KNOWN.values())]


class CompiledProgram(Program):
    """Program of one rank whose blocks are compiled. It measures neither memory nor traffic."""

    def _watching(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(self._fake)
        stack.enter_context(joined_pieces())
        return stack

    def _make_moments(self) -> None:
        pass

    def _look_on(self) -> None:
        self.memory_owners: Any = SimpleNamespace(begin=lambda: None, name_gradients=lambda: None)

    def give(self, *several: Microbatch) -> None:
        """Let the step have these microbatches."""
        loader: Any = SimpleNamespace(num_microbatches=lambda step: len(several), microbatches=lambda step: [*several])
        self._resources["feed"] = evolve(self._resources["feed"], loader=loader)

    def evaluate(self, rows: Microbatch, number: int) -> None:
        """Run the forward on the first `number` rows."""
        length = rows.positions_BS.shape[1]
        bounds = rows.cumulative_lengths
        first = evolve(
            rows,
            input_ids_BS=rows.input_ids_BS[:number],
            labels_BS=rows.labels_BS[:number],
            positions_BS=rows.positions_BS[:number],
            real_BS=rows.real_BS[:number],
            cumulative_lengths=bounds[bounds <= number * length],
            real_lengths=rows.real_lengths[:number],
            place_B=None if rows.place_B is None else rows.place_B[:number],
        )
        with self._watching(), torch.no_grad():
            for part in self.model.parts:
                part(None, ModelBatch.of(first, torch.device("cpu")))

    def packed(self, documents: int) -> Microbatch:
        """Return its rows, of several documents each."""
        whole = self.rows.whole
        rows, sequence = whole.positions_BS.shape
        bounds = torch.arange(0, rows * sequence + 1, sequence // documents, dtype=torch.int32)
        whole = evolve(whole, cumulative_lengths=bounds)
        return self._resources["feed"].collate.local_part(whole)


def _left_out(node: Node) -> bool:
    return node.op != "setup.compile" and (node.op.startswith(("setup.log.", "rollout.")) or not op_of(node).traced)


def compiled(
    plan: Plan,
    *,
    codegen: bool = False,
    partition: bool = False,
    packed: bool = False,
    single: bool = True,
    evaluated: Sequence[int] = (),
) -> Found:
    """Compile the blocks of a plan for CUDA, forward and backward.

    codegen: write the CUDA code. partition: divide graphs into forward and backward, as for code, and measure what
    blocks keep. single, packed: with rows of one document, of several, or of both in turn. evaluated: numbers of rows
    of further forwards without gradients.
    """
    load_ops()
    short, _ = shortened(plan)
    found = Found()
    torch.compiler.reset()
    counters.clear()
    clear_compilation_metrics()
    with as_on_cuda(found, codegen=codegen, partition=partition), fake_world(short, 0) as fake:
        program = CompiledProgram(short, fake)
        program.set_up()
        local = program.rows.local
        count = program.rows.accumulate
        rows = [evolve(local)] * single + [program.packed(4)] * packed
        program.give(*(rows[number % len(rows)] for number in range(max(count, len(rows)))))
        program.step(repeats=False)
        for number in evaluated:
            for one in rows:
                program.evaluate(one, number)
    found.breaks += [why for kind in ("graph_break", "unimplemented") for why in counters[kind]]
    found.recompiles += [metrics.recompile_reason for metrics in get_compilation_metrics() if metrics.recompile_reason]
    torch.compiler.reset()
    return found


class _Never:
    """Stands for the type of fake tensors where code must take the way of real ones."""


@contextmanager
def as_on_cuda(found: Found, *, codegen: bool, partition: bool) -> Iterator[None]:
    """Let torch.compile handle what is fake as it handles tensors of an H200."""
    real, own = torch.compile, backend_of(found, codegen=codegen, partition=partition)

    def compile(model: Any = None, *, backend: Any = None, mode: Any = None, **how: Any) -> Any:
        return real(model, backend=own, **how)

    @cache
    def flex_functions(device_type: str) -> tuple[Callable[..., Any], ...]:
        return tuple(compile(each, dynamic=False) for each in FLEX)

    def permuted(out: Tensor, query_strides: Sequence[int]) -> Tensor:
        """Return an empty tensor in the layout of the real one, into which nothing is copied: it has no device."""
        with patch.object(Tensor, "copy_", lambda new, old: new):
            return permute(out, query_strides)

    hop = importlib.import_module("torch._higher_order_ops.flex_attention")
    permute = hop._permute_strides
    with ExitStack() as stack:
        for target, name, value in (
            (hop, "_permute_strides", permuted),
            (torch, "compile", compile),
            (trace, "left_out", _left_out),
            (attention, "FakeTensor", _Never),
            (attention, "device_type", lambda x: "cuda"),
            (attention, "_flex_functions", flex_functions),
            (number_formats, "FakeTensor", _Never),
            (number_formats, "device_type", lambda x: "cuda"),
            (fused, "_has_kernel", lambda x, weight_D: weight_D.dim() == 1),
            (number_formats, "_TABLES", {}),
            (flex_attention, "_validate_device", lambda *a, **k: None),
            *([(DecoderBlock, "__call__", measured(found.kept))] if partition else []),
        ):
            stack.enter_context(patch.object(target, name, value))
        for operator in (hop.flex_attention, hop.flex_attention_backward):
            table = operator.python_key_table
            own_modes = {FakeDevice: table[FakeTensorMode]}
            for mode in (recompute._Keeping, recompute._Reusing):  # compiled code does not see them
                own_modes[mode] = lambda mode, *args, operator=operator, **how: operator(*args, **how)
            stack.enter_context(patch.dict(table, own_modes))
        yield


def measured(kept: list[int]) -> Callable[..., Tensor]:
    """Return a call of a block that adds the bytes that it keeps for its backward."""
    call = DecoderBlock.__call__

    def measuring(self: DecoderBlock, *args: Any, **how: Any) -> Tensor:
        own: set[int] = set()
        saved: dict[int, int] = {}

        def pack(value: Tensor) -> Tensor:
            if not own:  # FSDP has gathered the parameters now
                values = [getattr(each, "_local_tensor", each) for each in (*self.parameters(), *self.buffers())]
                own.update(each.untyped_storage()._cdata for each in values)
            storage = value.untyped_storage()
            if storage._cdata not in own:
                saved[storage._cdata] = storage.nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            out = call(self, *args, **how)
        kept.append(sum(saved.values()))
        return out

    return measuring


def backend_of(found: Found, *, codegen: bool, partition: bool) -> Callable[..., Any]:
    """Return a backend of torch.compile that notes graphs, and runs them as they are."""

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        found.graphs.append(sum(node.op in ("call_function", "call_method") for node in graph.graph.nodes))
        if not codegen and not partition:
            return graph.forward
        from torch._inductor.compile_fx import compile_fx

        with without_patterns():
            return compile_fx(graph, inputs, inner_compile=inner)

    def inner(graph: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        from torch._functorch.aot_autograd import make_boxed_func

        if codegen:
            with torch.no_grad(), h200():
                found.code.append(code_of(graph, inputs, **how))
        return make_boxed_func(graph.forward)

    return backend


# CUDA code ------------------------------------------------------------------------------------------------------------


def moved_to_cuda(value: Any) -> Any:
    """Return the same fake tensors on a CUDA device."""

    def moved(x: FakeTensor) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return FakeTensor(x.fake_mode, meta, torch.device("cuda", 0))

    return tree_map_only(FakeTensor, moved, value)


def graph_on_cuda(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph whose tensors are on a CUDA device."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    moved = fx.GraphModule(graph, copy)
    for old, new in zip(graph.graph.nodes, copy.nodes, strict=True):
        new.meta = {
            name: moved_to_cuda(value) if name in ("val", "example_value") else value
            for name, value in old.meta.items()
        }
        new.kwargs = {
            name: torch.device("cuda", 0) if isinstance(value, torch.device) and value.type == "cpu" else value
            for name, value in new.kwargs.items()
        }
        if new.op == "get_attr" and isinstance(child := getattr(graph, new.target), fx.GraphModule):
            setattr(moved, new.target, graph_on_cuda(child))
    return moved


class _Written(Exception):
    """Inductor has written the code of a graph."""


def code_of(graph: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Graph:
    """Return what Inductor makes of a graph."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering

    written: list[tuple[str, int]] = []

    def write(lowering: GraphLowering) -> Any:
        code, _ = lowering.codegen()
        own = [node for node in lowering.scheduler.nodes if not node.is_extern() and not node.is_template()]
        written.append((code.value, sum(node.get_read_write_buffers_sizes() for node in own)))
        raise _Written

    with patch.object(GraphLowering, "compile_to_module", write):
        try:
            compile_fx_inner(graph_on_cuda(graph), moved_to_cuda(list(inputs)), **how)
        except Exception:
            if not written:
                raise
    ((code, moved),) = written
    calls = Counter[str]()
    body = code[code.index("def call(self, args)") :]
    for extern, triton in re.findall(r"(?:extern_kernels|torch\.ops|aten)\.([\w.]+)\(|(triton_\w+)\.run\(", body):
        kind = (
            extern.removesuffix(".default").rsplit(".", 1)[-1] if extern else "flex" if "_tem_" in triton else "triton"
        )
        calls[kind] += 1
    sources = {
        m[0]: m[1]
        for m in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", code, re.DOTALL)
    }
    return Graph(backward=bool(how.get("is_backward")), calls=calls, moved=moved, sources=sources)


@contextmanager
def without_patterns() -> Iterator[None]:
    """Let Inductor look for no patterns of attention or of padded products, whose preparation takes ten seconds: the
    blocks have none."""
    import torch._inductor.fx_passes.fuse_attention as fuse_attention
    import torch._inductor.fx_passes.misc_patterns as misc_patterns
    import torch._inductor.fx_passes.pad_mm as pad_mm

    with ExitStack() as stack:
        for module, name in (
            (fuse_attention, "_sfdp_init"),
            (pad_mm, "_pad_mm_init"),
            (misc_patterns, "_misc_patterns_init"),
        ):
            stack.enter_context(patch.object(module, name, lambda *args, **how: None))
        yield


@contextmanager
def h200() -> Iterator[None]:
    """Let Inductor see an H200."""
    import torch._dynamo.device_interface as interfaces
    import torch._inductor.config as config
    import torch._inductor.fx_passes.post_grad as post_grad
    import torch._subclasses.fake_tensor as fake_tensor
    import torch.utils._triton as triton

    cuda, one = torch.cuda, interfaces.CudaInterface
    init = post_grad.lazy_init

    def without_cuda(*args: Any, **how: Any) -> Any:
        with patch.object(cuda, "is_available", lambda: False):
            return init(*args, **how)

    class Nothing:
        def __init__(self, *args: Any, **how: Any) -> None: ...
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *args: Any) -> None: ...

    def always(value: Any) -> Callable[..., Any]:
        return lambda *args, **how: value

    stream = SimpleNamespace(cuda_stream=0, stream_id=0, device_index=0, device_type=1)
    values: list[tuple[Any, dict[str, Any]]] = [
        (cuda, {"is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": H200}),
        (cuda, {"get_device_capability": (9, 0), "get_device_name": H200.name, "is_bf16_supported": True}),
        (cuda, {"_lazy_init": None, "is_initialized": True, "synchronize": None, "current_stream": stream}),
        (cuda, {"get_rng_state": torch.empty(0, dtype=torch.uint8), "set_rng_state": None, "set_device": None}),
        (cuda, {"_exchange_device": 0, "_maybe_exchange_device": 0}),
        (torch._C, {"_cuda_getDevice": 0, "_cuda_setDevice": 0, "_cuda_exchangeDevice": 0}),
        (torch._C, {"_cuda_maybeExchangeDevice": 0, "_cuda_getCurrentRawStream": 0}),
        (fake_tensor, {"init_gpu_context": None}),
        (triton, {"triton_hash_with_backend": "x"}),
    ]
    static: list[tuple[Any, dict[str, Any]]] = [
        (one, {"is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": H200}),
        (one, {"get_compute_capability": 90, "get_raw_stream": 0, "synchronize": None, "set_device": None}),
        (one, {"exchange_device": 0, "maybe_exchange_device": 0, "current_stream": stream}),
        (one, {"is_bf16_supported": True, "raise_if_triton_unavailable": None}),
        (one.Worker, {"get_device_properties": H200, "current_device": 0, "set_device": None}),
    ]
    changes = [
        *((target, name, always(value)) for target, all_ in values for name, value in all_.items()),
        *((target, name, staticmethod(always(value))) for target, all_ in static for name, value in all_.items()),
        *((target, name, Nothing) for target, name in ((cuda, "device"), (cuda, "device_of"), (one, "device"))),
        (torch.version, "cuda", "13.0"),
        (post_grad, "lazy_init", without_cuda),
    ]
    settings = {"compile_threads": 1, "force_disable_caches": True, "joint_graph_constant_folding": False}
    with ExitStack() as stack:
        for target, name, value in changes:
            stack.enter_context(patch.object(target, name, value, create=True))
        stack.enter_context(config.patch(settings))
        triton.has_triton.cache_clear()
        stack.callback(triton.has_triton.cache_clear)
        yield


# Cubins ---------------------------------------------------------------------------------------------------------------

# Blocks of kernels without a template; Inductor chooses among several at the first call on a device.
BLOCKS: Final = {
    "pointwise": {"XBLOCK": 512, "YBLOCK": 32},
    "reduction": {"XBLOCK": 1, "YBLOCK": 16, "R0_BLOCK": 2048, "RSPLIT_SIZE": 64, "NUM_STAGES": 1},
}


def spilled(source: str, folder: Path, capability: int) -> int:
    """Return the bytes a thread that a Triton kernel of Inductor spills, compiled by ptxas for sm_`capability`.

    Raises triton's errors for a kernel that does not compile.
    """
    import triton
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    taken: list[tuple[str, Any, dict[str, Any]]] = []

    def taking(kind: str) -> Callable[..., Any]:
        return lambda *args, **how: lambda function: taken.append((kind, function, how)) or function

    path = folder / f"kernel_{hashlib.sha256(source.encode()).hexdigest()[:16]}.py"
    path.write_text(source)
    kinds = ("template", "pointwise", "reduction", "persistent_reduction", "cooperative_reduction")
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(patch.object(triton_heuristics, kind, taking(kind)))
        stack.enter_context(patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        found = importlib.util.spec_from_file_location(path.stem, path)
        assert found is not None and found.loader is not None
        found.loader.exec_module(importlib.util.module_from_spec(found))
    ((kind, function, how),) = taken
    meta = how["triton_meta"]
    signature, constants = dict(meta["signature"]), dict(meta.get("constants", {}))
    blocks = BLOCKS["pointwise" if kind == "pointwise" else "reduction"]
    for name in function.arg_names:
        if name in blocks:
            signature[name], constants[name] = "constexpr", blocks[name]
    attributes = next(iter(meta.get("configs", [])), {})
    kernel = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    options = {
        "num_warps": how.get("num_warps", 4 if kind == "pointwise" else 16),
        "num_stages": how.get("num_stages", 1),
    }
    made = triton.compile(kernel, target=GPUTarget("cuda", capability, 32), options=options)
    cubin = folder / f"{path.stem}.cubin"
    cubin.write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    said = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    return max(int(size) for size in re.findall(r"STACK:(\d+)", said))
