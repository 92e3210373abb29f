"""What is wrong with a dimension of a sweep by itself: a setting that is not there, a value that it does not take."""

from collections.abc import Iterable, Sequence

from attrs import evolve

from xtrain.dsl.diagnostics.diagnostic import Diagnostic, Diagnostics
from xtrain.dsl.dimension import Dimension
from xtrain.dsl.load import Loaded, load_spec
from xtrain.dsl.overrides.paths import PATH
from xtrain.planner.findings import origin_of

_MOST = 8  # values of a dimension that are looked at; a point with a further one has no plan, which says why


def check_dimensions(loaded: Loaded, sets: Sequence[str] = ()) -> Diagnostics:
    """Load the spec with the values at the ends of all dimensions, and report what of it each of these is to blame for.

    sets: the `--set` texts that the spec was loaded with.
    """
    found = Diagnostics()
    spec = loaded.spec
    if spec is None or spec.sweep is None:
        return found
    over: dict[str, Dimension] = spec.sweep.over
    ends = {name: dimension.ends() for name, dimension in over.items()}
    texts = {source.path: source.text for source in loaded.sources}
    seen: set[tuple[str, str, str]] = set()
    for place in range(min(max(map(len, ends.values()), default=0), _MOST)):
        point = [f"{name}={values[min(place, len(values) - 1)]}" for name, values in ends.items()]
        for each in load_spec(loaded.sources[0].path, (*sets, *point), texts).diagnostics.errors:
            name = dimension_of(each, over)
            if name is None or (name, each.code, each.message) in seen:
                continue
            seen.add((name, each.code, each.message))
            origin = origin_of(spec, f"sweep.{name}")
            found.add(evolve(each, span=origin.span if origin else None, fix=None))
    return found


def dimension_of(diagnostic: Diagnostic, over: Iterable[str]) -> str | None:
    """The dimension whose `--set` text a diagnostic is about."""
    place = diagnostic.span
    if place is None or not place.text or place.source.path != PATH:
        return None
    text = place.source.text
    line = text[text.rfind("\n", 0, place.start) + 1 :].partition("\n")[0]
    return next((name for name in over if line.startswith(f"{name}=")), None)
