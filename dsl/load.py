"""`load_spec`: the entry point of the language, from a path to a typed `Spec` or to all its mistakes."""

from collections.abc import Mapping, Sequence
from os import PathLike, fspath

from attrs import field

from xtrain.dsl.checking.overrides import PATH, Overriding, override_source, read_overrides
from xtrain.dsl.checking.structure import Structurer
from xtrain.dsl.checking.user_parts import DeclaredParts, check_unused, read_uses
from xtrain.dsl.diagnostics.diagnostic import MOST_ERRORS, Diagnostics, EnoughErrors, SourceText, SpecErrors
from xtrain.dsl.evaluation.evaluate import Evaluator
from xtrain.dsl.evaluation.merge import resolve
from xtrain.dsl.evaluation.statements import ReadStatements, read_spec
from xtrain.dsl.schema.component import Registry
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen


@frozen
class Loaded:
    """Result of `load_spec`. spec: None if and only if there are errors. sources: all files that were read, in order.

    draft: the valid part of a spec with errors, for further checks; else the spec. Invalid settings have a default or
    any value, and `unknown_settings` has their paths (see `UnknownSettings`). reading, parts: intermediate results,
    with the places of all names; None if nothing could be read.
    """

    spec: Spec | None
    diagnostics: Diagnostics
    sources: tuple[SourceText, ...] = field(repr=False)
    draft: Spec | None = field(default=None, repr=False)
    unknown_settings: frozenset[str] = frozenset()
    reading: ReadStatements | None = field(default=None, repr=False)
    parts: DeclaredParts = field(factory=DeclaredParts, repr=False)

    def resolved_text(self) -> str:
        """Return the spec with everything resolved, defaults included: itself a spec that loads to an equal `Spec`.

        Raises SpecErrors if there is no spec.
        """
        from xtrain.dsl.spec_text import resolved_text

        return resolved_text(self.require())

    def require(self) -> Spec:
        """Return the spec. Raises SpecErrors, which carries the diagnostics, if there is none."""
        if self.spec is None:
            raise SpecErrors(self.diagnostics)
        return self.spec


def load_spec(path: str | PathLike[str], sets: Sequence[str] = (), texts: Mapping[str, str] | None = None) -> Loaded:
    """Load the spec at `path` with `--set` texts (`path.to.field=value`) applied.

    texts: path → content of files that are not read from disk, as in an editor or a plan.

    Mistakes of a user, including unreadable files, are diagnostics and never raise.
    """
    diagnostics = Diagnostics(most=MOST_ERRORS)
    try:
        return _load(fspath(path), sets, texts, diagnostics)
    except EnoughErrors:
        return Loaded(None, diagnostics, ())


def _load(path: str, sets: Sequence[str], texts: Mapping[str, str] | None, diagnostics: Diagnostics) -> Loaded:
    """Load a spec. Raises EnoughErrors."""
    reading = read_spec(path, diagnostics, texts)
    if not reading.sources:
        return Loaded(None, diagnostics, ())
    evaluator = Evaluator(diagnostics)
    overrides = read_overrides(override_source(sets), diagnostics)
    overriding = Overriding(reading, evaluator, diagnostics)
    overrides = overriding.set_params(overrides)
    tree = resolve(reading, evaluator, diagnostics)
    parts = read_uses(tree.uses, path, len(reading.sources), diagnostics)
    for override in overrides:
        overriding.set_field(override, tree, parts)
    settled = not any(error.span and error.span.source.path == PATH for error in diagnostics.errors)
    structurer = Structurer(evaluator, diagnostics, {d.name.text: d for d in reading.definitions})
    structurer.parts = parts
    spec = structurer.spec(tree, path, reading.sources[0])
    _check_unused(reading, evaluator, diagnostics)
    if not diagnostics.has_errors:
        check_unused(structurer.parts, tree.uses, diagnostics)
    for package, why in Registry.faults.items():
        message = f"the components of the package {package} cannot be loaded: {why}"
        diagnostics.warning("W206", message, None, hint="update or uninstall the package")
    sources = tuple(reading.sources)
    if not diagnostics.has_errors:
        return Loaded(spec, diagnostics, sources, spec, reading=reading, parts=parts)
    unknown = frozenset(structurer.unknown.paths)
    return Loaded(None, diagnostics, sources, spec if settled else None, unknown, reading, parts)


def _check_unused(reading: ReadStatements, evaluator: Evaluator, diagnostics: Diagnostics) -> None:
    """Evaluate unused constants for their mistakes; warn about them if there are no errors.

    If there are errors, one of them may be a reference that could not be read.
    """
    unused = [definition for definition in reading.definitions if not definition.used]
    for definition in unused:
        evaluator.definition(definition)
    if reading.broken or diagnostics.has_errors:
        return
    for definition in unused:
        name, kind = definition.name, definition.kind
        code = "W201" if kind == "let" else "W202"
        message = f"nothing uses the `{kind}` `{name.text}`"
        diagnostics.warning(code, message, name.span, hint="remove it, or use it")
