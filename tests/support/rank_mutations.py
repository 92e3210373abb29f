"""Faults that the tests put into ranks before these execute a plan: the table of topologies has to notice each.

A rank lives for one job, so nothing has to be undone.
"""

import os
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve

from xtrain.runtime.base.ops import OPS, load_ops, op_named
from xtrain.runtime.nn import adapters as tasks
from xtrain.runtime.nn import gradients
from xtrain.runtime.nn import gradients as task_gradients
from xtrain.runtime.nn import parallelize as fsdp
from xtrain.runtime.nn.axes import local
from xtrain.runtime.nn.batch import Step, StepCall

MUTATIONS: dict[str, Callable[..., None]] = {}


def mutation(function: Callable[..., None]) -> Callable[..., None]:
    MUTATIONS[function.__name__] = function
    return function


def rebind(name: str, change: Callable[[StepCall, dict[str, Any]], StepCall]) -> None:
    """Let a step op give `change(its callable, what it was given)` instead of its callable."""
    load_ops()
    original = op_named(name)
    assert original is not None

    @wraps(original.function)
    def factory(**given: Any) -> StepCall:
        return change(original.function(**given), given)

    OPS[name] = evolve(original, function=factory)


@mutation
def average() -> None:
    """FSDP divides dense gradients by its ranks, as torch does unless told otherwise."""
    vars(fsdp)["sum_gradients"] = lambda module: None


@mutation
def exact_llama() -> None:
    """Norms and rotary positions of transformers' Llama are computed in fp64, not in fp32 whatever the format."""
    from reference_models import Whole
    from transformers.models.llama import modeling_llama

    def exact(forward: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*given: Any, **named: Any) -> Any:
            with Whole(every=True):
                return forward(*given, **named)

        return compute

    for cls in (modeling_llama.LlamaRMSNorm, modeling_llama.LlamaRotaryEmbedding):
        cls.forward = exact(cls.forward)  # type: ignore[method-assign]


@mutation
def skip(op: str) -> None:
    """A node of the step does nothing."""
    rebind(op, lambda call, given: lambda step: None)


@mutation
def skip_on(op: str, rank: int) -> None:
    """A node of the step does nothing on one rank."""
    if os.environ.get("RANK") == str(rank):
        skip(op)


@mutation
def twice(op: str) -> None:
    """A node of the step acts twice."""

    def change(call: StepCall, given: dict[str, Any]) -> StepCall:
        def run(step: Step) -> None:
            call(step)
            call(step)

        return run

    rebind(op, change)


@mutation
def joined_documents() -> None:
    """Attention and positions see a row as one document."""
    from xtrain.runtime.nn.batch import DocumentLayout

    original = DocumentLayout.from_lengths

    def whole_rows(lengths: torch.Tensor, rows: int, sequence: int, device: torch.device) -> DocumentLayout:
        bounds = torch.arange(0, rows * sequence + 1, sequence, dtype=lengths.dtype)
        return original(bounds, rows, sequence, device)

    DocumentLayout.from_lengths = staticmethod(whole_rows)  # type: ignore[method-assign]


@mutation
def forgotten_moments() -> None:
    """A resumed run begins with moments of zero."""

    def change(call: StepCall, given: dict[str, Any]) -> StepCall:
        begun: list[int] = []

        def run(step: Step) -> None:
            if not begun and step.index > 0:
                for state in given["optimizer"].state.values():
                    for value in state.values():
                        if isinstance(value, torch.Tensor) and value.dim():
                            value.zero_()
            begun.append(step.index)
            call(step)

        return run

    rebind("step.optimizer", change)


@mutation
def reversed_labels(pp: int) -> None:
    """One stage of a pipeline takes the microbatches in another order."""

    def change(call: StepCall, given: dict[str, Any]) -> StepCall:
        def run(step: Step) -> None:
            call(step)
            if given["rank"].coordinates["pp"] == pp:
                step.microbatches.reverse()

        return run

    rebind("step.agree", change)


@mutation
def counted_copies() -> None:
    """The norm counts what several ranks hold as often as they hold it."""
    vars(gradients)["copies_of_parameter"] = lambda parameter, ranks: 1


@mutation
def same_rows() -> None:
    """All data ranks read the rows of the first one."""
    from xtrain.runtime.base.state import Rank

    original = op_named("setup.loader")
    assert original is not None

    @wraps(original.function)
    def factory(**given: Any) -> Any:
        rank = given["rank"]
        assert isinstance(rank, Rank)
        return original.function(**{**given, "rank": evolve(rank, data_rank=0)})

    OPS["setup.loader"] = evolve(original, function=factory)


@mutation
def own_tokens() -> None:
    """Every rank divides by its own valid tokens, sequences or pairs: a mean of means."""

    def change(call: StepCall, given: dict[str, Any]) -> StepCall:
        def run(step: Step) -> None:
            call(step)
            own = [m.num_valid if m.units is None else m.num_units for m in step.microbatches]
            step.units = max(1, sum(own)) * given["rank"].data_ranks

        return run

    rebind("step.agree", change)


@mutation
def own_sums() -> None:
    """A context-parallel rank takes the sums over its own positions for those of whole sequences."""
    from xtrain.runtime.nn import unit_losses

    vars(unit_losses)["total"] = lambda sums, group: sums


@mutation
def own_rewards() -> None:
    """A rank of a row takes the rewards of the last tokens that it has for those of all of them."""
    from xtrain.runtime.nn import unit_losses as reward_losses

    vars(reward_losses)["total"] = lambda rewards, group: rewards


@mutation
def token_before() -> None:
    """Rewards are read one position too early, where a rank has that."""
    from xtrain.runtime.feed.microbatch import Units

    original = Units.at
    Units.at = lambda self, index_BS: evolve(
        found := original(self, index_BS), last_N=torch.where(found.last_N > 0, found.last_N - 1, found.last_N)
    )


@mutation
def own_rest() -> None:
    """A rank takes what its piece of the vocabulary has beside the stored tokens for all that there is beside them."""
    from xtrain.runtime.nn import distillation

    original = distillation.all_reduce

    def reduced(value: Any, group: Any, how: str = "sum") -> Any:
        found = original(value, group, how)
        if how == "sum":
            found[3] = value[3]
        return found

    vars(distillation)["all_reduce"] = reduced


@mutation
def own_divergence() -> None:
    """A rank takes the divergence over its piece of the vocabulary for that over all of it."""
    from xtrain.runtime.nn import distillation as whole_distillation

    original = whole_distillation.all_reduce

    def reduced(value: Any, group: Any, how: str = "sum") -> Any:
        return value if how == "sum" and len(value) < 3 else original(value, group, how)

    vars(whole_distillation)["all_reduce"] = reduced


@mutation
def numbers_without_labels() -> None:
    """What stands where no loss is taken counts too, as a prompt that the reference has judged."""
    from xtrain.runtime.nn import transformer, unit_losses

    original = unit_losses.unit_losses

    def unmasked(hidden_TD: Any, weight_VD: Any, labels_T: Any, *more: Any, **named: Any) -> Any:
        head, columns, units, *rest = more
        term, segment_T = head.term, units.segment_BS.flatten()

        def function(given: Any) -> Any:
            sums = dict(given.sums)
            for name in term.columns:
                whole = torch.zeros(len(units.tokens_N), dtype=torch.float64)
                sums[name] = whole.index_add_(0, segment_T, columns[name].double())[units.members_KU]
            return term.function(evolve(given, sums=sums))

        head = evolve(head, term=evolve(term, function=function))
        return original(hidden_TD, weight_VD, labels_T, head, columns, units, *rest, **named)

    vars(transformer)["unit_losses"] = unmasked


@mutation
def mean_of_microbatch() -> None:
    """The tokens of a sequence are weighed by the mean length of the microbatch instead of its own."""
    from xtrain.runtime.nn.batch import SHARE, ModelBatch

    original = ModelBatch.numbers

    def numbers(self: Any, name: str) -> Any:
        found = original(self, name)
        return found if name != SHARE else torch.full_like(found, len(self.units.tokens_N) / self.units.tokens_N.sum())

    type.__setattr__(ModelBatch, "numbers", numbers)


@mutation
def draws_of_a_rank() -> None:
    """What completions are drawn by depends on the rank too."""
    from xtrain.runtime.sampling import sampler

    original = sampler.Random
    vars(sampler)["Random"] = lambda key: original(f"{key} {os.environ['RANK']}")


@mutation
def other_experts() -> None:
    """What is recorded is not the expert that a token was sent to, but the next one."""
    from xtrain.runtime.sampling import sampler

    original = sampler._of_rows
    experts = 8  # of the model of trials

    def next_ones(*given: Any) -> Any:
        return [column % experts + (column > 0) for column in original(*given)]

    vars(sampler)["_of_rows"] = next_ones


@mutation
def rows_at_once() -> None:
    """Products are of all rows of a batch at once."""
    from xtrain.runtime.nn import invariant

    del invariant._REPLACED[torch.nn.functional.linear]


@mutation
def keys_of_the_row() -> None:
    """A sampled token attends with the kernel of all keys of its row."""
    from xtrain.runtime.nn import attention, invariant

    vars(invariant)["newest"] = attention.newest


@mutation
def unshared_scores() -> None:
    """A rank that has not scored the completions of its rows takes their rewards for 0."""
    from xtrain.runtime.sampling.sampler import RowRanks

    original = RowRanks.share

    def share(self: Any, tensor: Any, stage: int = 0) -> Any:
        return tensor if tensor.dim() == 1 else original(self, tensor, stage)

    type.__setattr__(RowRanks, "share", share)


@mutation
def cut_pairs() -> None:
    """A rank has the first side of every pair alone, as if the other lay on another rank."""
    from xtrain.runtime.nn import transformer, unit_losses

    original = unit_losses.unit_losses

    def cut(hidden_TD: Any, weight_VD: Any, labels_T: Any, *more: Any, **named: Any) -> Any:
        head, columns, units, *rest = more

        def function(given: Any) -> Any:
            keep = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
            sums = {name: value * keep for name, value in given.sums.items()}
            return head.term.function(evolve(given, sums=sums))

        changed = evolve(head, term=evolve(head.term, function=function))
        return original(hidden_TD, weight_VD, labels_T, changed, columns, units, *rest, **named)

    vars(transformer)["unit_losses"] = cut


@mutation
def divide_experts(by: int) -> None:
    """Expert gradients are taken for sums over too many ranks."""

    def change(call: StepCall, given: dict[str, Any]) -> StepCall:
        def run(step: Step) -> None:
            call(step)
            for name, parameter in given["model"].named_parameters():
                if ".experts." in name:
                    with torch.no_grad():
                        if parameter.grad is not None:
                            parameter.grad.to_local().div_(by)

        return run

    rebind("step.forward_backward", change)


@mutation
def own_summands() -> None:
    """Weights that tensor-parallel ranks use for their parts of the work keep their summand of the gradient."""
    from xtrain.runtime.nn import layers, router

    for module in (layers, router):
        vars(module)["local"] = lambda parameter, partial=False: local(parameter)


@mutation
def own_statistics() -> None:
    """The balance loss takes the counts of this rank's positions for those of the whole row."""
    from xtrain.runtime.nn import router

    vars(router)["all_reduce"] = lambda counts, group: counts


@mutation
def own_pieces() -> None:
    """Muon makes the piece of a matrix orthogonal that a rank has, by itself."""
    from xtrain.runtime.nn.whole_matrices import WholeMatrices

    def apply(self: WholeMatrices, pieces: Callable[..., Any], compute: Callable[..., Any]) -> Any:
        for batch in self.batches:
            yield [(stack, compute(stack, pieces(stack))) for stack in batch.stacks]

    WholeMatrices.apply = apply


@mutation
def own_means() -> None:
    """An optimizer takes sums over the pieces of a rank for those over whole parameters."""
    from xtrain.runtime.nn.whole_matrices import SumsOverPieces

    SumsOverPieces.sum_up = lambda self, wanted: None


@mutation
def own_places() -> None:
    """Weights are rounded as if the piece of a rank began where the whole parameter does."""
    from xtrain.runtime.nn import optimizer as stochastic_rounding

    vars(stochastic_rounding)["start_of"] = lambda parameter: (0,) * parameter.dim()


@mutation
def clip_per_stage(stages: int) -> None:
    """The norm is taken over the ranks of a pipeline stage; the loss is still that of all ranks."""

    class Distributed:
        group = None

        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def all_reduce(self, tensor: torch.Tensor, **options: Any) -> Any:
            if options or tensor.numel() != 2:
                return dist.all_reduce(tensor, **options)
            if self.group is None:
                self.group, _ = dist.new_subgroups(dist.get_world_size() // stages)
            own = tensor.clone()
            dist.all_reduce(own, group=self.group)
            dist.all_reduce(tensor)
            tensor[0] = own[0]
            return None

    vars(gradients)["dist"] = Distributed()


@mutation
def shard_over(axis: str) -> None:
    """Parameters are sharded, and their gradients summed, over another axis of the mesh."""
    from xtrain.runtime.base.mesh import Meshes

    setattr(Meshes, "fsdp", property(lambda meshes: meshes.dense[axis]))  # noqa: B010


@mutation
def sync_context_over(axis: str) -> None:
    """The sum over context axes runs over another one."""
    load_ops()
    original = OPS["step.context_grad_sync"]

    @wraps(original.function)
    def factory(**given: Any) -> StepCall:
        return original.function(**{**given, "axes": [axis]})

    OPS["step.context_grad_sync"] = evolve(original, function=factory)


@mutation
def fail(rank: int, how: str) -> None:
    """One rank does not come through its second step: `raise`, `abort` or `hang`."""

    def change(call: StepCall, given: dict[str, Any]) -> StepCall:
        def run(step: Step) -> None:
            call(step)
            if step.index == 1 and int(os.environ["RANK"]) == rank:
                if how == "raise":
                    raise RuntimeError("the optimizer has left the building")
                if how == "abort":
                    os.abort()
                _wait_for_ever()

        return run

    rebind("step.optimizer", change)


def _wait_for_ever() -> None:
    while True:
        time.sleep(60)


@mutation
def shared_divisor() -> None:
    """Gradients of tasks stay those of the loss over the valid tokens of all of them."""
    original = task_gradients.TaskGradients.measure

    def measure(self: Any, step: Step) -> Any:
        found = original(self, step)
        return {name: evolve(each, tokens=step.valid_tokens) for name, each in found.items()}

    vars(task_gradients)["TaskGradients"].measure = measure


@mutation
def next_task() -> None:
    """The first row of a microbatch goes through the adapter of another task."""
    original = tasks.TaskRouting.of_rows

    def of_rows(self: Any, *given: Any) -> tuple[int, ...]:
        if not (counts := original(self, *given)):
            return counts
        first, *rest, last = counts
        return (first - 1, *rest, last + 1) if first else (1, *rest, last - 1)

    vars(tasks)["TaskRouting"].of_rows = of_rows


@mutation
def empty_reference() -> None:
    """A reference gives every label a log-probability of 0."""
    from xtrain.runtime.sampling.reference_column import RowsForward

    gathered = RowsForward._gathered
    vars_of(RowsForward, _gathered=lambda self, *given: 0 * gathered(self, *given))


@mutation
def own_rows_of_reference() -> None:
    """Of a reference the first rank writes what it has computed by itself."""
    from xtrain.runtime.sampling.reference_column import RowsForward

    gathered = RowsForward._gathered

    def alone(self: Any, *given: Any) -> Any:
        return gathered(evolve(self, rank=evolve(self.rank, world_size=1)), *given)

    vars_of(RowsForward, _gathered=alone)


@mutation
def trained_reference() -> None:
    """A reference has the weights that the model has, whatever it should begin with."""
    from xtrain.runtime.sampling.reference_weights import ReferenceWeights

    vars_of(ReferenceWeights, _begin=lambda self, ops: None)


def vars_of(kind: type, **methods: Any) -> None:
    """Put methods in the place of those of a class."""
    for name, method in methods.items():
        setattr(kind, name, method)


@mutation
def own_scales() -> None:
    """A rank scales what it multiplies in fp8, or rounds, by its own largest number."""
    from xtrain.runtime.nn import number_formats, rounding

    for module in (number_formats, rounding):
        vars(module)["over_ranks"] = lambda largest, groups: largest


@mutation
def wide_half() -> None:
    """What a plan computes in fp16 is computed in fp32, where a scale of the loss changes no bit."""
    from xtrain.runtime.nn import build

    build.DTYPES["fp16"] = torch.float32


@mutation
def overflow(steps: list[int]) -> None:
    """On the last rank the gradients of steps, from 1, overflow."""

    def change(call: StepCall, given: dict[str, Any]) -> StepCall:
        def unscale(step: Step) -> None:
            call(step)
            if step.index + 1 in steps and dist.get_rank() == dist.get_world_size() - 1:
                next(local(p.grad) for _, p in given["model"].trained() if p.grad is not None).fill_(float("inf"))

        return unscale

    rebind("step.unscale", change)
