"""Trained run in a single process: its model with the latest weights, and its tokenizer."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from attrs import evolve, frozen

from xtrain.plan.architecture import NO_TEXTS
from xtrain.plan.checkpoints import base_names
from xtrain.plan.groups import unfit_task
from xtrain.plan.mesh import AXES
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import load_plan
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.chat.template import load_template
from xtrain.runtime.feed.tokenizers import TextTokenizer, load_tokenizer
from xtrain.runtime.loop.bootstrap import choose_device, set_matmul, use_threads
from xtrain.runtime.nn.build import build_model
from xtrain.runtime.nn.texts import Chat, Continuation, Sampling, planned_arguments, planned_template
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.weights import model_tensors, quantise, saved_tensors
from xtrain.runtime.observe.provenance import started_in
from xtrain.runtime.sampling.text_generator import TextGenerator, continue_texts, tokens_and_ends
from xtrain.runtime.store.base_weights import BaseWeights, evaluated, leave_residual, prefix
from xtrain.runtime.store.beginning import check_weights, find_for_reading
from xtrain.runtime.store.checkpoints import CheckpointEntry
from xtrain.runtime.store.reading import read_tensors


@frozen(eq=False)
class TrainedRun:
    """Trained run, loaded for generation. plan: of the run. folder: where it was started, which paths of the plan are
    relative to."""

    plan: Plan
    folder: Path
    writer: TextGenerator
    tokenizer: TextTokenizer

    @classmethod
    def load(cls, directory: Path, device: str, checkpoint: str | None = None, task: str | None = None) -> "TrainedRun":
        """Read the latest checkpoint of a run, or the one named (see `find_named`), of any layout; weights alone are
        enough. task: whose adapter to use, of several. Raises EnvironmentFault if there is none or it is of another
        model, PlanError if the plan cannot be read."""
        entry, held = find_for_reading(directory, checkpoint)
        plan = load_plan(directory / "plan.json")
        if not plan.architecture.has_logits:
            raise EnvironmentFault("X442", f"{NO_TEXTS[0]}: nothing can be generated")
        if (problem := unfit_task(plan.architecture, task)) is not None:
            raise EnvironmentFault("X440", "; ".join(problem))
        chosen = choose_device(device, local_rank=0)
        use_threads(None, local_world=1)
        args = plan.node("setup.bootstrap").args
        set_matmul(args["matmul"], chosen, small_products=args.get("small_products", False))
        rank = alone(chosen)
        check_weights(plan, entry)
        # Paths are relative to where the run was started, not to where it is sampled.
        folder = started_in(directory)
        model = whole_model(_with_code_in(plan, folder), rank)
        _read_base(plan, model, entry, folder, chosen)
        read_tensors(saved_tensors(model, plan, prefix(entry, evaluated(entry))), entry.path)
        held.close()
        if any(node.op == "setup.residual" for node in plan.nodes):
            leave_residual(plan, model, rank, folder)
        tokenizer = load_tokenizer(plan.node("setup.tokenizer").args["source"], folder)
        model.train(False)
        if model.axes.tasks is not None and task is not None:
            model.axes.tasks.whole = model.axes.tasks.names.index(task)
        return cls(plan, folder, TextGenerator(model=model, rank=rank), tokenizer)

    def chat(self, template: str, system: str) -> Chat:
        """Return the chat of a template: `auto` (see `planned_template`), or any that a dataset may name. Raises
        DataError if there is none."""
        name = planned_template(self.plan) if template == "auto" else template
        loaded = load_template(name, self.tokenizer, self.folder, planned_arguments(self.plan, name))
        return Chat(template=loaded, tokenizer=self.tokenizer, system=system)

    def continue_texts(
        self,
        prompts: Sequence[str],
        tokens: int,
        sampling: Sampling,
        stop: Sequence[str] = (),
        chat: Chat | None = None,
        show: Callable[[list[Continuation]], None] | None = None,
    ) -> list[str]:
        """Continue prompts as `continue_texts` does; with `chat` prompts are messages of users. Raises DataError as
        `Chat.prompt` does."""
        ids, ends = tokens_and_ends(self.tokenizer, prompts, stop, chat)
        return continue_texts(self.writer, self.tokenizer, ids, ends, tokens, sampling, show=show)


@torch.no_grad()
def _read_base(plan: Plan, model: ModelParts, entry: CheckpointEntry, folder: Path, device: torch.device) -> None:
    """Read the weights that the checkpoint leaves out. Raises EnvironmentFault if they are not those that the run
    started from."""
    if not base_names(plan):
        return
    tensors = model_tensors(model, "")
    try:
        with BaseWeights.of(plan, folder, device) as base:
            base.check(entry, lambda name, whole: tensors[name].copy_(whole))
    except OSError as error:
        raise EnvironmentFault("X524", str(error)) from error


def alone(device: torch.device) -> Rank:
    return Rank(
        rank=0,
        local_rank=0,
        world_size=1,
        data_rank=0,
        data_ranks=1,
        device=device,
        pipeline_ranks=1,
        coordinates=dict.fromkeys(AXES, 0),
    )


def _with_code_in(plan: Plan, folder: Path) -> Plan:
    """Return the plan with the place of the model's own modeling files relative to the working directory."""
    code = plan.architecture.own.get("code", {})
    if (place := code.get("remote", {}).get("folder")) is None:
        return plan
    own = {**plan.architecture.own, "code": {**code, "remote": {"folder": str(folder / place)}}}
    return evolve(plan, architecture=evolve(plan.architecture, own=own))


def whole_model(plan: Plan, rank: Rank) -> ModelParts:
    """Build the whole model, whatever its layout in training, with uninitialized memory."""
    args = dict(plan.node("setup.build_model").args)
    whole = {"stages": [[0, plan.architecture.layers - 1]], "owners": [[0]]}
    model = build_model(plan, rank, **{**args, **whole, "architecture": plan.architecture})
    for node in plan.nodes:
        if node.op == "setup.quantise":
            quantise(plan, model, **node.args)
    model.whole.allocate(rank.device, rank.device)
    return model
