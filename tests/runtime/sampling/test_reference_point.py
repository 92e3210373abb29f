"""Answers behind the prompts of others: which they are, and what a point is that is estimated from them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_generators import generator_of, plan_of, recomputed_logits

from xtrain.components.collators.flatten_torch import flatten
from xtrain.components.collators.pack_torch import pack
from xtrain.components.collators.shift_tokens_torch import shift_tokens
from xtrain.components.collators.to_tensor_torch import to_tensor
from xtrain.dsl.schema.losses import MISMATCHED, REF
from xtrain.runtime.feed.collate import compose
from xtrain.runtime.feed.packing.stored_rows import RawRow, mismatched
from xtrain.runtime.nn.weights import model_tensors
from xtrain.runtime.sampling.reference_weights import PointEstimate, exchanged_rows

TRL = json.loads((Path(__file__).parents[2] / "support" / "loss_vectors.json").read_text())["kto_estimated"]
DOCUMENTS = [([256, 10, 11], [20, 21, 22, 257]), ([256, 12], [30, 257]), ([256, 13, 14, 15], [40, 41, 257])]


def row_of(documents: list[tuple[list[int], list[int]]], labels: tuple[bool, ...] = (True, False, True)) -> RawRow:
    """With a column that has the tokens themselves."""
    whole = [np.array([*prompt, *answer]) for prompt, answer in documents]
    trained = [np.repeat(np.array([0, 1], np.uint8), (len(p), len(a))) for p, a in documents]
    values = {"label": [float(label) for label in labels[: len(documents)]]}
    return RawRow(segments=whole, trained=trained, columns={MISMATCHED: [each / 7.0 for each in whole]}, values=values)


def rows(capacity: int = 32, align: int = 1) -> Any:
    return SimpleNamespace(capacity=capacity, align=align)


def test_each_prompt_has_the_answer_of_the_document_before_it():
    """TRL: (x_1, y_1), …, (x_n, y_n) become (x_1, y_n), (x_2, y_1), …, (x_n, y_{n−1})."""
    found = mismatched(row_of(DOCUMENTS), rows())
    prompts, answers = zip(*DOCUMENTS, strict=True)
    expected = [[*x, *y] for x, y in zip(prompts, (answers[2], answers[0], answers[1]), strict=True)]
    assert [each.tolist() for each in found.segments] == expected
    assert found.trained is not None
    assert [each.tolist() for each in found.trained] == [
        [0] * len(x) + [1] * (len(whole) - len(x)) for x, whole in zip(prompts, expected, strict=True)
    ]
    # Columns go with the tokens of the answer; all answers are there once, in as many positions as before.
    assert [each[len(x) :].tolist() for x, each in zip(prompts, found.columns[MISMATCHED], strict=True)] == [
        [token / 7.0 for token in y] for y in (answers[2], answers[0], answers[1])
    ]
    assert sum(map(len, found.segments)) == sum(map(len, row_of(DOCUMENTS).segments))


def test_documents_without_an_answer_take_no_part():
    row = row_of([DOCUMENTS[0], ([256, 9, 9], []), DOCUMENTS[1]])
    found = mismatched(row, rows())
    assert [each.tolist() for each in found.segments] == [[256, 10, 11, 30, 257], [256, 12, 20, 21, 22, 257]]
    assert not mismatched(row_of(DOCUMENTS[:1]), rows()).segments
    assert not mismatched(RawRow(segments=[]), rows()).segments


def test_what_does_not_fit_into_the_row_is_cut_off():
    """Of multiples of four positions documents took 8, 4 and 8; with other answers they would take 8, 8 and 8."""
    found = mismatched(row_of(DOCUMENTS), rows(capacity=20, align=4))
    assert [len(each) - 1 for each in found.segments] == [5, 5, 4]
    assert found.segments[2].tolist() == [256, 13, 14, 15, 30]
    # Where nothing of an answer is left the document is left out.
    assert len(mismatched(row_of(DOCUMENTS), rows(capacity=16, align=4)).segments) == 2


@pytest.fixture(scope="module")
def author():
    return generator_of(plan_of("llama { dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48, init_std = 0.3 }"))


@pytest.mark.parametrize("shift", [0.0, -30.0], ids=["likelier", "less likely"])
def test_the_point_is_the_mean_log_ratio_of_these_answers(author, shift: float):
    """Against a forward of each text by itself; never below 0."""
    made = pack(capacity=32, unit="sequence", columns=(REF,), computed=(REF,), values=("label",))
    chain = compose([to_tensor(), flatten(), shift_tokens(), made])
    batch = [[row_of(DOCUMENTS)], [row_of(DOCUMENTS[:1])], [row_of(DOCUMENTS[1:])]]
    for (row,) in batch:
        row.columns[MISMATCHED] = [-np.arange(len(each)) / 2 - 9 - shift for each in row.segments]
    total, count = 0.0, 0
    for (row,) in batch:
        found = mismatched(row, rows())
        for segment, trained, given in zip(found.segments, found.trained or (), found.columns[MISMATCHED], strict=True):
            first = int(np.argmax(trained))
            for at in range(first, len(segment)):
                logprobs = recomputed_logits(author, segment[:at].tolist()).log_softmax(-1)
                total += logprobs[segment[at]].item() - given[at]
            count += 1
    estimate = PointEstimate(model=author.model, rank=author.rank)
    with torch.no_grad():
        point = estimate.of(exchanged_rows(batch, rows(), chain))
    assert count == 5 and (total < 0) == (shift < 0)
    # Columns are fp32 numbers.
    assert point == pytest.approx(max(0.0, total / count), rel=1e-6)
    assert estimate.of([]) == 0.0


@pytest.mark.parametrize("name", TRL["cases"])
def test_the_point_is_that_of_trl(author, name: str):
    """Of documents of one row, which TRL has in one microbatch: the answers that it exchanges, and what comes of it."""
    given = TRL["cases"][name]
    row = row_of(
        [(prompt, answer) for prompt, answer, _ in TRL["documents"]], tuple(label for *_, label in TRL["documents"])
    )
    # The reference's number of a token stands beside it in its own document, which comes before that of the prompt.
    behind = given["reference_exchanged_logps"]
    for (prompt, *_), column, logps in zip(
        TRL["documents"], row.columns[MISMATCHED], behind[1:] + behind[:1], strict=True
    ):
        column[len(prompt) :] = logps
    found = mismatched(row, rows())
    for segment, (prompt, *_), answer in zip(found.segments, TRL["documents"], TRL["exchanged"], strict=True):
        assert segment.tolist() == prompt + answer
    with torch.no_grad():
        for tensor_name, tensor in model_tensors(author.model, "").items():
            places = torch.arange(tensor.numel(), dtype=torch.float64)
            phase = sum(tensor_name.encode()) + given["policy_phase"]
            tensor.copy_((0.6 * torch.sin(1.7 * places + phase)).view_as(tensor))
        made = pack(capacity=32, unit="sequence", columns=(REF,), computed=(REF,), values=("label",))
        chain = compose([to_tensor(), flatten(), shift_tokens(), made])
        point = PointEstimate(model=author.model, rank=author.rank).of(exchanged_rows([[row]], rows(), chain))
    assert point == pytest.approx(given["kl"], rel=1e-10, abs=1e-12)
    assert (point > 0) == (name != "likelier")
