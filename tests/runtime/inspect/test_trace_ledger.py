"""The ledger of a trace knows what is alive, how much of it, and what it is for."""

import torch

from xtrain.runtime.base.device import FakeDevice, capability, device_type, numbers
from xtrain.runtime.inspect.ledger import Ledger, bytes_of, pieces
from xtrain.runtime.nn.router import even


def new_tensor(ledger, *shape):
    tensor = torch.empty(*shape)
    ledger.see(tensor)
    return tensor


def test_storages_count_from_their_beginning_to_their_end():
    ledger = Ledger()
    first = new_tensor(ledger, 10)
    ledger.see(first[2:])  # a view is no storage of its own
    second = new_tensor(ledger, 4)
    assert ledger.over_time() == [40, 56]
    view = first[:1]
    del first
    assert ledger.over_time() == [40, 56]
    del view
    assert ledger.over_time() == [40, 56, 16]
    assert ledger.now == 3
    del second
    assert ledger.over_time()[-1] == 0


def test_an_address_that_is_used_again_is_another_storage():
    ledger = Ledger()
    for _ in range(20):
        new_tensor(ledger, 100)
    assert max(ledger.over_time()) == 400
    assert ledger.over_time()[-1] == 0


def test_memory_that_is_given_and_taken_counts_while_it_is_there():
    ledger = Ledger()
    with FakeDevice("cpu", 0), ledger.watching_sizes():
        tensor = new_tensor(ledger, 8)
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(32)
    assert ledger.over_time() == [32, 0, 32]
    size = torch.UntypedStorage(8)
    size.resize_(4)  # as before
    assert size.nbytes() == 4
    assert len(ledger.over_time()) == 3


def test_a_category_holds_from_the_beginning_and_a_second_one_from_then_on():
    ledger = Ledger()
    weight = new_tensor(ledger, 2)
    ledger.begin("lasting")
    assert ledger.over_time("lasting") == [8]
    ledger.assign("parameters", [weight])
    assert ledger.over_time("lasting") == [0] and ledger.over_time("parameters") == [8]
    other = new_tensor(ledger, 5)
    new_tensor(ledger, 1)
    assert ledger.over_time("") == [0, 20, 24, 20]
    ledger.assign("loss", [other, torch.empty(3)])
    assert ledger.over_time("loss") == [0, 20, 20, 20]
    ledger.assign("gradients", [other])
    ledger.assign("gradients", [other])
    assert max(ledger.over_time("loss")) == max(ledger.over_time("gradients")) == 20
    assert (ledger.over_time("loss")[-1], ledger.over_time("gradients")[-1]) == (0, 20)
    assert ledger.over_time()[-1] == 28
    assert ledger.over_time(but=("parameters",))[-1] == 20


def test_pieces_are_what_is_there():
    assert pieces([None, None]) == []
    assert bytes_of(pieces([torch.empty(3), None, torch.empty(2, dtype=torch.float64)])) == 28


def test_where_there_are_no_values_something_else_is_read():
    real = torch.tensor([3, 4])
    assert numbers(real, [0, 0]) == [3, 4]
    assert device_type(real) == "cpu"
    with FakeDevice("cuda", 9):
        fake = torch.empty(2)
        assert numbers(fake, [0, 0]) == [0, 0]
        assert (device_type(fake), capability(fake)) == ("cuda", 9)
        pinned = torch.ops.aten._pin_memory.default(fake)
    assert pinned.shape == fake.shape
    assert pinned.untyped_storage()._cdata != fake.untyped_storage()._cdata


def test_even_shares_differ_by_one_at_most():
    assert even(10, 4) == [3, 3, 2, 2]
    assert even(0, 3) == [0, 0, 0]
    assert even(8, 2) == [4, 4]
