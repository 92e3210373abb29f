"""`Findings`: verdicts of all rules on a spec, so that a user sees every mistake at once."""

from collections.abc import Callable
from typing import Literal

from xtrain.dsl.diagnostics.diagnostic import Diagnostic, Diagnostics, Fix, Span
from xtrain.dsl.spec import Origin, Spec
from xtrain.plan.plan import Check


def origin_of(spec: Spec, path: str) -> Origin | None:
    """Return the place where `path` was written; for an unwritten value, the nearest enclosing block.

    `parallel.cp.ring` falls back to `parallel.cp`, then `parallel`.
    """
    while path:
        origin = spec.origins.get(path)
        if origin is not None and origin.span is not None:
            return origin
        path = path.rpartition(".")[0]
    return None


class Findings:
    """Verdicts in the order of the checks. A rule reports exactly one of passed, warn, fail."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.checks: list[Check] = []
        self.diagnostics = Diagnostics()

    @property
    def failed(self) -> bool:
        return any(check.status == "fail" for check in self.checks)

    def fails(self, rule: str) -> bool:
        """Return True if a rule is broken."""
        return any(check.id == rule and check.status == "fail" for check in self.checks)

    def passed(self, rule: str, evidence: str) -> None:
        """Report that the rule holds; `evidence` gives the numbers that show it."""
        self.checks.append(Check(id=rule, status="pass", evidence=evidence))

    def unknown(self, rule: str, evidence: str) -> None:
        """Report that the rule cannot be decided before the run."""
        self.checks.append(Check(id=rule, status="unknown", evidence=evidence))

    def fail(
        self,
        rule: str,
        code: str,
        path: str,
        message: str,
        hint: str,
        fix_at: Callable[[Span], Fix | None] | None = None,
        span: Span | None = None,
    ) -> None:
        """Report that the rule is broken: `message` names the field and the numbers, `hint` a value that would work.

        fix_at: a replacement for the text at the path, if it is certain. span: the place, if it is not that of the
        path.
        """
        self._report(rule, "error", code, path, message, hint, fix_at, span)

    def warn(self, rule: str, code: str, path: str, message: str, hint: str) -> None:
        """Report a problem that does not prevent a plan."""
        self._report(rule, "warning", code, path, message, hint)

    def _is_decidable(self, rule: str) -> bool:
        """Return True if all inputs of a rule are known."""
        return True

    def _report(
        self,
        rule: str,
        severity: Literal["error", "warning"],
        code: str,
        path: str,
        message: str,
        hint: str,
        fix_at: Callable[[Span], Fix | None] | None = None,
        at: Span | None = None,
    ) -> None:
        if not self._is_decidable(rule):
            self.unknown(rule, "it rests on a setting that is wrong")
            return
        origin = origin_of(self.spec, path)
        span = at or (origin.span if origin else None)
        notes = origin.notes if origin and at is None else ()
        fix = fix_at(span) if fix_at is not None and span is not None else None
        self.diagnostics.add(
            Diagnostic(severity=severity, code=code, message=message, span=span, hint=hint, notes=notes, fix=fix)
        )
        check = Check(
            id=rule,
            status="fail" if severity == "error" else "warn",
            evidence=f"{message}; {hint}",
            code=code,
            place=str(span) if span else "",
        )
        self.checks.append(check)
