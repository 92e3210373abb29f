"""Documents that a dataset leaves out: repeated ones, and those that share words with a benchmark."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from commands import xtrain
from forking import ForkedCommand
from projects import TINY, Project, curve, events, worst

from xtrain.cli.run_data import RunData
from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_text
from xtrain.planner.review.resumable import resumable
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed import resemblance
from xtrain.runtime.feed.cleaning import repeated_documents
from xtrain.runtime.feed.dataset_view import data_nodes, tokenizer_of
from xtrain.runtime.feed.document_search import SearchedDataset, place_of
from xtrain.runtime.feed.prepared import PreparedDataset, counted_rows, prepared_from
from xtrain.runtime.feed.records import BadRecordReport
from xtrain.runtime.feed.resemblance import resembling_documents, shingles
from xtrain.runtime.feed.token_store import TokenStore

CLEAN = ', deduplicate = exact, decontaminate = ["bench.jsonl"]'
QUESTION = "how many words of a question must a document share before it counts as contaminated at all"


def written(name: str, texts: list[str]) -> None:
    Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Documents: 5 is that of 1, 9 and 30 are that of 2; 12, 20 and 33, which is that of 20, have 13 words of the
    benchmark, 21 has 12."""
    monkeypatch.chdir(tmp_path)
    Project(tmp_path)
    found = [f"document {i} " + "abc def ghi " * (i % 7) for i in range(40)]
    found[5], found[9], found[30] = found[1], found[2], found[2]
    words = QUESTION.split()
    found[12] = "Before. " + " ".join(words[1:14]).upper() + "! And after."
    found[20], found[21] = QUESTION, "other " + " ".join(words[:12]) + " other"
    found[33] = found[20]
    written("data.jsonl", found)
    written("bench.jsonl", [QUESTION, "too short"])
    return found


LEFT_OUT = {5, 9, 12, 20, 30, 33}


def planned(clean: str = CLEAN, holdout: str = "0%", more: str = "") -> Plan:
    text = TINY.format(steps=20, tied="true", more=more).replace("holdout = 10%", f"holdout = {holdout}{clean}")
    plan = plan_from_text(text, "tiny.xtrain").plan
    assert plan is not None
    return plan


def prepared(plan: Plan) -> PreparedDataset:
    return prepared_from(plan, data_nodes(plan)["lines"], tokenizer_of(plan), jobs=1)


def rows(data: PreparedDataset) -> list[list[bytes]]:
    reader = data.parts["training"]
    return [[part.tobytes() for part in reader.row(row).segments] for row in range(reader.rows.num_rows)]


def test_rows_are_those_of_the_data_without_them(texts: list[str]):
    data = prepared(planned())
    assert (data.left_out.repeated.tolist(), data.left_out.contaminated.tolist()) == ([5, 9, 30, 33], [12, 20])
    assert {*data.train_documents.tolist()} == {*range(40)} - LEFT_OUT
    written("data.jsonl", [text for number, text in enumerate(texts) if number not in LEFT_OUT])
    assert rows(data) == rows(prepared(planned(clean="")))


def test_short_documents_are_left_out(texts: list[str]):
    """Document 3 has exactly as many tokens as are asked for: bytes, and one for its end."""
    least = len(texts[3]) + 1
    short = {number for number, text in enumerate(texts) if len(text) + 1 < least}
    assert 3 not in short and {5, 14} <= short != short | LEFT_OUT
    data = prepared(planned(clean=f"{CLEAN}, min_tokens = {least}"))
    assert {*data.left_out.short.tolist()} == short and {*data.train_documents.tolist()} == {
        *range(40)
    } - LEFT_OUT - short
    assert not {*data.left_out.repeated.tolist()} & short
    assert data.left_out.text(40).startswith(
        f"{len(LEFT_OUT | short)} of 40 documents are left out: {len(short)} have fewer"
    )
    written("data.jsonl", [text for number, text in enumerate(texts) if number not in LEFT_OUT | short])
    assert rows(data) == rows(prepared(planned(clean="")))


def test_held_out_documents_are_cleaned_too(texts: list[str]):
    data = prepared(planned(holdout="30%"))
    parts = [{*each.tolist()} for each in (data.train_documents, data.heldout_documents)]
    assert parts[0] | parts[1] == {*range(40)} - LEFT_OUT and not parts[0] & parts[1] and len(parts[1]) > 5


def test_memory_is_bounded_and_the_cache_is_read(texts: list[str], monkeypatch: pytest.MonkeyPatch):
    plan = planned()
    data = prepared(plan)
    assert [repeated_documents(data.store, size).tolist() for size in (1, 7, 100)] == [[5, 9, 30, 33]] * 3
    monkeypatch.setattr("xtrain.runtime.feed.cleaning.repeated_documents", None)
    again = prepared(plan)
    assert again.left_out.all.tolist() == sorted(LEFT_OUT) and again.train_rows.num_rows == data.train_rows.num_rows
    counted, other = counted_rows(plan), counted_rows(planned(clean=""))
    assert counted is not None and counted.rows == {"lines": data.train_rows.num_rows} and other is None
    # Another benchmark of the same name is another cleaning.
    written("bench.jsonl", ["nothing that any document has"])
    assert counted_rows(plan) is None


def test_documents_that_resemble_an_earlier_one(texts: list[str], monkeypatch: pytest.MonkeyPatch):
    generator, words = random.Random(0), [f"w{number}" for number in range(4000)]
    found = [" ".join(generator.choices(words, k=150)) for _ in range(30)]
    near = found[3].replace(found[3].split()[70], "another")
    found += [near, f"{near} end", " ".join(found[5].split()[:75]), found[7], "short", "short", "?!", "short one"]
    written("data.jsonl", found)
    plan = planned(clean=", deduplicate = 0.8")
    data = prepared(plan)
    assert data.left_out is not None and data.left_out.all.tolist() == [30, 31, 33, 35]
    assert "4 of 38 documents are left out: 4 resemble an earlier one" in data.left_out.text(38)
    assert "resemble an earlier one by 80% (MinHash)" in data_nodes(plan)["lines"].does
    monkeypatch.setattr(resemblance, "BLOCK", 5)
    for at_once in (1, 7, 100):  # memory is bounded
        again = resembling_documents(iter(found), len(found), 0.8, Path("other"), at_once)
        assert again.tolist() == [30, 31, 33, 35]
    assert not list(Path("other").iterdir())
    similar = [
        len(shingles(one) & shingles(found[3])) / len(shingles(one) | shingles(found[3])) for one in found[30:32]
    ]
    assert min(similar) > 0.9 and counted_rows(plan) is not None
    assert counted_rows(planned(clean=", deduplicate = 0.9")) is None
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(DataError, match="needs the package datasketch"):
        prepared(planned(clean=", deduplicate = 0.7"))


def test_candidates_are_compared_with_the_first_that_they_resemble():
    minima = np.arange(4)[:, None] * 1000 + np.arange(128)
    minima[1, :64] = minima[0, :64]  # half of them
    minima[2] = minima[1]
    minima[3, :103] = minima[0, :103]
    similar = np.zeros(4, dtype=bool)
    resemblance._compare(minima, np.arange(4), 103, similar)
    assert similar.tolist() == [False, False, True, True]


def test_a_repeated_document_is_searched_as_the_one_that_stayed(
    texts: list[str], monkeypatch: pytest.MonkeyPatch, capsys
):
    plan = planned()
    dataset = SearchedDataset(name="lines", plan=plan, data=prepared(plan), tokenizer=tokenizer_of(plan))
    monkeypatch.setattr(RunData, "searched", lambda self: [dataset])
    found = RunData(Path("run")).named(["data.jsonl:31", "lines:12", "lines:1"])
    assert {name: documents.tolist() for name, documents in found.items()} == {"lines": [1, 2, 12, 30]}
    assert capsys.readouterr().err == "note: lines:30 repeats lines:2, which is searched as well\n"


def test_places_of_records_follow_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert place_of("data.jsonl:3") == (str(tmp_path / name / "data.jsonl"), "3")


def test_answers_with_other_labels_repeat_nothing(texts: list[str]):
    records = [{"text": "the same", "margin": margin} for margin in (1.0, 2.0, 1.0)] + [{"text": "more", "margin": 1.0}]
    Path("data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    data = prepared(planned(clean=', deduplicate = exact, columns = { weights: "margin" }'))
    assert data.left_out.repeated.tolist() == [2]


NUMBERS = {
    "trained": np.array([1, 1, 1, 0, 1, 1], np.uint8),
    "firsts": np.array([1, 2, 1], np.int32),
    "columns": {"c": np.array([1, 1, 1, 2, 1, 1], np.float32)},
    "values": {"v": np.array([1, 2, 1], np.float32)},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_documents_with_other_numbers_repeat_nothing(name: str):
    tokens, offsets = np.array([7, 8] * 3, np.uint16), np.arange(0, 8, 2)
    bad = BadRecordReport(count=0, first=())
    store = TokenStore(key="k", tokens=tokens, offsets=offsets, num_files=1, bad_records=bad)
    assert repeated_documents(store).tolist() == [1, 2]
    assert repeated_documents(evolve(store, **{name: NUMBERS[name]})).tolist() == [2]


def test_questions_are_left_out_whole(texts: list[str]):
    """Question 1 has a choice of question 0, question 2 is question 0, question 3 has the benchmark in one choice."""
    asked = [
        ("Is it?", ["yes", "no"]),
        ("Is it?", ["yes", "maybe"]),
        ("Is it?", ["yes", "no"]),
        ("Why?", ["so", QUESTION]),
    ]
    records = [{"question": question, "choices": choices, "answer": 0} for question, choices in asked]
    Path("asked.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    more = f'dataset asked {{ source = jsonl("asked.jsonl"), choices = "choices", holdout = 100%{CLEAN} }}'
    plan = planned(clean="", more=more + "\nevery 5 steps eval asked")
    data = prepared_from(plan, data_nodes(plan)["asked"], tokenizer_of(plan), jobs=1)
    assert (data.left_out.repeated.tolist(), data.left_out.contaminated.tolist()) == ([4, 5], [6, 7])
    assert repeated_documents(data.store, 1).tolist() == [4, 5]
    longest = planned(clean="", more=more.replace(CLEAN, ", min_tokens = 90") + "\nevery 5 steps eval asked")
    data = prepared_from(longest, data_nodes(longest)["asked"], tokenizer_of(longest), jobs=1)
    assert data.left_out.short.tolist() == [*range(8)]  # one choice of the last question is long, the other is not


def test_a_benchmark_that_cannot_be_read_is_named(texts: list[str]):
    Path("bench.jsonl").unlink()
    with pytest.raises(DataError, match=r"bench\.jsonl"):
        prepared(planned())
    Path("bench.jsonl").write_text("no json\n")
    with pytest.raises(DataError, match="is not a file of JSON lines"):
        prepared(planned())


WRONG = [
    ("deduplicate = 0.01", "0.1"),
    ("deduplicate = fuzzy", "`fuzzy` is not defined"),
    ("decontaminate = 3", "`decontaminate` must be"),
    ("min_tokens = -1", "`min_tokens` must not be negative"),
]


@pytest.mark.parametrize(("clean", "said"), WRONG)
def test_wrong_settings_are_explained(texts: list[str], clean: str, said: str):
    text = TINY.format(steps=20, tied="true", more="").replace("holdout = 10%", clean)
    assert any(said in each.message for each in plan_from_text(text, "tiny.xtrain").diagnostics.errors)


def test_the_plan_shows_it_and_other_plans_stay(texts: list[str]):
    with_it, without = planned(), planned(clean="")
    does = with_it.node("setup.data.lines").does
    assert "leave out documents that repeat an earlier one" in does and "share 13 words with bench.jsonl" in does
    assert with_it.config_id != without.config_id
    assert planned(clean=", deduplicate = none, decontaminate = []").id == without.id
    verdict = resumable(without, with_it)
    assert verdict.kind == "incompatible" and not verdict.certain
    assert {each.path for each in verdict.reasons} == {"dataset.lines.deduplicate", "dataset.lines.decontaminate"}
    longer = planned(clean=", min_tokens = 5")
    assert "leave out documents with fewer than 5 tokens" in longer.node("setup.data.lines").does
    assert [each.path for each in resumable(without, longer).reasons] == ["dataset.lines.min_tokens"]


@pytest.mark.parametrize("moments", [(0.4, 0.9), pytest.param([n / 5 for n in range(1, 11)], marks=pytest.mark.slow)])
def test_a_killed_build_is_completed_by_the_same_call(texts: list[str], moments: list[float]):
    project = Path.cwd()
    text = TINY.format(steps=20, tied="true", more="").replace("holdout = 10%", f"holdout = 10%{CLEAN}")
    Path("tiny.xtrain").write_text(text)
    for seconds in moments:
        process = ForkedCommand(["data", "build", "tiny.xtrain"], project, dict(os.environ))
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
    done = xtrain("data", "build", "tiny.xtrain", cwd=project)
    said = "6 of 40 documents are left out: 4 repeat an earlier one, 2 share 13 words with a benchmark"
    assert done.returncode == 0 and said in " ".join(done.stdout.split()), done.stderr
    shown = xtrain("data", "stats", "tiny.xtrain", cwd=project)
    assert said in " ".join(shown.stdout.split()), shown.stderr


@pytest.mark.slow
def test_all_layouts_leave_out_the_same(texts: list[str]):
    project, found = Project(Path.cwd()), []
    written("data.jsonl", texts)
    for root, parallel in (("one", ""), ("two", "parallel { fsdp 2 }"), ("three", "parallel { tp 2, fsdp 2 }")):
        text = TINY.format(steps=4, tied="true", more=parallel).replace("holdout = 10%", f"holdout = 10%{CLEAN}")
        Path("tiny.xtrain").write_text(text)
        found.append(project.run("tiny.xtrain", root=root))
    assert len({json.dumps(events(each, "data")[0]["rows"]) for each in found}) == 1
    curves = [curve(each) for each in found]
    assert all(np.max(worst(curves[0], each)) < 1e-4 for each in curves[1:])
