"""Collators of the user's own in the plan: where they may stand, what their nodes say, what follows from their code."""

import pytest

from xtrain.plan.serialise import from_json, signed, to_json
from xtrain.planner.load import plan_from_path
from xtrain.planner.review.changes import find_drift
from xtrain.planner.review.resumable import resumable

PARTS = '''
from xtrain import collator, source

@source
def documents(limit: int = 5):
    yield "x"

@collator(takes="rows of token arrays")
def rows(row): return row

@collator(takes="rows of token tensors", gives="labelled samples")
def mine(row): return []

@collator(takes="labelled samples")
def drop(samples, least: int = 8, only=[1, 2]):
    """Leave short samples out.

    More words.
    """
    return samples

@collator(takes="microbatch")
def hide(batch): return batch

@collator(takes="part of a microbatch")
def look(batch): return batch
'''
USUAL = "to_tensor -> flatten -> shift_tokens"


@pytest.fixture
def own(compiled, tmp_path):
    """Compile the small spec with a chain of which some links are the user's own."""

    def build(chain, world=None, parts=PARTS, **blocks):
        (tmp_path / "parts.py").write_text(parts)
        return compiled(world, use='use "parts.py"', collate=f"collate = {chain}", **blocks)

    return build


def chain_of(plan):
    return [node.id for node in plan.nodes if node.kind == "collate"]


def test_nodes_of_collators_say_what_is_called(own):
    plan = own(f"rows -> {USUAL} -> drop -> drop(2, only = [3]) -> pack -> hide").plan
    assert chain_of(plan) == [
        "collate.rows", "collate.to_tensor", "collate.flatten", "collate.shift_tokens", "collate.drop",
        "collate.drop.2", "collate.pack", "collate.hide", "collate.microbatches",
    ]  # fmt: skip
    first, second = plan.node("collate.drop"), plan.node("collate.drop.2")
    assert first.op == second.op == "collate.user"
    assert first.does == "Leave short samples out"
    assert plan.node("collate.hide").does == "hide of parts.py, row by row"
    digest = first.args["digest"]
    assert second.args == {
        "module": "parts.py", "function": "drop", "digest": digest, "arguments": {"least": 2, "only": [3]},
        "takes": "labelled samples", "gives": "labelled samples",
    }  # fmt: skip
    given = {edge.before: edge.data for edge in plan.edges}
    assert given["collate.drop.2"] == "labelled samples" and given["collate.hide"] == "microbatch"
    assert from_json(to_json(plan)) == plan


def test_a_collator_may_do_the_work_of_several_links(own):
    plan = own("to_tensor -> mine -> pack").plan
    assert chain_of(plan) == ["collate.to_tensor", "collate.mine", "collate.pack", "collate.microbatches"]


@pytest.mark.parametrize(("chain", "message", "hint"), [
    ("to_tensor -> flatten -> drop -> shift_tokens -> pack",
        "`drop` takes labelled samples, but `flatten` gives token samples", "put `drop` after `shift_tokens`"),
    (f"hide -> {USUAL} -> pack", "the reader gives rows of token arrays", "put `hide` after `pack`"),
    ("to_tensor -> rows -> flatten -> shift_tokens -> pack", "`rows` takes rows of token arrays", "put `rows` first"),
    ("to_tensor -> mine -> shift_tokens -> pack",
        "`shift_tokens` takes token samples, but `mine` gives labelled samples", "leave `shift_tokens` out"),
    ("to_tensor -> mine -> drop", "a model takes a microbatch, but `drop` gives", "`pack` takes labelled samples"),
    (f"{USUAL} -> pack -> look", "`look` takes part of a microbatch, but `pack` gives microbatch",
        "put `look` after `shard`"),
    (f"{USUAL} -> drop -> hide -> pack", "`hide` takes microbatch, but `drop` gives", "put `hide` after `pack`"),
])  # fmt: skip
def test_a_wrong_place_is_an_error_with_the_right_one(own, chain, message, hint):
    result = own(chain)
    assert result.plan is None
    (error,) = result.diagnostics.errors
    assert error.code == "X508"
    assert message in error.message
    assert hint in error.hint


def test_shard_stays_where_collators_need_it(own):
    cp = {"parallel": "parallel { cp 2 { ring = 2 } }"}
    chain = f"{USUAL} -> pack -> hide"
    assert chain_of(own(chain).plan)[-3:] == ["collate.pack", "collate.hide", "collate.microbatches"]
    assert chain_of(own(chain, **cp).plan)[-3:] == ["collate.hide", "collate.shard", "collate.microbatches"]
    written = f"{USUAL} -> pack -> hide -> shard"
    assert chain_of(own(written).plan) == chain_of(own(chain).plan)
    behind = f"{written} -> look"
    alone, two = own(behind).plan, own(behind, **cp).plan
    assert chain_of(alone) == chain_of(two)
    assert chain_of(two)[-3:] == ["collate.shard", "collate.look", "collate.microbatches"]
    assert alone.node("collate.shard").args == {"ring": 1, "ulysses": 1}
    assert two.node("collate.shard").args == {"ring": 2, "ulysses": 1}


def test_other_code_is_another_experiment(own, tmp_path):
    def ids(chain=f"{USUAL} -> drop -> pack", parts=PARTS):
        plan = own(chain, parts=parts, dataset="dataset own { source = documents() }").plan
        return plan.id, plan.config_id

    before = ids()
    assert ids() == before
    assert ids(f"{USUAL} -> drop(8, only = [1, 2]) -> pack") == before  # its own defaults
    for other in (
        ids(parts=PARTS.replace('yield "x"', 'yield "y"')),
        ids(f"{USUAL} -> drop(9) -> pack"),
        ids(f"{USUAL} -> drop -> drop -> pack"),
        ids(f"{USUAL} -> pack"),
    ):
        assert other[0] != before[0] and other[1] != before[1]


def test_the_folder_of_the_command_changes_nothing(own, tmp_path, monkeypatch):
    plan = own(f"{USUAL} -> drop -> pack").plan
    for folder in (tmp_path, tmp_path.parent):
        monkeypatch.chdir(folder)
        again = plan_from_path((tmp_path / "spec.xtrain").relative_to(folder)).plan
        assert (again.id, again.config_id) == (plan.id, plan.config_id)


def test_a_run_may_go_on_with_other_collators(own):
    before, after = own(f"{USUAL} -> pack").plan, own(f"{USUAL} -> drop -> pack").plan
    (reason,) = [r for r in resumable(before, after).reasons if r.path == "collate"]
    assert (reason.kind, reason.effect) == ("safe", "learning")
    assert "drop" in reason.text


def test_drift_names_the_code_that_has_changed(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own(f"{USUAL} -> drop -> pack")
    plan = signed(plan_from_path("spec.xtrain").plan, (), None)
    assert not find_drift(plan)
    (tmp_path / "parts.py").write_text(PARTS + "# changed\n")
    (found,) = find_drift(plan)
    assert found.code == "X710"
    assert ("parts.py has changed", None) in found.notes


def test_links_that_change_documents_are_in_the_plan(make_plan):
    from xtrain.planner.review.resumable import resumable

    def chain(*links: str) -> str:
        return " -> ".join(["collate = to_tensor", "flatten", *links, "shift_tokens", "pack"])

    plain = make_plan(collate=chain())
    plan = make_plan(collate=chain('fill_in_middle(rate = 40%, middle = "<m>")', "document_prefix(most = 20%)"))
    node = plan.node("collate.fill_in_middle")
    assert node.args == {"rate": 0.4, "suffix_first": 0.5, "tokens": ["<|fim_prefix|>", "<|fim_suffix|>", "<m>"]}
    assert "40% of the plain documents" in node.does
    assert plan.node("collate.document_prefix").args == {"most": 0.2}
    assert plan.config_id != plain.config_id
    other = make_plan(collate=chain('fill_in_middle(rate = 50%, middle = "<m>")', "document_prefix(most = 20%)"))
    assert other.config_id != plan.config_id
    texts = [reason.text for reason in resumable(plan, other).reasons]
    assert any(text.startswith("fill_in_middle, document_prefix: other code, arguments") for text in texts)
