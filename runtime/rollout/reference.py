"""`setup.rollout_reference` and `rollout.reference`: what a reference model makes of completions, step by step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from attrs import evolve, frozen
from torch import Tensor

from xtrain.dsl.schema.losses import ADAPTER_OFF, REF
from xtrain.dsl.schema.rollout import EXPERTS
from xtrain.planner.plan import Plan
from xtrain.runtime.data.loading.prepared import PreparedDataset
from xtrain.runtime.errors import ResumeRefused
from xtrain.runtime.models.batch import ModelBatch
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.models.tensors import model_tensors
from xtrain.runtime.monitoring.heartbeat import HeartbeatWriter
from xtrain.runtime.ops import op
from xtrain.runtime.parallel.tensor import local
from xtrain.runtime.parallelize.fsdp import reshard
from xtrain.runtime.parallelize.pipeline import PipelineSchedule, forwarded
from xtrain.runtime.reference.compute import weights_before, weights_now
from xtrain.runtime.reference.weights import ReferenceWeights
from xtrain.runtime.reporting.records import Records
from xtrain.runtime.state import Rank, Resources
from xtrain.runtime.step_state import Step, StepCall


@frozen(kw_only=True, eq=False)
class KeptReference:
    """The reference as what differs from the model of the run: this rank's pieces of `kept`, by name, and whether the
    adapter is left out."""

    model: ModelParts
    kept: Mapping[str, Tensor]
    without_adapter: bool

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the model is the reference. Behind it all is as it was before, bit for bit."""
        self._trade()
        try:
            with self.model.without_adapter() if self.without_adapter else nullcontext():
                yield
        finally:
            self._trade()

    @torch.no_grad()
    def _trade(self) -> None:
        """Tensor by tensor, so that there is never a third copy of all of them."""
        reshard(self.model)  # what FSDP has gathered is of the others
        tensors = model_tensors(self.model, "")
        for name, kept in self.kept.items():
            weight = local(tensors[name])
            before = weight.clone()
            weight.copy_(kept)
            kept.copy_(before)


@op("setup.rollout_reference", gives="kept_reference")
def keep_reference(
    plan: Plan,
    model: ModelParts,
    rank: Rank,
    records: Records,
    beat: HeartbeatWriter,
    prepared: dict[str, PreparedDataset],
    resources: Resources,
    reference: str,
    bytes: int,
) -> KeptReference:
    """Keep the weights of the reference that training changes, before a state of the run is read. bytes: of the rank
    with the most of them.

    Raises EnvironmentFault if files are not those of the plan, and ResumeRefused if the run has compared with other
    weights up to now.
    """
    named = weights_now(plan, rank, beat, reference)
    for dataset in plan.node("setup.loader").args["datasets"]:
        if weights_before(plan, records, dataset, reference) not in (None, named):
            raise ResumeRefused(
                f"the run has compared completions with the reference {reference}, whose weights are others by now; "
                "bring back the files that it has begun with, or start anew with checkpoint.resume = false"
            )
        # From there checkpoints know what the run compares with.
        known = {"reference": reference, "weights": named}
        prepared = {**prepared, dataset: evolve(prepared[dataset], reference=known)}
    resources["prepared"] = prepared
    off = reference == ADAPTER_OFF
    adapted = {each.name for each in plan.parameters.tensors if each.adapter}
    weights = ReferenceWeights(plan=plan, model=model, rank=rank, records=records, beat=beat, resources=resources)
    with weights.in_place(reference, "", None):
        frozen_ones = {name for name, each in model.named_parameters() if not each.requires_grad}
        kept = {
            name: local(value).clone()
            for name, value in model_tensors(model, "").items()
            if name not in frozen_ones and not (off and name in adapted)
        }
    return KeptReference(model=model, kept=kept, without_adapter=off)


@op("rollout.reference")
def refer(
    model: ModelParts, rank: Rank, kept_reference: KeptReference, pipeline: PipelineSchedule | None = None
) -> StepCall:
    """Give the microbatches of a step the log-probabilities of the reference."""

    @torch.no_grad()
    def run(step: Step) -> None:
        def batches() -> Iterator[ModelBatch]:
            for microbatch in step.microbatches:
                batch = ModelBatch.of(microbatch, rank.device)
                batch.columns.pop(EXPERTS, None)  # a reference chooses experts by itself
                batch.each = batch.as_sampled = True
                yield batch

        model.train(False)
        try:
            with kept_reference.in_place():
                found = [batch.losses_BS for batch in forwarded(model, pipeline, batches())]
        finally:
            model.train()
        for number, losses_BS in enumerate(found):
            if losses_BS is not None:  # else another stage has them
                microbatch = step.microbatches[number]
                columns = {**microbatch.columns, REF: losses_BS.neg()}
                step.microbatches[number] = evolve(microbatch, columns=columns)

    return run
