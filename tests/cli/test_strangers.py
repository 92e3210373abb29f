"""Files of strangers: whatever a run directory, checkpoint, model folder, plan or spec holds, commands say what is
wrong with it. No code of a file runs, no traceback is shown, and a command takes at most 10 s of a processor and 1 GB
more than it has at its start."""

import json
import os
import pickle
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import Folder
from small_runs import drawn, make_run, plan_of, save

from xtrain.cli.main import main
from xtrain.plan.serialise import plan_id, to_json
from xtrain.runtime.store.checkpoints import file_checksums, read_sidecar, write_sidecar

SPEC = (Path(__file__).parents[2] / "specs" / "quickstart.xtrain").read_text(encoding="utf-8")
SECONDS, MORE_BYTES = 10, 2**30
Change = Callable[[Path], Any]
"""Changes what lies in a folder with `run/`, a run with a checkpoint."""


class Runs:
    """Leaves a file where it is unpickled without limits."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


EVIL = pickle.dumps(Runs())
DEEP = b"[" * 200_000
ESCAPE = "\x1b[2J\x1b]0;x\x07\u202e\x9b1A"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run with a full checkpoint of shards and weights in one file, and what it has logged."""
    base = tmp_path_factory.mktemp("made")
    plan = plan_of()
    run = make_run(plan, base / "run", base)
    trained = drawn(plan)
    save(plan, run, trained)
    save(plan, run, trained, step=40, alone=True, backend="file")
    start = {"event": "run_start", "step": 0, "time": 1.8e9, "run_id": "run", "plan_id": plan.id, "name": "small"}
    start |= {"world_size": 1, "device": "cpu", "steps": 40, "attempt": 1, "directory": "run"}
    end = {"event": "run_end", "step": 40, "time": 1.8e9 + 9, "status": "done", "exit_code": 0, "seconds": 9.0}
    (run / "events.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(end)}\n")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 40, "time": 1.8e9 + 8, "loss": 2.0, "tokens": 10}) + "\n")
    return base


@pytest.fixture
def folder(made, tmp_path, monkeypatch) -> Path:
    shutil.copytree(made / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(name: str, content: bytes | str) -> Change:
    data = content.encode() if isinstance(content, str) else content

    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return change


def pipe(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def sparse(name: str, size: int = 2**36) -> Change:
    def change(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return change


def link(name: str, to: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(to)

    return change


def line(name: str, /, **values: Any) -> Change:
    """A file of records with one more before the others."""
    return before(name, json.dumps({"step": 1, "time": 1.8e9, **values}).encode() + b"\n")


def before(name: str, content: bytes) -> Change:
    """A file that begins with other content."""
    return lambda folder: (folder / name).write_bytes(content + (folder / name).read_bytes())


CHECKPOINT, WEIGHTS = "run/checkpoints/ckpt-s000000000020", "run/checkpoints/model-s000000000040"


def resealed(change: Callable[[Path, dict[str, Any]], Any], where: str = CHECKPOINT) -> Change:
    """A checkpoint whose checksums are right again after a change of its files, and of what `state.json` says."""

    def do(folder: Path) -> None:
        path = folder / where
        state = read_sidecar(path)
        names = list(state.pop("files"))
        for key in ("seal", "format"):
            state.pop(key)
        change(path, state)
        write_sidecar(path, state, file_checksums(path / name for name in names))

    return do


def says(**values: Any) -> Change:
    return resealed(lambda path, state: state.update(values))


def metadata(change: Callable[[Any], Any]) -> Change:
    """Other content of `.metadata`."""

    def do(path: Path, state: dict[str, Any]) -> None:
        found = change(pickle.loads((path / ".metadata").read_bytes()))
        (path / ".metadata").write_bytes(found if isinstance(found, bytes) else pickle.dumps(found))

    return resealed(do)


def within(name: str, value: Any) -> Change:
    def change(found: Any) -> Any:
        setattr(found, name, value)
        return found

    return metadata(change)


def shards(content: bytes) -> Change:
    def do(path: Path, state: dict[str, Any]) -> None:
        (shard,) = path.glob("*.distcp")
        shard.write_bytes(content.ljust(shard.stat().st_size, b"\0"))

    return resealed(do)


def one_file(content: Any) -> Change:
    def do(path: Path, state: dict[str, Any]) -> None:
        if isinstance(content, bytes):
            (path / "state.pt").write_bytes(content)
        else:
            torch.save(content, path / "state.pt")

    return resealed(do, WEIGHTS)


def plan(change: Callable[[dict[str, Any]], Any], *, sealed: bool = False) -> Change:
    """Another plan.json; sealed: with an id of its own."""

    def do(folder: Path) -> None:
        path = folder / "run" / "plan.json"
        content = json.loads(path.read_bytes())
        change(content)
        path.write_text(json.dumps(content))

    def do_sealed(folder: Path) -> None:
        from attrs import evolve

        from xtrain.plan.serialise import load_plan

        found = load_plan(folder / "run" / "plan.json")
        content: dict[str, Any] = {}
        change(content)
        found = evolve(found, **content, id="0" * 16)
        (folder / "run" / "plan.json").write_text(json.dumps(to_json(evolve(found, id=plan_id(found)))))

    return do_sealed if sealed else do


def model(**files: bytes) -> Change:
    """The folder of a model with other files, and a spec that begins with it."""

    def do(folder: Path) -> None:
        Folder.whole(folder)
        for name, content in files.items():
            (folder / "model" / name.replace("__", "/").replace("_DOT_", ".")).write_bytes(content)

    return do


LOOKS = (
    ("runs", "."), ("watch", "run", "--ui", "plain"), ("checkpoint", "show", "run"), ("checkpoint", "verify", "run"),
)  # fmt: skip
READS = (("export", "run", "--to", "out"), ("generate", "run", "--prompt", "a", "--tokens", "1"))
SHARDS = tuple((*command, "--checkpoint", "20") for command in READS)
PLANS = (("plan", "run/plan.json"), ("diff", "run", "run"), *READS)
CHECK = (("check", "a.xtrain"), ("fmt", "a.xtrain", "--check"))
CONVERT = (("checkpoint", "convert", "zero", "--to", "out", "--like", "run"),)
FILES: dict[str, dict[str, Change]] = {
    "events.jsonl": {
        "a pipe": pipe("run/events.jsonl"),
        "a device": link("run/events.jsonl", "/dev/zero"),
        "deep": before("run/events.jsonl", DEEP + b"\n"),
        "no text": before("run/events.jsonl", bytes(range(256)) * 100 + b"\n"),
        "zeros": before("run/events.jsonl", bytes(100_000)),
        "a long line": before("run/events.jsonl", b'{"event": "' + b"x" * 100_000 + b'"}\n'),
        "a name that is obeyed": line("run/events.jsonl", event="run_start", run_id=ESCAPE, name=ESCAPE, directory="x"),
        "an event that is obeyed": line("run/events.jsonl", event="warning", message=ESCAPE, kind=ESCAPE),
        "wrong kinds": line("run/events.jsonl", event="run_end", status=[ESCAPE], exit_code={}, seconds="x"),
        "huge numbers": line("run/events.jsonl", event="run_end", status="done", seconds=1e308, exit_code=10**30),
    },
    "metrics.jsonl": {"a pipe": pipe("run/metrics.jsonl"), "zeros without end": sparse("run/metrics.jsonl"),
        "deep": before("run/metrics.jsonl", DEEP + b"\n"),
        "no text": before("run/metrics.jsonl", bytes(range(256)) * 100 + b"\n"),
        "wrong kinds": line("run/metrics.jsonl", loss=ESCAPE, lr=[], tokens={}),
        "many keys": line("run/metrics.jsonl", **{f"k{number}": number for number in range(20_000)})},
    "locks and heartbeats": {"a pipe for a lock": pipe("run/.launcher.lock"),
        "a pipe for the lock of ranks": pipe("run/.worker.lock"), "a pipe for a log of metrics": pipe("run/finished")},
    "state.json": {
        "a pipe": pipe(f"{CHECKPOINT}/state.json"),
        "deep": put(f"{CHECKPOINT}/state.json", DEEP),
        "zeros without end": sparse(f"{CHECKPOINT}/state.json"),
        "texts that are obeyed": says(params=ESCAPE, plan_id=ESCAPE, made_by={"xtrain": ESCAPE},
            model={ESCAPE: ESCAPE}),
        "metrics of text": says(metrics={"loss": ESCAPE}),
        "tokens of text": says(tokens="many"),
        "a time of text": says(time=ESCAPE),
        "an infinite time": says(time=1e400),
        "an average of nothing": says(ema={"updates": "x"}),
        "a beginning of nothing": says(begun_from={"path": 3}),
        "no files": says(files=[]),
        "files elsewhere": put(f"{CHECKPOINT}/state.json",
            json.dumps({"files": {".metadata": 0, "../../../../../dev/zero": {"bytes": 0, "checksum": "x"}}})),
        "a list": put(f"{CHECKPOINT}/state.json", "[]"),
    },
    "pointers": {"another folder": put("run/checkpoints/latest", "../../../../etc"),
        "a pipe": pipe("run/checkpoints/latest"), "no text": put("run/checkpoints/latest", b"\xff\x1b[2J")},
}  # fmt: skip
SHARD_FILES: dict[str, Change] = {
    "a command": put(f"{CHECKPOINT}/.metadata", EVIL),
    **{
        f"a command in {name}": within(name, Runs()) for name in ("planner_data", "storage_meta", "storage_data", "own")
    },
    "a pipe": pipe(f"{CHECKPOINT}/.metadata"),
    "a sealed command": metadata(lambda found: EVIL),
    "an old pickle": metadata(lambda found: b"cposix\nsystem\n(S'touch ran'\ntR."),
    "a place far away": metadata(lambda found: b"\x80\x04}r\xff\xff\xff\x7f."),
    "a length without end": metadata(lambda found: b"\x80\x04\x96" + b"\xff" * 7 + b"\x0f."),
    "deep": metadata(lambda found: b"\x80\x04" + b"](" * 100_000 + b"e" * 100_000 + b"."),
    "shards that run": shards(EVIL),
    "shards of a whole pickle": shards(pickle.dumps({"a": Runs()}, 2)),
}
ONE_FILE: dict[str, Change] = {
    "a command": one_file(EVIL),
    "objects": one_file({"model.norm.weight": Runs()}),
    "a number": one_file(3),
    "cut off": one_file(b"PK\3\4"),
}
PLAN: dict[str, Change] = {
    "no plan": put("run/plan.json", "{}"),
    "deep": put("run/plan.json", DEEP),
    "a kind that is obeyed": plan(lambda found: found["graph"]["nodes"][0].update(kind=ESCAPE)),
    "a format that is obeyed": plan(lambda found: found.update(format=ESCAPE)),
    "no nodes": plan(lambda found: found["graph"].update(nodes={"a": 1})),
    "a mesh without end": plan(lambda found: found["mesh"]["axes"].update(pp=10**9)),
    "a mesh of nothing": plan(lambda found: found["mesh"]["axes"].update(pp=0)),
    "a mesh of text": plan(lambda found: found.update(mesh=ESCAPE)),
    "layers of text": plan(lambda found: found["architecture"].update(layers=ESCAPE)),
    "another name": plan(lambda found: found.update(name=f"x{ESCAPE}")),
    "an id that leads away": plan(lambda found: found.update(config_id="../../../OUT"), sealed=True),
    "a name that leads away": plan(lambda found: found.update(name="../../OUT"), sealed=True),
}
SPECS: dict[str, bytes | str] = {
    "a device": 'include "/dev/zero"',
    "a folder": 'include "/"',
    "itself": 'include "a.xtrain"',
    "names that are obeyed": f'a{ESCAPE} {{ }}\nlet x = "{ESCAPE}',
    "blocks in blocks": "a {" * 50_000,
    "a long sum": SPEC + "let x = 1" + "+1" * 200_000,
    "a long list": SPEC + f"let x = [{'1, ' * 300_000}]",
    "a long text": SPEC + f'let x = "{"a" * 10_000_000}"',
    "errors": "\n".join(f"nope{number} {{ a = 1 }}" for number in range(20_000)),
    "no text": bytes(range(256)) * 1000,
    "zeros": bytes(1_000_000),
    "a module that runs": f'{SPEC}\nuse "parts.py"\n',
    "tabs": "\t" * 1_000_000,
    "quotes": '"\n' * 100_000,
    "a name without end": SPEC + f"let {'x' * 500_000} = 1\n",
    "powers": f"{SPEC}let x = 9 ** 9 ** 9 ** 9\n",
    "layers without end": "".join(f"{each}\n" for each in SPEC.splitlines()) + "model qwen3 { layers = 1000000000 }",
}
MODELS: dict[str, dict[str, bytes]] = {
    "a config that is deep": {"config_DOT_json": DEEP},
    "layers without end": {
        "config_DOT_json": json.dumps({"model_type": "llama", "num_hidden_layers": 10**12}).encode()},
    "a config that is obeyed": {"config_DOT_json": json.dumps({"model_type": ESCAPE, ESCAPE: 1}).encode()},
    "a header without end": {"model_DOT_safetensors": (2**62).to_bytes(8, "little") + b"{}"},
    "tensors without end": {
        "model_DOT_safetensors": (2**25 - 8).to_bytes(8, "little") + (b'{"data_offsets":[],' * 2**21)[: 2**25 - 8]},
    "a pickle": {"model_DOT_safetensors": EVIL},
}  # fmt: skip
ZERO: dict[str, Change] = {
    "a command": put("zero/mp_rank_00_model_states.pt", EVIL),
    "nothing": put("zero/mp_rank_00_model_states.pt", b""),
    "a number": lambda folder: ((folder / "zero").mkdir(), torch.save(3, folder / "zero/mp_rank_00_model_states.pt")),
    "no module": lambda folder: ((folder / "zero").mkdir(), torch.save({}, folder / "zero/mp_rank_00_model_states.pt")),
}
NUMPY = b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(128) + EVIL


def source(text: str, name: str, content: bytes) -> Change:
    """A spec that reads a file of data."""

    def change(folder: Path) -> None:
        put(name, content)(folder)
        put("a.xtrain", re.sub(r"source = .*", f"source = {text}", SPEC))(folder)

    return change


STATS = (("data", "stats", "a.xtrain"),)
LISTS = (LOOKS[0], *LOOKS[2:])  # `watch` waits for the first whole record of a run
OTHERS: dict[str, tuple[Change, tuple[tuple[str, ...], ...]]] = {
    "a run without records: zeros": (sparse("run/events.jsonl"), LISTS),
    "a run without records: deep": (put("run/events.jsonl", DEEP), LISTS),
    "a run without records: a list": (put("run/events.jsonl", "[]\n"), LISTS),
    "law: deep": (put("law.json", DEEP), (("plan", "a.xtrain", "--law", "law.json"),)),
    "tokens: a pickle": (source('tokens("t.npy")', "t.npy", NUMPY), STATS),
    "parquet: a pickle": (source('parquet("t.parquet")', "t.parquet", EVIL), STATS),
    "arrow: a pickle": (source('arrow("t.arrow")', "t.arrow", EVIL), STATS),
    "mds: zeros": (source('mds("t.mds")', "t.mds", bytes(5000)), STATS),
    "webdataset: a pickle": (source('webdataset("t.tar")', "t.tar", EVIL), STATS),
    "jsonl: deep": (source('jsonl("t.jsonl")', "t.jsonl", DEEP + b"\n"), STATS),
    "zst: nothing": (source('jsonl("t.jsonl.zst")', "t.jsonl.zst", b"(\xb5/\xfd\xff"), STATS),
}


def cases() -> Iterator[Any]:
    for kind, rows in FILES.items():
        for name, change in rows.items():
            yield pytest.param(change, LOOKS, id=f"{kind}: {name}")
    for kind, rows, commands in (
        (".metadata", SHARD_FILES, SHARDS), ("state.pt", ONE_FILE, READS), ("plan.json", PLAN, PLANS),
        ("DeepSpeed", ZERO, CONVERT),
    ):  # fmt: skip
        for name, change in rows.items():
            yield pytest.param(change, commands, id=f"{kind}: {name}")
    for name, text in SPECS.items():
        yield pytest.param(put("a.xtrain", text), CHECK, id=f"spec: {name}")
    for name, files in MODELS.items():
        yield pytest.param(model(**files), (("check", "tiny.xtrain"),), id=f"model folder: {name}")
    for name, (change, commands) in OTHERS.items():
        yield pytest.param(change, commands, id=name)


CASES = list(cases())
# A part of them at each run of the ordinary tests: other ones for each kind, all with -m slow.
for number, case in enumerate(CASES):
    if number % 8:
        CASES[number] = pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)


@pytest.mark.parametrize(("change", "commands"), CASES)
def test_a_file_of_a_stranger(folder: Path, change: Change, commands: tuple[tuple[str, ...], ...]):
    change(folder)
    (folder / "parts.py").write_text("import os\nos.system('touch ran')\n")
    (folder / "tiny.xtrain").write_text(SPEC.replace("model ", 'model "model"\n#', 1))
    if not (folder / "a.xtrain").exists():
        (folder / "a.xtrain").write_text(SPEC)
    for command in commands:
        status, said = limited(command, folder)
        assert status in (0, 1, 2, 3, 4), (command, status, said[-2000:])
        assert "Traceback" not in said and len(said) < 200_000, (command, said[-3000:])
        assert not set(said) & {"\x1b", "\x9b", "\u202e", "\x07"}, (command, said)
        assert not (folder / "ran").exists(), command
        shutil.rmtree(folder / "out", ignore_errors=True)
    assert not any(folder.parent.glob("OUT*"))


def test_there_are_enough_of_them():
    kinds = {case.id.partition(":")[0] for case in CASES}  # type: ignore[union-attr]
    assert len(CASES) >= 100 and len(kinds) >= 12


def limited(command: tuple[str, ...], folder: Path) -> tuple[int, str]:
    """(exit status, output) of a command in a forked process with bounds; negative for a signal."""
    output = folder / "said"
    child = os.fork()
    if not child:
        try:
            with output.open("w", encoding="utf-8") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
                sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
                now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                used = resource.getrusage(resource.RUSAGE_SELF)
                seconds = int(used.ru_utime + used.ru_stime) + SECONDS
                resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
                resource.setrlimit(resource.RLIMIT_AS, (now + MORE_BYTES, now + MORE_BYTES))
                signal.alarm(120)
                try:
                    status = main(list(command))
                except SystemExit as exit:
                    status = int(exit.code or 0)
                except BaseException:
                    import traceback

                    traceback.print_exc()
                    status = 99
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        finally:
            os._exit(98)
    _, ended = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(ended), output.read_text(encoding="utf-8", errors="replace")
