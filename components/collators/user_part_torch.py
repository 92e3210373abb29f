"""`collate.user`: a user-defined collator as a stage of the chain.

The collator is called once per row and sees only that row, so its result does not depend on how rows are assigned to
ranks and microbatches. Rows of padding are not passed to it. Its result is validated, because a mistake would otherwise
show, if at all, as a slightly wrong loss.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from hashlib import blake2b
from threading import Lock
from typing import Any

import numpy as np
from attrs import define, evolve

from xtrain.dsl.schema.data_components import LABELLED_SAMPLES, LOCAL_MICROBATCH, TENSOR_ROWS, TOKEN_SAMPLES
from xtrain.dsl.user_parts.kinds import GENERATOR
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.user_parts import UserPart, failures_of, part_of, spec_folder
from xtrain.runtime.feed.collate import Stage, TensorRow
from xtrain.runtime.feed.microbatch import Microbatch, Sample, Samples
from xtrain.runtime.feed.packing.stored_rows import UNKNOWN, RawRow
from xtrain.runtime.feed.user_collators import (
    Wrong,
    check_microbatch,
    check_row,
    check_samples,
    join_rows,
    kind_of,
    split_rows,
)

# First words of the random seed, so that training and evaluation are independent.
_TRAINING, _EVALUATION = 1, 2
# A thread may read ahead while another evaluates; user code need not be thread-safe.
_TURN = Lock()


@op("collate.user", gives="stages")
def user_collator(
    plan: Plan,
    node_id: str,
    stages: list[Stage],
    module: str,
    function: str,
    digest: str,
    arguments: dict[str, Any],
    takes: str,
    gives: str,
    variables: dict[str, str] | None = None,
) -> list[Stage]:
    """Append the stage. Raises PartChanged if the code differs from the planned code, PartFailed if it cannot be
    loaded."""
    options = {"module": module, "function": function, "digest": digest, "arguments": arguments}
    options["variables"] = variables or {}
    part = part_of("collator", options, spec_folder(plan.spec))
    calls = CollatorCalls(
        part=part,
        node=node_id,
        takes=takes,
        gives=gives,
        vocab=plan.architecture.vocab,
        seed=plan.seed,
        random=GENERATOR in inspect.signature(part.load()).parameters,
    )
    return [*stages, Stage(name=function, takes=takes, gives=gives, function=calls)]


@define(kw_only=True, frozen=True, eq=False)
class CollatorCalls:
    """Calls a collator row by row. It can be pickled: the user's code is loaded in the process that runs it."""

    part: UserPart
    node: str
    """Its node in the plan: two nodes of one name draw different numbers."""
    takes: str
    gives: str
    vocab: int
    """Vocabulary size, an exclusive bound of token ids."""
    seed: int
    random: bool
    """True if the collator asks for random numbers."""

    def __call__(self, value: Any) -> Any:
        """Apply the collator to all rows. Raises PartFailed if it raises or returns something invalid."""
        if isinstance(value, Samples):
            return self._of_samples(value)
        if isinstance(value, Microbatch):
            return join_rows([self._microbatch(row) for row in split_rows(value)])
        if self.gives in (TOKEN_SAMPLES, LABELLED_SAMPLES):
            cut = [
                self._samples(row, n, row.dataset, row.position) if row.segments else [] for n, row in enumerate(value)
            ]
            return _gathered(cut)
        return [self._row(row) for row in value]

    # Kinds of value ---------------------------------------------------------------------------------------------------

    def _of_samples(self, value: Samples) -> Samples:
        rows: list[list[Sample]] = [[] for _ in range(value.num_rows)]
        for sample in value.samples:
            # Labels are a view of the tokens: without a copy, writing to one would change the other.
            labels = None if sample.labels is None else sample.labels.clone()
            rows[sample.row].append(evolve(sample, labels=labels))
        samples = [
            self._samples(row, number, row[0].dataset, row[0].position) if row else []
            for number, row in enumerate(rows)
        ]
        return _gathered(samples)

    def _samples(self, shown: Any, row: int, dataset: int, position: int) -> list[Sample]:
        """Return the collator's samples for row `row` of the microbatch."""
        given = self._call(shown, position)
        with self._naming_row(position):
            if isinstance(given, str | bytes | Samples) or not hasattr(given, "__iter__"):
                raise Wrong(f"gave {kind_of(given)} instead of a list of samples")
        with _TURN, failures_of(self.part):
            samples = list(given)  # it may be a generator
        with self._naming_row(position):
            labelled = self.gives == LABELLED_SAMPLES
            return check_samples(samples, row, dataset, position, self.vocab, labelled=labelled)

    def _row(self, row: RawRow | TensorRow) -> Any:
        kind = TensorRow if self.gives == TENSOR_ROWS else RawRow
        if not row.segments:
            return kind(segments=[], dataset=row.dataset, position=row.position)
        given = self._call(row, row.position)
        with self._naming_row(row.position):
            return check_row(given, kind, row, self.vocab)

    def _microbatch(self, row: Microbatch) -> Microbatch:
        if not bool(row.real_BS.any()):
            return row
        position = UNKNOWN if row.place_B is None else int(row.place_B[0])
        given = self._call(row, position)
        with self._naming_row(position):
            return check_microbatch(given, row, self.vocab, local=self.gives == LOCAL_MICROBATCH)

    # Calls ------------------------------------------------------------------------------------------------------------

    def _call(self, shown: Any, position: int) -> Any:
        function = self.part.load()
        # Copies: a call that changes its list must not affect the next row.
        arguments = deepcopy(self.part.arguments)
        if self.random:
            arguments[GENERATOR] = self._generator(shown, position)
        with _TURN, failures_of(self.part):
            return function(shown, **arguments)

    def _generator(self, shown: Any, position: int) -> np.random.Generator:
        """Return the random generator of a row, seeded by its position in the run, which no layout changes; in
        evaluation, by its tokens."""
        whose = blake2b(self.node.encode(), digest_size=8)
        if position == UNKNOWN:
            for tokens in _token_arrays(shown):
                whose.update(np.ascontiguousarray(tokens, dtype=np.int64).data)
        kind, place = (_EVALUATION, 0) if position == UNKNOWN else (_TRAINING, position)
        return np.random.default_rng([kind, self.seed, place, int.from_bytes(whose.digest(), "little")])

    @contextmanager
    def _naming_row(self, position: int) -> Iterator[None]:
        """Turn Wrong into PartFailed, with the location of the function and the row."""
        try:
            yield
        except Wrong as wrong:
            whose = "a row of evaluation" if position == UNKNOWN else f"row {position:,} of the run"
            raise self.part.failed(f"{wrong} ({whose})") from None


def _gathered(rows: list[list[Sample]]) -> Samples:
    return Samples(num_rows=len(rows), samples=tuple(sample for row in rows for sample in row))


def _token_arrays(shown: Any) -> list[Any]:
    """Return the tokens of a row of any kind of value."""
    match shown:
        case Microbatch():
            return [shown.input_ids_BS]
        case RawRow() | TensorRow():
            return list(shown.segments)
    return [sample.tokens for sample in shown]
