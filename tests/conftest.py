"""Which tests run beside each other: those of one group of ranks keep to one process, of the others each file does."""

import ast
import gc
import os
import sys
import textwrap
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import examples
import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from lean_forks import SmallServer
    from trials import Laboratory

# While modules are loaded and tests are collected next to nothing becomes garbage: a fifth of that time.
gc.disable()

# Tests say which terminal and language they need: those of whoever starts them decide nothing.
for variable in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "LC_ALL", "LC_CTYPE"):
    os.environ.pop(variable, None)
os.environ |= {"LANG": "C.UTF-8", "TERM": "xterm"}

# Threads of several processes would wait for each other's cores; torch reads this when it is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests start hundreds of interpreters: without compiled files each would compile the same modules again, and each
# process of this session would rewrite the assertions of all files, which takes half of the time of collection.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

RANKS = "tests/distributed"
# They need no `lab`, and keep to another process: one has loaded what their commands are forked from.
COMMANDS = f"{RANKS} (commands)"
WITH_COMMANDS = (
    *(
        f"{RANKS}/test_{name}.py"
        for name in (
            "survival", "ways_in", "restarts", "epochs", "started", "stopped_commands", "crash_campaign", "full_disks",
            "data_parallel", "moved", "replay", "bisect",
        )
    ),
    *(f"tests/components/test_{name}.py" for name in ("batches_of_loaders", "lr_sweep")),
    *(f"tests/test_{name}.py" for name in ("distill_spec", "dpo_cpu", "release", "reward_spec")),
    *(f"tests/runtime/loop/test_{name}.py" for name in ("edges", "harness", "hooks", "own_loops")),
    "tests/runtime/jobs/test_survival.py",
    "tests/runtime/nn/test_further_tokens.py",
    "tests/runtime/store/test_chat_walk.py",
)  # fmt: skip
WITH_RANKS = ("tests/planner/test_diff_resume.py", "tests/server/engine/test_as_a_run.py")
# They load transformers, which takes three seconds, and start the process that ranks of an inspection are forked from,
# or they fork a few ranks for a function (`ranks`), some of models of transformers: one process does, beside that of
# the ranks.
TRANSFORMERS = "tests (transformers)"
WITH_TRANSFORMERS = (
    "tests/components/test_imported_run.py",
    "tests/components/test_lora_against_peft.py",
    "tests/planner/test_agreement.py",
    "tests/planner/test_model_folder.py",
    "tests/runtime/feed/test_found_records.py",
    "tests/runtime/inspect/test_peaks.py",
    "tests/runtime/feed/test_tokenizer_folders.py",
    *(
        f"tests/runtime/store/test_{name}.py"
        for name in ("further_modules", "peft", "peft_types", "pissa", "reward_models", "round_trip", "stored_weights")
    ),
    *(f"tests/runtime/sampling/test_{name}.py" for name in ("generation", "scorer", "teaching")),
    *(
        f"tests/runtime/nn/test_{name}.py"
        for name in ("code_experts", "code_models", "code_resumes", "published_code", "remote_code", "rope")
    ),
    "tests/client/test_examples.py",
    *(f"tests/server/engine/test_{name}.py" for name in ("training", "sampling", "extremes", "greedy")),
    *(f"tests/runtime/nn/test_{name}.py" for name in ("experts", "loss", "loss_terms", "ring", "token_statistics")),
    "tests/runtime/feed/test_feed.py",
    "tests/runtime/loop/test_dataset_losses.py",
    "tests/runtime/store/test_save_planner.py",
)
# The longest first, so that no process is left alone with one of them at the end.
LONG = (
    "tests/components/test_families.py",
    "tests/runtime/inspect/test_trace.py",
    "tests/planner/test_every_setting.py",
    "tests/api/test_from_python.py",
    "tests/runtime/feed/test_tokenise_pool.py",
    "tests/runtime/feed/test_reading_processes.py",
    "tests/tui/board/test_keys.py",
    "tests/tui/board/test_terminal.py",
    "tests/planner/test_alternatives.py",
    "tests/runtime/store/test_layout.py",
)
FIRST = (RANKS, TRANSFORMERS, COMMANDS, "tests/test_quickstart.py", *LONG)
# Behind these: tests that wait for processes and timers, while others compute; those that only compute are the last.
WAITING = ("tests/tui/", "tests/server/", "tests/client/", "tests/cli/", "tests/runtime/")


class Dealt(LoadScopeScheduling):
    """Ranks of several tests at once would fight for the cores, and one process forks those of a whole session."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Dealt:
    return Dealt(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> Generator[None, int, int]:
    """One more than there would be: dashboards, timers and ranks that wait for each other leave cores idle."""
    return (yield) + 1


@pytest.fixture(autouse=True)
def nothing_left_of_ranks() -> Iterator[None]:
    """What a test that sets up ranks in this process has chosen for fp32 products and algorithms, and its process group
    of one, is not for those behind it."""
    yield
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    if torch.get_float32_matmul_precision() != "highest":
        torch.set_float32_matmul_precision("highest")
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(AssertionError):
        for told in _which_of_all(call.excinfo.traceback[-1]):
            report.sections.append(("Items", told))
    return report


def _which_of_all(entry: Any) -> Iterator[str]:
    """Of `all(… for …)` and `any(… for …)` in an assertion: for which items it holds or not, as `False` says little."""
    with suppress(Exception):  # the report is that of another failure
        for node in ast.walk(ast.parse(textwrap.dedent(str(entry.statement)))):
            match node:
                case ast.Call(func=ast.Name(id="all" | "any" as name), args=[ast.GeneratorExp() as each]):
                    items = ", ".join(ast.unparse(loop.target) for loop in each.generators)
                    loops = "".join(map(ast.unparse, each.generators))
                    negated = "not " * (name == "all")
                    found = eval(
                        f"[({items}){loops} if {negated}({ast.unparse(each.elt)})]",
                        {**entry.frame.f_globals, **entry.frame.f_locals},
                    )
                    yield f"{negated}{ast.unparse(each.elt)}, for {items} in {found}"


def pytest_configure(config: pytest.Config) -> None:
    chosen = config.option.markexpr
    examples.is_long = "slow" in chosen and "not slow" not in chosen
    # Of tests that do not say how many themselves.
    count = 100 if examples.is_long else 20
    hypothesis.settings.register_profile("xtrain", max_examples=count, deadline=None)  # a busy machine keeps none
    hypothesis.settings.load_profile("xtrain")
    worker = getattr(config, "workerinput", None)
    if worker and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        # Each process begins with other files: what it compiles of the first ones the others then find compiled.
        files = sorted(map(str, Path(__file__).parent.rglob("test_*.py")))
        first = files[int(worker["workerid"][2:]) :: worker["workercount"]]
        config.args = [*first, *sorted(set(files) - set(first))]
    if worker:
        _send_less(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if examples.is_long:
        for item in items:
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                item.add_marker("slow")
                item.add_marker(pytest.mark.timeout(3600))

    def place(item: pytest.Item) -> tuple[int, str]:
        group = _group(item.nodeid)
        if group in FIRST:
            return FIRST.index(group), str(item.path)
        waits = next((place for place, folder in enumerate(WAITING) if group.startswith(folder)), len(WAITING))
        return len(FIRST) + waits, str(item.path)

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    # What is loaded by now stays loaded: garbage is looked for among what comes later, and not after every 700 objects,
    # which takes a tenth of the time in which plans are made.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    if (ranks := sys.modules.get("ranks")) is not None:
        ranks.begin()


def _send_less(config: pytest.Config) -> None:
    """Of a test that passes one message, not five: the others take two of the milliseconds that a short test takes."""
    # xdist runs the text of its module on a worker: the class is not the one that can be imported.
    worker: Any = next(each for each in config.pluginmanager.get_plugins() if type(each).__name__ == "WorkerInteractor")
    send = worker.sendevent

    def send_what_counts(name: str, **content: Any) -> None:
        data = content.get("data")
        if name in ("logstart", "logfinish") or (
            name == "testreport" and data["when"] != "call" and data["outcome"] == "passed"
        ):
            return
        send(name, **content)

    worker.sendevent = send_what_counts


def _group(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    if file in WITH_COMMANDS:
        return COMMANDS
    if file in WITH_TRANSFORMERS:
        return TRANSFORMERS
    return RANKS if file.startswith(f"{RANKS}/") or file in WITH_RANKS else file


@pytest.fixture
def inspected_here(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Inspect models that transformers computes, and layers of users, in this process and once for all tests."""
    from code_models import inspected, measured

    from xtrain.dsl.checking import inspections, model_code

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # all processes share the folder
        folder = folder.parent
    monkeypatch.setattr(inspections, "_cache", lambda: folder / "inspected")
    monkeypatch.setattr(model_code, "_inspected", inspected)
    monkeypatch.setattr(inspections, "run_child", measured)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Laboratory"]:
    """One process that ranks are forked from for all tests; what one process computes of a trial is computed once."""
    from forked_ranks import ForkedRanks
    from trials import Laboratory

    with ForkedRanks() as ranks:
        yield Laboratory.open(tmp_path_factory.mktemp("lab"), ranks)


@pytest.fixture(scope="session")
def small_server() -> "SmallServer":
    from lean_forks import SmallServer

    return SmallServer()


@pytest.fixture
def lean_forks(small_server: "SmallServer", monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork bounded functions, such as templates, from a process that has little memory."""
    small_server.install(monkeypatch)
