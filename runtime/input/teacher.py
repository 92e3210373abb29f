"""`setup.teacher`: what a teacher has been found to hold probable, beside the tokens of a dataset."""

from pathlib import Path

from attrs import evolve

from xtrain.planner.plan import Plan
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.loading.prepared import PreparedDataset, cache_of
from xtrain.runtime.data.stores.taught import TaughtKey, missing, open_taught
from xtrain.runtime.ops import op

TEACHERS = "teachers"


@op("setup.teacher", gives="prepared")
def read_teacher(
    plan: Plan,
    prepared: dict[str, PreparedDataset],
    dataset: str,
    folder: str,
    top: int,
    temperature: float,
    precision: str,
    sequence: int,
) -> dict[str, PreparedDataset]:
    """Map what `xtrain data teach` has stored for a dataset. Raises DataError where that is not in the cache."""
    ready, cache = prepared[dataset], cache_of(plan) / TEACHERS
    key = TaughtKey.of(
        ready.store, Path(folder), cache, top=top, temperature=temperature, precision=precision, sequence=sequence
    )
    columns = open_taught(cache, key, ready.store.num_tokens)
    if columns is None:
        message = f"dataset {dataset}: the loss learns from {folder}, and {missing(cache, key)}"
        raise DataError(message, remedy=f"Run `xtrain data teach {plan.spec}` first.")
    store = evolve(ready.store, columns={**ready.store.columns, **columns})
    return {**prepared, dataset: evolve(ready, store=store)}
