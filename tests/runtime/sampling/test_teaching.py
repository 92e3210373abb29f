"""What `xtrain data teach` stores: the distributions of transformers, once, and found again by all they depend on."""

import json
import shutil

import numpy as np
import pytest
import torch
from teachers import make_teacher, taught

from xtrain.dsl.schema.losses import TEACHER_IDS, TEACHER_LOGPROBS
from xtrain.planner.load import plan_from_path
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.dataset_view import data_nodes, tokenizer_of
from xtrain.runtime.feed.packing.rows import pack_rows
from xtrain.runtime.feed.prepared import prepared_from
from xtrain.runtime.feed.teacher import TaughtEntry, read_teacher
from xtrain.runtime.sampling.teaching import Lesson

SPEC = """experiment student {{ seed = 1, budget = 4 steps }}
model qwen3 {{ dim = 16, layers = 1, heads = 2 }}
tokenizer bytes
dataset lines {{ source = jsonl("data.jsonl"), holdout = 10% }}
batch {{ sequence = {sequence}, rows = 4, micro = 2 }}
loss distill {{ teacher = "teacher", {settings} }}
optimizer adamw {{ lr = 1e-3 }}
precision {{ params = {params} }}
launch {{ device = cpu }}
"""
TEXTS = [f"line {i} " + "abc def ghi " * (i % 13) for i in range(40)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, TEXTS)
    make_teacher(tmp_path / "teacher", 258)
    return tmp_path


def write(folder, texts):
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def plan_of(folder, settings="top = 5", *, sequence=64, params="fp64", more=""):
    spec = folder / "student.xtrain"
    spec.write_text(SPEC.format(settings=settings, sequence=sequence, params=params) + more)
    compiled = plan_from_path(spec)
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


def opened(plan):
    """The store of the dataset with what is stored of its teacher, as a rank opens it."""
    prepared = {"lines": prepared_from(plan, data_nodes(plan)["lines"], tokenizer_of(plan))}
    return read_teacher(plan, prepared, **plan.node("setup.teacher.lines").args)["lines"].store


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_it_is_what_transformers_computes(folder, temperature):
    plan = plan_of(folder, f"top = 5, temperature = {temperature}")
    assert taught(plan, folder) == 0
    store = opened(plan)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "teacher").double()
    longest = int(store.lengths().max())
    assert longest > 2 * 64 + 1  # cut into three pieces, each of which begins anew
    ids, logprobs = store.columns[TEACHER_IDS], store.columns[TEACHER_LOGPROBS]
    seen = np.zeros(store.num_tokens, dtype=bool)
    for document in range(store.num_documents):
        begin, end = store.offsets[document], store.offsets[document + 1]
        for first in range(begin, end - 1, 64):
            last = min(first + 64, end - 1)
            with torch.no_grad():
                tokens = torch.from_numpy(store.tokens[first:last].astype(np.int64))[None]
                log_SV = (model(tokens).logits[0] / temperature).log_softmax(-1)
            own = slice(first + 1, last + 1)
            found = log_SV.topk(5)
            torch.testing.assert_close(torch.from_numpy(ids[own].astype(np.int64)), found.indices)
            torch.testing.assert_close(
                torch.from_numpy(logprobs[own, :5].astype(np.float64)), found.values, rtol=1e-5, atol=2e-5
            )
            rest = (1 - found.values.exp().sum(-1)).log()
            torch.testing.assert_close(
                torch.from_numpy(logprobs[own, 5].astype(np.float64)), rest, rtol=1e-4, atol=2e-5
            )
            seen[own] = True
    firsts = np.zeros_like(seen)
    firsts[store.offsets[:-1]] = True
    assert (seen == ~firsts).all()


def test_nothing_is_computed_twice_and_nothing_else_is_taken_for_it(folder, capsys):
    plan = plan_of(folder)
    states = []
    for _ in range(2):
        taught(plan, folder)
        states.append(json.loads(capsys.readouterr().out)["state"])
    assert states == ["computed", "there"]
    first = opened(plan).columns[TEACHER_LOGPROBS].copy()
    others = (plan_of(folder, "top = 6"), plan_of(folder, "top = 5, temperature = 2"), plan_of(folder, params="fp32"),
              plan_of(folder, sequence=32))  # fmt: skip
    for other, why in zip(others, ("top = 5", "temperature = 1", "computes in fp64", "another length"), strict=True):
        with pytest.raises(DataError, match=rf"(?s)the stored values are of [^\n]*{why}.*xtrain data teach") as problem:
            opened(other)
        assert "student.xtrain" in str(problem.value)
    make_teacher(folder / "teacher", 258, seed=6)
    with pytest.raises(DataError, match="another teacher, or one that has changed"):
        opened(plan)
    assert taught(plan, folder) == 0
    assert not np.array_equal(opened(plan).columns[TEACHER_LOGPROBS], first)
    make_teacher(folder / "teacher", 258, seed=5)  # as it was
    assert np.array_equal(opened(plan).columns[TEACHER_LOGPROBS], first)
    write(folder, [*TEXTS, "one more"])
    with pytest.raises(DataError, match="another dataset, or one that has changed"):
        opened(plan)


def test_without_an_entry_or_without_a_teacher_it_is_said_what_to_do(folder):
    plan = plan_of(folder)
    with pytest.raises(DataError, match=r"(?s)nothing is stored of its teacher.*xtrain data teach"):
        opened(plan)
    shutil.rmtree(folder / "teacher")
    for act in (opened, lambda each: taught(each, folder)):
        with pytest.raises(DataError, match=r"there is no model at .*teacher, which the loss learns from") as caught:
            act(plan)
        assert "weights = none" not in str(caught.value)  # which is of the model that is trained


def columns_of(plan):
    columns = opened(plan).columns
    return [columns[name].tobytes() for name in (TEACHER_IDS, TEACHER_LOGPROBS)]


def test_a_command_that_ends_early_leaves_no_entry_and_is_gone_on_with(folder, monkeypatch):
    from xtrain.runtime.sampling import teaching

    plan = plan_of(folder)
    taught(plan, folder)
    wanted = columns_of(plan)
    shutil.rmtree(folder / "runs" / "cache" / "teachers")
    whole = teaching.largest
    calls = []

    def failing(logits_TV, top):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return whole(logits_TV, top)

    monkeypatch.setattr(teaching, "SAVED_EVERY", 2)
    monkeypatch.setattr(teaching, "largest", failing)
    assert taught(plan, folder) == 130
    with pytest.raises(DataError, match="nothing is stored of its teacher"):
        opened(plan)
    assert taught(plan, folder) == 0
    # The first attempt has computed five microbatches, of which four are known to be written.
    assert len(calls) == 6 + microbatches(plan) - 4
    assert columns_of(plan) == wanted
    names = {path.name for path in (folder / "runs" / "cache" / "teachers").glob("*/*")}
    assert names == {"meta.json", f"{TEACHER_IDS}.bin", f"{TEACHER_LOGPROBS}.bin"}


def microbatches(plan):
    """Of two rows of 64 positions each, into which the documents are cut."""
    store = prepared_from(plan, data_nodes(plan)["lines"], tokenizer_of(plan)).store
    return -(-pack_rows(store.lengths(), 64, "split").num_rows // 2)


def test_two_commands_at_once_are_refused(folder):
    plan = plan_of(folder)
    lesson = Lesson.of(plan, "lines", prepared_from(plan, data_nodes(plan)["lines"], tokenizer_of(plan)).store)
    entry = TaughtEntry(lesson.cache, lesson.key, lesson.store.num_tokens, 2)
    with entry.begin(), pytest.raises(DataError, match="another process computes it"):
        taught(plan, folder)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "exact"), [("fsdp 2", True), ("tp 2", False)])
def test_ranks_store_what_one_process_does(folder, layout, exact):
    """Ranks of fsdp compute the same numbers, those of tp sums of parts."""
    taught(plan_of(folder), folder)
    wanted = columns_of(plan_of(folder))
    shutil.rmtree(folder / "runs" / "cache" / "teachers")
    plan = plan_of(folder, more=f"parallel {{ {layout} }}")
    assert plan.mesh.world_size == 2
    assert taught(plan, folder) == 0
    found = columns_of(plan)
    if exact:
        assert found == wanted
    else:
        assert found[0] == wanted[0]
        numbers = [np.frombuffer(each[1], dtype=np.float32) for each in (found, wanted)]
        np.testing.assert_allclose(*numbers, rtol=2e-6, atol=1e-6)


@pytest.mark.slow
def test_a_rank_says_what_is_wrong(folder, capfd):
    plan = plan_of(folder, more="parallel { fsdp 2 }")
    config = folder / "teacher" / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"mamba"'))
    with pytest.raises(SystemExit) as ended:
        taught(plan, folder)
    assert ended.value.code == 3 and "mamba" in capfd.readouterr().err


def test_a_damaged_entry_is_none(folder):
    plan = plan_of(folder)
    taught(plan, folder)
    (path,) = (folder / "runs" / "cache" / "teachers").glob(f"*/{TEACHER_IDS}.bin")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match="xtrain data teach"):
        opened(plan)
    assert taught(plan, folder) == 0
    opened(plan)
