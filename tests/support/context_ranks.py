"""Context parallel on real ranks: a table of layouts, each held against attention over whole rows in one process."""

# shapes: B rows, H query heads, K key/value heads, S positions of a whole row, A head width

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from xtrain.runtime.feed.collate import local_positions
from xtrain.runtime.feed.microbatch import Microbatch, whole_positions
from xtrain.runtime.nn.attention import by_document, masked
from xtrain.runtime.nn.attention_blocks import PLAIN, Scores
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.batch import DocumentLayout
from xtrain.runtime.nn.parallelize import ContextKernel

WORLD = 4
UNEVEN = ((12,), (1, 5, 1, 4, 1), (3, 7, 2))
SINGLE = ((12,), (12,))


@frozen(kw_only=True)
class Case:
    """`rows`: lengths of the segments of each row, in units of 2 · ring positions."""

    name: str
    ring: int = 1
    ulysses: int = 1
    heads: int = 4
    kv_heads: int = 4
    rows: tuple[tuple[int, ...], ...] = UNEVEN
    dtype: str = "float64"
    mode: str = "plain"
    scores: Scores = PLAIN
    sinks: bool = False

    @property
    def lengths(self) -> list[int]:
        unit = 2 * self.ring
        return [unit * length for row in self.rows for length in row]


LAYOUTS = (
    Case(name="ring2", ring=2),
    Case(name="ring3", ring=3),
    Case(name="ring4", ring=4),
    Case(name="ring4 of single documents", ring=4, rows=SINGLE),
    Case(name="ring2 of grouped heads", ring=2, kv_heads=2),
    Case(name="ulysses2", ulysses=2),
    Case(name="ulysses2 of grouped heads", ulysses=2, kv_heads=2),
    Case(name="ulysses4 of two kv heads", ulysses=4, heads=8, kv_heads=2),
    Case(name="ulysses3 of one kv head", ulysses=3, heads=6, kv_heads=1),
    Case(name="ring2 ulysses2", ring=2, ulysses=2),
    Case(name="ring2 ulysses2 of one kv head", ring=2, ulysses=2, kv_heads=1),
    Case(name="ring2 ulysses2 of grouped heads", ring=2, ulysses=2, heads=8, kv_heads=4),
)
# Windows that end inside of a chunk, at its end, and in one that lies on the rank with later positions.
WINDOWED = (
    *(Case(name=f"ring2 of windows of {n}", ring=2, scores=Scores(n), sinks=n == 1) for n in (1, 2, 7, 12, 23, 47, 48)),
    *(Case(name=f"ring4 of windows of {n}", ring=4, scores=Scores(n), kv_heads=2) for n in (3, 12, 31, 80)),
    Case(name="ring3 of windows of 17, with sinks", ring=3, scores=Scores(17), sinks=True),
    Case(name="ring2 with sinks", ring=2, sinks=True, kv_heads=1),
    Case(name="ring2 of capped scores", ring=2, scores=Scores(13, 0.7, 1.5), sinks=True),
    Case(name="ulysses2 of windows of 5, with sinks", ulysses=2, scores=Scores(5), sinks=True, kv_heads=2),
    Case(name="ulysses4 of capped scores", ulysses=4, scores=Scores(None, 0.7, 1.5), sinks=True),
    Case(name="ring2 ulysses2 of windows of 10, with sinks", ring=2, ulysses=2, scores=Scores(10), sinks=True),
)
CASES = (
    *LAYOUTS,
    *WINDOWED,
    *(evolve(case, name=f"{case.name} fp32", dtype="float32") for case in LAYOUTS),
    *(
        Case(name=f"{ring}·{ulysses} {mode}", ring=ring, ulysses=ulysses, kv_heads=2, mode=mode)
        for ring, ulysses in ((2, 1), (2, 2))
        for mode in ("recomputed", "recomputed in part", "without gradient", "twice")
    ),
    *(
        Case(name=f"ring2 of windows {mode}", ring=2, mode=mode, scores=Scores(9), sinks=True)
        for mode in ("recomputed", "recomputed in part", "without gradient", "twice")
    ),
    Case(name="ring2 bf16", ring=2, dtype="bfloat16"),
    Case(name="ring2 of windows bf16", ring=2, dtype="bfloat16", scores=Scores(9), sinks=True),
)


def microbatch(case: Case) -> Microbatch:
    """Without tokens; every position is real."""
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    positions_T, real_T = whole_positions(bounds, lengths, int(lengths.sum()))
    shape = (len(case.rows), -1)
    return Microbatch(
        input_ids_BS=None,
        labels_BS=None,
        positions_BS=positions_T.view(shape),
        real_BS=real_T.view(shape),
        cumulative_lengths=bounds,
        real_lengths=lengths,
        num_valid=0,
    )


def errors(case: Case, rank: int, axes: Axes) -> dict[str, float]:
    """Largest differences to the reference, relative to its largest value, of out and of the gradients."""
    batch = microbatch(case)
    rows, sequence = batch.positions_BS.shape
    packing = DocumentLayout.from_lengths(batch.cumulative_lengths, rows, sequence, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.dtype)
    whole = [
        torch.randn(rows, heads, sequence, 8, dtype=torch.float64, generator=generator).to(dtype).double()
        for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    ]
    grad = whole.pop()
    sink = torch.randn(case.heads, dtype=torch.float64, generator=generator).to(dtype).double() if case.sinks else None
    for tensor in (*whole, *([] if sink is None else [sink])):
        tensor.requires_grad_()
    expected = masked(*whole, packing, case.scores, sink)
    expected.backward(grad)

    index_BS = local_positions(batch, case.ring, case.ulysses, rank // case.ulysses, rank % case.ulysses)

    def own(x_BHSA: Tensor) -> Tensor:
        x_THA = x_BHSA.detach().transpose(1, 2).flatten(0, 1)
        return x_THA[index_BS].transpose(1, 2)

    local = [own(x).to(dtype).requires_grad_() for x in whole]
    own_sink = None if sink is None else sink.detach().to(dtype).requires_grad_()
    kernel = partial(ContextKernel(by_document, axes), packing=packing, scores=case.scores, sink_H=own_sink)
    found = {"out": _attend(case.mode, kernel, local, own(grad).to(dtype))}
    references = {"out": own(expected)}
    if case.mode != "without gradient":
        times = 2 if case.mode == "twice" else 1
        for name, ours, theirs in zip("qkv", local, whole, strict=True):
            assert ours.grad is not None and theirs.grad is not None
            found[name], references[name] = ours.grad / times, own(theirs.grad)
        if sink is not None:  # of which a rank has a summand
            assert own_sink is not None and own_sink.grad is not None and sink.grad is not None
            found["sink"], references["sink"] = own_sink.grad / times, sink.grad
            for group in (axes.ring, axes.ulysses):
                if group is not None:
                    dist.all_reduce(found["sink"], group=group)
    return {
        name: float((found[name].double() - reference).abs().max() / reference.abs().max())
        for name, reference in references.items()
    }


def _attend(mode: str, kernel: Callable[..., Tensor], local: list[Tensor], grad: Tensor) -> Tensor:
    if mode == "without gradient":
        with torch.no_grad():
            return kernel(*local)
    if mode == "recomputed":
        out = checkpoint(kernel, *local, use_reentrant=False)
    elif mode == "recomputed in part":
        # Keeps what costs most, as a selective policy does: the products inside the ring are among it.
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

        def policy(context, op, *args, **kwargs) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if op is attention else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        out = checkpoint(kernel, *local, use_reentrant=False, context_fn=contexts)
    else:
        out = kernel(*local)
    assert isinstance(out, Tensor)
    out.backward(grad, retain_graph=mode == "twice")
    if mode == "twice":  # as a pipeline does that takes gradients of inputs and of weights apart
        out.backward(grad)
    return out.detach()


def measure(rank: int, world: int) -> dict[str, dict[str, float]]:
    """Every case on the first ranks, as many as it needs: case name → name of the tensor → error."""
    groups = {layout: _axes(*layout, rank) for layout in sorted({(case.ring, case.ulysses) for case in CASES})}
    return {
        case.name: errors(case, rank, groups[case.ring, case.ulysses])
        for case in CASES
        if rank < case.ring * case.ulysses <= world
    }


def _axes(ring: int, ulysses: int, rank: int) -> Axes:
    """Ring outer, ulysses inner. Collective over all ranks."""
    axes = Axes()
    for number in range(ulysses):
        members = [r * ulysses + number for r in range(ring)]
        group = dist.new_group(members) if ring > 1 else None
        axes.ring = group if rank in members else axes.ring
    for number in range(ring):
        members = [number * ulysses + u for u in range(ulysses)]
        group = dist.new_group(members) if ulysses > 1 else None
        axes.ulysses = group if rank in members else axes.ulysses
    return axes
