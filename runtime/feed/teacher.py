"""Teacher probabilities of a store's tokens (`setup.teacher`), computed by `xtrain data teach`.

They are in the cache under the hash of everything that they depend on. Shapes: K tokens that the teacher finds most
probable, in descending order.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import asdict, define, evolve, frozen

from xtrain.dsl.schema.losses import TEACHER_IDS, TEACHER_LOGPROBS
from xtrain.plan.canonical import DATA, digest
from xtrain.plan.plan import Plan
from xtrain.plan.weight_files import CONFIG, WeightsUnreadable, read_weight_files
from xtrain.regular_files import read_json
from xtrain.runtime.base.errors import DataError, EnvironmentFault
from xtrain.runtime.base.files import PARTIAL_PREFIX as PARTIAL
from xtrain.runtime.base.files import STALE_SECONDS, publish, sweep, write
from xtrain.runtime.base.locks import HeldLock, hold
from xtrain.runtime.base.ops import op
from xtrain.runtime.feed.digests import FileDigests, file_digest, remembering
from xtrain.runtime.feed.prepared import PreparedDataset, cache_of
from xtrain.runtime.feed.token_store import META, TokenStore

FORMAT: Final = 1
INDEX: Final = "files.json"
PROGRESS: Final = "progress.json"
LOCK: Final = ".lock"
COLUMNS: Final = {TEACHER_IDS: np.int32, TEACHER_LOGPROBS: np.float32}
# Parts of a key that a person can change, each with its words for messages.
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
    """Identity of stored teacher probabilities.

    store: name of the tokens. weights: digest of the teacher's files. top: K. temperature: divisor of its logits.
    precision: its number format. window: positions after which it forgets earlier ones, as the rows of the run are no
    longer; 0 if no document is longer.
    """

    store: str
    weights: str
    top: int
    temperature: float
    precision: str
    window: int

    @property
    def name(self) -> str:
        """Name of the folder in the cache."""
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
        """Return the key; reads the teacher's files unless their digests are known. cache: folder of the digests.

        Raises DataError if they cannot be read.
        """
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
    """Return the hex digest of a model's config and weights. Raises DataError."""
    if not (folder / CONFIG).is_file():
        remedy = "Train, export or download it to that folder first; then run `xtrain data teach` with this spec."
        raise DataError(f"there is no model at {folder.as_posix()}, which the loss learns from", remedy=remedy)
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
    """Return the mapped, read-only columns of an intact entry, or None.

    int32 [tokens, K] ids, and float32 [tokens, K + 1] log-probabilities: of the ids, then of all other tokens together.
    """
    folder = cache / key.name
    widths = {TEACHER_IDS: key.top, TEACHER_LOGPROBS: key.top + 1}
    try:
        read_json(folder / META)
        flat = {name: np.asarray(np.memmap(folder / f"{name}.bin", dtype=COLUMNS[name], mode="r")) for name in COLUMNS}
        return {name: column.reshape(tokens, widths[name]) for name, column in flat.items()}
    except (OSError, ValueError):
        return None


def missing(cache: Path, key: TaughtKey) -> str:
    """Return why there is no entry: how the nearest existing one differs."""
    others = [other for meta in cache.glob(f"*/{META}") if (other := _covers(meta)) is not None]
    if not others:
        return "nothing is stored of its teacher"
    wanted = asdict(key)
    nearest = min(others, key=lambda other: sum(other.get(name) != value for name, value in wanted.items()))
    apart = [text.format(nearest.get(name)) for name, text in NAMED.items() if nearest.get(name) != wanted[name]]
    return f"the stored values are of {' and '.join(apart)}"


def _covers(meta: Path) -> Mapping[str, Any] | None:
    try:
        return read_json(meta)["covers"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


@define(eq=False)
class TaughtEntry:
    """An entry in progress, written by one process or by several ranks; unwritten values are 0.

    An interrupted one resumes from its last written progress. micro: rows of a microbatch. done: number of complete
    microbatches, the first ones.
    """

    cache: Path
    key: TaughtKey
    tokens: int
    micro: int
    done: int = 0

    @property
    def folder(self) -> Path:
        """Folder of the entry in progress. Swept when abandoned."""
        return self.cache / f"{PARTIAL}{self.key.name}"

    def begin(self) -> HeldLock:
        """Create the files, or resume with existing ones; returns the lock that keeps other processes from writing to
        them.

        Raises DataError if they cannot be written, or another process holds the lock.
        """
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            sweep(self.cache, f"{PARTIAL}*", STALE_SECONDS)
            self.folder.mkdir(exist_ok=True)
            lock = hold(self.folder, LOCK)
            self.done = self._known()
            if not self.done:
                for name, kind in COLUMNS.items():
                    size = self.tokens * self._widths[name] * np.dtype(kind).itemsize
                    (self.folder / f"{name}.bin").unlink(missing_ok=True)
                    with (self.folder / f"{name}.bin").open("wb") as file:
                        file.truncate(size)
        except EnvironmentFault as fault:
            raise DataError("another process computes it", remedy="Wait until that ends.", path=self.folder) from fault
        except OSError as error:
            raise DataError(f"cannot be written: {error.strerror}", path=self.cache) from error
        return lock

    def columns(self) -> dict[str, np.memmap]:
        """Map the columns for writing."""
        return {
            name: np.memmap(self.folder / f"{name}.bin", dtype=kind, mode="r+", shape=(self.tokens, self._widths[name]))
            for name, kind in COLUMNS.items()
        }

    def went_on(self, done: int) -> None:
        """Record that the first `done` microbatches are on the disk."""
        self.done = done
        write(self.folder / PROGRESS, json.dumps({"micro": self.micro, "done": done, "covers": asdict(self.key)}))

    def complete(self) -> None:
        """Publish the entry in the cache. Raises DataError."""
        try:
            for name in (PROGRESS, LOCK):
                (self.folder / name).unlink(missing_ok=True)
            meta = {"format": FORMAT, "tokens": self.tokens, "covers": asdict(self.key)}
            write(self.folder / META, json.dumps(meta))
            intact = lambda folder: open_taught(folder.parent, self.key, self.tokens) is not None  # noqa: E731
            publish(self.folder, self.cache / self.key.name, intact)
        except OSError as error:
            raise DataError(f"cannot be written: {error.strerror}", path=self.cache) from error

    @property
    def _widths(self) -> dict[str, int]:
        return {TEACHER_IDS: self.key.top, TEACHER_LOGPROBS: self.key.top + 1}

    def _known(self) -> int:
        """Return the number of complete microbatches that another process left."""
        try:
            progress = read_json(self.folder / PROGRESS)
            fits = progress["micro"] == self.micro and progress["covers"] == asdict(self.key)
            sizes = {name: (self.folder / f"{name}.bin").stat().st_size for name in COLUMNS}
            whole = {name: self.tokens * self._widths[name] * np.dtype(COLUMNS[name]).itemsize for name in COLUMNS}
            return int(progress["done"]) if fits and sizes == whole else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0


TEACHERS = "teachers"


@op("setup.teacher", gives="prepared", traced=False)
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
    """Map the stored probabilities of a dataset. Raises DataError if they are not in the cache."""
    ready, cache = prepared[dataset], cache_of(plan) / TEACHERS
    key = TaughtKey.of(
        ready.store, Path(folder), cache, top=top, temperature=temperature, precision=precision, sequence=sequence
    )
    columns = open_taught(cache, key, ready.store.num_tokens)
    if columns is None:
        message = f"dataset {dataset}: the loss learns from {folder}, but {missing(cache, key)}"
        raise DataError(message, remedy=f"Run `xtrain data teach {plan.spec}` first.")
    store = evolve(ready.store, columns={**ready.store.columns, **columns})
    return {**prepared, dataset: evolve(ready, store=store)}
