"""Reports of runs, servers and sweeps: what the page says, and what of hostile files it does not."""

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest
from attrs import evolve
from hostile_run import HOSTILE, hostile_run
from made_runs import made_run, made_sweep

from xtrain.api.reports import report_page
from xtrain.plan.serialise import dumps
from xtrain.planner.load import plan_from_path
from xtrain.planner.review.page import render
from xtrain.records.status import SERVER_FILE, ServedModel, ServerStatus
from xtrain.runtime.store.certificates import certificate_path
from xtrain.text.printing import whole_pages
from xtrain.tui.report.content import report_of, topic_of
from xtrain.tui.report.page import MARK, fragment, page, titled


class Elements(HTMLParser):
    """Names of the elements and attributes of a page, its texts, and whether every element is closed."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.said: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["script"] and self.open[-1:] != ["style"]:
            self.said.append(data)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    first = made_run(root / "curriculum" / "aaaa", "datasets", logged=60)
    first.event("generate", node="tick.generate", weights="trained", samples=[{"prompt": "def ", "text": "def f(): 0"}])
    first.event("alert", kind="loss_spike", state="raised", message="loss 9.1 is far above 5.2", value=9.1)
    (root / "curriculum/aaaa/metadata/environment.json").write_text(
        json.dumps({"torch": "2.13.0", "command": ["a", "b"]})
    )
    (root / "curriculum/aaaa/spec.xtrain").write_text("experiment curriculum { seed = 1 }\n")
    made_run(root / "curriculum" / "bbbb", "datasets", logged=40, end="failed", steps=400)
    return root


def text_of(found: str) -> str:
    return re.sub(r"\s+", " ", " ".join(Elements(found).said))


def test_the_page_of_one_run(root: Path) -> None:
    found = report_page([root / "curriculum" / "aaaa"])
    assert found.startswith(MARK) and "http" not in found.replace("http://www.w3.org/2000/svg", "").replace(
        "http-equiv", ""
    )
    said = text_of(found)
    for words in (
        "curriculum·aaaa", "DONE after 60 steps", "60 of 200", "loss_spike", "loss 9.1 is far above 5.2",
               "def f(): 0", "torch 2.13.0", "command a b", "experiment curriculum { seed = 1 }", "grad_norm", "eval/",
        "Plan against measured", "step time", "memory, all",
    ):  # fmt: skip
        assert words.replace(" ", "") in said.replace(" ", ""), words
    assert "Differences" not in said and "loss/code" in said
    assert found.count("<figure") == len(re.findall(r"<svg xmlns", found)) > 10


@pytest.mark.parametrize(("key", "topic"), [
    ("loss", "Training"),
    ("eval/web/loss", "Evaluation"),
    ("eval_8/web/loss", "Evaluation"),
    ("eval_all/web/acc", "Evaluation"),
    ("final/web/loss", "Evaluation"),
    ("loss/code", "Datasets"),
    ("hook/largest/norm", "Other metrics"),
])  # fmt: skip
def test_topics(key: str, topic: str) -> None:
    assert topic_of(key) == topic


def test_the_page_of_a_large_plan_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_from_path(Path(__file__).parents[3] / "specs" / "llama_405b_16k.xtrain", ()).plan
    assert plan is not None
    made_run(tmp_path / "run", logged=4)
    (tmp_path / "run" / "plan.json").write_text(dumps(plan))
    certificate_path(plan).parent.mkdir(parents=True)
    certificate_path(plan).write_text("{}")
    found = unescape(report_page([tmp_path / "run"]))
    with whole_pages():
        assert render(plan) in found
    assert render(plan) not in found  # as on a terminal
    assert re.search(
        r"<summary>Certificate: not valid here</summary><pre>runs/certificates/.* is no certificate", found
    )


def test_runs_next_to_each_other(root: Path) -> None:
    report = report_of([root / "curriculum" / "aaaa", root / "curriculum" / "bbbb"])
    assert [(part.run.label, part.run.color) for part in report.runs] == [
        ("curriculum·aaaa", 0),
        ("curriculum·bbbb", 1),
    ]
    assert {each.key: each.values for each in report.differences or ()}["steps"] == ("200", "400")
    loss = report.charts[0][1][0]
    lines = loss.picture.points["lines"]
    assert [(line["name"], line["color"], len(line["x"])) for line in lines] == [
        ("curriculum·aaaa", 0, 60),
        ("curriculum·bbbb", 1, 40),
    ]
    assert lines[0]["last"] == f"{lines[0]['y'][-1]:.4f}"
    said = text_of(page(report))
    assert "RuntimeError: boom" in said and "Differences of settings" in said and "400" in said


def test_figures_that_some_runs_have_not_leave_their_columns_empty(root: Path) -> None:
    report = report_of([root / "curriculum" / "aaaa", root / "curriculum" / "bbbb"])
    first, other = report.runs
    first = evolve(first, figures={"reward": "0.925", **first.figures})
    table = page(evolve(report, runs=(first, other))).partition("</table>")[0]
    names = re.findall(r"<th>(.*?)</th>", table)
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    assert [dict(zip(names, row, strict=True))["reward"] for row in rows] == ["0.925", "–"]
    assert dict(zip(names, rows[1], strict=True))["loss"] == other.figures["loss"]


def test_steps_of_other_sizes_are_compared_by_tokens(root: Path, tmp_path: Path) -> None:
    made_run(tmp_path / "dense" / "cccc", "dense", logged=20)
    report = report_of([root / "curriculum" / "aaaa", tmp_path / "dense" / "cccc"])
    assert {chart.picture.points["x"] for _, charts in report.charts for chart in charts} == {"tokens"}


def test_measured_values_lie_next_to_planned_ones(tmp_path: Path) -> None:
    run = made_run(tmp_path / "large" / "a", "large", logged=30, device="cuda")
    charts = {chart.title: chart.picture.svg for _, charts in report_of([run.directory]).charts for chart in charts}
    planned = {key for key, svg in charts.items() if 'class="level"' in svg}
    assert planned == {"memory_bytes", "step_seconds", "tokens_per_second"}
    said = text_of(report_page([run.directory]))
    assert "llama_8b: 23,842 steps on 64 ranks" in said and "memory" in said  # the page of its plan


def test_a_sweep(tmp_path: Path) -> None:
    folder = tmp_path / "sizes-sweep-1a2b3c4d"
    made_sweep(folder)
    report = report_of([folder / "003-x"], sweep=folder)
    assert report.sweep is not None and len(report.sweep.rows) == 10
    assert [chart.title for chart in report.sweep.charts] == ["eval/web/loss", "loss"]
    assert {name for name, _, _ in report.sweep.importance} == {"optimizer.lr", "model.ffn"}
    found = page(report)
    assert "stopped early" in text_of(found) and found.count("<tr><td>00") == 10


def test_a_hostile_sweep_leads_to_no_other_folder(tmp_path: Path) -> None:
    folder, secret = tmp_path / "theirs", made_run(tmp_path / "mine", logged=4)
    folder.mkdir()
    names = ["../mine", "/etc", "", "..", "a\0b", str(secret.directory), "006-x"]
    lines: list[dict] = [{"event": "sweep_begin", "sweep_id": HOSTILE, "attempt": "a", "lag": 2, "objective": HOSTILE}]
    for number, name in enumerate(names):
        asked = {"trial": number, "name": name, "point": {HOSTILE: HOSTILE}, "sameness": "s", "config_id": "c"}
        lines += [{"event": "trial_asked", **asked, "same_as": 99, "reason": ""}]
        lines += [{"event": "trial_measured", "trial": number, "rung": None, "trained": 1, "tokens": 1, "value": -1.0}]
    (folder / "sweep.jsonl").write_text("".join(json.dumps({"step": 0, "time": 1, **line}) + "\n" for line in lines))
    report = report_of([], sweep=folder)
    assert report.sweep is not None and [trial.number for trial, _, _ in report.sweep.rows] == [6]
    found = page(report)
    found.encode()
    assert Elements(found).open == [] and "alert(1)</script>" not in found and "two_ranks_cpu" not in found


def test_a_server_shows_its_models_and_a_run_next_to_it_its_figures(root: Path, tmp_path: Path) -> None:
    served = made_run(tmp_path / "serve" / "a", end="waiting")
    model = ServedModel(id="43f4:train:0", connected=True, in_memory=True, steps=40, client="<script>")
    status = ServerStatus(
        time=1.0, began=0.0, state="serving", url="http://127.0.0.1:8123", requests=1234, models=[model]
    )
    (served.directory / SERVER_FILE).parent.mkdir()
    (served.directory / SERVER_FILE).write_bytes(msgspec.json.encode(status))
    found = page(report_of([served.directory, root / "curriculum" / "aaaa"]))
    said = text_of(found)
    assert "1,234 requests done" in said and "train:0" in said and "<script>" in said and "60 of 200" in said
    assert Elements(found).open == []


def test_a_run_that_has_written_nothing(tmp_path: Path) -> None:
    waiting = made_run(tmp_path / "dense" / "a", end="waiting")
    assert "waiting" in text_of(report_page([waiting.directory]))
    (tmp_path / "dense" / "b").mkdir()
    (tmp_path / "dense" / "b" / "plan.json").write_text("{")
    assert "dense·b" in text_of(report_page([tmp_path / "dense" / "b"]))


def test_hostile_texts_are_texts(tmp_path: Path) -> None:
    runs = [hostile_run(tmp_path / "<b>x" / name).directory for name in ("<i>a", "b")]
    for found in (
        report_page(runs),
        report_page(runs[:1]),
        fragment(report_of(runs)),
        titled(HOSTILE, [(HOSTILE, HOSTILE)], HOSTILE),
    ):
        found.encode()
        elements = Elements(found)
        assert not elements.names & {"img", "i" if found.startswith(MARK) and len(runs) < 2 else "object", "iframe"}
        assert not any(name.startswith("on") for name in elements.attributes)
        assert elements.open == []
        assert found.count("<script") == found.count("</script>") and "alert(1)</script>" not in found
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e\ud800]", found)
        assert "{{ 7*7 }}" in found and ">49<" not in found
        assert "onerror=alert(1)>" in " ".join(elements.said)


@pytest.mark.parametrize("name", ["spec.xtrain", "metadata/git.yaml", "metadata/environment.json"])
def test_links_show_no_files_from_elsewhere(tmp_path: Path, name: str) -> None:
    run = made_run(tmp_path / "runs/dense/aaaa", logged=3).directory
    (tmp_path / "private").write_text('{"key": "s3cret"}')
    (run / name).unlink(missing_ok=True)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(tmp_path / "private")
    assert "s3cret" not in page(report_of([run]))
    (run / name).unlink()
    (run / name).symlink_to(run / name)
    assert page(report_of([run]))  # a link to itself


def test_spikes_do_not_flatten_a_plot(tmp_path: Path) -> None:
    run = made_run(tmp_path / "dense" / "a", logged=100)
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    (run.directory / "metrics.jsonl").write_text(
        "".join(json.dumps(line | ({"loss": 900.0} if line["step"] == 50 else {})) + "\n" for line in lines)
    )
    loss = report_of([run.directory]).charts[0][1][0]
    assert loss.title == "loss" and loss.scale == "1 to 99%" and 'l4 7h-8Z"' in loss.picture.svg
    assert max(value for value in loss.picture.points["lines"][0]["y"]) == 900


def test_the_fragment_of_a_notebook_has_plots_and_no_script(root: Path) -> None:
    found = fragment(report_of([root / "curriculum" / "aaaa"]))
    assert found.startswith('<div class="xtrain-report">') and found.endswith("</div>")
    assert found.count("<svg") == 6 and "application/json" not in found and "<script" not in found
    assert np.mean([len(found)]) < 200_000
