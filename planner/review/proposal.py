"""Review of a proposed change of a plan: its figures, the rules of a policy that it breaks, and a comment for a pull
request."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Final

from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.blocks import REQUIRED
from xtrain.dsl.schema.run import Policy
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.plan import Plan, Provenance
from xtrain.plan.serialise import PlanError
from xtrain.plan.views import headroom, no_times
from xtrain.planner.review.diff import EFFECTS, SAYS, Amount, PlanDifference, amount_row
from xtrain.planner.review.resumable import KINDS
from xtrain.text.units import plural

MOST_VALUES: Final = 40
LONGEST_VALUE: Final = 80
# A spec that lacks nothing but a policy.
_WITHOUT_POLICY: Final = "\n".join((*REQUIRED.values(), 'dataset records { source = jsonl("records.jsonl") }', ""))
# Setting of a policy → amount and its unit, and 1 if it is the most, −1 if it is the least.
_LIMITS: Final = {
    "max_cost": ("cost", "count", 1),
    "max_time": ("time", "seconds", 1),
    "max_step_time": ("time of a step", "seconds", 1),
    "max_loss": ("predicted loss", "nats", 1),
    "min_headroom": ("headroom", "share", -1),
}


@frozen(kw_only=True)
class Proposal:
    """Change from plan `a` to plan `b` of the difference, and whether it keeps a policy.

    losses: predicted ones, None without a law. policy: None if there is none. uncertified: why `b` has no valid
    certificate; empty if it has one.
    """

    difference: PlanDifference
    losses: tuple[float | None, float | None] | None
    policy: Policy | None
    uncertified: str

    @property
    def amounts(self) -> tuple[Amount, ...]:
        """Figures of both plans: the figures of a diff, memory, and the predicted loss."""
        pairs = [_figures(plan) for plan in (self.difference.a, self.difference.b)]
        own = [Amount(name=name, unit=unit, before=pairs[0][name, unit], after=pairs[1][name, unit])
               for name, unit in pairs[0]]  # fmt: skip
        if self.losses is not None:
            own.append(Amount(name="predicted loss", unit="nats", before=self.losses[0], after=self.losses[1]))
        found = [*own, *self.difference.amounts]
        return tuple(each for each in found if each.before is not None or each.after is not None)

    def rules(self) -> Iterator[tuple[str, str, bool]]:
        """Yield each rule of the policy, what the changed plan has, and whether that keeps the rule. An unknown figure
        keeps no rule."""
        policy = self.policy
        if policy is None:
            return
        amounts = {each.name: each for each in self.amounts}
        for name, (figure, unit, sign) in _LIMITS.items():
            limit = getattr(policy, name)
            if limit is None:
                continue
            amount, most = amounts.get(figure), _number(limit)
            spelled = amount_row(Amount(name=figure, unit=unit, before=None, after=most))[2]
            rule = f"{figure} {'at most' if sign > 0 else 'at least'} {spelled}"
            if amount is None or amount.after is None:
                yield rule, f"unknown: {self._why_unknown(figure)}", False
            else:
                yield rule, amount_row(amount)[2], sign * amount.after <= sign * most
        verdict = self.difference.verdict
        if policy.resume != "any":
            kept = KINDS.index(verdict.kind) <= KINDS.index(policy.resume)
            yield f"resume: {policy.resume} or better", verdict.kind, kept
        if policy.certificate == "required":
            yield "certificate required", self.uncertified or "valid", not self.uncertified

    def _why_unknown(self, figure: str) -> str:
        plan = self.difference.b
        if figure == "predicted loss":
            return "give a law with --law" if self.losses is None else "the data has not been counted"
        if figure == "headroom":
            return "`cluster` has no memory"
        if plan.estimates.times is None:
            return no_times(plan)
        if plan.cluster.price is None and figure == "cost":
            return "`cluster` has no price"
        return "the data has not been counted"

    @property
    def holds(self) -> bool:
        """True if the change keeps the policy, or there is none."""
        return all(kept for *_, kept in self.rules())

    def policy_lines(self) -> list[str]:
        """Return a line for each rule, and for a policy that the change itself changes."""
        if self.policy is None:
            lines = ["no policy: BASE has no block `policy`"]
        else:
            marks = {True: "ok     ", False: "BROKEN "}
            lines = [f"{marks[kept]} {rule}: {value}" for rule, value, kept in self.rules()]
        if self.changed_rules:
            lines.append(
                f"note    the policy itself is changed ({', '.join(self.changed_rules)}); it applies afterwards"
            )
        return lines

    @property
    def changed_rules(self) -> list[str]:
        """Settings of the policy that the change changes."""
        return [each.path for each in self.difference.values if each.path.startswith("policy.")]


def policy_of(plan: Plan) -> Policy | None:
    """Return the policy that a plan was made with; None if it has none. Raises PlanError."""
    said = {each.path.partition(".")[2]: each.value for each in plan.provenance if each.path.startswith("policy.")}
    if not said:
        return None
    if (signers := said.get("signers", "none")) != "none":
        said["signers"] = json.dumps(signers, ensure_ascii=False)
    text = "".join(f"  {name} = {value}\n" for name, value in said.items())
    policy, diagnostics = read_policy("(policy)", {"(policy)": f"{_WITHOUT_POLICY}policy {{\n{text}}}\n"})
    if policy is None:  # a plan whose policy cannot be read must not count as one without
        raise PlanError(
            "X704", f"the policy of the plan cannot be read: {next(iter(diagnostics)).message}", "plan the spec again"
        )
    return policy


def read_policy(path: str, texts: Mapping[str, str] | None = None) -> tuple[Policy | None, Diagnostics]:
    """Read the policy of a file: a spec, or a file with a block `policy` alone; None if it has none."""
    loaded = load_spec(path, (), texts)
    if loaded.spec is None and texts is None:
        text = f'{_WITHOUT_POLICY}include "{path}"\n'
        alone = load_spec("(policy)", (), {"(policy)": text})
        if alone.spec is not None:
            return alone.spec.policy, alone.diagnostics
    return (None if loaded.spec is None else loaded.spec.policy), loaded.diagnostics


def _figures(plan: Plan) -> dict[tuple[str, str], float | None]:
    free, need = headroom(plan).free, plan.estimates.fullest.memory.total_bytes
    device = plan.cluster.memory_bytes
    sent = max(sum(each.bytes for each in one.traffic) for one in plan.estimates.classes)
    return {
        ("memory of the fullest rank", "bytes"): need,
        ("headroom", "share"): None if free is None or not device else free / device,
        ("sent by a rank in a step", "bytes"): sent,
    }


def _number(limit: float | Quantity) -> float:
    if not isinstance(limit, Quantity):
        return limit
    return limit.value / 100 if limit.unit == "%" else limit.value


def _head(name: str, said: str) -> list[str]:
    return [f"<!-- xtrain review {_comment_text(name)} -->", f"### {_code(name)}: {said}", ""]


def comment_on_errors(name: str, diagnostics: Diagnostics) -> str:
    """Return the comment on a changed spec that has no plan."""
    lines = [f"- {each.code}: {_text(each.message)}" + (f" ({_text(each.hint)})" if each.hint else "")
             for each in diagnostics.errors]  # fmt: skip
    return "\n".join([*_head(name, "no plan"), *lines]) + "\n"


def comment(proposal: Proposal, name: str) -> str:
    """Return the comment for a pull request, in the Markdown of GitHub and GitLab. name: of the changed spec."""
    found = proposal.difference
    verdict, broken = found.verdict, [rule for rule in proposal.rules() if not rule[-1]]
    said = "no policy" if proposal.policy is None else plural(len(broken), "broken rule") if broken else "policy kept"
    lines = _head(name, said)
    if proposal.policy is not None:
        lines += ["| policy | | this change |", "| --- | --- | --- |"]
        lines += [
            f"| {_text(rule)} | {'✅' if kept else '❌'} | {_text(value)} |" for rule, value, kept in proposal.rules()
        ]
        lines.append("")
    rows = [amount_row(each) for each in proposal.amounts]
    if not found.differ:
        lines += [f"Both plans do the same ({_code(found.a.id)}).", ""]
    lines += ["| | base | head | change |", "| --- | ---: | ---: | --- |"]
    lines += [f"| {' | '.join(map(_text, row))} |" for row in rows if row[3] or row[0] in _ALWAYS]
    condition = "" if verdict.certain else ", unless the data is in fact the same"
    says = SAYS[verdict.kind].replace(" of A", " from before").replace(" under B", " after the change")
    says = says.replace(" under A", " before it")
    lines += ["", f"**Resume: {verdict.kind}.** {says[0].upper()}{says[1:]}{condition}."]
    if verdict.kind in ("safe", "resharded"):
        lines[-1] += f" {EFFECTS[verdict.effect].replace('under B', 'with the change')}"
    lines += [f"- {_code(reason.path)}: {_text(reason.text)}" for reason in verdict.reasons[:8]]
    lines += ["", *_value_lines(found)]
    if changed := proposal.changed_rules:
        names = ", ".join(map(_code, changed))
        lines += ["", f"The policy itself is changed ({names}); this review is by the policy from before."]
    lines += ["", f"Plan {_code(found.a.id)} → {_code(found.b.id)}: "
              f"{'certified' if not proposal.uncertified else 'not certified'}."]  # fmt: skip
    return "\n".join(lines) + "\n"


_ALWAYS: Final = ("memory of the fullest rank", "headroom", "time of a step", "cost", "predicted loss")


def _value_lines(found: PlanDifference) -> list[str]:
    if not found.values:
        return ["No value differs."]
    lines = ["<details><summary>" + plural(len(found.values), "changed value") + "</summary>", ""]
    lines += ["| value | base | head |", "| --- | --- | --- |"]
    for each in found.values[:MOST_VALUES]:
        lines.append(f"| {_code(each.path)} | {_value(each.before)} | {_value(each.after)} |")
    if left := len(found.values) - MOST_VALUES:
        lines += [f"| and {left} more | | |"] if left > 0 else []
    return [*lines, "", "</details>"]


def _value(entry: Provenance | None) -> str:
    return "–" if entry is None else _code(entry.value)


def _code(text: str) -> str:
    """Return a text as code in a table: nothing in it is read as Markdown, a mention or a link."""
    plain = " ".join(text.split())
    plain = plain if len(plain) <= LONGEST_VALUE else f"{plain[: LONGEST_VALUE - 1]}…"
    return f"`{plain.replace('`', 'ˋ').replace('|', chr(92) + '|')}`" if plain else "–"


def _text(text: str) -> str:
    """Return a text of a table, in which no character starts markup, a mention or a tag."""
    return re.sub(r"[\\|<>*_~\[\]@#`&]", lambda found: f"&#{ord(found[0])};", " ".join(text.split()))


def _comment_text(text: str) -> str:
    return "".join(each for each in text if each.isalnum() or each in "/._ ")
