"""`generate { prompts = […] }`: generated texts."""

from typing import TYPE_CHECKING, ClassVar, Final

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS
from xtrain.dsl.schema.setting import (
    AUTO,
    Auto,
    at_least,
    between,
    cadence_setting,
    file_path,
    not_negative,
    seed_range,
    some_text,
)
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import NO_TEXTS, Architecture
from xtrain.plan.canonical import portable
from xtrain.plan.data import reads
from xtrain.plan.graph import ActionNode, ActionPlace, averaged_weights
from xtrain.text.units import plural

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved

# Cache positions for the text that a chat template adds around messages. A longer template enlarges the cache.
WRITTEN_BY_TEMPLATE: Final = 256


@ACTIONS.register()
@frozen
class Generate(PlannedAction):
    """`generate { prompts = […] }`: continue prompts to show the progress of training."""

    kind: ClassVar[str] = "generate"
    records = True
    uses_averages = True

    prompts: tuple[str, ...] = cadence_setting(
        "texts to continue; special tokens may be written by name", example='["def "]'
    )
    tokens: int = cadence_setting("maximum number of tokens to add to each prompt", default=64, check=at_least(1))
    temperature: float = cadence_setting(
        "sampling temperature; 0: always take the most probable token", default=0.8, check=not_negative
    )
    top_k: int | None = cadence_setting(
        "sample from this many most probable tokens; none: from all",
        default=None,
        check=at_least(1),
        example="50",
        added=True,
    )
    top_p: float = cadence_setting(
        "nucleus sampling: share of the probability to sample from", default=0.95, check=between(0.01, 1)
    )
    min_p: float = cadence_setting(
        "sample only tokens with at least this share of the highest probability; 0: from all",
        default=0.0,
        check=between(0, 1),
        added=True,
    )
    seed: int | Auto = cadence_setting(
        "seed of sampling; a prompt is sampled alike whatever the other prompts are; auto: the experiment's seed",
        default=AUTO,
        check=seed_range,
        added=True,
    )
    stop: tuple[str, ...] = cadence_setting(
        "texts that end a completion, without being part of it; special tokens may be written by name",
        default=(),
        check=some_text,
        example='["\\n\\n"]',
        added=True,
    )
    chat: str | Auto | None = cadence_setting(
        "format prompts as user messages by this chat template: `chatml`, `llama3`, `plain`, or the path of a Jinja "
        "template; auto: the template of the conversations trained on, else the tokenizer's template; none: continue "
        "prompts as plain text",
        default=None,
        check=file_path,
        example='"chatml"',
        added=True,
    )
    system: str = cadence_setting('with `chat`: system message; "": none', default="", added=True)
    task: str | None = cadence_setting(
        "in a run with tasks: task whose adapter is used", default=None, added=True, example='"sql"'
    )

    def faults(self, event: str, arch: Architecture, spec: Spec) -> dict[str, tuple[str, str, str]]:
        from xtrain.plan.groups import unfit_task

        if not arch.has_logits:
            return {"": ("X442", *NO_TEXTS)}
        unfit = unfit_task(arch, self.task)
        return {} if unfit is None else {"task" if self.task else "": ("X440", *unfit)}

    def node(self, resolved: "Resolved", place: ActionPlace) -> ActionNode:
        averaged, of = averaged_weights(resolved)
        of += f" with the adapter of task {self.task}" if self.task else ""
        args = {
            "prompts": list(self.prompts),
            "tokens": self.tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": resolved.spec.experiment.seed if isinstance(self.seed, Auto) else self.seed,
            "positions": self._positions(resolved),
            **averaged,
        }
        chat, turns = self.template(resolved.spec), ""
        if chat is not None:
            chat = portable(chat)
            turns = f", as user messages by template {'of the tokenizer' if chat == 'auto' else chat},"
        given = {
            "top_k": self.top_k,
            "min_p": self.min_p,
            "stop": list(self.stop),
            "chat": chat,
            "system": self.system if chat is not None else "",
            "task": self.task,
        }
        args |= {name: value for name, value in given.items() if value}
        from xtrain.planner.derive.further_models import cache_text

        does = f"continue {plural(len(self.prompts), 'prompt')}{turns} by {self.tokens} tokens{of}"
        return ActionNode("tick.generate", args, f"{does}; {cache_text(resolved, self._cache(resolved))}")

    def _positions(self, resolved: "Resolved") -> int:
        """Return the cache positions for each prompt. A tokenizer produces at most one token per byte, plus bos; the
        last added token is not read again. The model's context may be shorter."""
        written = WRITTEN_BY_TEMPLATE + len(self.system.encode()) if self.chat is not None else 0
        wanted = max((len(prompt.encode()) for prompt in self.prompts), default=0) + written + self.tokens
        limit = resolved.architecture.rope.limit
        return wanted if limit is None else min(wanted, limit)

    def _cache(self, resolved: "Resolved") -> int:
        """Return the bytes of the keys and values of all prompts on a rank."""
        from xtrain.planner.derive.further_models import cache_bytes

        return cache_bytes(resolved, len(self.prompts), self._positions(resolved))

    def allocates(self, resolved: "Resolved", states: int) -> int:
        return self._cache(resolved)

    def template(self, spec: Spec) -> str | None:
        if not isinstance(self.chat, Auto):
            return self.chat
        found = {reads(dataset).get("template") for dataset in spec.datasets.values()} - {None}
        return str(found.pop()) if len(found) == 1 else "auto"

    def idle(self, spec: Spec, ranks: int) -> dict[str, tuple[str, str]]:
        found: dict[str, tuple[str, str]] = {}
        if not self.temperature:
            why = "at temperature 0 the most probable token is always chosen"
            hint = "leave it out, or raise the temperature"
            found |= dict.fromkeys(("top_k", "top_p", "min_p", "seed"), (why, hint))
        if self.chat is None:
            found["system"] = ("prompts are continued as plain text", "leave it out, or set `chat`")
        return found
