"""`xtrain docs --capabilities`: asked of the rules, for every component there is."""

import pytest
from attrs import evolve

from xtrain.dsl.diagnostics.codes import CODES
from xtrain.dsl.load import load_spec
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.actions import ACTIONS
from xtrain.dsl.schema.component import Registry, registry_of
from xtrain.dsl.schema.optimizers import OPTIMIZERS
from xtrain.dsl.schema.parallel import STACKS
from xtrain.dsl.schema.run import TRACKERS
from xtrain.planner.review import capabilities as page

REGISTRIES = [registry for block in blocks.KINDS.values() if (registry := registry_of(block)) is not None]


@pytest.fixture(scope="module")
def rows(known_machine: None) -> dict[tuple[str, str], page.CapabilityRow]:
    return {(row.where, row.name): row for row in page.capabilities()}


def test_every_component_has_a_row_with_who_offers_it(rows):
    registries: list[Registry] = [ACTIONS, TRACKERS, *REGISTRIES]
    for registry in registries:
        for name in registry:
            row = rows[registry.word, name]
            assert row.origin == "xtrain" and row.cells["alone"] == page.YES


def test_a_row_of_a_tracker_is_that_of_one_that_is_on():
    for name in TRACKERS:
        text = page._text(next(page._probes()) | {"log": f"log {{ {page._member(TRACKERS[name], name)} }}"})
        loaded = load_spec("a.xtrain", [], {"a.xtrain": text})
        assert not loaded.diagnostics and [each.kind for each in loaded.require().log.trackers()] == [name]


def test_columns_are_the_stacks_axes_and_formats_of_the_schema(rows):
    expected = [
        "alone", "ddp", "deepspeed", "torchft", "tp", "ep", "fsdp", "pp", "cp", "fp64", "bf16", "→fp64", "→bf16",
        "→fp16", "→fp8", "loader", "export",
    ]  # fmt: skip
    assert all(list(row.cells) == expected for row in rows.values())


def test_cells_are_what_the_rules_say(rows):
    assert rows["parallel.stack", "ddp"].cells["tp"] == "X415"
    assert rows["model", "llama"].cells["ep"] == "X409" and rows["model", "mixtral"].cells["ep"] == page.YES
    assert rows["checkpoint.backend", "file"].cells["fsdp"] == "X621"
    assert rows["parallel.pp.schedule", "zbv"].cells["pp"] == page.YES
    assert rows["parallel.pp.schedule", "zbv"].cells["tp"] == page.IDLE
    assert rows["cluster", "a100"].cells["→fp8"] == "X443" and rows["cluster", "h100"].cells["→fp8"] == page.YES
    assert rows["parallel.stack", "torchft"].cells["export"] == "X415"
    assert rows["parallel.stack", "deepspeed"].cells["loader"] == page.YES
    codes = {word for row in rows.values() for cell in row.cells.values() for word in cell.split()}
    for code in codes - {page.YES, page.IDLE}:
        assert code in CODES


@pytest.mark.parametrize("stack", STACKS)
def test_a_row_is_refused_for_its_own_sake_alone(rows, stack):
    """Each stack is probed with a model and an optimizer that it supports: the default scheduler, loss and trackers."""
    for row in (("scheduler", "cosine"), ("loss", "cross_entropy"), ("tracker", "tensorboard"), ("action", "eval"),
                ("optimizer", "adamw"), ("model", "llama")):  # fmt: skip
        assert rows[row].cells.get(stack, page.YES) == page.YES, row
    assert rows["optimizer", "muon"].cells["deepspeed"] == "X415"  # what a stack itself refuses
    assert rows["model", "mixtral"].cells["torchft"] == rows["loss", "dpo"].cells["torchft"] == "X415"
    assert rows["parallel.stack", "deepspeed"].cells["alone"] == page.YES


def test_a_rule_that_changes_changes_the_table(monkeypatch, rows):
    def refuses(spec, world):
        found = real(spec, world)
        if spec.optimizer.kind == "lion" and spec.parallel.tp.size == 2:
            found.error("X415", "no", None)
        return found

    real = page.check_spec
    monkeypatch.setattr(page, "check_spec", refuses)
    columns = [evolve(column, usual=page._supported(column)) for column in page._columns()]
    for name, different in (("adamw", {}), ("lion", {"tp": "X415"})):
        lines = {"optimizer": page._written("optimizer", OPTIMIZERS[name], name)}
        before = rows["optimizer", name]
        row = page._row("optimizer", name, before.origin, columns, lines)
        assert row == evolve(before, cells=before.cells | different) and (row == before) == (not different)
