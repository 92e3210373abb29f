"""`xtrain init JOB --model … --data …`: a spec for a job, from what the model's folder and the data hold."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from string import Template
from typing import Any, Final

from xtrain.cli.verb import Refused
from xtrain.dsl.checking.config_json import SnapshotMissing, find_snapshot, names_repo
from xtrain.dsl.diagnostics.diagnostic import SourceText
from xtrain.dsl.importing.draft import identifier
from xtrain.dsl.schema.data_components import SOURCES, source_of, tokenizer_kind
from xtrain.dsl.schema.model import snapshot_text
from xtrain.dsl.spec_text import value_text
from xtrain.dsl.starter import JobTemplate
from xtrain.dsl.syntax.format import format_source
from xtrain.lazy_attrs import frozen
from xtrain.plan.data import TokenizerUnreadable
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.sources.fields import settings_for
from xtrain.runtime.feed.sources.files import array_units, blocks, matched, opened, unreadable
from xtrain.runtime.feed.sources.tables import pyarrow

SAMPLED: Final = 256
"""Records that are read for the fields and the lengths."""
CHARACTERS: Final = 3.0
"""Characters of a token, at least: tokenizers of published models have about 4 for English."""
SHORTEST, LONGEST, LONGEST_TEXT = 128, 8192, 4096
"""Bounds of `sequence`, and its maximum for texts."""
GROUP, COMPLETION = 8, 256
"""Completions of a question, and their tokens."""
FEW: Final = 200
"""Fewer records are not held out."""
MARKS: Final = {"chatml": "<|im_start|>", "llama3": "<|start_header_id|>"}
TEXTS: Final = ("text", "content", "body", "document", "code")
_WANTED: Final = {
    "answers": "conversations (`messages`), a prompt with a response, or texts",
    "pairs": "`chosen` and `rejected`",
    "questions": "a prompt and its answer",
    "texts": "a text",
}


def job_spec(job: str, of: JobTemplate, name: str, path: str, model: str, data: list[str], teacher: str | None) -> str:
    """Return the text of a spec. of: template of the job. Raises Refused."""
    records, template = of.records, of.text
    label, tokenizer, context = _model(model)
    if ("$teacher" in template) != (teacher is not None):
        problem = "needs --teacher FOLDER" if teacher is None else "takes no --teacher"
        raise Refused(2, f"xtrain init: `{job}` {problem}")
    if not data and records != "none":
        raise Refused(2, f"xtrain init: `{job}` needs --data: a file, folder or pattern")
    read = [_Data.read(place, records, tokenizer) for place in data] if records != "none" else []
    named = {_unused(each.name, [other.name for other in read[:number]]): each for number, each in enumerate(read)}
    tokens, on_gpu = min(COMPLETION, context // 2), Path("/dev/nvidia0").exists()
    text = Template(template).substitute(
        name=name,
        path=path,
        model=label,
        teacher=value_text(teacher or ""),
        group=GROUP,
        tokens=tokens,
        rows=32 if records == "texts" else 8,
        sequence=_sequence(records, max((each.characters for each in read), default=0), context, tokens),
        data="\n\n".join([*(each.text(own) for own, each in named.items()), *_mixture(list(named))]),
        evaluations="".join(f"\nevery 10% eval {own} {{ batches = 8 }}" for own in named if named[own].held_out),
        compute="bf16" if on_gpu else "auto",
        compile="\ncompile" if on_gpu else "",
    )
    return format_source(SourceText(path, text))


def _mixture(names: list[str]) -> list[str]:
    return [f"mixture {{ {', '.join(f'{name} = 1' for name in names)} }}"] if len(names) > 1 else []


def _unused(name: str, names: list[str]) -> str:
    return f"{name}_{names.count(name) + 1}" if name in names else name


def _sequence(records: str, characters: int, context: int, tokens: int) -> int:
    """Return the length of a row: the context for texts, all completions of a question, else a long record.

    characters: of a long record. tokens: of a completion.
    """
    if records == "texts":
        return min(context, LONGEST_TEXT)
    needed, most = characters / CHARACTERS, min(context, LONGEST)
    if records == "questions":
        needed, most = GROUP * (needed + tokens), GROUP * context
    sequence = SHORTEST
    while sequence < needed:
        sequence *= 2
    return min(sequence, most)


def _model(place: str) -> tuple[str, str, int]:
    """Return the label of a model, the source of its tokenizer, and its context in tokens."""
    folder, label, source = place, value_text(place), place
    if not Path(place).is_dir():
        if not names_repo(place):
            raise Refused(2, f"xtrain init: there is no model folder {place}; `xtrain fetch org/name` downloads one")
        try:
            folder, commit = find_snapshot(place, "main")
        except SnapshotMissing as problem:
            raise Refused(2, f"xtrain init: {problem}; {problem.hint}") from None
        label, source = f'hub("{place}")', snapshot_text(place, commit)
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config") or config
        context = config.get("max_position_embeddings") or config.get("n_positions")
    except (OSError, ValueError, AttributeError):
        raise Refused(2, f"xtrain init: {folder} has no readable config.json: give the folder of a model") from None
    return label, source, context if isinstance(context, int) and context > 1 else LONGEST


@frozen
class _Data:
    """A dataset. settings: its source and fields. characters: of a long record."""

    name: str
    settings: tuple[str, ...]
    characters: int
    held_out: bool

    @classmethod
    def read(cls, place: str, kind: str, tokenizer: str) -> "_Data":
        """Read the first records of files, a folder or a pattern. Raises Refused."""
        try:
            source, patterns, files = _files(place)
            records = list(islice(_records(source, files), SAMPLED))
        except DataError as error:
            if names_repo(place) and not Path(place).exists():
                hint = f"`xtrain fetch {place} --dataset` downloads it, and names the folder"
                raise Refused(2, f"xtrain init: there is no file {place}; {hint}") from None
            raise Refused(3 if "pip install" in (error.remedy or "") else 2, f"xtrain init: {error}") from None
        call = f"source = {source}({', '.join(map(value_text, patterns))})"
        settings = [call, *_fields(place, kind, {name for record in records for name in record})]
        if kind != "texts" and any(each.startswith(("messages", "response", "chosen", "prompt")) for each in settings):
            settings += _template(tokenizer)
        if held_out := len(records) >= FEW and kind != "questions":
            settings.append("holdout = 2%")
        if kind == "questions":
            settings.append("oversized = skip")
        lengths = sorted(len(json.dumps(each, ensure_ascii=False, default=str)) for each in records)
        characters = lengths[int(0.95 * len(lengths))] if lengths else 0
        return cls(identifier(place, "data"), tuple(settings), characters, held_out)

    def text(self, name: str) -> str:
        return "\n".join([f"dataset {name} {{", *(f"  {setting}" for setting in self.settings), "}"])


def _fields(place: str, kind: str, fields: set[str]) -> list[str]:
    """Return the settings that name the fields of records. Raises Refused."""
    found = settings_for(fields)
    usual = found.split(", ") if found else []
    names = dict(setting.split(" = ") for setting in usual)
    if kind == "texts" and (text := next((name for name in TEXTS if name in fields), None)) is not None:
        return [] if text == "text" else [f"text = {value_text(text)}"]
    if kind == "pairs" and "chosen" in names:
        return usual
    if kind == "questions" and "response" in names:
        response = '"answer"' if "answer" in fields else names["response"]
        return [f"prompt = {names['prompt']}", f"response = {response}"]
    if kind == "answers" and "chosen" not in names and (usual or "text" in fields):
        return usual
    shown = ", ".join(sorted(fields)) or "none"
    raise Refused(2, f"xtrain init: records of {place} need {_WANTED[kind]}; their fields are: {shown}")


def _template(tokenizer: str) -> list[str]:
    """Return the template of conversations if the tokenizer has none: the one whose marks are tokens of it."""
    kind = tokenizer_kind(tokenizer)
    try:
        if kind.template(tokenizer) is not None:
            return []
        whole = kind.whole(tokenizer) or ()
    except TokenizerUnreadable:
        return []  # the plan reports it
    name = next((name for name, mark in MARKS.items() if mark in whole), "plain")
    return [f'template = "{name}"']


def _files(place: str) -> tuple[str, list[str], tuple[Path, ...]]:
    """Return the source of data, its patterns, and its files. Raises DataError."""
    if not Path(place).is_dir():
        files = matched((place,), Path())
        return _source(place, {source_of(files[0].name)}), [place], files
    files = matched((f"{place}/**/*.*",), Path())
    kinds = {source_of(file.name) for file in files}
    kind = _source(place, kinds if len(kinds) == 1 else {each for each in kinds if SOURCES[each].ends != ("",)})
    files = tuple(file for file in files if source_of(file.name) == kind)
    ends = sorted({"".join(file.suffixes[-1 - (file.suffix in (".gz", ".zst")) :]) for file in files})
    return kind, [f"{Path(place).as_posix()}/**/*{end}" for end in ends], files


def _source(place: str, kinds: set[str]) -> str:
    """Return the only kind of source. Raises Refused."""
    if len(kinds) != 1:
        raise Refused(2, f"xtrain init: {place} has {' and '.join(sorted(kinds))} files; give a pattern for each")
    (kind,) = kinds
    if SOURCES[kind].records == "tokens":
        raise Refused(2, f"xtrain init: {place} has token ids; write `source = {kind}(…)` into a spec of your own")
    return kind


def _records(source: str, files: tuple[Path, ...]) -> Iterator[Mapping[str, Any]]:
    """Yield the first records of each file. Raises DataError."""
    for file in files:
        if SOURCES[source].records != "fields":
            yield {"text": next(blocks(file))[0].decode(errors="replace")}
        elif not SOURCES[source].beginnings:
            yield from _objects(file)
        else:
            yield from _rows(source, file)


def _objects(file: Path) -> Iterator[Mapping[str, Any]]:
    is_array, data = opened(file, blocks(file))
    if is_array:
        texts = (text for unit in array_units(file, data) for _, text in unit.part)
    else:
        first, whole = next(data)[0].split(b"\n"), next(data, None) is None
        texts = iter(first if whole or len(first) == 1 else first[:-1])
    for text in texts:
        try:
            record = json.loads(text) if text.strip() else None
        except ValueError as error:
            raise DataError(f"invalid JSON: {error}", path=file, remedy="Correct the file.") from error
        if isinstance(record, dict):
            yield record


def _rows(source: str, file: Path) -> Iterator[Mapping[str, Any]]:
    pa = pyarrow(source)
    with file.open("rb") as start:
        is_parquet = start.read(4) == b"PAR1"
    try:
        if is_parquet:
            from pyarrow.parquet import ParquetFile

            batch = next(ParquetFile(file).iter_batches(SAMPLED), None)
        else:
            with pa.memory_map(str(file)) as mapped:
                batch = next(_batches(pa, mapped), None)
    except (OSError, pa.ArrowException) as error:
        raise unreadable(file, error) from error
    yield from () if batch is None else batch.slice(0, SAMPLED).to_pylist()


def _batches(pa: Any, mapped: Any) -> Iterator[Any]:
    if mapped.read(6) == b"ARROW1":
        file = pa.ipc.open_file(mapped)
        yield from (file.get_batch(number) for number in range(file.num_record_batches))
    else:
        mapped.seek(0)
        yield from pa.ipc.open_stream(mapped)
