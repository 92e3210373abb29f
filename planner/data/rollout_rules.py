"""Rules of runs that sample what they learn from: what `rollout` needs of the rest of a spec."""

from collections.abc import Iterator, Set

from xtrain.dsl.schema.collators import RowLink, row_link, usual_chain
from xtrain.dsl.schema.data import Dataset
from xtrain.dsl.schema.losses import ADAPTER_OFF, ADVANTAGES, INITIAL, OLD, REF
from xtrain.dsl.schema.packings import PACKINGS
from xtrain.dsl.schema.policy_losses import PolicyLoss
from xtrain.dsl.schema.rollout import MADE, Rollout
from xtrain.dsl.spec import Spec
from xtrain.planner.architecture import Architecture
from xtrain.planner.findings import Findings

CODE = "X528"
Problem = tuple[str, str, str, str]
"""(rule, path, what is wrong, what to write)."""


def check_rollout(spec: Spec, trained: Set[str], found: Findings) -> None:
    """Report everything that a rollout cannot be combined with. trained: the datasets that are trained on."""
    problems = list(_problems(spec, trained))
    for rule, path, message, hint in problems:
        found.fail(f"rollout.{rule}", CODE, path, message, hint)
    if spec.rollout is not None and not problems:
        found.passed("rollout", f"groups of {spec.rollout.group} completions fit into rows of {spec.batch.sequence:,}")


def _problems(spec: Spec, trained: Set[str]) -> Iterator[Problem]:
    if spec.rollout is not None:
        yield from (*_own(spec, spec.rollout), *_loss(spec), *_around(spec))
        asked = {action.asks() for trigger in (*spec.ticks, *spec.events) for action in trigger.actions}
        for name in (each for each in spec.datasets if each in trained | asked):
            yield from _dataset(name, spec.datasets[name])
        if spec.rollout.updates > 1:
            yield from _repeated(spec, trained)
    elif spec.reward is not None:
        message = "`reward` scores the completions of a rollout, and there is none"
        yield "reward", "reward", message, "add `rollout { group = 8 }`, or remove `reward`"


def check_replay(spec: Spec, arch: Architecture, found: Findings) -> None:
    """Only mixtures of experts have choices that can be replayed."""
    if spec.rollout is not None and spec.rollout.replay_routing and not arch.is_moe:
        message = f"{arch.title} has no experts that tokens could be sent to"
        found.fail("rollout.replay", CODE, "rollout.replay_routing", message, "remove it")


def _own(spec: Spec, rollout: Rollout) -> Iterator[Problem]:
    if spec.reward is None:
        yield "reward", "rollout", "nothing says how good a completion is", "add `reward exact_answer { }`"
    if rollout.group == 1:
        message = "a completion by itself has nothing to be compared with: its advantage would be 0"
        yield "group", "rollout.group", message, "write `group = 8`"
    # A prompt has a token at least; the last token of a completion takes no position.
    needed = rollout.group * rollout.max_tokens
    if rollout.group > 1 and needed > spec.batch.sequence:
        message = (
            f"{rollout.group} completions of {rollout.max_tokens:,} tokens take {needed:,} positions without their "
        )
        message += f"prompt, and the row that holds them has {spec.batch.sequence:,}"
        yield "room", "rollout.max_tokens", message, f"write `sequence = {2 * needed}`, or lower max_tokens or group"


def _loss(spec: Spec) -> Iterator[Problem]:
    loss = spec.loss
    made = " and ".join(f"`{each}`" for each in MADE)
    if ADVANTAGES not in loss.columns:
        message = f"the loss {loss.kind} does not read `{ADVANTAGES}`, and a rollout makes {made}"
        yield "loss", "loss.kind", message, "write `loss grpo { }`"
        return
    if isinstance(loss, PolicyLoss) and REF in loss.columns and loss.reference not in (INITIAL, ADAPTER_OFF):
        message = "completions are compared with the model under the adapter or the weights that the run begins with: "
        message += "no data has numbers of them, and a folder would be a second model on each rank"
        hint = f'write `reference = {INITIAL}`; a run begins with a folder by `model "FOLDER"`'
        yield "loss.reference", "loss.reference", message, hint
    elif REF in loss.columns and spec.adapter is not None and spec.adapter.decomposes:
        message = "the first values of the adapter are computed from the weights of the model, which are others from "
        message += "there on: a run that goes on could not tell what its reference was"
        yield "loss.reference", "loss.kl", message, "write `kl = none`, or another `init` of the adapter"
    several = [name for name in ("steps", "updates") if getattr(spec.rollout, name) > 1]
    if several and OLD not in loss.columns:
        message = (
            f"the loss {loss.kind} does not read `{OLD}`: it cannot know by how much the weights have moved since "
        )
        message += "the completions were sampled that several steps learn from"
        hint = f"write `{several[0]} = 1`, or choose a loss such as `grpo`"
        yield several[0], f"rollout.{several[0]}", message, hint
    for name in (each for each in loss.columns if each not in (*MADE, REF)):
        message = f"the loss {loss.kind} reads `{name}`, and a rollout makes {made}"
        yield f"loss.{name}", "loss.kind", message, "choose a loss without it"


def _around(spec: Spec) -> Iterator[Problem]:
    if not row_link(spec.collate).packing.single:
        message = "each prompt needs a row of its own, which its completions then fill"
        yield "collate", "collate", message, f"write `{rows_of_prompts()}`"
    if any(link.changes for link in spec.collate):
        name = next(link.name for link in spec.collate if link.changes)
        yield "changes", "collate", f"`{name}` changes documents, and completions stay as they are", f"remove `{name}`"
    if spec.optimizer.before_forward:
        message = f"{spec.optimizer.kind} takes gradients at other weights than those that are sampled from"
        yield "optimizer", "optimizer.kind", message, "choose another optimizer, such as adamw"
    if spec.tasks:
        path = f"task.{next(iter(spec.tasks))}"
        yield "tasks", path, "tasks learn from documents, not from rollouts", "remove `rollout`"
    if spec.step is not None:
        message = "a step of your own does not say which log-probabilities it has computed"
        yield "step", "step.name", message, "remove `step` or `rollout`"


def _dataset(name: str, dataset: Dataset) -> Iterator[Problem]:
    path, who = f"dataset.{name}", f"dataset {name}"
    answers = dataset.messages is not None or dataset.response is not None or dataset.mask is not None
    if dataset.has_pairs or dataset.choices is not None or not answers:
        hint = 'name their fields: `prompt = "prompt", response = "answer"`'
        yield f"data.{name}", f"{path}.source", f"{who}: rollouts need records with a prompt and an answer", hint
    elif dataset.train_on == "all":
        message = f"{who}: `train_on = all` does not tell the answer from the prompt"
        yield f"data.{name}", f"{path}.train_on", message, "remove `train_on`"
    elif dataset.long_documents in ("split", "truncate"):
        message = f"{who}: a document that is cut has no whole prompt and answer"
        yield f"oversized.{name}", f"{path}.oversized", message, "write `oversized = skip`"


def _repeated(spec: Spec, trained: Set[str]) -> Iterator[Problem]:
    """Prompts that come again are the rows of steps that are alike."""
    path, hint = "rollout.updates", "write `updates = 1`"
    if len(trained) > 1:
        names = ", ".join(sorted(trained))
        message = f"steps draw their prompts from several datasets ({names}), and those of one alone can come again"
        yield "updates.datasets", path, message, f"{hint}, or put all prompts into one dataset"
    if spec.batch.ramp_from is not None:
        message = "the steps of a ramp have unequal numbers of prompts, which cannot come again"
        yield "updates.ramp", path, message, f"{hint}, or remove `ramp_from`"


def rows_of_prompts() -> str:
    """The chain of a run with rollouts, as a spec has it."""
    single = next(name for name, each in PACKINGS.items() if each.single)
    links = (f"{link.name}({single})" if isinstance(link, RowLink) else link.name for link in usual_chain())
    return f"collate = {' -> '.join(links)}"
