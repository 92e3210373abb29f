"""`xtrain review`: what a comment says of a changed spec, and whose policy it is."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import xtrain

from xtrain.cli.review import _at
from xtrain.planner.load import plan_from_spec
from xtrain.planner.review.proposal import policy_of

ROOT = Path(__file__).parents[2]
POLICY = "\npolicy { min_headroom = 8%, max_cost = 9_000, resume = resharded }\n"
PRICED = ("cluster h100\n", "cluster h100 { price = 2.5 }\n")


def git(*arguments: str) -> None:
    who = ("-c", "user.name=ann", "-c", "user.email=ann@example.com")
    subprocess.run(["git", *who, *arguments], check=True, capture_output=True)


def write(text: str, name: str = "run.xtrain") -> None:
    Path("specs", name).write_text(text)


@pytest.fixture
def spec(tmp_path, monkeypatch) -> str:
    """The text of `specs/run.xtrain` in the revision `main`, with a policy in an included file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    Path("specs").mkdir()
    Path("temporary").mkdir()
    text = (ROOT / "specs/llama_8b_64gpu.xtrain").read_text().replace(*PRICED)
    Path("specs/policy.xtrain").write_text(POLICY)
    write(f'include "policy.xtrain"\n{text}')
    git("init", "-q", "-b", "main")
    git("add", "specs")
    git("commit", "-qm", "one")
    return Path("specs/run.xtrain").read_text()


def review(head: str = "specs/run.xtrain", *more: str) -> subprocess.CompletedProcess[str]:
    return xtrain("review", "main:specs/run.xtrain", head, *more, cwd=Path.cwd())


def test_a_broken_policy_is_that_of_base(spec):
    assert review().returncode == 0
    write(spec.replace("rows = 512", "rows = 512, micro = 2"))
    Path("specs/policy.xtrain").write_text("policy { min_headroom = 0% }\n")  # which would allow it
    done = review("specs/run.xtrain", "--format", "github")
    assert done.returncode == 1, done.stderr
    assert "### `specs/run.xtrain`: 1 broken rule" in done.stdout
    assert "| headroom at least 8.0% | ❌ | -0.5% |" in done.stdout
    assert "| cost at most 9,000 | ✅ |" in done.stdout and "**Resume: safe.**" in done.stdout
    assert "The policy itself is changed (`policy.max_cost`, `policy.min_headroom`, `policy.resume`)" in done.stdout
    assert review("specs/run.xtrain", "--format", "gitlab").stdout == done.stdout
    assert "BROKEN  headroom at least 8.0%: -0.5%" in review().stdout
    assert review("specs/run.xtrain", "--policy", "specs/policy.xtrain").returncode == 1  # headroom is below 0
    assert not [*Path("temporary").iterdir()]


def test_a_revision_is_what_is_committed(spec):
    """`git archive` would leave out files; links may lead anywhere; untracked data is in a folder of a later commit."""
    Path(".gitattributes").write_text("specs/policy.xtrain export-ignore\n*.xtrain export-subst\n")
    Path("specs/elsewhere").symlink_to("/nowhere")
    Path("later").mkdir()
    Path("later/tracked").touch()
    write(f"{spec}# $Format:%H$\n")
    git("add", ".gitattributes", "specs", "later")
    git("commit", "-qm", "two")
    Path("later/data").write_text("untracked")
    with _at("main~1:specs/run.xtrain"):
        assert Path("later/data").read_text() == "untracked" and not Path("later/tracked").exists()
    plan = plan_from_spec("specs/run.xtrain").plan
    done = review("HEAD:specs/run.xtrain")
    assert done.returncode == 0 and plan and plan.id in done.stdout, done.stderr
    assert "no policy" not in done.stdout


RULES = [
    ("max_cost = 8_000", "", "cost at most 8,000: 8,265"),
    ("max_cost = 9_000", ("{ price = 2.5 }", ""), "cost at most 9,000: unknown: `cluster` has no price"),
    ("max_cost = 9_000", ("cluster h100 { price = 2.5 }", ""), "cost at most 9,000: unknown: no `cluster` is given"),
    ("min_headroom = 8%", ("cluster h100 { price = 2.5 }", ""), "headroom at least 8.0%: unknown: `cluster` has no"),
    ("max_step_time = 5 s", "", "time of a step at most 5.00 s: 7.80 s"),
    ("max_time = 1 d", "", "time at most 24.0 h: 2.15 d"),
    ("max_loss = 2", "", "predicted loss at most 2.0000: unknown: give a law with --law"),
    ("resume = same", ("lr = 3e-4", "lr = 4e-4"), "resume: same or better: safe"),
    ("resume = resharded", ("rope_theta = 500_000", "rope_theta = 10_000"), "resume: resharded or better: incomp"),
    ("certificate = required", "", "certificate required: plan "),
]


@pytest.mark.parametrize(("rule", "change", "said"), RULES, ids=[rule for rule, *_ in RULES])
def test_a_rule_is_broken(spec, rule, change, said):
    if change:
        assert change[0] in spec
        write(spec.replace(*change))
    Path("other.xtrain").write_text(f"policy {{ {rule} }}\n")
    done = review("specs/run.xtrain", "--policy", "other.xtrain")
    assert done.returncode == 1, done.stderr
    assert f"BROKEN  {said}" in done.stdout


def test_the_worst_allowed_verdict_is_kept(spec):
    write(spec.replace("lr = 3e-4", "lr = 4e-4"))
    Path("other.xtrain").write_text("policy { resume = safe }\n")
    done = review("specs/run.xtrain", "--policy", "other.xtrain")
    assert done.returncode == 0 and "ok      resume: safe or better: safe" in done.stdout, done.stderr


WRONG = [
    (("nothing:specs/run.xtrain", "specs/run.xtrain"), 3, "this repository has no revision `nothing`"),
    (("main:specs/none.xtrain", "specs/run.xtrain"), 2, "main:specs/none.xtrain cannot be planned"),
    (("main:specs/run.xtrain", "none.xtrain"), 2, "none.xtrain cannot be planned"),
    (("main:specs/run.xtrain", "serve.xtrain"), 2, "only training runs can be compared"),
    (("specs/run.xtrain", "specs/run.xtrain", "--policy", "specs/free.xtrain"), 2, "has no block `policy`"),
    (("specs/run.xtrain", "specs/run.xtrain", "--policy", "bad.xtrain"), 2, "must be above 0"),
    (("specs/run.xtrain", "specs/run.xtrain", "--policy", "bad2.xtrain"), 2, "unknown setting `cost` in `policy`"),
    (("specs/run.xtrain", "specs/run.xtrain", "--law", "serve.xtrain"), 2, "law"),
    (("specs/run.xtrain", "--output=x:y", "--format", "github"), 2, "arguments"),
    (("--upload-pack=x:specs/run.xtrain", "specs/run.xtrain"), 2, "arguments"),
]


@pytest.mark.parametrize(("arguments", "code", "said"), WRONG, ids=[said for *_, said in WRONG])
def test_wrong_use_is_explained(spec, arguments, code, said):
    shutil.copy(ROOT / "specs/serve_cpu.xtrain", "serve.xtrain")
    write(spec.replace('include "policy.xtrain"\n', ""), "free.xtrain")
    Path("bad.xtrain").write_text("policy { max_cost = -1 }\n")
    Path("bad2.xtrain").write_text("policy { cost = 1 }\n")
    done = xtrain("review", *arguments, cwd=Path.cwd())
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_a_spec_without_a_plan_gets_a_comment(spec):
    write(spec.replace("heads = 32", "heads = 33"))
    done = review("specs/run.xtrain", "--format", "github")
    assert done.returncode == 2 and "cannot be planned" in done.stderr
    assert done.stdout.startswith("<!-- xtrain review specs/run.xtrain -->\n### `specs/run.xtrain`: no plan\n\n- X")


def test_no_text_of_a_spec_is_markup(spec):
    write(spec.replace('text = "content"', 'text = "`a|b` <img> @ann"'))
    said = review("specs/run.xtrain", "--format", "github").stdout
    assert r"| `ˋa\|bˋ <img> @ann` |" in said and said.count("<img>") == 1


def test_a_policy_changes_no_id(spec):
    with_policy = plan_from_spec("specs/run.xtrain").plan
    write(spec.replace('include "policy.xtrain"\n', ""))
    free = plan_from_spec("specs/run.xtrain").plan
    assert with_policy and free and (with_policy.id, with_policy.config_id) == (free.id, free.config_id)
    policy = policy_of(with_policy)
    assert policy is not None and policy.max_cost == 9000 and policy_of(free) is None


@pytest.mark.parametrize(
    "moments", [(0.5, 1.2), pytest.param([n / 5 for n in range(1, 11)], marks=pytest.mark.slow)], ids=["two", "ten"]
)
def test_a_killed_review_leaves_nothing(spec, moments):
    command = [sys.executable, "-m", "xtrain", "review", "main:specs/run.xtrain", "HEAD:specs/run.xtrain"]
    for seconds in moments:
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
    Path("temporary/xtrain-review-left").mkdir()  # as a killed one leaves it
    assert review("HEAD:specs/run.xtrain").returncode == 0
    assert not [*Path("temporary").iterdir()]


def test_a_figure_that_neither_plan_has_is_left_out(spec):
    unpriced = spec.replace(" { price = 2.5 }", "")
    write(unpriced)
    write(unpriced.replace("rows = 512", "rows = 1024"), "more.xtrain")
    both = ("specs/run.xtrain", "specs/more.xtrain")
    table = xtrain("review", *both, "--format", "github", cwd=Path.cwd()).stdout
    assert "| headroom |" in table and "| cost |" not in table, table
