"""The data half of a run: what is built once and waited for, and where a resumed run ends."""

import threading
import time
from concurrent.futures import wait
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from one_rank import one_rank
from projects import Project
from ranks import on_ranks

from xtrain.components.collators.flatten_torch import flatten
from xtrain.components.collators.pack_torch import pack
from xtrain.components.collators.shift_tokens_torch import shift_tokens
from xtrain.components.collators.to_tensor_torch import to_tensor
from xtrain.components.packings.sequential_run import pack as pack_sequential
from xtrain.plan.arithmetic import Arithmetic
from xtrain.plan.plan import PlanPhase, Timeline
from xtrain.plan.step_sizes import StepSizes
from xtrain.plan.timeline import counted_timeline
from xtrain.planner.load import plan_from_spec
from xtrain.records.events import event_of
from xtrain.records.lines import Event, objects_since
from xtrain.records.training_events import DataEvent, TokeniseEvent
from xtrain.runtime.base.ops import OPS
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed import setup as feed_module
from xtrain.runtime.feed.collate import compose
from xtrain.runtime.feed.curriculum import Curriculum, TrainingRows
from xtrain.runtime.feed.loader import RowLoader
from xtrain.runtime.feed.packing.stored_rows import RowReader
from xtrain.runtime.feed.records import BadRecordReport
from xtrain.runtime.feed.setup import Feed, report_rows
from xtrain.runtime.feed.token_store import TokenStore
from xtrain.runtime.feed.tokenizers import load_tokenizer
from xtrain.runtime.observe.heartbeat import HeartbeatWriter, first_of_machine
from xtrain.runtime.observe.records import Records


def rank_of(number: int, world: int, local: int) -> Rank:
    return one_rank(number, local_rank=local, world_size=world)


def test_alone_there_is_nobody_to_wait_for():
    assert first_of_machine(rank_of(0, 1, 0), threading.current_thread, HeartbeatWriter()) is threading.main_thread()


def _two_machines(number: int, world: int, folder: Path) -> tuple[object, bool]:
    """Ranks 0 and 2 are the first of their machines; the second one takes longer than any single collective."""

    def build() -> int:
        time.sleep(0.4 * number)
        (folder / f"built{number}").touch()
        return number

    found = first_of_machine(rank_of(number, world, number % 2), build, HeartbeatWriter())
    return found, all((folder / f"built{first}").exists() for first in (0, 2))


def test_all_wait_for_the_first_rank_of_every_machine(tmp_path):
    assert on_ranks(4, _two_machines, tmp_path, tmp_path) == [(0, True), (None, True), (2, True), (None, True)]


def test_what_the_work_raises_is_raised_here(monkeypatch):
    def fail() -> None:
        raise ValueError("no room")

    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, op: None)
    with pytest.raises(ValueError, match="no room"):
        first_of_machine(rank_of(0, 2, 0), fail, HeartbeatWriter())


def test_work_that_fails_while_ranks_ask_is_not_done(monkeypatch):
    asked, failing = [], threading.Event()

    def fail() -> None:
        failing.wait()
        raise ValueError("no room")

    def wait_(futures, pause):
        if asked:
            return wait(futures, pause)
        failing.set()
        wait(futures)
        return SimpleNamespace(done=set())  # as if it had failed just after the pause

    monkeypatch.setattr("xtrain.runtime.observe.heartbeat.wait", wait_)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, op: asked.append(tensor.item()))
    with pytest.raises(ValueError, match="no room"):
        first_of_machine(rank_of(0, 2, 0), fail, HeartbeatWriter())
    assert asked == [0.0]


ROWS = {"one": 30, "two": 12}
ONE = {"one": 1.0}


def rows_of(store: TokenStore, name: str) -> TrainingRows:
    """Some of the documents, a row each."""
    documents = torch.arange(ROWS[name]).numpy()
    rows = pack_sequential(store.lengths()[: ROWS[name]], 8, "split")
    return TrainingRows.of(name, RowReader(store=store, documents=documents, rows=rows), 0)


def feed(store: TokenStore, rows_per_step: int, epochs: float, shares: dict[str, float] = ONE) -> Feed:
    whole = PlanPhase(name="train", first=0, fraction=None, shares=shares)
    half = PlanPhase(name="half", first=None, fraction=0.5, shares=shares, lr_scale=0.5)
    late = PlanPhase(name="late", first=None, fraction=None, epochs=1.75, shares=shares)
    planned = Timeline(steps=None, tokens=None, epochs=epochs, phases=(whole, half, late), ticks=(), triggers=())
    batch = Arithmetic(micro=rows_per_step, accumulate=1, rows=rows_per_step, sequence=8, epochs=epochs)
    batch = batch.counted(Fraction(sum(ROWS[name] for name in shares)))
    timeline = counted_timeline(planned, batch, {name: ROWS[name] for name in shares})
    chain = compose([to_tensor(), flatten(), shift_tokens(), pack(capacity=8)])
    loader = RowLoader(datasets=tuple(rows_of(store, name) for name in shares), curriculum=Curriculum(
        datasets=tuple(shares),
        phases=timeline.phases,
        steps=batch.steps,
        rows_per_step=rows_per_step,
        seed=0,
    ), collate=chain, micro=rows_per_step, accumulate=1, data_rank=0, data_ranks=1)  # fmt: skip
    return Feed(
        loader=loader, collate=chain, micro=rows_per_step, steps=batch.steps, datasets={}, phases=timeline.phases,
        planned=planned, batch=batch,
    )  # fmt: skip


@pytest.fixture
def store() -> TokenStore:
    """Thirty documents, each of which fills a row."""
    offsets = torch.arange(0, 31 * 9, 9).numpy()
    tokens = torch.arange(30 * 9).numpy().astype("uint16")
    return TokenStore(key="memory", tokens=tokens, offsets=offsets, num_files=1, bad_records=BadRecordReport())


def test_a_budget_in_epochs_is_kept_by_a_run_whose_steps_become_larger(store):
    first = feed(store, 4, 2.0)
    assert first.steps == 15
    state = first.loader.state(7)
    second = feed(store, 8, 2.0)
    assert second.steps == 8
    second.resume(state, StepSizes(4))
    assert second.steps == 7 + 4 and second.loader.curriculum.steps == 11
    assert second.rows_taken(11) == {} and second.loader.rows_taken(11) == {"one": 28 + 32}
    # Of 60 rows 28 were taken by then: 1.75 epochs, 52.5 rows, are behind the third of the steps that are left.
    assert [second.phase(step).name for step in (7, 9, 10)] == ["half", "half", "half"]
    assert second.timeline.phases[2].first == 7 + 4 and second.epoch(11) == 2.0


def test_a_budget_in_epochs_of_a_mixture_counts_the_rows_of_all_its_datasets(store):
    mixed = {"one": 0.5, "two": 0.5}
    first = feed(store, 4, 2.0, mixed)
    assert first.steps == 21
    second = feed(store, 6, 2.0, mixed)
    second.resume(first.loader.state(6), StepSizes(4))
    assert second.steps == second.loader.curriculum.steps == 6 + 10
    assert sum(second.rows_taken(16).values()) == 2 * (30 + 12)


@pytest.mark.parametrize("stop", [0, 1, 7, 14, 15])
def test_a_run_that_goes_on_as_it_was_ends_where_it_would_have_ended(store, stop):
    again = feed(store, 4, 2.0)
    again.resume(feed(store, 4, 2.0).loader.state(stop), StepSizes(4))
    assert again.steps == 15
    assert again.loader.state(15) == feed(store, 4, 2.0).loader.state(15)


def test_a_phase_is_that_of_the_step(store):
    fed = feed(store, 4, 2.0)
    assert [fed.phase(step).name for step in (0, 7, 8, 13, 14)] == ["train", "train", "half", "half", "late"]


def test_how_much_data_there_is_is_reported(store):
    events: list[Event] = []

    class Heard:
        def event(self, event: Event) -> None:
            events.append(event)

    batch = Arithmetic(micro=4, accumulate=1, rows=4, sequence=8, steps=12).counted(Fraction(30))
    report_rows(Heard(), (rows_of(store, "one"),), 12, batch)
    epoch = {"epoch_rows": 30.0, "epoch_tokens": 240.0, "epochs": None}
    assert events == [DataEvent(step=0, time=events[0].time, steps=12, rows={"one": 30}, **epoch)]


def test_a_long_build_reports_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(feed_module, "REPORT_SECONDS", 0.0)
    plan = plan_from_spec(tmp_path / Project(tmp_path).spec()).plan
    assert plan is not None
    node = plan.node("setup.data.lines")
    resources = {
        "plan": plan, "rank": rank_of(0, 1, 0), "records": Records.open(tmp_path, 0), "beat": HeartbeatWriter(),
        "tokenizer": load_tokenizer("bytes", tmp_path), "prepared": {}, "node_id": node.id,
    }  # fmt: skip
    OPS["setup.data"].bind(node, resources)()
    *_, last = map(event_of, objects_since(tmp_path / "events.jsonl"))
    size = (tmp_path / "data.jsonl").stat().st_size
    assert isinstance(last, TokeniseEvent)
    assert (last.dataset, last.stage, last.done, last.total, last.resumed) == ("lines", "tokens", size, size, 0)
    assert last.message.startswith("tokenizing: 100% of ")
