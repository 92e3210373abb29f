"""`Findings`: verdicts of all rules on a spec, so that a user sees every mistake at once.

A rule has a verdict only if all settings are known that could change it. A setting with a mistake of its own is
unknown. An error that only follows from its stand-in value would send the user after a mistake that nobody made.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from sys import maxunicode
from typing import Any, Final, Literal, TypeVar

from xtrain.dsl.diagnostics.diagnostic import Diagnostic, Diagnostics, Fix, Span
from xtrain.dsl.schema.data import Dataset
from xtrain.dsl.schema.setting import Auto, settings_of
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

    def __init__(self, spec: Spec, unknown_settings: frozenset[str] = frozenset()) -> None:
        self.spec = spec
        self.unknown_settings = unknown_settings
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

        fix_at: a replacement for the text at the path, if it is certain. span: the place, if it differs from the
        path's.
        """
        self._report(rule, "error", code, path, message, hint, fix_at, span)

    def warn(self, rule: str, code: str, path: str, message: str, hint: str) -> None:
        """Report a problem that does not prevent a plan."""
        self._report(rule, "warning", code, path, message, hint)

    def mark_unknown(self, *paths: str) -> None:
        """Treat these settings as unknown from now on."""
        self.unknown_settings |= frozenset(paths)

    def _is_decidable(self, rule: str) -> bool:
        """Return True if all inputs of a rule are known."""
        unknown = self.unknown_settings
        return not (unknown and any(is_unknown(path, unknown) for path in rule_inputs(rule, self.spec)))

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
            self.unknown(rule, "it depends on an invalid setting")
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


# Inputs of rules ------------------------------------------------------------------------------------------------------

# Rule, or a pattern of rules with one `*` → the settings that it reads.
INPUTS: Final[dict[str, str]] = {}
# Rule → the module that declares it; a package's module that failed to import is imported again.
_DECLARED: Final[dict[str, str]] = {}
_Check = TypeVar("_Check", bound=Callable[..., Any])


def checks(rules: str, *, reads: str) -> Callable[[_Check], _Check]:
    """Declare the rules that a function checks, and the settings that can change their verdicts.

    rules: names separated by spaces; `*` stands for a name that the spec gives. reads: paths as in `Spec.origins`; `{}`
    is the name that `*` stands for, and `{world}` the settings of that group in `_group`.
    """

    def declare(check: _Check) -> _Check:
        for rule in rules.split():
            declared = _DECLARED.setdefault(rule, check.__module__)
            assert declared == check.__module__, f"the inputs of {rule} are declared twice"
            INPUTS[rule] = reads
        return check

    return declare


def rule_inputs(rule: str, spec: Spec) -> Iterator[str]:
    """Yield the paths of the settings that a rule reads in this spec; `*` for a rule that declares nothing."""
    fitting = [pattern for pattern in INPUTS if fnmatchcase(rule, pattern)]
    if not fitting:
        yield "*"
        return
    pattern = rule if rule in INPUTS else max(fitting, key=len)
    before, _, after = pattern.partition("*")
    name = rule[len(before) : len(rule) - len(after)]
    for path in _expanded(INPUTS[pattern].split(), spec):
        yield path.replace("{}", name)


def _expanded(paths: Iterable[str], spec: Spec) -> Iterator[str]:
    for path in paths:
        if path.startswith("{") and not path.startswith("{}"):
            yield from _expanded(_group(path.strip("{}"), spec), spec)
        else:
            yield path


def is_unknown(rule_input: str, unknown: frozenset[str]) -> bool:
    """Return True if a setting, or any setting that a pattern with `*` matches, is unknown."""
    if rule_input in unknown:
        return True
    plain, patterns = _sorted(unknown)
    if any(fnmatchcase(rule_input, path) or fnmatchcase(path, rule_input) for path in patterns):
        return True
    prefix, star, _ = rule_input.partition("*")
    begin, end = (bisect_left(plain, prefix + after) for after in ("", chr(maxunicode))) if star else (0, 0)
    return any(fnmatchcase(path, rule_input) for path in plain[begin:end])


@lru_cache(maxsize=1)
def _sorted(paths: frozenset[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the paths without `*` in order, and the other ones."""
    return sorted(path for path in paths if "*" not in path), tuple(path for path in paths if "*" in path)


def _group(name: str, spec: Spec) -> tuple[str, ...]:
    """Return the settings of a group shared by rules. Written settings depend on nothing; derived values depend on
    everything that they are derived from."""
    parallel, batch = spec.parallel, spec.batch
    groups = ("parallel.stack", f"parallel.{parallel.stack}.*") if parallel.execution.groups else ()
    copies = ("parallel.fsdp.replicate", *groups)
    match name:
        case "model":
            return ("model.*", "adapter", "adapter.*", "task", "task.*", "tokenizer.source", "loss.kind")
        case "evaluated":
            return ("every.*.actions.*.dataset", "on.*.actions.*.dataset")
        case "records":  # how the records of a dataset are read
            return tuple(
                f"dataset.{{}}.{name}"
                for name in settings_of(Dataset)
                if name not in ("bad_records", "deduplicate", "decontaminate", "min_tokens", "without")
            )
        case "all_records":
            return tuple(path.format("*") for path in _group("records", spec))
        case "datasets":
            return ("dataset", "dataset.*.name", "dataset.*.holdout")
        case "world":
            sizes = tuple(f"parallel.{axis}.size" for axis in ("pp", "fsdp", "tp", "cp"))
            context = ("parallel.cp.ring", "parallel.cp.ulysses")
            return (*sizes, *context, *copies, "{machines}")
        case "machines":
            return ("launch.nodes", "launch.ranks_per_node", "cluster.nodes", "cluster.devices")
        case "data_ranks":
            rest = ("{world}",) if isinstance(parallel.fsdp.size, Auto) else ()
            return ("parallel.fsdp.size", *copies, *rest)
        case "kv_heads":  # of layers with and without a window, if these differ
            known = settings_of(type(spec.model))
            own = ("full_kv_heads", "window", "full_layers") if "full_kv_heads" in known else ()
            return ("model.family", "model.heads", "model.kv_heads", *(f"model.{name}" for name in own))
        case "context":
            own = ("parallel.cp.size", "parallel.cp.ring", "parallel.cp.ulysses")
            derived = isinstance(parallel.cp.ring, Auto) and isinstance(parallel.cp.ulysses, Auto)
            return (*own, "{kv_heads}", "parallel.tp.size") if derived and parallel.cp.size > 1 else own
        case "ffn":
            return ("model.ffn", *(("model.dim",) if isinstance(spec.model.ffn, Auto) else ()))
        case "stages":
            return ("parallel.pp.size", "parallel.pp.stages_per_rank", "parallel.pp.schedule")
        case "accumulate":
            rest = ("batch.rows", "batch.micro", "{data_ranks}") if isinstance(batch.accumulate, Auto) else ()
            return ("batch.accumulate", *rest)
        case "rows":
            rest = ("batch.micro", "batch.accumulate", "{data_ranks}") if isinstance(batch.rows, Auto) else ()
            return ("batch.rows", *rest, *(("{ramp}",) if batch.ramp_from is not None else ()))
        case "ramp":
            return ("batch.ramp_from", "batch.ramp", "batch.rows", "experiment.budget")
        case "steps":
            return ("experiment.budget", *(("{tokens}",) if spec.experiment.budget.unit == "tokens" else ()))
        case "tokens":
            return ("batch.sequence", "{rows}") if spec.experiment.budget.unit != "epochs" else ()
        case "stops":
            return ("launch.time_limit", "launch.stop_at", "launch.stop_after", "launch.stop_file")
        case "decay":
            return tuple(f"scheduler.{name}" for name in spec.scheduler.lengths() if name != "warmup")
    raise AssertionError(name)
