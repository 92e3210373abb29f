"""What a teacher holds probable in the place of each token of a store: made once by `xtrain data teach`, kept in the
cache under the hash of everything it depends on.

Shapes: K tokens that the teacher holds most probable, the first most of all.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import asdict, frozen

from ....dsl.schema.losses import TEACHER_IDS, TEACHER_LOGPROBS
from ....planner.canonical import DATA, digest
from ....planner.weights.files import CONFIG, WeightsUnreadable, read_weight_files
from ..errors import DataError
from .cache_folder import make_folder
from .digests import FileDigests, file_digest, remembering
from .store import META, TokenStore

FORMAT: Final = 1
INDEX: Final = "files.json"
COLUMNS: Final = {TEACHER_IDS: np.int32, TEACHER_LOGPROBS: np.float32}
# What of a key a person can change, and what each is called where it differs.
NAMED: Final = {
    "store": "another dataset, or one that has changed",
    "weights": "another teacher, or one that has changed",
    "top": "top = {}",
    "temperature": "temperature = {:g}",
    "precision": "a teacher that computes in {}",
    "window": "rows of another length, by which long documents are cut",
}


@frozen(kw_only=True)
class TaughtKey:
    """store: name of the tokens. weights: digest of the teacher's files. top: K. temperature: what its logits are
    divided by. precision: the number format that it computes in. window: positions after which it forgets what was
    before, as the rows of the run are no longer; 0 where no document is longer."""

    store: str
    weights: str
    top: int
    temperature: float
    precision: str
    window: int

    @property
    def name(self) -> str:
        """Of the folder in the cache."""
        return digest({"format": FORMAT, **asdict(self)}, DATA, size=16)

    @classmethod
    def of(
        cls,
        store: TokenStore,
        teacher: Path,
        cache: Path,
        *,
        top: int,
        temperature: float,
        precision: str,
        sequence: int,
    ) -> "TaughtKey":
        """Reads the files of the teacher, unless they are known. cache: where what is known of files is kept. Raises
        DataError where they cannot be read."""
        longest = int(store.lengths().max(initial=0)) - 1
        return cls(
            store=store.key,
            weights=model_digest(teacher, cache),
            top=top,
            temperature=float(temperature),
            precision=precision,
            window=sequence if longest > sequence else 0,
        )


def model_digest(folder: Path, cache: Path) -> str:
    """Hex digest of the config and the weights of a model. Raises DataError."""
    try:
        names = read_weight_files(str(folder)).files
    except WeightsUnreadable as problem:
        raise DataError(str(problem), remedy=f"{problem.hint[0].upper()}{problem.hint[1:]}.") from problem
    digests = FileDigests(cache / INDEX)
    paths = [folder / name for name in (CONFIG, *sorted(names))]
    with remembering(digests):
        digests.learn(paths)
        return digest([file_digest(path) for path in paths], DATA, size=16)


def open_taught(cache: Path, key: TaughtKey, tokens: int) -> dict[str, np.ndarray] | None:
    """The columns of an intact entry: int32 [tokens, K] ids, and float32 [tokens, K + 1] log-probabilities, of the
    others together behind those of the ids; mapped and read-only. None where there is none."""
    folder = cache / key.name
    widths = {TEACHER_IDS: key.top, TEACHER_LOGPROBS: key.top + 1}
    try:
        json.loads((folder / META).read_bytes())
        found = {name: np.asarray(np.memmap(folder / f"{name}.bin", dtype=COLUMNS[name], mode="r")) for name in COLUMNS}
        return {name: column.reshape(tokens, widths[name]) for name, column in found.items()}
    except (OSError, ValueError):
        return None


def missing(cache: Path, key: TaughtKey) -> str:
    """Why there is no entry, as far as those tell that there are: of the nearest, what it was made for."""
    others = [other for meta in cache.glob(f"*/{META}") if (other := _covers(meta)) is not None]
    if not others:
        return "nothing of its teacher is stored"
    wanted = asdict(key)
    nearest = min(others, key=lambda other: sum(other.get(name) != value for name, value in wanted.items()))
    apart = [text.format(nearest.get(name)) for name, text in NAMED.items() if nearest.get(name) != wanted[name]]
    return f"what is stored is of {' and '.join(apart)}"


def _covers(meta: Path) -> Mapping[str, Any] | None:
    try:
        return json.loads(meta.read_bytes())["covers"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store_taught(cache: Path, key: TaughtKey, tokens: int, fill: Callable[[Mapping[str, np.ndarray]], None]) -> None:
    """Make an entry that `fill` writes into; it is there as a whole or not at all. What is not written is 0.

    Raises DataError where the cache cannot be written.
    """

    def write(folder: Path) -> None:
        widths = {TEACHER_IDS: key.top, TEACHER_LOGPROBS: key.top + 1}
        columns = {
            name: np.memmap(folder / f"{name}.bin", dtype=kind, mode="w+", shape=(tokens, widths[name]))
            for name, kind in COLUMNS.items()
        }
        fill(columns)
        for column in columns.values():
            column.flush()
        (folder / META).write_text(json.dumps({"format": FORMAT, "tokens": tokens, "covers": asdict(key)}))

    try:
        make_folder(cache / key.name, write, lambda folder: open_taught(folder.parent, key, tokens) is not None)
    except OSError as error:
        raise DataError(f"cannot be written: {error.strerror}", path=cache) from error
