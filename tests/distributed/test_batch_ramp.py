"""Steps of a ramp: each is the step that as many rows make, whatever steps behind it take."""

import pytest
from attrs import evolve
from projects import records
from topologies import BY_NAME, RAMP


def test_a_step_of_a_ramp_is_one_of_so_many_rows(lab):
    """Its loss, and with the losses of its routers its gradients, are means over the tokens and rows that it has."""
    ramp = BY_NAME["pp 2 · fsdp 2, ramp (moe)"].trial("fp64", shallow=True)
    settings = tuple(each for each in ramp.settings if each not in RAMP)
    grown, small = lab.alone(ramp), lab.alone(evolve(ramp, rows=4, steps=1, settings=settings))
    assert grown.curve[0] == pytest.approx(small.curve[0], rel=1e-12)
    taken, aux = ([record[key] for record in records(grown.directory, "metrics")] for key in ("tokens", "moe/aux_loss"))
    assert taken == [4 * 64, (4 + 8) * 64]
    assert aux[0] == pytest.approx(small.routing[0]["moe/aux_loss"], rel=1e-12)
