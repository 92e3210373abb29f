"""Ops of a training step in plan order, and steps whose loss or gradient norm is not finite.

An op takes its resources once and returns the callable that the loop runs.
"""

import time
from math import isfinite

import torch
from torch import Tensor
from torch.optim import Optimizer

from xtrain.plan.plan import Plan
from xtrain.records.training_events import PhaseEvent
from xtrain.runtime.base.mesh import Meshes
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import BadSteps, LossScale, Progress, Rank, Resources
from xtrain.runtime.feed.microbatch import DocumentSums
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.loop.agreement import Agreement, Limits
from xtrain.runtime.loop.alerts import AlertMonitor
from xtrain.runtime.loop.hooks import LossHooks
from xtrain.runtime.loop.metrics import Window
from xtrain.runtime.nn.axes import local
from xtrain.runtime.nn.batch import ModelBatch, NonFinite, NothingLearned, SkipStep, Step, StepCall
from xtrain.runtime.nn.gradients import GradientNorm, clip_factor
from xtrain.runtime.nn.optimizer import MovesWeights, Schedule, SeveralOptimizers
from xtrain.runtime.nn.pipeline import Outlines, PipelineSchedule, WrappedModel
from xtrain.runtime.nn.router import LayerLosses, RouterLosses
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records
from xtrain.runtime.observe.watch import Poller
from xtrain.text.units import plural


@op("step.fetch")
def fetch(feed: Feed, rank: Rank, readers: list[int], records: Records | None = None) -> StepCall:
    """Take this rank's microbatches of the step on the pipeline coordinates `readers`; others have none yet.

    With several phases, emits a PhaseEvent when a phase begins, and once after a resume.
    """
    reads = rank.coordinates["pp"] in readers
    several, reported = len(feed.phases) > 1, ""

    def fetch_microbatches(step: Step) -> None:
        nonlocal reported
        phase = feed.phase(step.index)
        step.phase = phase.name
        if several and phase.name != reported and records is not None:
            shares = {name: share for name, share in phase.shares.items() if share}
            event = PhaseEvent(
                step=step.index,
                name=phase.name,
                shares=shares,
                lr_scale=phase.lr_scale,
                epoch=feed.epoch(step.index),
            )
            records.event(event)
            reported = phase.name
        begin = time.perf_counter()
        step.microbatches = feed.microbatches(step.index) if reads else []
        step.data_seconds = time.perf_counter() - begin

    return fetch_microbatches


@op("step.share_outline")
def outline(
    plan: Plan, feed: Feed, rank: Rank, meshes: Meshes, source: int, numbers: list[str] | None = None
) -> StepCall:
    """Share document boundaries with the ranks that read no data, from the pipeline coordinate `source`. numbers: of
    rows, sent along."""
    outlines = Outlines.of(plan, feed.collate, rank, meshes)
    assert outlines.readers[0] == source and outlines.numbers == tuple(numbers or ())

    def share_outline(step: Step) -> None:
        step.microbatches = outlines.share(step.microbatches, feed.loader.num_microbatches(step.index))

    return share_outline


@op("step.agree")
def agree(
    plan: Plan,
    rank: Rank,
    agreement: Agreement,
    poller: Poller,
    progress: Progress,
    time_limit_seconds: float | None = None,
    stop_file: str | None = None,
    empty_steps: int | None = None,
    unit: str = "token",
    positions: bool = False,
) -> StepCall:
    """Agree in one sum over all ranks: valid tokens of the step, lengths of its documents, stop requests, clocks and
    commands.

    unit: what the loss is averaged over, counted here too. positions: also count the positions of its rows, which
    differ. empty_steps: steps in a row without a valid token that end the run. Raises on all ranks alike: Halt if the
    run is to stop, SkipStep if no rank has a valid token, NothingLearned in the last of `empty_steps` such steps.
    """
    limited = time_limit_seconds is not None or stop_file is not None
    limits = Limits(time_limit_seconds, stop_file) if limited else None
    agreement.among(rank, limits)
    if limits is not None:
        poller.looks["a stop file"] = limits.look
    counts = rank.is_tp_first and rank.coordinates["pp"] == 0
    # One of the ranks that share rows counts their documents.
    measures = counts and rank.coordinates["ring"] == rank.coordinates["ulysses"] == 0

    def agree_on_step(step: Step) -> None:
        valid = sum(m.num_valid for m in step.microbatches) if counts else 0
        own = DocumentSums.of(step.microbatches, plan.estimates.work.pairs) if measures else DocumentSums()
        counted = [] if unit == "token" else [sum(m.num_units for m in step.microbatches) if measures else 0]
        if positions:
            counted.append(sum(int(m.cumulative_lengths[-1]) for m in step.microbatches) if measures else 0)
        heard = agreement.meet(valid, own.tokens, own.pairs, own.laid_pairs, *counted)
        step.valid_tokens, *sums = map(int, heard)
        step.documents = DocumentSums(*sums[:3], positions=sums[-1] if positions else 0)
        step.units = step.valid_tokens if unit == "token" else sums[3]
        if step.units == 0:
            raise _empty(progress, empty_steps)

    return agree_on_step


def _empty(progress: Progress, limit: int | None) -> Exception:
    """Return the exception for a step without a valid token. limit: of such steps in a row; None in older plans."""
    bad = progress.bad
    bad.empty += 1
    if limit is None:
        return SkipStep("no rank has a valid token")
    if bad.empty < limit:
        return SkipStep(f"no rank has a valid token; {bad.empty} in a row of {limit}")
    since = f"step {bad.last_good:,} was the last with a valid token" if bad.last_good else "no step had a valid token"
    return NothingLearned(
        f"{plural(limit, 'step')} in a row without a valid token ({since}): the labels of all rows are masked, "
        "by a collator or by `train_on`, or the rows are padding; if this is intended, raise "
        f"`fault_tolerance {{ empty_steps = {limit} }}`"
    )


@op("step.zero_gradients")
def zero_gradients(optimizer: Optimizer) -> StepCall:
    """Set all gradients to None, through the optimizer's own `zero_grad` if it has one."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad:
        return lambda step: optimizer.zero_grad(set_to_none=True)

    def set_gradients_to_none(step: Step) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return set_gradients_to_none


@op("step.router_rows")
def router_rows(model: ModelParts, rank: Rank) -> StepCall:
    """Scale losses of layers, which are means over the rows of a step: in the batch ramp, each row counts more."""
    factor = torch.ones((), dtype=torch.float64, device=rank.device)
    for module in model.modules():
        if isinstance(module, LayerLosses):
            module.row_factor = factor

    def set_row_factor(step: Step) -> None:
        factor.fill_(1 / step.share)

    return set_row_factor


@op("step.mtp_weight")
def weigh_further(model: ModelParts, feed: Feed, weight: float) -> StepCall:
    """Set the weight of further tokens to the phase's, or to `weight`."""

    def set_further_weight(step: Step) -> None:
        chosen = feed.phase(step.index).mtp_weight
        for part in model.parts:
            part.further_weight = weight if chosen is None else chosen

    return set_further_weight


@op("step.router_weights")
def weigh_routers(
    model: ModelParts, feed: Feed, router_aux_loss: float | None = None, router_z_loss: float | None = None
) -> StepCall:
    """Set the weights of router losses to the phase's, or to those given here, the model's; None: no phase changes
    them."""
    routers = [module for module in model.modules() if isinstance(module, RouterLosses)]

    def set_router_weights(step: Step) -> None:
        chosen = feed.phase(step.index).router
        for router in routers:
            if router_aux_loss is not None:
                router.aux_weight = chosen.get("router_aux_loss", router_aux_loss) / router.divisor
            if router_z_loss is not None:
                router.z_weight = chosen.get("router_z_loss", router_z_loss) / router.divisor

    return set_router_weights


@op("step.forward_backward")
def forward_backward(
    model: ModelParts,
    rank: Rank,
    accumulate: int,
    sync: str,
    each: bool = False,
    wrapped: WrappedModel | None = None,
    beat: HeartbeatWriter | None = None,
    plan: Plan | None = None,
    resources: Resources | None = None,
) -> StepCall:
    """Compute gradients of the mean loss over the step's valid tokens, sequences or pairs, one microbatch at a time.

    The divisor counts all ranks and microbatches, so gradients are only added. Ranks exchange them in the backward of
    the last microbatch, or of every one if `sync` is `microbatch`. accumulate: microbatches of a step; fewer in a batch
    ramp. each: keep the cross-entropy of each token for later nodes.
    """
    wrapped = wrapped or WrappedModel.of(model)
    beat = beat or HeartbeatWriter()  # read by no one
    hooks = None if plan is None or resources is None else LossHooks.of(plan, resources)

    def train_microbatches(step: Step) -> None:
        count = len(step.microbatches)
        assert 1 <= count <= accumulate
        scale = step.loss_scale / step.units
        sums: list[Tensor] = []
        for number, microbatch in enumerate(step.microbatches, start=1):
            wrapped.sync_gradients(number == count or sync == "microbatch")
            beat.mark()
            batch = ModelBatch.of(microbatch, rank.device)
            batch.each = each
            if hooks is None:
                objective = wrapped.forward(None, batch)
            else:
                objective = hooks.forward(wrapped.forward, batch, microbatch, step)
            wrapped.backward((objective * scale).sum())
            sums.append(batch.sums)
            step.row_losses += [batch.row_losses] if batch.row_losses is not None else []
            step.batches += [batch] if each else []
        step.loss_sums = torch.stack(sums).sum(0)

    return train_microbatches


@op("step.pipeline")
def pipelined(pipeline: PipelineSchedule, rank: Rank, accumulate: int, each: bool = False) -> StepCall:
    """Do the same over the stages of a pipeline, in the order of its schedule."""

    def train_pipeline(step: Step) -> None:
        assert 1 <= len(step.microbatches) <= accumulate
        batches = [ModelBatch.of(microbatch, rank.device) for microbatch in step.microbatches]
        for batch in batches:
            batch.each = each
        step.loss_sums = pipeline.train(batches, step.loss_scale / step.units)
        step.row_losses = [batch.row_losses for batch in batches if batch.row_losses is not None]
        step.batches = batches if each else []

    return train_pipeline


@op("step.loss_scale")
def scale_loss(model: ModelParts, rank: Rank, progress: Progress, scale: float) -> StepCall:
    """Multiply the loss of the step, and losses of layers, by a scale: `scale` at the start of a run, and then as
    `step.check_overflow` has changed it."""
    of_layers = torch.ones((), dtype=torch.float64, device=rank.device)
    for module in model.modules():
        if isinstance(module, LayerLosses):
            module.loss_scale = of_layers

    def set_loss_scale(step: Step) -> None:
        progress.loss_scale = progress.loss_scale or LossScale(scale)
        step.loss_scale = progress.loss_scale.value
        of_layers.fill_(step.loss_scale)

    return set_loss_scale


@op("step.unscale")
def unscale(model: ModelParts) -> StepCall:
    """Divide the gradients by the scale of the loss."""

    @torch.no_grad()
    def unscale_gradients(step: Step) -> None:
        gradients = [local(parameter.grad) for _, parameter in model.trained() if parameter.grad is not None]
        if gradients and step.loss_scale != 1.0:
            torch._foreach_mul_(gradients, 1 / step.loss_scale)  # pyright: ignore[reportPrivateImportUsage]

    return unscale_gradients


@op("step.check_overflow", traced=False)
def check_overflow(model: ModelParts, progress: Progress, interval: int) -> StepCall:
    """Skip a step whose gradients overflowed although its loss is finite, with half the scale from then on, and double
    the scale after `interval` steps without.

    Raises SkipStep on all ranks alike. A step whose loss is not finite, or that overflows without a scale, is left to
    `step.check_finite`.
    """
    counts = LayerCountsCopy(model)

    def check_gradients(step: Step) -> None:
        scale = progress.loss_scale
        assert scale is not None
        if isfinite(step.grad_norm):
            scale.worked(interval)
            counts.keep()
            return
        if not isfinite(step.loss) or scale.value == 1.0:
            return
        before = scale.value
        scale.overflowed()
        counts.restore()
        reason = f"gradients overflowed in fp16; the scale of the loss is {scale.value:,.0f} from here on"
        raise SkipStep(f"{reason}, before {before:,.0f}", loss=step.loss, grad_norm=step.grad_norm)

    return check_gradients


@op("step.clip")
def clip(
    model: ModelParts,
    rank: Rank,
    progress: Progress,
    max_norm: float | None = None,
    deviations: float | None = None,
    decay: float = 0.0,
    first: int = 0,
    wrapped: WrappedModel | None = None,
) -> StepCall:
    """Scale gradients so that their norm over all ranks is at most `max_norm`, and at most the limit of
    `NormStatistics` for `deviations`, `decay` and `first`."""
    norm = GradientNorm(model, rank, None if wrapped is None else wrapped.gradients)

    def clip_gradients(step: Step) -> None:
        _reduce(step, norm, rank, model)
        limit = float("inf") if max_norm is None else max_norm
        if deviations is not None and isfinite(step.loss) and isfinite(step.grad_norm):
            limit = min(limit, progress.norms.limit(step.grad_norm, deviations, decay, first))
        step.clipped = clip_factor(step.grad_norm, limit)
        norm.scale(limit)

    return clip_gradients


@op("step.clip_value")
def clip_value(model: ModelParts, largest: float) -> StepCall:
    """Clamp every gradient element to [-largest, largest]."""

    @torch.no_grad()
    def clamp_gradients(step: Step) -> None:
        gradients = [local(parameter.grad) for _, parameter in model.trained() if parameter.grad is not None]
        if gradients:
            torch._foreach_clamp_max_(gradients, largest)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_clamp_min_(gradients, -largest)  # pyright: ignore[reportPrivateImportUsage]

    return clamp_gradients


@op("step.gradient_norm")
def gradient_norm(model: ModelParts, rank: Rank, wrapped: WrappedModel | None = None) -> StepCall:
    """Measure the norm of the gradients over all ranks without scaling them."""
    norm = GradientNorm(model, rank, None if wrapped is None else wrapped.gradients)

    def measure_norm(step: Step) -> None:
        _reduce(step, norm, rank, model)

    return measure_norm


def _reduce(step: Step, norm: GradientNorm, rank: Rank, model: ModelParts) -> None:
    assert step.loss_sums is not None
    sums = norm.measure(step.loss_sums if rank.is_tp_first else torch.zeros_like(step.loss_sums))
    step.loss = sums[0] / (step.valid_tokens if model.predicts else step.units)
    step.record(model.measured, sums[1:], step.units if model.measures_units else step.valid_tokens)
    step.grad_norm = norm.value


@op("step.schedule", traced=False)
def schedule_lr(plan: Plan, optimizer: Optimizer, schedule: Schedule, decay: str | None = None) -> StepCall:
    """Set the learning rate of this step. decay: `lr` scales weight decay with the rate, as a share of its peak
    (Defazio 2025, arXiv 2506.02285); None leaves it constant."""
    assert decay in (None, "lr")
    peak = plan.node("setup.scheduler").args["lr"]
    decays = [group.get("weight_decay", 0.0) for group in optimizer.param_groups]

    def set_learning_rate(step: Step) -> None:
        step.lr = schedule(step.index)
        for group in optimizer.param_groups:
            group["lr"] = step.lr * group.get("lr_scale", 1.0)
        if decay is not None:
            for group, whole in zip(optimizer.param_groups, decays, strict=True):
                group["weight_decay"] = whole * (step.lr / peak)

    return set_learning_rate


@op("step.training_point")
def to_training_point(optimizer: Optimizer) -> StepCall:
    """Move the weights to the point where gradients are taken; the optimizer step moves them back."""
    several = optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else (optimizer,)
    moving = [inner for inner in several if isinstance(inner, MovesWeights)]

    def move_weights(step: Step) -> None:
        for inner in moving:
            inner.to_training_point()

    return move_weights


@op("step.optimizer")
def update(optimizer: Optimizer) -> StepCall:
    def update_weights(step: Step) -> None:
        if isinstance(optimizer, SeveralOptimizers):
            optimizer.left_out = step.left_out
        optimizer.step()

    return update_weights


@op("step.measure", traced=False)
def measure(window: Window, rank: Rank, alerts: AlertMonitor | None = None, lets_go: bool = True) -> StepCall:
    """Add the step to the next log line and to alerts. lets_go: free its microbatches, because no later node needs
    them."""
    watched = alerts if rank.is_first else None

    def measure_step(step: Step) -> None:
        now = time.perf_counter()
        window.add(step, now)
        if watched is not None:
            watched.step_done(step, now - step.began)
        if lets_go:
            step.release()

    return measure_step


@op("step.let_go", traced=False)
def let_go() -> StepCall:
    """Free the microbatches of the step."""
    return Step.release


@op("step.check_finite", traced=False)
def check_finite(model: ModelParts, progress: Progress, limit: int, alerts: AlertMonitor | None = None) -> StepCall:
    """Skip a step whose loss or norm is not finite, up to the `limit`-th in a row.

    Raises SkipStep for skipped steps, NonFinite for the `limit`-th, on all ranks alike.
    """
    counts = LayerCountsCopy(model) if limit > 1 else None

    def check_step(step: Step) -> None:
        number, bad = step.index + 1, progress.bad
        if isfinite(step.loss) and isfinite(step.grad_norm):
            bad.in_a_row, bad.empty, bad.last_good = 0, 0, number
            bad.latest.clear()
            if counts is not None:
                counts.keep()
            return
        bad.in_a_row += 1
        bad.total += 1
        bad.latest.append((number, step.loss, step.grad_norm))
        if alerts is not None:
            alerts.bad_step(step.loss, step.grad_norm)
        if bad.in_a_row >= limit:
            raise NonFinite(number, step.loss, step.grad_norm, bad_steps_text(bad) if limit > 1 else "")
        assert counts is not None
        counts.restore()
        reason = f"loss {step.loss:g}, gradient norm {step.grad_norm:g}; {bad.in_a_row} in a row of {limit}"
        raise SkipStep(reason, loss=step.loss, grad_norm=step.grad_norm, in_a_row=bad.in_a_row, limit=limit)

    return check_step


def bad_steps_text(bad: BadSteps) -> str:
    """List the bad steps in a row, with the values of the latest."""
    listed = "; ".join(f"step {number}: loss {loss:g}, gradient norm {norm:g}" for number, loss, norm in bad.latest)
    more = f"the latest {len(bad.latest)} of them: " if bad.in_a_row > len(bad.latest) else ""
    since = f"step {bad.last_good:,} was the last good one" if bad.last_good else "none was good before"
    return f"{plural(bad.in_a_row, 'step')} in a row without a finite loss and gradient norm ({since}): {more}{listed}"


class LayerCountsCopy:
    """Copy of the counts of this rank's layers with losses after the last good step.

    Counts only grow: after a NaN they would stay NaN, and tokens of a skipped step must not move the biases of experts.
    """

    def __init__(self, model: ModelParts) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, LayerLosses)]
        self._before: list[Tensor] = []
        self._begun: list[int] = []

    def keep(self) -> None:
        """Save the current counts."""
        now = self._now()
        if len(self._before) != len(now):
            self._before = [torch.empty_like(count) for count in now]
        if now:
            torch._foreach_copy_(self._before, now)  # pyright: ignore[reportPrivateImportUsage]
        self._begun = [layer.begun for layer in self._layers]

    def restore(self) -> None:
        """Restore the saved counts, or reset them if counting has started over."""
        if self._begun == [layer.begun for layer in self._layers]:
            if self._before:
                torch._foreach_copy_(self._now(), self._before)  # pyright: ignore[reportPrivateImportUsage]
            return
        for layer in self._layers:
            layer.forget()

    def _now(self) -> list[Tensor]:
        return [count for layer in self._layers for count in layer.counts]
