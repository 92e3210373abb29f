"""Which settings of a dataset belong together: pairs of answers, labels, token ids, numbers beside them."""

import pytest

from xtrain.dsl.load import load_spec
from xtrain.dsl.spec_text import resolved_text
from xtrain.planner.compile import compile_plan
from xtrain.planner.review.resumable import resumable

from .conftest import spec_text

PAIRS = 'chosen = "c", rejected = "r"'
# Settings of a dataset → what the span of the mistake shows, words of the message, what makes it right.
WRONG = {
    "half a pair": ('chosen = "c"', '"c"', "`chosen` without `rejected`", 'rejected="r"'),
    "the other half": ('rejected = "r"', '"r"', "`rejected` without `chosen`", 'chosen="c"'),
    "answers of conversations": (f'{PAIRS}, messages = "m"', '"m"', "`messages` does not apply to", "messages=none"),
    "answers and a response": (f'{PAIRS}, response = "a"', '"a"', "`response` does not apply to", "response=none"),
    "answers and token ids": (f'{PAIRS}, tokens = "t"', '"t"', "`tokens` does not apply to these", "tokens=none"),
    "turns of answers": (f"{PAIRS}, train_on = last", "last", "`train_on` does not apply to these", "train_on=auto"),
    "text of answers": (f'{PAIRS}, text = "t"', '"t"', "`text` does not apply to these", 'text="text"'),
    "labels of text": ('label = "l"', '"l"', "`label` is for pairs of `prompt` and `response`", "label=none"),
    "labels of answers": (f'{PAIRS}, label = "l"', '"l"', "`label` is for pairs of", "label=none"),
    "further input of answers": (f'{PAIRS}, prompt = "p", template = "plain", input = "i"', '"i"', "`input` is for",
                                 "input=none"),
    "a mask of text": ('mask = "m"', '"m"', "`mask` is for token ids", 'tokens="t"'),
    "a template of token ids": ('tokens = "t", template = "plain"', '"plain"', "`template` does not apply to these",
                                "template=auto"),
    "a system of text": ('system = "t"', '"t"', "`system` is for conversations", "system=none"),
    "a system of text that is left out": ("drop_system = true", "true", "`drop_system` is for conversations",
                                          "drop_system=false"),
    "a system that is added and left out": ('messages = "m", template = "plain", system = "s", drop_system = true',
                                            "true", "leaves out what `system` adds", "drop_system=false"),
    "tools of text": ('tools = "t"', '"t"', "`tools` is for conversations", "tools=none"),
    "weights of text": ('message_weight = "w"', '"w"', "`message_weight` is for conversations",
                        "message_weight=none"),
    "turns of all tokens": ('messages = "m", template = "plain", train_on = all, message_train = "t"', '"t"',
                            "`train_on = all` takes every token", "train_on=last"),
    "arguments of text": ('template_arguments = { a: 1 }', '{ a: 1 }', "`template_arguments` is for conversations",
                          "template_arguments={}"),
    "losses of token ids": ('tokens = "t", lost = error', "error", "`lost` is for conversations", "lost=warn"),
    "an argument that is always given": ('messages = "m", template = "plain", template_arguments = { tools: 1 }',
                                         "{ tools: 1 }", "`tools` is not an argument", "template_arguments={}"),
    "two weights": ('messages = "m", template = "plain", message_weight = "w", columns = { weights: "x" }',
                    '{ weights: "x" }', "both give the column `weights`", "message_weight=none"),
    "two labels": ('prompt = "p", response = "r", template = "plain", label = "l", values = { label: "x" }',
                   '{ label: "x" }', "both give the value `label`", "label=none"),
    "a number without a field": ('columns = { weights: "" }', '{ weights: "" }', "`weights` has no field",
                                 'columns={ weights: "w" }'),
}  # fmt: skip


def blocks(settings: str) -> dict[str, str]:
    """Those of a spec with such a dataset, and a loss that takes it."""
    loss = {"loss": "loss simpo { }"} if "chosen" in settings or "rejected" in settings else {}
    return {"dataset": f'dataset c {{ source = jsonl("a"), {settings} }}', **loss}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
def test_what_does_not_belong_together_is_named(case, tmp_path):
    settings, at, says, fix = case
    path = tmp_path / "spec.xtrain"
    path.write_text(spec_text(**blocks(settings)))
    result = compile_plan(load_spec(path).require())
    (error,) = result.diagnostics.errors
    assert error.code == "X516" and says in error.message and error.hint
    assert error.span is not None and error.span.text.strip() == at
    fixed = load_spec(path, [f"dataset.c.{fix}"]).require()
    assert not compile_plan(fixed).diagnostics.errors


def test_fields_of_token_files_are_refused(tmp_path):
    path = tmp_path / "spec.xtrain"
    path.write_text(spec_text(dataset='dataset c { source = tokens("a.npy"), columns = { weights: "w" } }'))
    (error,) = compile_plan(load_spec(path).require()).diagnostics.errors
    assert error.code == "X517" and "no field `columns`" in error.message


def test_pairs_and_labelled_answers_are_never_split(make_plan):
    def args(settings: str) -> dict:
        return make_plan(**blocks(settings)).node("setup.data.c").args

    labelled = 'prompt = "p", response = "r", label = "l", template = "plain"'
    assert args(PAIRS)["oversized"] == args(labelled)["oversized"] == "skip"
    assert args(f"{PAIRS}, oversized = truncate")["oversized"] == "truncate"
    assert args('tokens = "t"')["oversized"] == "split"
    reads = args(f'{PAIRS}, values = {{ margin: "m" }}')["reads"]
    assert reads == {
        "form": "preference", "prompt": None, "chosen": "c", "rejected": "r", "template": "auto",
        "values": {"margin": "m"},
    }  # fmt: skip


def test_the_plan_says_what_is_read(make_plan):
    plan = make_plan(**blocks('tokens = "t", mask = "m", columns = { logprobs: "old", advantages: "gain" }'))
    says = plan.node("setup.data.c").does
    assert "token ids in `t`, mask in `m`, numbers per token: advantages in `gain` and logprobs in `old`" in says
    plan = make_plan(**blocks(f'{PAIRS}, prompt = "p", template = "chatml", oversized = truncate'))
    says = plan.node("setup.data.c").does
    assert "pairs of answers, `c` preferred to `r`, the prompt in `p`, by template chatml" in says
    assert "a pair longer than a row is truncated, both answers to the same length" in says


def test_every_setting_of_pairs_changes_the_plan_and_the_experiment(make_plan):
    settings = {"prompt": '"p"', "chosen": '"c"', "rejected": '"r"', "template": '"plain"', "values": '{ margin: "m" }'}

    def plan(**changes: str):
        return make_plan(**blocks(", ".join(f"{name} = {value}" for name, value in (settings | changes).items())))

    first = plan()
    others = {"prompt": '"q"', "chosen": '"d"', "rejected": '"s"', "template": '"chatml"', "values": '{ margin: "n" }'}
    for name, value in others.items():
        other = plan(**{name: value})
        assert other.config_id != first.config_id
        reasons = [reason for reason in resumable(first, other).reasons if reason.path == f"dataset.c.{name}"]
        assert len(reasons) == 1 and reasons[0].kind == "incompatible", name


CHAIN = "collate = to_tensor -> flatten -> shift_tokens -> pack"
TURNS = 'messages = "m", template = "plain"'


@pytest.mark.parametrize(("settings", "method"), [
    ('text = "text"', None),
    ('tokens = "t"', None),
    (TURNS, "multipack"),
    ('prompt = "p", response = "r", template = "plain"', "multipack"),
    (PAIRS, "multipack"),
])  # fmt: skip
def test_conversations_and_answers_are_packed_to_fill_rows(settings, method, make_plan):
    plan = make_plan(**blocks(settings))
    assert plan.node("collate.pack").args["method"] == ("auto" if method else "sequential")
    assert plan.node("setup.data.c").args.get("method") == method
    written = make_plan(**blocks(settings), more=CHAIN)
    assert written.node("collate.pack").args["method"] == "sequential"
    assert "method" not in written.node("setup.data.c").args


def test_each_dataset_is_packed_as_it_would_be_alone(make_plan, load, tmp_path):
    both = f'dataset c {{ source = jsonl("a") }}\ndataset talks {{ source = jsonl("b"), {TURNS} }}'
    plan = make_plan(dataset=both, mixture="mixture { c = 1, talks = 1 }")
    assert "method" not in plan.node("setup.data.c").args
    assert plan.node("setup.data.talks").args["method"] == "multipack"
    assert "best fit within 100,000" in plan.node("setup.data.talks").does
    spec = load(dataset=both, mixture="mixture { c = 1, talks = 1 }")
    (tmp_path / "again.xtrain").write_text(resolved_text(spec))
    assert load_spec(tmp_path / "again.xtrain").require() == spec
    alone = make_plan(dataset='dataset c { source = jsonl("a") }')
    assert resumable(alone, plan).kind != "incompatible"
    other = make_plan(dataset=both, mixture="mixture { c = 1, talks = 1 }", more=CHAIN)
    (reason,) = resumable(plan, other).reasons
    assert (reason.kind, reason.path) == ("incompatible", "collate") and "multipack → sequential" in reason.text


def test_what_is_only_evaluated_is_no_reason(make_plan):
    held = f'dataset talks {{ source = jsonl("b"), {TURNS}, holdout = 100% }}\nevery 10 steps eval talks'
    plan = make_plan(dataset=f'dataset c {{ source = jsonl("a") }}\n{held}')
    assert plan.node("collate.pack").args["method"] == "sequential"
    assert "method" not in plan.node("setup.data.talks").args


def test_a_plan_says_that_system_messages_are_left_out(make_plan):
    talks = 'dataset c { source = jsonl("a"), messages = "m", template = "plain"'
    kept, dropped = (make_plan(dataset=f"{talks}{more} }}") for more in ("", ", drop_system = true"))
    assert "without system messages" in dropped.node("setup.data.c").does
    assert "system" not in kept.node("setup.data.c").does and kept.config_id != dropped.config_id
    (reason,) = resumable(kept, dropped).reasons
    assert (reason.kind, reason.path, reason.certain) == ("incompatible", "dataset.c.drop_system", False)
