"""What is trained on and when: weights into shares, phases into steps, and all that can be wrong with either."""

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.data import TEMPLATES
from xtrain.plan.amounts import shares
from xtrain.plan.learning_rate import first_step, in_order, learning_rate, phase_at
from xtrain.plan.plan import PlanPhase
from xtrain.plan.serialise import dumps, from_json
from xtrain.plan.timeline import known_arithmetic
from xtrain.planner.compile import compile_plan
from xtrain.planner.review.page import render
from xtrain.planner.review.resumable import resumable
from xtrain.planner.review.training import phase_rows
from xtrain.planner.rules.validate import check_spec
from xtrain.runtime.feed.chat import template as chat_builtin
from xtrain.runtime.feed.curriculum import Curriculum

from .conftest import spec_text

ONE = "dataset web { source = synthetic() }"
TWO = "dataset web { source = synthetic(), holdout = 1% }\ndataset code { source = python_stdlib() }"
THREE = f'{TWO}\ndataset chat {{ source = jsonl("c/*.jsonl"), messages = "messages", template = "plain" }}'
MIXED = "mixture { web = 3, code = 1 }"


def mixture_of(text):
    """The blocks of a spec over two datasets."""
    return {"dataset": TWO, "mixture": text}


def test_the_page_gives_the_rows_that_a_run_reads(make_plan):
    phases = "phase late { from = 40 steps, mix = { web: 0.1 } }\nphase last { from = 90%, mix = { code: 0 } }"
    plan = make_plan(**mixture_of(f"mixture {{ web = 0.7, code = 0.3 }}\n{phases}"))
    total = plan.timeline.steps
    curriculum = Curriculum(
        datasets=tuple(plan.node("setup.loader").args["datasets"]), phases=plan.timeline.phases, steps=total,
        rows_per_step=plan.node("setup.loader").args["rows"], seed=plan.node("setup.loader").args["seed"],
    )  # fmt: skip
    cursors = {row[3]: int(row[5].replace(",", "")) for row in phase_rows(plan)[-2:]}
    assert cursors == curriculum.position(total).cursors


def test_a_folder_stays_one_that_is_no_name_of_the_hub(make_plan):
    for written, name in (("./no//folder", "./no/folder"), ("../up", "../up"), ("org/name", "org/name")):
        plan = make_plan(dataset=f'dataset hub {{ source = huggingface("{written}") }}')
        assert plan.node("setup.data.hub").args["options"]["name"] == name


# Shares ---------------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1e6), min_size=1), st.floats(1e-3, 1e3))
def test_shares_add_up_and_nought_stays_nought(weights, temperature):
    found = shares(weights, temperature)
    assert found.keys() == weights.keys()
    assert all(found[name] == 0 for name, weight in weights.items() if weight == 0)
    assert sum(found.values()) == pytest.approx(1 if any(weights.values()) else 0)


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(1.0, (0.75, 0.25)), (2.0, (0.6339746, 0.3660254)), (0.5, (0.9, 0.1)), (1e9, (0.5, 0.5)), (1e-9, (1.0, 0.0))],
)
def test_temperature_is_the_root_of_weights(temperature, expected):
    """3 to 1: the square root of it is 1.732 to 1, the square 9 to 1."""
    assert tuple(shares({"a": 3, "b": 1}, temperature).values()) == pytest.approx(expected)


def test_weights_of_any_size_are_the_same_shares():
    assert shares({"a": 0.8, "b": 0.2}, 1.0) == pytest.approx(shares({"a": 8e200, "b": 2e200}, 1.0))
    assert shares({"a": 1e-300, "b": 1e-300}, 0.1) == {"a": 0.5, "b": 0.5}


# Epochs ---------------------------------------------------------------------------------------------------------------


def test_weights_in_epochs_stand_in_the_plan_as_they_are_written(make_plan, tmp_path):
    """Shares follow from rows, which are counted where the data is: a plan is the same on every machine."""
    blocks = mixture_of(f"{BOTH}\nphase late {{ from = 50%, mix = {{ web: 0 }} }}\nphase end {{ from = 90%, mix = "
                        "{ web: 0.3, code: 0.7 } }")  # fmt: skip
    plan = make_plan(**blocks)
    train, late, end = plan.timeline.phases
    assert (train.passes, train.shares) == ({"web": 1.0, "code": 3.0}, {})
    assert (late.passes, late.shares) == ({"web": 0.0, "code": 3.0}, {})
    assert (end.passes, end.shares) == (None, {"web": 0.3, "code": 0.7})
    assert plan.node("setup.loader").args["datasets"] == ["web", "code"]
    again = from_json(json.loads(dumps(plan)))
    assert again == plan
    page = render(plan, full=True)
    assert (
        "how often an epoch takes each" in page and "3 epochs" in page and "all rows of web once, code 3 times" in page
    )


def test_a_plan_without_epochs_is_written_as_it_always_was(make_plan):
    assert all(
        "passes" not in phase for phase in json.loads(dumps(make_plan(**mixture_of(MIXED))))["timeline"]["phases"]
    )


def test_an_experiment_with_other_epochs_is_another_one(make_plan):
    plans = [
        make_plan(**mixture_of(text))
        for text in (BOTH, BOTH.replace("3 epochs", "2 epochs"), "mixture { web = 1, code = 3 }")
    ]
    assert len({plan.config_id for plan in plans}) == len({plan.id for plan in plans}) == 3


# Phases ---------------------------------------------------------------------------------------------------------------


def test_a_plan_without_phases_has_one(make_plan):
    (only,) = make_plan().timeline.phases
    assert only == PlanPhase(name="train", first=0, fraction=None, shares={"code": 1.0}, lr_scale=1.0)
    assert make_plan().node("setup.loader").args["datasets"] == ["code"]


def test_phases_are_laid_out_in_their_order_however_they_are_written(make_plan):
    blocks = {
        "dataset": THREE,
        "mixture": f"{MIXED}\nphase late {{ from = 90%, mix = {{ code: 0, chat: 6 }}, lr_scale = 0.5 }}\n"
        "phase early { from = 10k tokens, mix = { web: 1 } }\nphase middle { from = 60 steps, mix = { web: 0 } }",
    }
    plan = make_plan(**blocks)
    assert plan.node("setup.loader").args["rows"] == 4
    found = [(phase.name, phase.first) for phase in plan.timeline.phases]
    # 10,000 tokens are 9.77 steps of 4 · 256: the first step before which so many were trained on is the eleventh.
    assert found == [("train", 0), ("early", 10), ("middle", 60), ("late", 90)]
    mixes = [phase.shares for phase in plan.timeline.phases]
    assert mixes[0] == {"web": 0.75, "code": 0.25, "chat": 0.0}
    assert mixes[1] == {"web": 0.5, "code": 0.5, "chat": 0.0}
    assert mixes[2] == {"web": 0.0, "code": 1.0, "chat": 0.0}
    assert mixes[3] == {"web": pytest.approx(1 / 3), "code": 0.0, "chat": pytest.approx(2 / 3)}
    assert [phase.lr_scale for phase in plan.timeline.phases] == [1, 1, 1, 0.5]
    assert plan.node("setup.loader").args["datasets"] == ["web", "code", "chat"]


def test_a_phase_at_the_start_takes_the_place_of_the_first(make_plan):
    plan = make_plan(**mixture_of(f"{MIXED}\nphase warm {{ from = 0%, mix = {{ code: 0 }} }}"))
    assert [(phase.name, phase.first) for phase in plan.timeline.phases] == [("warm", 0)]
    # The mixture alone is never drawn from, so that code is not even read.
    assert plan.node("setup.loader").args["datasets"] == ["web"]
    assert [node.id for node in plan.nodes if node.op == "setup.data"] == ["setup.data.web"]


def test_the_first_phase_never_takes_a_name_that_is_given(make_plan):
    plan = make_plan(**mixture_of(f"{MIXED}\nphase train {{ from = 50%, lr_scale = 0.1 }}"))
    assert [phase.name for phase in plan.timeline.phases] == ["train_0", "train"]


def test_a_share_of_a_budget_in_epochs_waits_for_the_data(make_plan):
    plan = make_plan(
        experiment="experiment tiny { budget = 2 epochs }", phase="phase cool { from = 75%, lr_scale = 0.1 }"
    )
    _, cool = plan.timeline.phases
    assert (cool.first, cool.fraction) == (None, 0.75)
    assert first_step(cool, 40) == 30


@given(st.lists(st.integers(0, 50), unique=True, max_size=5), st.integers(0, 60))
def test_the_phase_of_a_step_is_the_last_that_has_begun(starts, step):
    phases = [PlanPhase(name=f"p{n}", first=n, fraction=None, shares={}) for n in sorted({0, *starts})]
    assert phase_at(phases, step, 60).first == max(n for n in (0, *starts) if n <= step)
    assert [first for first, _ in in_order(phases, 60)] == sorted({0, *starts})


def test_the_learning_rate_is_that_of_the_schedule_times_the_scale(make_plan):
    blocks = mixture_of(f"{MIXED}\nphase low {{ from = 30 steps, lr_scale = 0.25 }}\nphase back {{ from = 31 steps }}")
    plan = make_plan(**blocks, scheduler="scheduler cosine { warmup = 10 steps, floor = 10% }")
    args = plan.node("setup.scheduler").args
    batch = known_arithmetic(plan)
    plain, scaled = learning_rate(args, batch), learning_rate(args, batch, plan.timeline.phases)
    for step in range(100):
        assert scaled(step) == plain(step) * (0.25 if step == 30 else 1)


# Rules ----------------------------------------------------------------------------------------------------------------

EPOCHS = "experiment tiny { budget = 2 epochs }"
# Blocks → code, what its span shows, words of the message, words of the hint, a `--set` that fixes it ("" for none).
WRONG = {
    "no weights": ({"dataset": TWO}, "X503", "dataset code", "web, code", "mixture { web = 1, code = 1 }",
        "mixture.web=1"),
    "a name to be quoted": (
        {"dataset": 'dataset "c++" { source = python_stdlib() }\ndataset web { source = synthetic() }'}, "X503",
        "dataset web", "c++, web", "call `c++` by a name", "dataset.c++.holdout=100%"),
    "unknown": (mixture_of("mixture { web = 1, cod = 1 }"), "X513", "cod", "unknown dataset `cod`",
        "did you mean `code`?", ""),
    "setting": (mixture_of("mixture { web = 1, temprature = 2 }"), "X513", "temprature", "`temprature`",
        "`temperature`", ""),
    "nothing near": (mixture_of("mixture { web = 1, zebra = 2 }"), "X513", "zebra", "`zebra`", "web, code", ""),
    "unknown in a phase": (mixture_of(f"{MIXED}\nphase late {{ from = 50%, mix = {{ wbe: 1 }} }}"), "X513", "wbe",
        "`wbe`", "`web`", "phase.late.mix={ web: 1 }"),
    "a dataset called temperature": (
        {"dataset": f"{TWO}\ndataset temperature {{ source = synthetic() }}", "mixture": MIXED}, "X513",
        "dataset temperature", "cannot have a weight", "rename", ""),
    "empty": (mixture_of("mixture { temperature = 2 }"), "X502", "mixture", "no dataset", "web = 1, code = 1",
        "mixture.web=1"),
    "all zero": (mixture_of("mixture { web = 0, code = 0 }"), "X514", "mixture", "every weight is 0", "above 0",
        "mixture.web=1"),
    "all zero in a phase": (mixture_of(f"{MIXED}\nphase late {{ from = 50%, mix = {{ web: 0, code: 0 }} }}"), "X514",
        "{ web: 0, code: 0 }", "in phase late every weight is 0", "above 0", "phase.late.mix={ web: 0 }"),
    "held out whole": ({"dataset": f"{TWO}\ndataset test {{ source = synthetic(), holdout = 100% }}",
            "mixture": "mixture { web = 1, test = 2 }"}, "X515", "test", "a weight of 2, and `holdout = 100%`",
        "lower the holdout", "mixture.test=0"),
    "chat and pairs": (
        {
            "dataset": 'dataset c { source = jsonl("a"), messages = "m", prompt = "p", response = "r", '
            'template = "plain" }'
        },
        "X516", '"p"', "not both", "keep the one", "dataset.c.messages=none",
    ),
    "half a pair": ({"dataset": 'dataset c { source = jsonl("a"), template = "plain", prompt = "p" }'}, "X516", '"p"',
        "`prompt` without `response`", "name the field of the response", 'dataset.c.response="r"'),
    "the other half": ({"dataset": 'dataset c { source = jsonl("a"), template = "plain", response = "p" }'}, "X516",
        '"p"', "`response` without `prompt`", "name the field of the prompt", 'dataset.c.prompt="r"'),
    "text of a conversation": (
        {"dataset": 'dataset c { source = jsonl("a"), template = "plain", messages = "m", text = "t" }'}, "X516", '"t"',
        "`text` is for plain text", "leave out `text` or `messages`", 'dataset.c.text="text"'),
    "half of plain text": ({"dataset": 'dataset c { source = jsonl("a"), train_on = last }'}, "X516", "last",
        "these records are plain text", 'messages = "messages"', "dataset.c.train_on=auto"),
    "template of plain text": ({"dataset": 'dataset c { source = jsonl("a"), template = "chatml" }'}, "X516",
        '"chatml"', "`template` is for conversations", "remove it", "dataset.c.template=auto"),
    "questions that are trained on": ({"dataset": 'dataset c { source = jsonl("a"), choices = "c", holdout = 10% }'},
        "X516", "10%", "never trained on", "`holdout = 100%`", "dataset.c.choices=none"),
    "questions and pairs": (
        {"dataset": f'{ONE}\ndataset c {{ source = jsonl("a"), choices = "c", prompt = "p", holdout = 100% }}'}, "X516",
        '"p"', "`prompt` does not apply to these", "leave out `prompt`", "dataset.c.prompt=none"),
    "long questions": (
        {"dataset": f'{ONE}\ndataset c {{ source = jsonl("a"), choices = "c", oversized = skip, holdout = 100% }}'},
        "X516", "skip", "`oversized` does not apply to these", "leave out `oversized`", "dataset.c.oversized=split"),
    "an answer without choices": ({"dataset": 'dataset c { source = jsonl("a"), answer = "b" }'}, "X516", '"b"',
        "`answer` is for questions", 'choices = "choices"', 'dataset.c.answer="answer"'),
    "questions in columns": (
        {"dataset": f'{ONE}\ndataset c {{ source = parquet("a"), choices = "c", holdout = 100% }}'}, "X517", '"c"',
        "`choices` is a list", "by jsonl", 'dataset.c.source=jsonl("a")'),
    "a benchmark at a URL": (
        {"dataset": 'dataset c { source = jsonl("a"), decontaminate = ["s3://b/c.jsonl"] }'}, "X507", '["s3://b/c.jsonl"]',
        "benchmarks are files", "download it", "dataset.c.decontaminate=[]"),
    "a folder of benchmarks": (
        {"dataset": 'dataset c { source = jsonl("a"), decontaminate = ["/"] }'}, "X507", '["/"]',
        "/ is a folder", "name its files", "dataset.c.decontaminate=[]"),
    "field of a text file": ({"dataset": 'dataset c { source = text("a"), text = "body" }'}, "X517", '"body"',
        "no field `text`", "leave `text` out", 'dataset.c.text="text"'),
    "conversations of token ids": ({"dataset": 'dataset c { source = tokens("a.npy"), messages = "m" }'}, "X517", '"m"',
        "tokens gives token ids", "leave `messages` out", "dataset.c.messages=none"),
    "pairs that are made": ({"dataset": 'dataset c { source = synthetic(), prompt = "p", response = "r" }'}, "X517",
        '"p"', "no field `prompt`", "leave `prompt` out", ""),
    "the same start": (
        mixture_of(f"{MIXED}\nphase a {{ from = 50 steps, lr_scale = 2 }}\nphase b {{ from = 50%, lr_scale = 3 }}"),
        "X606", "50%", "phases a and b both begin with step 51", "later", "phase.b.from=60%"),
    "behind the end": (mixture_of(f"{MIXED}\nphase a {{ from = 100 steps, lr_scale = 2 }}"), "X607", "100 steps",
        "the run has 100 steps", "from = 90%", "phase.a.from=90%"),
    "behind the tokens": (mixture_of(f"{MIXED}\nphase a {{ from = 1M tokens, lr_scale = 2 }}"), "X607", "1M tokens",
        "before step 978", "from = 90%", "phase.a.from=90%"),
    "no whole rows of a step": (mixture_of("mixture { web = 2, code = 1, exact = true }"), "X526", "true",
        "0.6667 of 4 rows a step, the share of web, is 2.667 rows", "`batch { rows }`", "mixture.web=3"),
    "exact shares in epochs": (mixture_of("mixture { web = 2 epochs, code = 1 epoch, exact = true }"), "X526", "true",
        "these are in epochs", "without `epochs`", "mixture.exact=false"),
    "exact shares of a ramp": ({**mixture_of(MIXED.replace(" }", ", exact = true }")),
            "batch": "batch { sequence = 256, accumulate = 4, ramp_from = 1 }"}, "X526", "true", "a ramp changes it",
        "`ramp_from`", "mixture.exact=false"),
    "at the end": ({"experiment": EPOCHS, "phase": "phase a { from = 100%, lr_scale = 2 }"}, "X607", "100%",
        "when the run is over", "from = 90%", "phase.a.from=90%"),
    "behind the epochs": ({"experiment": EPOCHS, "phase": "phase a { from = 2 epochs, lr_scale = 2 }"}, "X607",
        "2 epochs", "the run has 2 epochs", "from = 90%", "experiment.budget=3 epochs"),
    "the same epoch": (
        {"experiment": EPOCHS, "phase": "phase a { from = 1 epoch, lr_scale = 2 }\nphase b { from = 1 epoch }"}, "X606",
        "1 epoch", "both begin with 1 epoch", "start one of them later", "phase.b.from=1.5 epochs"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_named_with_a_value_that_works(case, tmp_path):
    blocks, code, at, says, hint, override = case
    path = tmp_path / "spec.xtrain"
    path.write_text(spec_text(**blocks))
    result = compile_plan(load_spec(path).require())
    said = result.diagnostics.render()
    assert [error.code for error in result.diagnostics.errors] == [code], said
    (error,) = result.diagnostics.errors
    assert error.span is not None and error.span.text == at, said
    assert says in error.message and hint in (error.hint or ""), said
    if error.fix is not None:
        text = path.read_text()
        path.write_text(text[: error.fix.span.start] + error.fix.text + text[error.fix.span.end :])
        assert compile_plan(load_spec(path).require()).plan is not None
    if override:
        again = compile_plan(load_spec(path, [override]).require())
        assert again.plan is not None, again.diagnostics.render()


BOTH = "mixture { web = 1 epoch, code = 3 epochs }"
WRONG |= {
    "epochs beside a share": (mixture_of("mixture { web = 1 epoch, code = 3 }"), "X518", "3",
        "`code` is 3, a share of rows, `web` is 1 epoch", "as `code = 3 epochs`", "mixture.code=3 epochs"),
    "a share beside epochs": ({"dataset": THREE, "mixture": "mixture { web = 1, code = 3, chat = 2 epochs }"}, "X518",
        "2 epochs", "`chat` is 2 epochs, `web` is 1, a share", "as `chat = 2`, or in epochs", "mixture.chat=2"),
    "a share in a phase of epochs": (mixture_of(f"{BOTH}\nphase a {{ from = 50%, mix = {{ web: 0.5 }} }}"), "X518",
        "0.5", "in phase a: `web` is 0.5, a share of rows, `code` is 3 epochs of `mixture`",
        "`mix = { web: …, code: … }`", "phase.a.mix={ web: 0.5, code: 0.5 }"),
    "epochs in a phase of shares": (mixture_of(f"{MIXED}\nphase a {{ from = 50%, mix = {{ web: 2 epochs }} }}"), "X518",
        "2 epochs", "in phase a: `web` is 2 epochs, `code` is 1, a share of rows of `mixture`",
        "every dataset a weight in epochs", "phase.a.mix={ web: 2 }"),
    "two kinds in a phase": (mixture_of(f"{BOTH}\nphase a {{ from = 50%, mix = {{ web: 2 epochs, code: 1 }} }}"),
        "X518", "1", "`code` is 1, a share of rows, `web` is 2 epochs", "as in `mixture`", "phase.a.mix={ web: 0 }"),
    "a temperature of epochs": (mixture_of("mixture { web = 1 epoch, code = 3 epochs, temperature = 2 }"), "X519", "2",
        "a temperature of 2", "leave it out", "mixture.temperature=1"),
    "no epochs": (mixture_of("mixture { web = 0 epochs, code = 0 }"), "X514", "mixture", "every weight is 0", "above 0",
        "mixture.web=1 epoch"),
    "epochs of what is held out": ({"dataset": f"{TWO}\ndataset test {{ source = synthetic(), holdout = 100% }}",
            "mixture": "mixture { web = 1 epoch, test = 2 epochs }"}, "X515", "test",
        "a weight of 2 epochs, and `holdout = 100%`", "lower the holdout", "mixture.test=0"),
}  # fmt: skip


WARNED = {
    "a mixture of one": ({"mixture": "mixture { code = 1 }"}, "W401", "code is its only dataset"),
    "an epoch of one": ({"mixture": "mixture { code = 1 epoch }"}, "W401", "code is its only dataset"),
    "a phase of the same epochs": (mixture_of(f"{BOTH}\nphase a {{ from = 5%, mix = {{ web: 1 epoch }} }}"), "W401",
        "the ones of train"),
    "no epoch of one": (mixture_of("mixture { web = 1 epoch }"), "W506", "nothing uses the dataset `code`"),
    "a phase without effect": (mixture_of(f"{MIXED}\nphase a {{ from = 5%, mix = {{ web: 3 }} }}"), "W401",
        "the ones of train"),
    "a phase like the one before": (mixture_of(
            f"{MIXED}\nphase a {{ from = 5%, mix = {{ web: 1 }} }}\nphase b {{ from = 9%, mix = {{ web: 1 }} }}"),
        "W401", "the ones of a"),
    "unused": (mixture_of("mixture { web = 1 }"), "W506", "nothing uses the dataset `code`"),
    "too cold for one": (mixture_of("mixture { web = 3, code = 1, temperature = 1e-3 }"), "W506",
        "nothing uses the dataset `code`"),
    "held out and not looked at": (
        {"dataset": "dataset a { source = synthetic() }\ndataset b { source = synthetic(), holdout = 100% }"}, "W506",
        "nothing uses the dataset `b`"),
    "readers of nothing": ({"batch": "batch { sequence = 256, prefetch = 0, workers = 2 }"}, "W401",
        "nothing is read ahead"),
    "a folder that is missing": ({"dataset": 'dataset a { source = huggingface("./no/such/folder") }'}, "W501",
        "there is no folder"),
    "a template that is missing": (
        {"dataset": 'dataset a { source = huggingface("o/n"), messages = "m", template = "chatlm" }'}, "W501",
        "there is no template chatlm"),
    "a benchmark that is missing": (
        {"dataset": 'dataset a { source = synthetic(), decontaminate = ["no/*.jsonl"] }'}, "W501",
        "there is no file no/*.jsonl"),
    "token ids that are missing": ({"dataset": 'dataset a { source = tokens("no/*.npy") }'}, "W501", "no file matches"),
}  # fmt: skip


@pytest.mark.parametrize(("blocks", "code", "says"), WARNED.values(), ids=WARNED.keys())
def test_what_is_odd_is_said(blocks, code, says, compiled):
    result = compiled(**blocks)
    assert result.plan is not None, result.diagnostics.render()
    (warning,) = result.diagnostics
    assert warning.code == code and says in warning.message and warning.span is not None


@pytest.mark.parametrize("blocks", [
    mixture_of(MIXED),
    mixture_of("mixture { web = 1, code = 0 }"),  # switched off, and said so
    mixture_of("mixture { web = 1 }\nphase late { from = 90%, mix = { code: 1 } }"),
    {**mixture_of("mixture { code = 1 }"), "every": "every 10 steps eval web"},
    {"dataset": 'dataset hub { source = huggingface("org/name", config = "en") }'},
    {"phase": "phase late { from = 90%, lr_scale = 0.1 }"},
    {"experiment": EPOCHS, **mixture_of(MIXED)},
    {"experiment": EPOCHS, **mixture_of(BOTH)},
    {"mixture": "mixture { code = 2 epochs }"},  # an epoch of the run has both passes
    mixture_of("mixture { web = 1 epoch, code = 0 }"),
    mixture_of(f"{BOTH}\nphase a {{ from = 5%, mix = {{ web: 0 }} }}"),
    mixture_of(f"{BOTH}\nphase a {{ from = 5%, mix = {{ web: 0.5, code: 0.5 }} }}"),
    mixture_of(f"{BOTH}\nphase a {{ from = 5%, mix = {{ web: 4 epochs }} }}"),
    {"experiment": EPOCHS, **mixture_of("mixture { web = 1 }\nphase a { from = 5%, mix = { code: 1 } }")},
])  # fmt: skip
def test_what_is_well_is_not_spoken_of(blocks, compiled):
    result = compiled(**blocks)
    assert result.plan is not None and not list(result.diagnostics), result.diagnostics.render()


def test_a_mistake_in_a_weight_brings_no_others_with_it(tmp_path):
    """The dataset whose weight is wrong may have any: nothing is said of weights that are all 0, or of one unused."""
    path = tmp_path / "spec.xtrain"
    path.write_text(
        spec_text(**mixture_of('mixture { web = 0, code = "1" }\nphase a { from = 3 s, mix = { web: x } }'))
    )
    loaded = load_spec(path)
    assert [error.code for error in loaded.diagnostics.errors] == ["X301", "X302", "X202"]
    assert loaded.draft is not None
    assert not list(check_spec(loaded.draft, unknown_settings=loaded.unknown_settings))


def test_templates_that_need_no_file_are_those_of_the_runtime():
    assert set(TEMPLATES) == set(chat_builtin.TEMPLATES)


def test_two_mistakes_are_both_reported(tmp_path):
    path = tmp_path / "spec.xtrain"
    path.write_text(spec_text(**mixture_of("mixture { web = 1, cod = 1 }\nphase a { from = 120 steps, lr_scale = 0 }")))
    loaded = load_spec(path)
    assert [error.code for error in loaded.diagnostics.errors] == ["X304"]
    assert loaded.draft is not None
    found = check_spec(loaded.draft, unknown_settings=loaded.unknown_settings)
    assert [error.code for error in found] == ["X513", "X607"]


# Identity -------------------------------------------------------------------------------------------------------------


def test_exact_shares_are_shown_and_do_nothing_with_one_dataset(make_plan):
    plan = make_plan(**mixture_of("mixture { web = 3, code = 1, exact = true }"))
    assert plan.timeline.phases[0].exact_rows == 4 and from_json(json.loads(dumps(plan))) == plan
    assert "exact shares of the 4 rows of every step" in render(plan)


def test_what_belongs_to_the_experiment(make_plan):
    base = make_plan(**mixture_of(MIXED))
    same = [
        mixture_of("mixture { web = 0.75, code = 0.25 }"),
        {**mixture_of(MIXED), "batch": "batch { sequence = 256, accumulate = 4, prefetch = 0, workers = 3 }"},
    ]
    other = [
        mixture_of("mixture { web = 3, code = 2 }"),
        mixture_of("mixture { web = 3, code = 1, temperature = 2 }"),
        mixture_of("mixture { web = 3, code = 1, exact = true }"),
        mixture_of(f"{MIXED}\nphase a {{ from = 50%, lr_scale = 0.5 }}"),
        mixture_of(f"{MIXED}\nphase a {{ from = 50%, mix = {{ web: 1 }} }}"),
        mixture_of(f"{MIXED}\nphase b {{ from = 50%, mix = {{ web: 1 }} }}"),  # rows are drawn by the phase's name
        mixture_of(f"{MIXED}\nphase a {{ from = 60%, mix = {{ web: 1 }} }}"),
        {"dataset": "\n".join(reversed(TWO.splitlines())), "mixture": MIXED},  # and by the order of the datasets
    ]
    assert {make_plan(**blocks).config_id for blocks in same} == {base.config_id}
    ids = [make_plan(**blocks).config_id for blocks in other]
    assert len({base.config_id, *ids}) == len(other) + 1


@pytest.mark.parametrize(("step", "effect"), [(50, "none"), (51, "learning"), (None, "learning")])
def test_rows_are_drawn_by_the_name_of_a_phase(make_plan, step, effect):
    a, b = (make_plan(**mixture_of(f"{MIXED}\nphase {name} {{ from = 50%, lr_scale = 2 }}")) for name in "ab")
    verdict = resumable(a, b, step)
    assert (verdict.kind, verdict.effect) == ("safe", effect)
    assert [reason.path for reason in verdict.reasons] == ["phase.b", "phase.a"]


LATE = "phase late { from = 50%, lr_scale = 2 }"


@pytest.mark.parametrize(("before", "after", "step", "effect"), [
    # A phase with the same weights goes on with the epoch under way, whatever it is called.
    (f"{BOTH}\n{LATE}", f"{BOTH}\n{LATE.replace('late', 'end')}", 70, "none"),
    (BOTH, f"{BOTH}\nphase late {{ from = 50% }}", 70, "none"),
    (BOTH, f"{BOTH}\n{LATE}", 50, "none"),
    (BOTH, f"{BOTH}\n{LATE}", 51, "learning"),
    (BOTH, BOTH.replace("3 epochs", "4 epochs"), 10, "learning"),
    (BOTH, "mixture { web = 1, code = 3 }", 10, "learning"),
    (f"{BOTH}\n{LATE.replace('lr_scale = 2', 'mix = { web: 0 }')}", f"{BOTH}\n{LATE}", 50, "none"),
    (f"{BOTH}\n{LATE.replace('lr_scale = 2', 'mix = { web: 0 }')}", f"{BOTH}\n{LATE}", 51, "learning"),
])  # fmt: skip
def test_what_other_epochs_mean_for_a_run_that_goes_on(make_plan, before, after, step, effect):
    verdict = resumable(make_plan(**mixture_of(before)), make_plan(**mixture_of(after)), step)
    assert (verdict.kind, verdict.effect) == ("safe", effect), verdict


def test_what_has_changed_of_epochs_is_said(make_plan):
    (reason,) = resumable(
        make_plan(**mixture_of(BOTH)), make_plan(**mixture_of("mixture { web = 1, code = 3 }")), 10
    ).reasons
    assert reason.path == "mixture" and "web 1 epoch, code 3 epochs → web 25%, code 75%" in reason.text


@pytest.mark.parametrize("step", [50, 90, None])
def test_a_phase_of_one_dataset_may_be_called_otherwise(make_plan, step):
    a, b = (make_plan(phase=f"phase {name} {{ from = 50%, lr_scale = 2 }}") for name in "ab")
    verdict = resumable(a, b, step)
    assert (verdict.kind, verdict.effect) == ("safe", "none")


def test_one_dataset_is_the_experiment_it_was(make_plan):
    """A mixture of one dataset says nothing new, and a run that was started without it can be gone on with."""
    assert make_plan(mixture="mixture { code = 2, temperature = 3 }").config_id == make_plan().config_id


def test_shares_are_exact_where_numbers_allow(make_plan):
    plan = make_plan(**mixture_of("mixture { web = 0.75, code = 0.25 }"))
    assert [Fraction(share) for share in plan.timeline.phases[0].shares.values()] == [Fraction(3, 4), Fraction(1, 4)]
