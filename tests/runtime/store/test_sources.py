"""Where a run begins: what is named, its own checkpoints, weights of another run; and what of it is refused."""

import json
import shlex
from pathlib import Path

import pytest
from attrs import evolve
from small_checkpoints import save, save_model

from xtrain.cli.run import _print_notes
from xtrain.plan.checkpoints import checkpoint_contents
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import signed
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.base.errors import EnvironmentFault, NothingLeft, ResumeRefused
from xtrain.runtime.observe.provenance import CodeUnread
from xtrain.runtime.store.beginning import begun_from, check_left, find, find_named, has_finished, starting_point
from xtrain.runtime.store.checkpoints import CheckpointFolder
from xtrain.runtime.store.run_directory import RunDirectory, locate, open_workspace

ROOT = Path(__file__).parents[3]


def plan(root: Path, *sets: str) -> Plan:
    found = plan_from_spec(ROOT / "specs/quickstart.xtrain", (f"workspace.root={root}", *sets)).plan
    assert found is not None
    return evolve(found, spec=str(root / "quickstart.xtrain"))


@pytest.fixture
def other(tmp_path) -> Path:
    """Another run, of the same experiment: steps 100 and 200."""
    directory = tmp_path / "other"
    for step in (100, 200):
        save(CheckpointFolder(directory / "checkpoints"), step, **checkpoint_contents(plan(tmp_path)))
    return directory


def run_of(run_plan: Plan, *steps: int, **state) -> Path:
    """The directory of a plan's run, with checkpoints."""
    directory = locate(run_plan, None)
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(1, 31)))
    for step in steps:
        save(CheckpointFolder(directory / "checkpoints"), step, **checkpoint_contents(run_plan), **state)
    return directory


def test_a_new_run_begins_at_nothing_or_where_the_plan_says(tmp_path, other):
    start = starting_point(plan(tmp_path), tmp_path / "new")
    assert start.entry is None and not start.anew and begun_from(plan(tmp_path), start) is None
    run_plan = plan(tmp_path, f'checkpoint.from="{other}"')
    start = starting_point(run_plan, tmp_path / "new")
    assert start.step == 200 and not start.own and not start.anew
    begun = {"from": str(other), "place": str(other.resolve()), "path": str(start.entry.path), "step": 200}
    assert begun_from(run_plan, start) == begun
    exact = plan(tmp_path, f'checkpoint.from="{other}/checkpoints/ckpt-s000000000100"')
    assert starting_point(exact, tmp_path / "new").step == 100


def test_what_is_named_comes_before_resume_and_a_run_begun_there_goes_on(tmp_path, other):
    named = f'checkpoint.from="{other}"'
    run_plan = plan(tmp_path, named, "workspace.run=mine")
    directory = run_of(run_plan, 10, 20)
    start = starting_point(run_plan, directory)
    assert start.step == 200 and start.anew  # what is there has not begun from it
    save(CheckpointFolder(directory / "checkpoints"), 210, begun_from={"from": str(other), "path": "", "step": 200})
    start = starting_point(run_plan, directory)
    assert start.step == 210 and start.own and not start.anew
    assert begun_from(run_plan, start) == {"from": str(other), "path": "", "step": 200}
    assert starting_point(plan(tmp_path, "workspace.run=mine"), directory).step == 210  # `from` left out again
    again = starting_point(plan(tmp_path, named, "checkpoint.resume=false"), directory)
    assert again.step == 200 and again.anew


def test_a_beginning_is_the_same_in_whatever_words_it_is_written(tmp_path, other, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(other)
    (tmp_path / "below").mkdir()
    words = ("other", str(other), "below/../other", "link", str(tmp_path / "link"))
    for first in words:
        run_plan = plan(tmp_path, f'checkpoint.from="{first}"', f'workspace.run="from {words.index(first)}"')
        begun = begun_from(run_plan, starting_point(run_plan, locate(run_plan, None)))
        directory = run_of(run_plan, 210, begun_from=begun)
        del begun["place"]  # as earlier versions wrote it
        earlier = tmp_path / f"earlier {first.replace('/', ' ')}"
        save(CheckpointFolder(earlier / "checkpoints"), 210, begun_from=begun)
        for again in words:
            for run in (directory, earlier):
                start = starting_point(plan(tmp_path, f'checkpoint.from="{again}"'), run)
                assert start.own and start.step == 210, (first, again)
        another = plan(tmp_path, 'checkpoint.from="other/checkpoints/ckpt-s000000000100"')
        assert starting_point(another, directory).anew
    # The folder of the whole project has moved: the same words mean the same.
    monkeypatch.chdir(tmp_path / "below")
    (tmp_path / "below/other").symlink_to(other)
    other.rename(tmp_path / "elsewhere")
    (tmp_path / "below/other").unlink()
    (tmp_path / "below/other").symlink_to(tmp_path / "elsewhere")
    first = locate(plan(tmp_path, 'workspace.run="from 0"'), None)
    assert starting_point(plan(tmp_path, 'checkpoint.from="other"'), first).own


def test_from_is_another_experiment_and_pretrained_too(tmp_path, other):
    base, source = plan(tmp_path), f'"{other}"'
    ids = {p.config_id for p in (base, *(plan(tmp_path, f"checkpoint.{n}={source}") for n in ("from", "pretrained")))}
    assert len(ids) == 3
    both = plan(tmp_path, f"checkpoint.from={source}", f"checkpoint.pretrained={source}")
    assert not [node for node in both.nodes if node.op == "setup.pretrained"]
    assert any(check.code == "W401" and "pretrained" in check.id for check in both.checks)


def test_metrics_make_way_for_what_is_computed_again(tmp_path, other):
    run_plan = plan(tmp_path)
    directory = run_of(run_plan, 10, 20)
    opened = open_workspace(run_plan, "")
    assert len((directory / "metrics.jsonl").read_text().splitlines()) == 20 and opened.directory == directory
    opened.lock.close()
    fresh = plan(tmp_path, f'checkpoint.from="{other}"', "workspace.run=mine")
    directory = run_of(fresh, 10)
    open_workspace(fresh, "").lock.close()
    assert not (directory / "metrics.jsonl").exists()
    (aside,) = (d for d in directory.parent.iterdir() if d.name.startswith("mine~"))
    assert CheckpointFolder(aside / "checkpoints").latest().step == 10


def events(directory: Path) -> list[dict]:
    return list(map(json.loads, (directory / "events.jsonl").read_text().splitlines()))


@pytest.mark.parametrize("began", [None, "other"])
@pytest.mark.parametrize("how", ["checkpoint.resume=false", 'checkpoint.from="other/checkpoints/ckpt-s000000000100"'])
def test_a_run_that_makes_way_is_reported_with_the_command_that_goes_back(
    tmp_path, other, monkeypatch, capsys, how, began
):
    monkeypatch.chdir(tmp_path)
    spec = (ROOT / "specs/quickstart.xtrain").read_text()
    (tmp_path / "my spec.xtrain").write_text(spec)
    sets = (
        "workspace.run=mine",
        "optimizer.lr=2e-3",
        "workspace.root=runs",
        *([f'checkpoint.from="{began}"'] if began else []),
    )
    first = plan_from_spec("my spec.xtrain", sets).plan
    begun = begun_from(first, starting_point(first, locate(first, None)))
    directory = run_of(first, 210, **({"begun_from": begun} if begun else {}))
    (directory / "metrics.jsonl").unlink()  # nothing was logged: what was saved is progress all the same
    workspace = open_workspace(signed(plan_from_spec("my spec.xtrain", (*sets, how)).plan, (*sets, how), None), "")
    workspace.lock.close()
    (aside,) = events(directory)
    assert aside["event"] == "set_aside" and aside["step"] == 210 and Path(aside["directory"]).name.startswith("mine~")
    _print_notes(workspace)
    said = capsys.readouterr().err
    assert aside["directory"] in said and aside["command"] in said and aside["reason"] in said
    xtrain, run, path, *more = shlex.split(aside["command"])
    assert (xtrain, run, path) == ("xtrain", "run", "my spec.xtrain") and set(more[::2]) == {"--set"}
    back = plan_from_spec(path, more[1::2]).plan
    start = starting_point(back, locate(back, None))
    assert start.own and start.step == 210 and back.config["optimizer"]["lr"] == 2e-3


def test_the_same_experiment_in_other_words_is_reported(tmp_path, other, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(other)

    def opened(path: str):
        run_plan = plan(tmp_path, f'dataset.stdlib.source=text("{path}/data/*.txt")', f'checkpoint.from="{path}"')
        workspace = open_workspace(run_plan, "")
        workspace.lock.close()
        return workspace, run_plan

    first, run_plan = opened("other")
    assert first.other is None and opened("./other")[0].directory == first.directory
    again, _ = opened(str(other))
    assert again.directory != first.directory and again.other is None, "there is no checkpoint"
    save(CheckpointFolder(first.directory / "checkpoints"), 210, **checkpoint_contents(run_plan), begun_from=begun_from(
        run_plan,
        starting_point(run_plan, first.directory),
    ))  # fmt: skip
    assert opened(str(other))[0].other.directory == first.directory
    assert opened(str(tmp_path / "link"))[0].other.directory == first.directory
    assert opened(str(other / "checkpoints/latest"))[0].other is None
    assert opened("other")[0].other is None and opened("other")[0].aside is None


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew_in_silence(tmp_path):
    run_plan = plan(tmp_path)
    directory = run_of(run_plan, 10, 20)
    for entry in CheckpointFolder(directory / "checkpoints").published():
        (entry.path / ".metadata").unlink()
    with pytest.raises(ResumeRefused, match=r"ckpt-s0{10}20: .metadata is missing.*resume = false"):
        open_workspace(run_plan, "")
    assert len((directory / "metrics.jsonl").read_text().splitlines()) == 30
    open_workspace(plan(tmp_path, "checkpoint.resume=false"), "").lock.close()
    assert starting_point(run_plan, directory).entry is None


@pytest.mark.parametrize("setting", ["from", "pretrained"])
def test_another_model_is_refused_before_anything_is_touched(tmp_path, other, setting):
    run_plan = plan(tmp_path, f'checkpoint.{setting}="{other}"', "model.dim=64")
    with pytest.raises(ResumeRefused, match=r"model\.dim"):
        open_workspace(run_plan, "")
    assert not (locate(run_plan, None) / "plan.json").exists()


@pytest.mark.parametrize("setting", ["from", "pretrained"])
def test_what_is_not_there_is_reported(tmp_path, setting):
    run_plan = plan(tmp_path, f'checkpoint.{setting}="{tmp_path}/nowhere"')
    for there in (False, True):
        with pytest.raises(EnvironmentFault, match=r"there is no .*checkpoint at"):
            open_workspace(run_plan, "")
        if not there:
            (tmp_path / "nowhere").mkdir()


def test_weights_of_another_optimizer_and_format_will_do(tmp_path, other):
    """But a full state of them is refused."""
    sets = ("precision.params=bf16",)
    open_workspace(plan(tmp_path, f'checkpoint.pretrained="{other}"', *sets), "").lock.close()
    with pytest.raises(ResumeRefused, match=r"precision\.params"):
        open_workspace(plan(tmp_path, f'checkpoint.from="{other}"', *sets), "")


def test_a_checkpoint_of_the_very_run_needs_another_name(tmp_path):
    run_plan = plan(tmp_path, "workspace.run=mine")
    directory = run_of(run_plan, 10)
    again = plan(tmp_path, "workspace.run=mine", f'checkpoint.from="{directory}/checkpoints/ckpt-s000000000010"')
    with pytest.raises(EnvironmentFault, match="of this run"):
        open_workspace(again, "")
    assert (directory / "metrics.jsonl").exists()


def test_every_spelling_of_a_source(tmp_path, other):
    folder = CheckpointFolder(other / "checkpoints")
    save(folder, 150, "best")
    save(folder, 200)
    model = save_model(folder, 200)
    for path, step in ((other, 200), (folder.root, 200), (folder.root / "best", 150), (folder.path(100), 100)):
        assert find(path).step == step and find(path).is_full
    assert find(other, weights=True).path == find(model, weights=True).path == model
    assert find(folder.root / "latest", weights=True).is_full
    with pytest.raises(EnvironmentFault, match="weights alone"):
        find(model)
    (folder.path(100) / ".metadata").write_bytes(b"")
    with pytest.raises(EnvironmentFault, match="damaged"):
        find(folder.path(100))


def test_a_checkpoint_of_a_run_is_found_by_pointer_by_name_and_by_path(tmp_path, other, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "run"
    checkpoints = CheckpointFolder(directory / "checkpoints")
    save(checkpoints, 10, "best")
    save(checkpoints, 20, backend="file")
    for name, step in (
        ("latest", 20),
        ("best", 10),
        ("ckpt-s000000000010", 10),
        ("other", 200),  # a path
        ("other/checkpoints/ckpt-s000000000100", 100),
        (str(checkpoints.alias("latest")), 20),
        (str(checkpoints.path(20) / "state.pt"), 20),
    ):
        assert find_named(directory, name).step == step, name
    for name, said in (
        ("model", "has no checkpoint model; there are latest, best, ckpt-s000000000010, ckpt-s000000000020"),
        ("bset", "has no checkpoint bset; there are latest, best"),
        ("elsewhere/nothing", "there is no checkpoint at elsewhere/nothing"),
    ):
        with pytest.raises(EnvironmentFault, match=said) as wrong:
            find_named(directory, name)
        assert wrong.value.code == "X720"
    with pytest.raises(EnvironmentFault, match="the run has no checkpoint yet"):
        find_named(tmp_path / "empty", "best")
    (checkpoints.path(10) / "__0_0.distcp").unlink()
    with pytest.raises(EnvironmentFault, match=r"damaged: __0_0\.distcp is missing"):
        find_named(directory, "best")


def test_under_other_code_the_run_that_saved_last_is_named(tmp_path):
    """Commits are named by hashes, which say nothing of the order in which they were run."""
    run_plan = plan(tmp_path)
    new = locate(run_plan, None)

    def opened(run_plan: Plan) -> str | None:
        workspace = open_workspace(run_plan, "")
        workspace.lock.close()
        return workspace.other and workspace.other.directory.name

    assert opened(run_plan) is None
    for code, time in (("bbbbbbbb", 2.0), ("aaaaaaaa-d0123456789", 3.0), ("cccccccc", 1.0)):
        folder = CheckpointFolder(new.with_name(f"{code}-{run_plan.config_id}") / "checkpoints")
        save(folder, 10, time=time, **checkpoint_contents(run_plan))
    newest = f"aaaaaaaa-d0123456789-{run_plan.config_id}"
    new.with_name(f"dddddddd-{run_plan.config_id}").mkdir()  # has never saved
    save(CheckpointFolder(new.with_name(f"{newest}~20260101-000000-1") / "checkpoints"), 10, time=9.0)  # moved aside
    assert opened(run_plan) == newest
    assert opened(plan(tmp_path, "checkpoint.resume=false")) is None  # which is to begin anew
    assert opened(plan(tmp_path, "workspace.run=mine")) is None
    # Where git cannot read the code, that run is resumed.
    assert locate(run_plan, CodeUnread("`git` is not installed")).name == newest
    assert locate(plan(tmp_path, "checkpoint.resume=false"), CodeUnread("x")).name == run_plan.config_id
    save(CheckpointFolder(new / "checkpoints"), 20, time=0.0, **checkpoint_contents(run_plan))
    assert opened(run_plan) is None and locate(run_plan, CodeUnread("x")) == new


def test_a_run_of_the_same_spec_with_other_derived_values_is_named_with_both_ways_to_resume_it(tmp_path):
    (tmp_path / "micro.xtrain").write_text(
        f"""experiment tiny {{ budget = 100 steps }}
        model llama {{ dim = 16, layers = 1, heads = 2 }}
        tokenizer bytes
        dataset a {{ source = text("*.txt"), holdout = 5% }}
        batch {{ sequence = 32, micro = 4 }}
        optimizer adamw {{ lr = 1e-3 }}
        workspace {{ root = "{tmp_path}/runs" }}"""
    )

    def opened(world: int, *sets: str) -> RunDirectory:
        found = plan_from_spec(tmp_path / "micro.xtrain", sets, world).plan
        assert found is not None
        workspace = open_workspace(found, "")
        workspace.lock.close()
        save(CheckpointFolder(workspace.directory / "checkpoints"), 10, **checkpoint_contents(found))
        return workspace

    one = opened(1)
    assert one.other is None
    two = opened(2)
    assert two.other is not None and two.other.directory == one.directory != two.directory
    text = two.other.text()
    assert (
        "at step 10, is a run of the same spec with other values (" in text
        and "batch.rows 4 → 8" in text
        and "tokens_per_step" in text
    )
    assert text.endswith(f"to resume that run: --world 1 or --set workspace.run={one.directory.name}")
    assert opened(2, "optimizer.lr=0.5").other is None, "somebody chose that value"


FROM = 'checkpoint.from="{}"'


@pytest.mark.parametrize(("own", "named", "finished", "left"), [
    (0, 200, None, "a state of step 200, and the budget ends with step 150: nothing is left to train"),
    (0, 100, None, ""),
    (150, 0, None, ""),  # cut off behind its last step: its end is left
    (160, 0, None, "the run is at step 160, and the budget ends with step 150: nothing is left to train"),
    (160, 0, 160, ""),  # it has ended there, and says so when it is started again
    (160, 0, 100, "or '160 steps' to end the run there"),
    (120, 0, None, ""),
])  # fmt: skip
def test_a_run_that_would_train_nothing_is_refused(tmp_path, other, own, named, finished, left):
    sets = ["experiment.budget=150 steps", "workspace.run=mine"]
    if named:
        sets.append(FROM.format(other if named == 200 else f"{other}/checkpoints/ckpt-s{named:012d}"))
    run_plan = plan(tmp_path, *sets)
    directory = run_of(run_plan, *([own] if own else []))
    if finished is not None:
        (directory / "finished").write_text(f"{finished}\n")
    if not left:
        open_workspace(run_plan, "").lock.close()
        return
    with pytest.raises(NothingLeft, match=left) as refused:
        open_workspace(run_plan, "")
    assert refused.value.code == "X722" and not (directory / "plan.json").exists()


def test_steps_of_a_budget_in_epochs_are_compared_as_well(tmp_path, other):
    """They are known when the data has been counted, behind the set-up."""
    run_plan = plan(tmp_path, FROM.format(other), "experiment.budget=2 epochs", "scheduler.warmup=5 steps")
    start = starting_point(run_plan, tmp_path / "new")
    check_left(run_plan, start, tmp_path / "new")
    check_left(run_plan, start, tmp_path / "new", 201)
    with pytest.raises(NothingLeft, match="ends with step 200"):
        check_left(run_plan, start, tmp_path / "new", 200)


@pytest.mark.parametrize(("setting", "saved", "finished", "ends_at_once"), [
    ("experiment.budget=150 steps", 150, 150, True),
    ("experiment.budget=120 steps", 150, 150, True),
    ("experiment.budget=151 steps", 150, 150, False),
    ("experiment.budget=150 steps", 150, None, False),  # stopped before the actions at its end
    ("experiment.budget=150 steps", 150, 140, False),
    ("experiment.budget=150 steps", None, 150, False),  # its checkpoints were removed
    ("experiment.budget=1 epochs", 150, 150, False),  # steps are known once the data is counted
])  # fmt: skip
def test_a_run_has_finished_where_the_checkpoint_and_the_plan_say_so(tmp_path, setting, saved, finished, ends_at_once):
    run_plan = plan(tmp_path, setting, "workspace.run=mine", "scheduler.warmup=5 steps")
    directory = run_of(run_plan, *([saved] if saved else []))
    if finished is not None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "finished").write_text(f"{finished}\n")
    assert has_finished(run_plan, starting_point(run_plan, directory), directory) == ends_at_once


def test_a_run_that_has_ended_is_not_compared_with_a_smaller_budget(tmp_path):
    """Under the settings of its last start and under others: it has nothing to do, and says so."""
    run_plan = plan(tmp_path, "workspace.run=mine")
    directory = run_of(run_plan, 300)
    (directory / "finished").write_text("300\n")
    for ended in (run_plan, plan(tmp_path, "workspace.run=mine", "experiment.budget=150 steps")):
        workspace = open_workspace(ended, "")
        workspace.lock.close()
        assert workspace.directory == directory and has_finished(ended, starting_point(ended, directory), directory)
