"""`xtrain init JOB --model … --data …`: a spec for a job, from what the model's folder and the data hold."""

import gzip
import json
import os
from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any, Final

from xtrain.cli.verb import Refused
from xtrain.dsl.checking.config_json import SnapshotMissing, find_snapshot, names_repo
from xtrain.dsl.importing.draft import identifier
from xtrain.dsl.schema.data_components import tokenizer_kind
from xtrain.dsl.schema.model import snapshot_text
from xtrain.dsl.spec_text import value_text
from xtrain.lazy_attrs import frozen
from xtrain.plan.data import TokenizerUnreadable
from xtrain.runtime.feed.sources.fields import settings_for

SAMPLED: Final = 256
"""Records that are read for the fields and the lengths."""
CHARACTERS: Final = 3.0
"""Characters of a token, at least: tokenizers of published models have about 4 for English."""
SHORTEST, LONGEST = 128, 8192
"""Bounds of `sequence`."""
LONGEST_TEXT: Final = 4096
"""Maximum of `sequence` for texts."""
GROUP, COMPLETION = 8, 256
"""Completions of a question, and their tokens."""
FEW: Final = 200
"""Fewer records are not held out."""
SUFFIXES: Final = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".md": "text",
}
MARKS: Final = {"chatml": "<|im_start|>", "llama3": "<|start_header_id|>"}
PACKED: Final = (".gz", ".zst")


@frozen
class JobTemplate:
    """Job of `xtrain init`.

    kind: form of the records that it needs. lines: statements of its own, in which {teacher} is replaced by
    `--teacher`, {tokens} by the length of a completion.
    """

    about: str
    kind: str
    budget: str
    rate: str
    lines: tuple[str, ...] = ()
    adapter: bool = False
    model: str = "{}"


_ADAPTER = "adapter lora { rank = 16, alpha = 32 }"
JOBS: Final[Mapping[str, JobTemplate]] = {
    "sft": JobTemplate("fine-tune all parameters on conversations or answers", "answers", "2 epochs", "1e-5"),
    "lora": JobTemplate("fine-tune a LoRA adapter", "answers", "2 epochs", "2e-4", (_ADAPTER,), adapter=True),
    "qlora": JobTemplate(
        "fine-tune a LoRA adapter on a model stored in 4 bits", "answers", "2 epochs", "2e-4",
        (_ADAPTER, "precision { base nf4 { double = true } }"), adapter=True,
    ),
    "dpo": JobTemplate(
        "learn from pairs of a preferred and another answer", "pairs", "1 epoch", "5e-7",
        ("loss dpo { beta = 0.1, reference = initial }",),
    ),
    "grpo": JobTemplate(
        "learn from answers that the model gives itself and that are checked", "questions", "200 steps", "1e-6",
        (
            "collate = to_tensor -> flatten -> shift_tokens -> pack(single)  # a row holds the answers to one question",
            "rollout { group = 8, max_tokens = {tokens} }", "reward exact_answer { compare = number }", "loss grpo {}",
        ),
    ),
    "distill": JobTemplate(
        "learn from the distributions of a teacher, `--teacher`", "answers", "1 epoch", "1e-5",
        ("loss distill { teacher = {teacher}, live = true, form = forward_kl }",),
    ),
    "pretrain": JobTemplate(
        "train a new model of the folder's shape on texts", "texts", "1 epoch", "3e-4", model="{ weights = none }"
    ),
    "serve": JobTemplate(
        "train and sample adapters as clients ask", "", "", "", ("adapter lora { rank = 32 }", "serve {}"), adapter=True
    ),
}  # fmt: skip
_WANTED: Final = {
    "answers": "conversations (`messages`), a prompt with a response, or texts",
    "pairs": "`chosen` and `rejected`",
    "questions": "a prompt and its answer",
    "texts": "a text",
}


def job_spec(
    job: JobTemplate, word: str, name: str, path: str, model: str, data: list[str], teacher: str | None
) -> str:
    """Return the text of a spec. Raises Refused."""
    label, source, context = _model(model)
    if ("{teacher}" in "".join(job.lines)) != (teacher is not None):
        problem = "needs --teacher FOLDER" if teacher is None else "takes no --teacher"
        raise Refused(2, f"xtrain init: `{word}` {problem}")
    tokens = min(COMPLETION, context // 2)
    own = {"{teacher}": value_text(teacher or ""), "{tokens}": str(tokens)}
    lines = _machine([reduce(lambda text, name: text.replace(name, own[name]), own, line) for line in job.lines], word)
    about = job.about.replace(", `--teacher`", "")
    head = [f"# {about[0].upper()}{about[1:]}.", "#"]
    if word == "serve":
        commands = [f"xtrain plan {path}", f"xtrain serve {path}"]
        blocks = [f"experiment {name} {{ seed = 1 }}", f"model {label} {{}}", *lines]
        return _text(head, commands, blocks)
    if not data:
        raise Refused(2, f"xtrain init: `{word}` needs --data: a file, folder or pattern")
    read = [_Data.read(place, job.kind, source) for place in data]
    named = _names([each.name for each in read])
    held = [name for name, each in zip(named, read, strict=True) if each.holdout]
    blocks = [
        f"experiment {name} {{ seed = 1, budget = {job.budget} }}",
        f"model {label} {job.model}",
        *lines,
        *(each.text(name) for name, each in zip(named, read, strict=True)),
        _batch(job, max(each.length for each in read), context, tokens),
        f"optimizer adamw {{ lr = {job.rate}, clip = 1.0 }}",
        "scheduler cosine { warmup = 5%, floor = 10% }",
        "\n".join(
            [
                "every 10 steps log" if word != "grpo" else "every 1 step log",
                *(f"every 10% eval {name} {{ batches = 8 }}" for name in held),
                "every 20% checkpoint",
                _export(job, name),
            ]
        ),
    ]
    commands = [f"xtrain data show {path} -n 1", f"xtrain plan {path}", f"xtrain run {path}"]
    return _text(head, commands, blocks)


def _text(head: list[str], commands: list[str], blocks: list[str]) -> str:
    return "\n".join([*head, *(f"#     {command}" for command in commands), "", "\n\n".join(blocks)]) + "\n"


def _export(job: JobTemplate, name: str) -> str:
    if job.adapter:
        return f'on finish export {{ to = "adapters/{name}", adapter = true }}'
    return f'on finish export {{ to = "models/{name}" }}'


def _machine(lines: list[str], word: str) -> list[str]:
    """Return the blocks with those that depend on the machine: number formats, compilation, layout."""
    layout = "parallel { fsdp auto }"
    if not Path("/dev/nvidia0").exists():
        return [*lines, layout]
    formats = [line.replace("precision { ", "precision { compute = bf16, ") for line in lines]
    own = [] if any(line.startswith("precision") for line in lines) else ["precision { compute = bf16 }"]
    return [*formats, *own, *(["compile"] if word != "serve" else []), layout]


def _batch(job: JobTemplate, length: float, context: int, tokens: int) -> str:
    """Return the block `batch`: for texts rows of the whole context, else rows that hold a long record.

    length: characters of a long record. tokens: of a completion.
    """
    if job.kind == "texts":
        return f"batch {{ sequence = {min(context, LONGEST_TEXT)}, rows = 32 }}"
    needed = length / CHARACTERS
    needed = GROUP * (needed + tokens) if job.kind == "questions" else min(needed, LONGEST, context)
    sequence = SHORTEST
    while sequence < needed:
        sequence *= 2
    return f"batch {{ sequence = {sequence}, rows = 8 }}"


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
        context = config.get("max_position_embeddings") or config.get("n_positions") or LONGEST
    except (OSError, ValueError, AttributeError):
        raise Refused(2, f"xtrain init: {folder} has no readable config.json: give the folder of a model") from None
    return label, source, context if isinstance(context, int) and context > 1 else LONGEST


@frozen
class _Data:
    """A dataset. settings: its source and fields. length: characters of a long record."""

    name: str
    settings: tuple[str, ...]
    length: float
    holdout: bool

    @classmethod
    def read(cls, place: str, kind: str, tokenizer: str) -> "_Data":
        source, patterns, files = _source(place)
        call = f"source = {source}({', '.join(value_text(each) for each in patterns)})"
        records = list(islice(_records(source, files), SAMPLED)) if files else []
        fields = {name for record in records for name in record} if source != "text" else {"text"}
        settings = [call, *_fields(place, kind, fields)]
        if kind != "texts" and any(each.startswith(("messages", "response", "chosen", "prompt")) for each in settings):
            settings += _template(tokenizer)
        lengths = sorted(len(json.dumps(each, ensure_ascii=False)) for each in records)
        holdout = len(records) >= FEW and kind != "questions"
        settings += ["holdout = 2%"] if holdout else []
        settings += ["oversized = skip"] if kind == "questions" else []
        return cls(
            identifier(place, "data"), tuple(settings), lengths[int(0.95 * len(lengths))] if lengths else 0, holdout
        )

    def text(self, name: str) -> str:
        return "\n".join([f"dataset {name} {{", *(f"  {setting}" for setting in self.settings), "}"])


def _fields(place: str, kind: str, fields: set[str]) -> list[str]:
    """Return the settings that name the fields of records. Raises Refused."""
    found = settings_for(fields)
    usual = found.split(", ") if found else []
    names = dict(setting.split(" = ") for setting in usual)
    if kind == "texts":
        text = next((name for name in ("text", "content", "body", "document", "code") if name in fields), None)
        if text is not None or not fields:
            return [] if text in (None, "text") else [f"text = {value_text(text)}"]
    elif kind == "pairs" and ("chosen" in names or not fields):
        return usual or ['chosen = "chosen"', 'rejected = "rejected"']
    elif kind == "questions" and ("response" in names or not fields):
        if "answer" in fields:
            names["response"] = '"answer"'
        return [f"{setting} = {names[setting]}" for setting in ("prompt", "response") if setting in names]
    elif kind == "answers" and "chosen" not in names and (usual or "text" in fields or not fields):
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


def _source(place: str) -> tuple[str, list[str], list[Path]]:
    """Return the source of data, its patterns, and its files."""
    path = Path(place)
    if path.is_dir():
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            return "huggingface", [place], []
        found = [file for file in sorted(path.rglob("*")) if _suffix(file) in SUFFIXES]
        if not found:
            raise Refused(2, f"xtrain init: no file of {place} is one of {', '.join(SUFFIXES)}")
        kinds = {SUFFIXES[_suffix(file)] for file in found}
        if len(kinds) > 1:
            raise Refused(2, f"xtrain init: {place} has {' and '.join(sorted(kinds))} files; give a pattern for each")
        ends = sorted({"".join(file.suffixes[-1 - (file.suffix in PACKED) :]) for file in found})
        return kinds.pop(), [f"{path.as_posix()}/**/*{end}" for end in ends], found
    found = (
        [path]
        if path.is_file()
        else [file for file in sorted(Path().glob(place)) if file.is_file()]
        if not path.is_absolute()
        else []
    )
    if not found and names_repo(place):
        return "huggingface", [place], []
    if not found:
        raise Refused(2, f"xtrain init: there is no file {place}")
    kind = SUFFIXES.get(_suffix(found[0]))
    if kind is None:
        raise Refused(2, f"xtrain init: {found[0]} is not one of {', '.join(SUFFIXES)}")
    return kind, [place], found


def _suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix in PACKED else path).suffix


def _records(source: str, files: list[Path]) -> Iterator[Mapping[str, Any]]:
    """Yield the first records. Raises Refused for a file that cannot be read."""
    for file in files:
        try:
            yield from _records_of(source, file)
        except (OSError, ValueError, EOFError) as error:
            raise Refused(2, f"xtrain init: {file} cannot be read: {error}") from None


def _records_of(source: str, file: Path) -> Iterator[Mapping[str, Any]]:
    if source in ("parquet", "arrow"):
        yield from _rows(source, file)
        return
    with _opened(file) as lines:
        if source == "text":
            yield {"text": lines.read(1 << 20).decode(errors="replace")}
            return
        first = lines.readline()
        if first.lstrip()[:1] == b"[":
            yield from (each for each in json.loads(first + lines.read()) if isinstance(each, dict))
            return
        for line in (first, *islice(lines, SAMPLED)):
            if line.strip() and isinstance(record := json.loads(line), dict):
                yield record


def _rows(source: str, file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise Refused(3, "xtrain init: tables need pyarrow: pip install 'xtrain[data]'") from None
    if source == "parquet":
        found = next(pq.ParquetFile(file).iter_batches(SAMPLED), None)
    else:
        with file.open("rb") as opened:
            is_file = opened.read(6) == b"ARROW1"
        with pa.memory_map(os.fspath(file)) as mapped:
            found = pa.ipc.open_file(mapped).get_batch(0) if is_file else next(iter(pa.ipc.open_stream(mapped)), None)
    yield from [] if found is None else found.slice(0, SAMPLED).to_pylist()


def _opened(file: Path) -> Any:
    if file.suffix == ".gz":
        return gzip.open(file)
    if file.suffix != ".zst":
        return file.open("rb")
    try:
        import zstandard
    except ImportError:
        raise Refused(3, "xtrain init: .zst files need zstandard: pip install 'xtrain[data]'") from None
    return zstandard.open(file, "rb")


def _names(names: list[str]) -> list[str]:
    """Return the names, made different."""
    return [name if names.index(name) == number else f"{name}_{number + 1}" for number, name in enumerate(names)]
