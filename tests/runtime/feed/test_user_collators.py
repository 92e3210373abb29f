"""Collators of the user's own: called row by row, checked, the same whatever the layout."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve, fields
from examples import drawn
from hypothesis import given
from hypothesis import strategies as st

from xtrain.components.collators.flatten_torch import flatten
from xtrain.components.collators.pack_torch import pack
from xtrain.components.collators.shard_torch import shard
from xtrain.components.collators.shift_tokens_torch import shift_tokens
from xtrain.components.collators.to_tensor_torch import to_tensor
from xtrain.components.collators.user_part_torch import CollatorCalls, join_rows, split_rows
from xtrain.dsl.schema import data_components as links
from xtrain.dsl.user_parts.files import find_module, module_digest
from xtrain.runtime.base.user_parts import PartChanged, PartFailed, part_of
from xtrain.runtime.feed.collate import Stage, compose
from xtrain.runtime.feed.loader import RowFeeder
from xtrain.runtime.feed.microbatch import IGNORE_INDEX, Microbatch
from xtrain.runtime.feed.packing.rows import pack_rows
from xtrain.runtime.feed.packing.stored_rows import PADDING, RawRow

HEAD = """
import numpy as np
import torch
from attrs import evolve
from xtrain import IGNORE_INDEX, Microbatch, Sample, collator
from xtrain.runtime.feed.collate import TensorRow
from xtrain.runtime.feed.packing.stored_rows import RawRow
"""
CAPACITY = 12
VOCAB = 5000


def assert_same(found: Microbatch, expected: Microbatch) -> None:
    for name in (attribute.name for attribute in fields(Microbatch)):
        one, other = getattr(found, name), getattr(expected, name)
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other), name
        else:
            assert one == other, name


def feeder(store, capacity: int, align: int = 1, more=()) -> RowFeeder:
    documents = np.arange(store.num_documents, dtype=np.int64)
    rows = pack_rows(store.lengths(), capacity, "split", align, method="sequential", group=1)
    usual = [to_tensor(), flatten(), shift_tokens(), pack(capacity=capacity, align=align)]
    return RowFeeder(store=store, documents=documents, rows=rows, collate=compose([*usual, *more]))


def stage_of(
    folder: Path, code: str, takes: str, gives: str = "", name: str = "f", node: str = "", **arguments
) -> Stage:
    """The stage of function `name` of a file with this code."""
    path = folder / "parts.py"
    text = HEAD + code
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    digest = module_digest(find_module("parts.py", folder))
    options = {"module": "parts.py", "function": name, "digest": digest, "arguments": arguments}
    part = part_of("collator", options, folder)
    calls = CollatorCalls(
        part=part, node=node or f"collate.{name}", takes=takes, gives=gives or takes, vocab=VOCAB, seed=7,
        random="generator" in code,
    )  # fmt: skip
    return Stage(name=name, takes=takes, gives=gives or takes, function=calls)


def chain(*own: Stage, cut: bool = False):
    """The usual chain with collators put where they belong."""
    usual = [to_tensor(), flatten(), shift_tokens(), pack(capacity=CAPACITY)]
    if cut:
        usual.append(shard(ring=1, ulysses=2, ring_rank=0, ulysses_rank=1))
    stages, kind = [], links.RAW_ROWS
    for stage in (*usual, None):
        while (mine := next((each for each in own if each.takes == kind and each not in stages), None)) is not None:
            stages.append(mine)
            kind = mine.gives
            if mine.gives != mine.takes:
                break
        if stage is not None and stage.takes == kind:
            stages.append(stage)
            kind = stage.gives
    return compose(stages)


def some_rows(count: int = 4, start: int = 100) -> list[RawRow]:
    """Rows of two or three samples each, the second of them padding."""
    generator = np.random.default_rng(0)
    rows = []
    for number in range(count):
        lengths = [] if number == 1 else [5, 4] if number % 2 else [3, 4, 4]
        rows.append(
            RawRow(segments=[generator.integers(0, 250, n + 1).astype(np.uint16) for n in lengths],
                position=start + number),
        )  # fmt: skip
    return rows


def identity(folder: Path, kind: str) -> Stage:
    place = links.KINDS.index(kind)
    code = "".join(f"@collator(takes={k!r})\ndef f{i}(value): return value\n" for i, k in enumerate(links.KINDS))
    return stage_of(folder, code, kind, name=f"f{place}")


@pytest.mark.parametrize("cut", [False, True])
def test_collators_that_do_nothing_change_nothing_anywhere(tmp_path, cut):
    kinds = links.KINDS if cut else links.KINDS[:-1]
    own = [identity(tmp_path, kind) for kind in kinds]
    expected = chain(cut=cut)(some_rows())
    assert_same(chain(*own, cut=cut)(some_rows()), expected)
    for each in own:
        assert_same(chain(each, cut=cut)(some_rows()), expected)


def test_rows_laid_out_in_one_pass_go_through_what_stands_behind_pack(tmp_path, make_store):
    code = """
@collator(takes="microbatch")
def f(batch, least=3):
    return evolve(batch, labels_BS=torch.where(batch.positions_BS < least, IGNORE_INDEX, batch.labels_BS))
@collator(takes="part of a microbatch")
def g(batch):
    return evolve(batch, labels_BS=torch.where(batch.positions_BS > 5, IGNORE_INDEX, batch.labels_BS))
"""
    own = [
        stage_of(tmp_path, code, links.MICROBATCH, least=2),
        stage_of(tmp_path, code, links.LOCAL_MICROBATCH, name="g"),
    ]
    cut = shard(ring=1, ulysses=2, ring_rank=0, ulysses_rank=1)
    fed = feeder(make_store([9, 30, 4, 7]), CAPACITY, more=(own[0], cut, own[1]))
    asked = np.array([0, PADDING, 2, 1])
    found = fed.microbatch(asked)
    plain = feeder(make_store([9, 30, 4, 7]), CAPACITY, more=(cut,)).microbatch(asked)
    hidden = (found.positions_BS < 2) | (found.positions_BS > 5)
    assert torch.equal(found.labels_BS, torch.where(hidden, IGNORE_INDEX, plain.labels_BS))
    assert found.num_valid == int((found.labels_BS != IGNORE_INDEX).sum()) < plain.num_valid
    assert torch.equal(found.input_ids_BS, plain.input_ids_BS)
    assert fed.collate.lays_out is not None


def test_samples_that_are_left_out_leave_room(tmp_path):
    code = """
@collator(takes="labelled samples")
def f(samples, least):
    return (sample for sample in samples if len(sample.tokens) >= least)
"""
    found = chain(stage_of(tmp_path, code, links.LABELLED_SAMPLES, least=4))(some_rows())
    assert [int(row.sum()) for row in found.real_BS] == [8, 0, 8, 9]
    gone = chain(stage_of(tmp_path, code, links.LABELLED_SAMPLES, least=40))(some_rows())
    assert gone.num_valid == 0 and not gone.real_BS.any()


@pytest.mark.parametrize("kind", links.KINDS)
def test_rows_of_padding_are_not_shown(tmp_path, kind):
    """Row 1 of them has no document."""
    code = f"""
@collator(takes={kind!r})
def f(value):
    assert value.real_BS.any() if isinstance(value, Microbatch) else value and getattr(value, "segments", True)
    with open({str(tmp_path / "called")!r}, "a") as called:
        called.write(".")
    return value
"""
    chain(stage_of(tmp_path, code, kind), cut=kind == links.LOCAL_MICROBATCH)(some_rows())
    assert (tmp_path / "called").read_text() == "..."  # of four rows


def test_links_can_be_replaced(tmp_path):
    code = """
@collator(takes="rows of token arrays", gives="labelled samples")
def f(row):
    for segment in row.segments:
        tokens = torch.from_numpy(segment.astype(np.int64))
        yield Sample(row=99, tokens=tokens[:-1], labels=tokens[1:])
"""
    own = stage_of(tmp_path, code, links.RAW_ROWS, links.LABELLED_SAMPLES)
    found, expected = compose([own, pack(capacity=CAPACITY)])(some_rows()), chain()(some_rows())
    assert_same(found, expected)


def test_writing_labels_in_place_leaves_tokens_alone(tmp_path):
    code = """
@collator(takes="labelled samples")
def f(samples):
    for sample in samples:
        sample.labels[:2] = 3
    return samples
"""
    found = chain(stage_of(tmp_path, code, links.LABELLED_SAMPLES))(some_rows())
    assert torch.equal(found.input_ids_BS, chain()(some_rows()).input_ids_BS)


RANDOM = """
@collator(takes="labelled samples")
def f(samples, share=0.5, *, generator):
    for sample in samples:
        hidden = torch.from_numpy(generator.random(len(sample.tokens)) < share)
        yield evolve(sample, labels=torch.where(hidden, IGNORE_INDEX, sample.labels))

@collator(takes="microbatch")
def g(batch, generator):
    hidden = torch.from_numpy(generator.random(tuple(batch.labels_BS.shape)) < 0.5)
    return evolve(batch, labels_BS=torch.where(hidden, IGNORE_INDEX, batch.labels_BS))
"""


@pytest.mark.parametrize(("name", "kind"), [("f", links.LABELLED_SAMPLES), ("g", links.MICROBATCH)])
def test_random_numbers_belong_to_the_row_and_not_to_the_layout(tmp_path, name, kind):
    own = stage_of(tmp_path, RANDOM, kind, name=name)
    rows = some_rows()
    whole = chain(own)(rows)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        for count in (1, 2):
            batches = [[rows[n] for n in order[i : i + count]] for i in range(0, 4, count)]
            found = torch.cat([chain(own)(batch).labels_BS for batch in batches])
            assert torch.equal(found, whole.labels_BS[order])
    assert len({tuple((row == IGNORE_INDEX).tolist()) for row in whole.labels_BS}) == 4
    elsewhere = chain(own)(some_rows(start=0))
    assert not torch.equal(elsewhere.labels_BS, whole.labels_BS)
    twice = stage_of(tmp_path, RANDOM, kind, name=name, node="collate.f.2")
    assert not torch.equal(chain(twice)(rows).labels_BS, whole.labels_BS)


def test_an_evaluation_draws_the_same_each_time_and_other_numbers_for_other_rows(tmp_path):
    own = stage_of(tmp_path, RANDOM, links.LABELLED_SAMPLES)
    unplaced = [RawRow(segments=row.segments) for row in some_rows()]
    found = chain(own)(unplaced).labels_BS
    assert torch.equal(chain(own)(unplaced[::-1]).labels_BS.flip(0), found)
    assert len({tuple((row == IGNORE_INDEX).tolist()) for row in found}) == 4


def test_a_stage_can_be_sent_to_another_process(tmp_path):
    own = stage_of(tmp_path, RANDOM, links.LABELLED_SAMPLES)
    again = pickle.loads(pickle.dumps(own))
    assert_same(chain(again)(some_rows()), chain(own)(some_rows()))


def test_a_list_that_a_call_changes_is_whole_for_the_next(tmp_path):
    code = """
@collator(takes="labelled samples")
def f(samples, names):
    assert names.pop() == "a" and not names
    return samples
"""
    own = chain(stage_of(tmp_path, code, links.LABELLED_SAMPLES, names=["a"]))
    assert_same(own(some_rows()), chain(identity(tmp_path, links.LABELLED_SAMPLES))(some_rows()))


# What goes wrong ------------------------------------------------------------------------------------------------------

# (kind, what the collator gives of `value`, part of what is said)
WRONG = [
    (links.RAW_ROWS, "None", "gave None instead of a RawRow"),
    (links.RAW_ROWS, "[1]", "a value of type list"),
    (links.RAW_ROWS, "evolve(value, segments=[[1, 2]])", "segment 0 as a value of type list"),
    (links.RAW_ROWS, "evolve(value, segments=[np.ones(3)])", "a numpy array of float64"),
    (links.RAW_ROWS, "evolve(value, segments=[np.array([1])])", "segment 0 with 1 token,"),
    (links.RAW_ROWS, "evolve(value, segments=[np.array([1, 5000])])", "5,000 among its tokens; they are 0 to 4,999"),
    (links.RAW_ROWS, "evolve(value, trained=[np.ones(3)])", "`trained` that does not fit"),
    (links.TENSOR_ROWS, "evolve(value, segments=[torch.ones(3)])", "of float32 instead of int64"),
    (links.TENSOR_ROWS, "RawRow(segments=[])", "instead of a TensorRow"),
    (links.TOKEN_SAMPLES, "3", "gave a value of type int instead of a list of samples"),
    (links.TOKEN_SAMPLES, "['x']", "a value of type str as sample 0"),
    (links.TOKEN_SAMPLES, "[evolve(value[0], tokens=[1, 2])]", "tokens as a value of type list"),
    (links.TOKEN_SAMPLES, "[evolve(value[0], tokens=value[0].tokens[:1])]", "with 1 token, and it needs 2 or more"),
    (links.TOKEN_SAMPLES, "[evolve(value[0], tokens=value[0].tokens[None])]", "instead of one dimension"),
    (links.TOKEN_SAMPLES, "[evolve(value[0], tokens=-value[0].tokens - 1)]", "they are 0 to 4,999"),
    (links.TOKEN_SAMPLES, "[evolve(value[0], labels=value[0].tokens)]", "labels already"),
    (links.TOKEN_SAMPLES, "[evolve(value[0], trained=value[0].tokens)]", "of int64 instead of bool"),
    (links.LABELLED_SAMPLES, "[evolve(value[0], labels=None)]", "sample 0 without labels"),
    (links.LABELLED_SAMPLES, "[evolve(value[0], labels=value[0].labels[1:])]", "shape [2] instead of [3]"),
    (links.LABELLED_SAMPLES, "[value[0], evolve(value[0], labels=value[0].labels + 5000)]", "sample 1 with 5,"),
    (links.LABELLED_SAMPLES, "[evolve(value[0], labels=value[0].labels * 0 - 1)]", "or -100"),
    (links.LABELLED_SAMPLES, "[evolve(value[0], trained=value[0].tokens > 0)]", "it is None"),
    (links.MICROBATCH, "value.labels_BS", "a value of type Tensor instead of a Microbatch"),
    (links.MICROBATCH, "evolve(value, labels_BS=value.labels_BS[:, :-1])", "shape [1, 11] instead of [1, 12]"),
    (links.MICROBATCH, "evolve(value, labels_BS=value.labels_BS.int())", "of int32 instead of int64"),
    (links.MICROBATCH, "evolve(value, input_ids_BS=value.input_ids_BS - 1)", "-1 among its `input_ids_BS`"),
    (links.MICROBATCH, "evolve(value, labels_BS=value.labels_BS.clamp(min=0))", "labels for padding"),
    (links.MICROBATCH, "evolve(value, positions_BS=value.positions_BS + 1)", "do not follow from the lengths"),
    (links.MICROBATCH, "evolve(value, cumulative_lengths=value.cumulative_lengths[1:])",
        "of shape [3] instead of [4]"),
    (links.MICROBATCH, "evolve(value, cumulative_lengths=value.cumulative_lengths * 2)",
        "do not rise from 0 to the 12"),
    (links.MICROBATCH, "evolve(value, real_lengths=value.real_lengths + 1)", "longer than their segments"),
    (links.LOCAL_MICROBATCH, "evolve(value, positions_BS=value.positions_BS + 1)", "after `shard` other ranks"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "given", "message"), WRONG)
def test_what_a_collator_gives_is_checked(tmp_path, kind, given, message):
    rows = some_rows()
    rows[0] = RawRow(segments=rows[0].segments[:2], position=100)  # room for padding
    code = f"\n@collator(takes={kind!r})\ndef f(value):\n    return {given}\n"
    with pytest.raises(PartFailed) as caught:
        chain(stage_of(tmp_path, code, kind), cut=kind == links.LOCAL_MICROBATCH)(rows)
    text = str(caught.value)
    assert message in text
    assert text.startswith(f"{(tmp_path / 'parts.py').as_posix()}:9: collator `f` ") and "(row 100 of the run)" in text
    assert caught.value.code == "X512"


FAULTS = [
    ("    return samples[9]\n", 11, "IndexError: list index out of range"),
    ("    return helper(samples)\n", 16, "ZeroDivisionError: division by zero"),
    ("    yield samples[0]\n    raise ValueError\n", 12, "collator `f`: ValueError"),
    ("    return torch.cat(samples)\n", 11, "TypeError: expected Tensor"),
    ("    return wrapped()\n", 21, "RuntimeError: it went wrong, because of KeyError: 'first' ("),
    ("    import nowhere_at_all\n", 11, "ModuleNotFoundError: No module named 'nowhere_at_all'"),
]


@pytest.mark.parametrize(("body", "line", "message"), FAULTS)
def test_what_a_collator_raises_is_reported_with_its_line(tmp_path, body, line, message):
    code = "\n@collator(takes='labelled samples')\ndef f(samples):\n" + body
    code += "\n" * (13 - (HEAD + code).count("\n"))
    code += "def helper(x):\n    y = 3\n    return y / 0\ndef wrapped():\n    try:\n        {}['first']\n"
    code += "    except KeyError as e:\n        raise RuntimeError('it went wrong') from e\n"
    with pytest.raises(PartFailed) as caught:
        chain(stage_of(tmp_path, code, links.LABELLED_SAMPLES))(some_rows())
    assert message in str(caught.value)
    assert caught.value.line == line
    assert caught.value.path == tmp_path / "parts.py"
    assert caught.value.__suppress_context__


def test_code_that_is_not_what_was_planned_is_refused(tmp_path):
    fine = "\n@collator(takes='microbatch')\ndef f(batch): return batch\ndef g(batch): return batch\n"
    own = stage_of(tmp_path, fine, links.MICROBATCH).function.part
    assert callable(own.load())
    for function, kind in (("g", "collator"), ("h", "collator"), ("f", "source")):
        options = {"module": "parts.py", "function": function, "digest": own.digest, "arguments": {}}
        with pytest.raises(PartChanged, match=f"no {kind} called `{function}`"):
            part_of(kind, options, tmp_path).load()
    (tmp_path / "other.py").write_text((tmp_path / "parts.py").read_text())
    options = {"module": "other.py", "function": "f", "digest": own.digest, "arguments": {}}
    with pytest.raises(PartChanged, match=r"other.py, or a module that it imports, has changed") as caught:
        part_of("collator", options, tmp_path).load()
    assert (caught.value.code, caught.value.agreed) == ("X713", True)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(PartChanged, match="there is no such file"):
        part_of("collator", {**options, "module": "gone.py"}, tmp_path).load()
    with pytest.raises(PartChanged, match="no module `gone`"):
        part_of("collator", {**options, "module": "gone.parts"}, tmp_path).load()


def test_a_module_that_fails_as_it_is_loaded_is_reported_with_its_line(tmp_path):
    code = "\n@collator(takes='microbatch')\ndef f(batch): return batch\nprint(undefined)\n"
    with pytest.raises(PartFailed, match=r"parts.py:11: loading .*: NameError: name 'undefined'"):
        stage_of(tmp_path, code, links.MICROBATCH).function.part.load()


# Rows of microbatches -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(2, 30), min_size=1, max_size=20), st.integers(1, 3), st.data())
@drawn(30, 600)
def test_rows_of_a_microbatch_are_cut_apart_and_joined(make_store, lengths, align, data):
    fed = feeder(make_store(lengths), 6 * align, align)
    asked = data.draw(st.lists(st.integers(PADDING, fed.rows.num_rows - 1), min_size=1, max_size=5))
    indices = np.array(asked, dtype=np.int64)
    whole = fed.microbatch(indices, np.arange(len(asked)))
    rows = split_rows(whole)
    for number, row in enumerate(rows):
        assert_same(row, fed.microbatch(indices[number : number + 1], np.array([number])))
    assert_same(join_rows(rows), whole)
    assert isinstance(rows[0], Microbatch)


@pytest.mark.parametrize("takes", [links.MICROBATCH, links.LOCAL_MICROBATCH])
def test_only_rows_that_are_read_are_shown_to_a_collator(tmp_path: Path, takes: str):
    """A prompt, and the rows of a pipeline stage that reads no tokens, are cut over context ranks and nothing else."""
    collate = chain(stage_of(tmp_path, refuses(takes), takes), cut=True)
    whole = chain()([RawRow(segments=[np.arange(9, dtype=np.uint16)])])
    expected = chain(cut=True).local_part(whole)
    assert_same(collate.local_part(whole), expected)
    found = collate.local_part(evolve(whole, input_ids_BS=None, labels_BS=None, num_valid=0))
    assert_same(found, evolve(expected, input_ids_BS=None, labels_BS=None, num_valid=0))
    with pytest.raises(PartFailed, match="it was called"):
        collate.behind_pack([whole])


def refuses(takes: str) -> str:
    return f'''
@collator(takes="{takes}")
def f(batch):
    raise RuntimeError("it was called")
'''
