"""`eval DATASET { … }`: losses on held-out documents, or accuracy on multiple-choice questions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS, ENDINGS, Action
from xtrain.dsl.schema.setting import AUTO, Auto, at_least, cadence_setting
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.graph import ActionNode, ActionPlace, averaged_weights
from xtrain.text.units import flops_text, plural

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


@ACTIONS.register()
@frozen
class Eval(PlannedAction):
    """`eval DATASET { … }`: loss on the held-out part of a dataset; accuracy on a dataset of questions."""

    kind: ClassVar[str] = "eval"
    records = True
    uses_averages = True
    hooked = "evaluation"
    metrics: ClassVar = {
        "eval/NAME/loss": (
            "loss on the held-out part of dataset NAME after this step: the cross-entropy, for questions the "
            "cross-entropy of the correct choices, for a reward model the minimized loss",
            "nats a token",
        ),
        "eval/NAME/objective": (
            "minimized loss on the same rows, for a dataset with the columns that the loss reads; only if it is not "
            "the cross-entropy",
            "",
        ),
        "eval/NAME/METRIC": ("[metrics of the loss](losses.md#what-is-measured) on the same rows", ""),
        "eval/NAME/reward": (
            "with `answers`: mean reward of one completion of each held-out prompt of dataset NAME; with rewards of 1 "
            "for a correct answer and 0 otherwise, the share of correct answers",
            "",
        ),
        "eval/NAME/bits_per_byte": (
            "cross-entropy per byte of the text ([evaluation.md](evaluation.md#bits-per-byte))",
            "bits a byte",
        ),
        "eval/NAME/acc": (
            "share of questions whose correct choice has the highest log-likelihood "
            "([evaluation.md](evaluation.md#questions-with-choices))",
            "share, 0 to 1",
        ),
        "eval/NAME/acc_norm": ("the same with log-likelihoods per character of a choice", "share, 0 to 1"),
        "eval/NAME/acc_bytes": ("the same with log-likelihoods per byte of a choice", "share, 0 to 1"),
        "final/NAME/METRIC": (
            "the same of an evaluation at the end on another number of batches than the first declared one "
            "([evaluation.md](evaluation.md#one-curve-one-protocol))",
            "",
        ),
    }

    dataset: str
    batches: int | Auto | None = cadence_setting(
        "number of batches to evaluate, each with as many rows as a step; auto: steps // 20, at least 1; none: all "
        "held-out rows",
        default=AUTO,
        check=at_least(1),
    )
    answers: Literal["none", "greedy", "sampled"] = cadence_setting(
        "in a run with rollouts, also measure the mean reward of one completion of each held-out prompt; greedy: the "
        "most probable tokens; sampled: with the settings of `rollout`; none: no completions",
        default="none",
        added=True,
    )

    environment: str | None = cadence_setting(
        "with `answers` in a run with environments: the environment that the model has an episode with for each "
        "held-out prompt; none: the environment of `rollout`",
        default=None,
        block="environment",
        added=True,
        example="guessing",
    )

    def node(self, resolved: "Resolved", place: ActionPlace) -> ActionNode:
        averaged, of = averaged_weights(resolved)
        from xtrain.plan.groups import task_of
        from xtrain.planner.data.training import is_measured

        name = task_of(resolved.spec, self.dataset)
        task = {} if name is None else {"task": name}
        of += "" if name is None else f" with the adapter of task {name}"
        after = ((f"setup.data.{self.dataset}", "held-out rows"),)
        name = f"tick.eval.{self.dataset}"
        if resolved.spec.datasets[self.dataset].choices is not None:
            args = {"dataset": self.dataset, "rows": None, "choices": True, **averaged, **task}
            from xtrain.plan.parameters import flops_per_token

            row = flops_text(
                flops_per_token(resolved.architecture, resolved.batch.sequence) * resolved.batch.sequence / 3
            )
            does = f"accuracy on all questions of {self.dataset}, by the most probable choice{of}; {row} a row"
            return ActionNode("tick.eval", args, does, name=name, after=after)
        batches = self._batches(resolved.batch.steps)
        # Counted in the rows of a step, not of a microbatch: every layout then evaluates the same rows.
        rows = None if batches is None else batches * resolved.batch.rows
        reach = "all held-out rows" if rows is None else f"the first {plural(rows, 'held-out row')}"
        body, loss = resolved.spec.evaluation_step, resolved.spec.loss
        args = {"dataset": self.dataset, "rows": rows, **averaged, **task}
        what = "loss"
        if body is not None:
            args["user"] = body.call()
            of += f", by {body.function} of {body.module}"
        elif is_measured(resolved.spec, self.dataset):
            args["objective"] = loss.unit
            other = "objective" if loss.plain else loss.kind
            what = " and ".join(("loss", other, *(["its metrics"] if loss.measured else [])))
        if self.asks() is not None and resolved.spec.rollout is not None:
            args["answers"] = self.answers
            after += (("setup.prompts", "prompts"),)
            what += f" and the mean reward of a {self.answers} completion of each prompt"
            if (named := self.environment or resolved.spec.rollout.environment) is not None:
                args["environment"] = named
                what += f", an episode with {named}"
                after += ((f"setup.environment.{named}", "environment"),)
        if (curve := self._curve(resolved, place)) != "eval":
            args["curve"] = curve
            of += f", as {curve}/{self.dataset}"
        does = f"{what} on {reach} of {self.dataset}{of}"
        return ActionNode("tick.eval", args, does, name=name, after=after)

    def _curve(self, resolved: "Resolved", place: ActionPlace) -> str:
        """Return the first part of the names of the metrics: `eval` if the evaluation measures like the first declared
        one of its dataset, of ticks before events; else `final` at the end of a run, or the number of batches."""
        actions, steps = resolved.spec.actions, resolved.batch.steps
        first = next((one for _, one in actions if isinstance(one, type(self)) and one.dataset == self.dataset), self)
        if self.measures_like(first, steps):
            return "eval"
        batches = self._batches(steps)
        return "final" if place.event in ENDINGS else f"eval_{'all' if batches is None else batches}"

    def measures_like(self, other: Action, steps: int | None) -> bool:
        if not isinstance(other, type(self)) or other.dataset != self.dataset:
            return False
        asked = {(each.answers, each.environment) for each in (self, other) if each.answers != "none"}
        return self._batches(steps) == other._batches(steps) and len(asked) < 2

    def _batches(self, steps: int | None) -> int | None:
        """Return the number of batches. `auto` is a twentieth of the steps, at least 1; None (all held-out rows) while
        the number of steps is unknown."""
        if not isinstance(self.batches, Auto):
            return self.batches
        return None if steps is None else max(steps // 20, 1)

    @classmethod
    def commands(
        cls, declared: Sequence[Action], spec: Spec, training: tuple[str, ...]
    ) -> Iterator[tuple[str, Action, str]]:
        """Yield the evaluation command of each dataset that is trained or evaluated and has held-out rows: the
        evaluation that the spec declares first, so that losses are comparable; otherwise the default one."""
        evaluated = (name for action in declared if (name := action.held_out()) is not None)
        for name in dict.fromkeys((*training, *evaluated)):
            if spec.datasets[name].holdout.value:
                own = (action for action in declared if isinstance(action, cls) and action.dataset == name)
                yield f"eval {name}", next(own, cls(dataset=name)), ""

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        return f"eval {args['dataset']}"

    def idle(self, spec: Spec, ranks: int) -> dict[str, tuple[str, str]]:
        dataset, found = spec.datasets.get(self.dataset), {}
        if self.answers != "none" and spec.rollout is None:
            found["answers"] = ("there is no `rollout`, whose settings are used to sample answers", "leave it out")
        if self.answers == "none":
            found["environment"] = ("the model answers nothing", "add `answers = greedy`, or leave it out")
        if dataset is not None and dataset.choices is not None:
            found["batches"] = ("all questions are evaluated", "leave it out")
        return found

    def asks(self) -> str | None:
        return None if self.answers == "none" else self.dataset

    def asks_in(self) -> str | None:
        return self.environment

    def held_out(self) -> str:
        return self.dataset
