"""Rollouts in one process: prompts, what is sampled behind them, how it is scored and made into rows."""

import math
import re
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from small_generators import generator_of, plan_of, recomputed_logits

from xtrain.components.collators.flatten_torch import flatten
from xtrain.components.collators.pack_torch import pack
from xtrain.components.collators.shift_tokens_torch import shift_tokens
from xtrain.components.collators.to_tensor_torch import to_tensor
from xtrain.components.packings.single_run import pack as pack_single
from xtrain.components.rewards.exact_answer_torch import answer_in, equal, score
from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.dsl.schema.policy import KEPT, SEEN, SHARES
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.collate import compose
from xtrain.runtime.feed.microbatch import IGNORE_INDEX
from xtrain.runtime.nn.batch import Completion, Prompt, SampledGroup, Step, advantages_of, overlong_rewards
from xtrain.runtime.nn.router import ExpertRouter
from xtrain.runtime.nn.texts import Sampling, TextEnds
from xtrain.runtime.sampling.prompts import check_prompts, last_run, prompt_lengths
from xtrain.runtime.sampling.rollout import compare, replace, summed
from xtrain.runtime.sampling.sampler import RowRanks, Sampler
from xtrain.runtime.sampling.text_generator import LogitsNotFinite
from xtrain.runtime.sampling.trained_run import alone

PROMPTS = [[256, *b"def f"], [256, *b"a"], [256, *b"while true:"]]


# Prompts -------------------------------------------------------------------------------------------------------------


def test_a_prompt_is_what_comes_before_the_last_answer():
    documents = [[0, 0, 1, 1], [1, 0, 0, 1, 1, 0], [0, 0], [1, 1, 1], [0, 1]]
    trained = np.array([each for document in documents for each in document], dtype=np.uint8)
    offsets = np.cumsum([0, *map(len, documents)])
    # Two turns: up to the second. No answer, and no prompt: neither is one.
    assert prompt_lengths(trained, offsets).tolist() == [2, 3, -1, 0, 1]
    assert prompt_lengths(None, offsets).tolist() == [-1] * 5
    assert [last_run(np.array(documents[number])) for number in (0, 1, 3)] == [(2, 4), (3, 5), (0, 3)]


def dataset(trained: list[int], offsets: list[int]) -> Any:
    count = len(offsets) - 1
    store = SimpleNamespace(trained=np.array(trained, dtype=np.uint8), offsets=np.array(offsets))
    rows = SimpleNamespace(document=np.arange(count), row_offsets=np.arange(count + 1))
    return SimpleNamespace(name="sums", reader=SimpleNamespace(store=store, rows=rows, documents=np.arange(count)))


def test_prompts_that_cannot_be_used_are_counted_before_the_first_step():
    check_prompts("sums", dataset([0, 0, 1, 0, 1], [0, 3, 5]).reader, longest=2, max_tokens=4)
    with pytest.raises(DataError, match="dataset sums: 1 prompts are longer than 1 tokens, the longest 2"):
        check_prompts("sums", dataset([0, 0, 1, 0, 1], [0, 3, 5]).reader, longest=1, max_tokens=4)
    with pytest.raises(DataError, match="dataset sums: 2 documents have no prompt with an answer"):
        check_prompts("sums", dataset([0, 0, 1, 1, 0, 1], [0, 2, 4, 6]).reader, longest=9, max_tokens=4)


def test_each_document_has_a_row():
    lengths = np.array([4, 1, 8, 3, 14])
    for policy, documents, starts in (
        ("skip", [0, 3], []),
        ("truncate", [0, 2, 3, 4], []),
        ("split", [0, 2, 2, 3, 4, 4, 4], [5, 5, 10]),
    ):
        rows = pack_single(lengths, 5, policy)
        assert rows.document.tolist() == documents and rows.cut_starts.tolist() == starts
        assert rows.row_offsets.tolist() == list(range(len(documents) + 1))
        kept = {"skip": 5, "truncate": 3 + 5 + 2 + 5, "split": 3 + 7 + 2 + 13}[policy]
        assert (rows.num_positions, rows.num_empty) == (kept, 1)
        assert rows.num_positions + rows.num_dropped_positions == 25
    with pytest.raises(DataError, match="document 2 has 7 positions"):
        pack_single(lengths, 5, "error")


# Sampling ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def author():
    return generator_of(plan_of("llama { dim = 32, layers = 2, heads = 4, ffn = 40, kv_heads = 2 }"))


def sampler(author: Any, most: int = 12, **settings: Any) -> Sampler:
    ranks = RowRanks(author.rank, None, None)
    sampling = Sampling(**settings)
    return Sampler(author=author, tokenizer=ByteTokenizer(), row_ranks=ranks, sampling=sampling, most=most)


def sampled(author: Any, prompts: list[list[int]], keys: list[str], most: int = 12, **settings: Any):
    ends = [TextEnds.of(ByteTokenizer(), ["z"])] * len(prompts)
    return sampler(author, most, **settings).sample(prompts, ends, keys)


def test_a_completion_follows_from_its_prompt_and_its_key_alone(author):
    keys = ["1 0 0", "1 0 1", "1 4 0"]
    together = sampled(author, PROMPTS, keys)
    assert together == sampled(author, PROMPTS, keys)
    for prompt, key, found in zip(PROMPTS, keys, together, strict=True):
        assert sampled(author, [prompt], [key]) == [evolve(found, logprobs=pytest.approx(found.logprobs, rel=1e-9))]
    first, *others = sampled(author, [PROMPTS[0]] * 6, [f"1 0 {number}" for number in range(6)])
    assert first.tokens == together[0].tokens and any(each.tokens != first.tokens for each in others)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5, "top_k": 5, "top_p": 0.8}])
def test_log_probabilities_are_those_of_the_temperature_whatever_is_left_out(author, settings):
    temperature = settings.get("temperature", 1)
    for prompt, found in zip(PROMPTS, sampled(author, PROMPTS, ["a", "b", "c"], **settings), strict=True):
        ids, left_out = list(prompt), 0.0
        for token, logprob in zip(found.tokens, found.logprobs, strict=True):
            logprobs = (recomputed_logits(author, ids) / temperature).log_softmax(-1)
            assert logprob == pytest.approx(logprobs[token].item(), rel=1e-10)
            ids.append(token)
            # The fewest of the five likeliest tokens with eight tenths of what these have together.
            best = logprobs.exp().topk(5).values
            kept = int((best.cumsum(0) < 0.8 * best.sum()).sum()) + 1
            left_out += 1 - best[:kept].sum().item() if settings else 0
        assert found.left_out == pytest.approx(left_out, abs=1e-12) and (left_out > 0) == bool(settings)


def test_log_probabilities_may_be_of_the_tokens_that_are_left(author):
    """With the likeliest of them, and the probabilities of these and of all others together."""
    chosen = evolve(sampler(author, temperature=0.7, top_k=9, top_p=0.8), processed=True, compared=4)
    ends = [TextEnds.of(ByteTokenizer(), ["z"])] * len(PROMPTS)
    plain = sampled(author, PROMPTS, ["a", "b", "c"], temperature=0.7, top_k=9, top_p=0.8)
    counts = set()
    for prompt, found, other in zip(PROMPTS, chosen.sample(PROMPTS, ends, ["a", "b", "c"]), plain, strict=True):
        assert found.tokens == other.tokens and found.left_out == pytest.approx(other.left_out, abs=1e-12)
        ids = list(prompt)
        for place, (token, logprob) in enumerate(zip(found.tokens, found.logprobs, strict=True)):
            best = (recomputed_logits(author, ids) / 0.7).softmax(-1).topk(9)
            kept = int((best.values.cumsum(0) < 0.8 * best.values.sum()).sum()) + 1
            counts.add(kept)
            of_all = best.values[:kept] / best.values[:kept].sum()
            left = dict(zip(best.indices[:kept].tolist(), of_all.tolist(), strict=True))
            assert logprob == pytest.approx(math.log(left[token]), rel=1e-10)
            recorded = found.columns[KEPT][place]
            assert recorded.shape == (9,) and set(recorded[recorded > 0] - 1) == set(left)
            seen, shares = found.columns[SEEN][place].tolist(), found.columns[SHARES][place]
            assert shares[:4] == pytest.approx([left.get(each, 0) for each in seen], rel=1e-6)
            assert shares[4] == pytest.approx(1 - shares[:4].sum(), abs=1e-6)
            ids.append(token)
    assert len(counts) > 1


def test_what_ends_a_completion_is_part_of_its_tokens_and_not_of_its_text(author):
    tokenizer = ByteTokenizer()
    found = sampled(author, [PROMPTS[0]] * 40, [str(number) for number in range(40)], most=60)
    ended = [each for each in found if not each.cut]
    assert ended and len(ended) < len(found)
    for each in ended:
        assert each.tokens[-1] in (tokenizer.eos, ord("z")) and len(each.tokens) <= 60
        assert each.text == tokenizer.decode(each.tokens[:-1]) and "z" not in each.text
    for each in found:
        assert len(each.tokens) == len(each.logprobs) and (not each.cut or len(each.tokens) == 60)


def test_the_experts_of_each_token_are_recorded():
    sizes = "dim = 32, layers = 2, heads = 4, kv_heads = 2, experts = 6, experts_per_token = 2, expert_ffn = 24"
    author = generator_of(plan_of(f"qwen3_moe {{ {sizes} }}"))
    ranks = RowRanks(author.rank, None, None)
    kept = Sampler(author=author, tokenizer=ByteTokenizer(), row_ranks=ranks, sampling=Sampling(), most=5, records=True)
    ends = [TextEnds.of(ByteTokenizer())] * len(PROMPTS)
    for prompt, found in zip(PROMPTS, kept.sample(PROMPTS, ends, ["a", "b", "c"]), strict=True):
        ids = [*prompt, *found.tokens]
        assert found.experts is not None and found.experts.shape == (len(ids), 4) and not found.experts[0].any()
        author.model.axes.recorded = chosen = []
        recomputed_logits(author, ids[:-1])
        author.model.axes.recorded = None
        expected = torch.cat([each[0] for each in chosen], 1) + 1
        assert np.array_equal(found.experts[1:], expected.numpy())


def test_a_router_sends_tokens_where_they_were_sent_before():
    sizes = "dim = 16, layers = 1, heads = 2, experts = 6, experts_per_token = 2, expert_ffn = 8"
    author = generator_of(plan_of(f"qwen3_moe {{ {sizes} }}"))
    (router,) = (each for each in author.model.modules() if isinstance(each, ExpertRouter))
    x_BSD = torch.randn(1, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    real_BS = torch.tensor([[True, True, True, False]])
    own_TK = router(x_BSD, real_BS).chosen_TK
    known_BSK = (own_TK + 1)[None].int()
    known_BSK[0, 1] = known_BSK[0, 1] % 6 + 1
    known_BSK[0, 2] = 0  # not known
    router.train()
    routing = router(x_BSD, real_BS, known_BSK)
    assert torch.equal(routing.chosen_TK[1], known_BSK[0, 1].long() - 1)
    assert torch.equal(routing.chosen_TK[[0, 2, 3]], own_TK[[0, 2, 3]])
    others = len(set((known_BSK[0, 1] - 1).tolist()) - set(own_TK[1].tolist()))
    assert router.replayed is not None and router.replayed.tolist() == [4, others] and others > 0


def test_no_token_can_be_chosen_where_weights_are_not_finite(author):
    weight = author.model.whole.norm.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    try:
        with pytest.raises(LogitsNotFinite):
            sampled(author, PROMPTS, ["a", "b", "c"])
    finally:
        with torch.no_grad():
            weight.copy_(before)


# Scores and rows -----------------------------------------------------------------------------------------------------


def group(texts: list[str], answer: str = "7") -> SampledGroup:
    ids = np.array([256, *b"3+4="])
    prompt = Prompt(
        ids=ids, text="3+4=", answer=answer, rest=np.array([10]), values={"weight": 2.0}, dataset=-1, place=5
    )
    completions = [
        Completion(tokens=[*text.encode(), 257], logprobs=[-0.5] * len(text) + [-0.25], text=text, cut=False)
        for text in texts
    ]
    return SampledGroup(prompt, completions)


@pytest.mark.parametrize(("text", "pattern", "found"), [
    (" 7 ", None, "7"),
    ("7 or 8", r"\d", "8"),
    ("#### 1,000", r"#### (.+)", "1,000"),
    ("#### 1,000 \n####  7  ", r"#### (.+)", "7"),
    ("no", r"\d", None),
    ("ab", r"a(x)?", None),
])  # fmt: skip
def test_the_answer_in_a_text(text, pattern, found):
    assert answer_in(text, None if pattern is None else re.compile(pattern)) == found


def test_answers_are_compared_as_texts_or_as_numbers():
    assert equal("7", "7", "text") and not equal("7.0", "7", "text")
    assert equal("1,000", "1000.0", "number") and equal("-0.5", "-.50", "number")
    assert (
        not equal("seven", "7", "number")
        and not equal("nan", "nan", "number")
        and not equal("7", "sNaN", "number")
        and not equal("7", "8", "number")
    )


def test_completions_are_scored_in_their_order():
    step = Step(index=0, groups=[[group(["7", "8"]), group(["= 7", "7 7"], answer="it is 8")]])
    rank = alone(torch.device("cpu"))
    meshes: Any = SimpleNamespace(has=lambda axis: False)
    score(rank, meshes, pattern=None, compare="text")(step)
    assert [each.rewards.tolist() for each in step.groups[0]] == [[1, 0], [0, 0]]
    # In an answer of the dataset that the pattern does not match all of it counts.
    score(rank, meshes, pattern=r"\d", compare="text")(step)
    assert [each.rewards.tolist() for each in step.groups[0]] == [[1, 0], [0, 0]]


def test_advantages_are_those_of_trl():
    rewards = [1.0, 0.0, 0.0, 0.5]
    expected = [(each - mean(rewards)) / (stdev(rewards) + 1e-4) for each in rewards]
    assert advantages_of(np.array(rewards), "group") == pytest.approx(expected, rel=1e-12)
    assert advantages_of(np.array(rewards), "none") == pytest.approx([each - mean(rewards) for each in rewards])
    assert advantages_of(np.ones(3), "group").tolist() == [0, 0, 0]


def test_the_last_tokens_before_the_limit_are_punished():
    """Equation 13 of DAPO, with 4 of 10 tokens."""
    assert overlong_rewards(np.array([1, 6, 7, 9, 10]), 10, 4).tolist() == [0, 0, -0.25, -0.75, -1]


def test_groups_of_equal_rewards_are_replaced_by_those_of_other_prompts():
    """Of the same place, each attempt a run later; by the number of attempts at most."""
    asked: list[list[int]] = []

    def made(prompt: Prompt) -> SampledGroup:
        text = {17: "7", 27: "8", 8: "7"}.get(prompt.place, "")  # the answer is 7: place 17 has only right ones
        return SampledGroup(prompt, group([text, "x" if prompt.place == 8 else text]).completions)

    def sample(prompts: list[Prompt]) -> list[SampledGroup]:
        asked.append([prompt.place for prompt in prompts])
        return [made(prompt) for prompt in prompts]

    def at(place: int) -> Prompt:
        return evolve(group([""]).prompt, place=place)

    reader: Any = SimpleNamespace(instead_of=lambda place, step, other: at(place + other - step))
    node = SimpleNamespace(id="rollout.score", op="rollout.score", args={"kind": "exact_answer", "pattern": None,
        "compare": "text"})  # fmt: skip
    nodes: Any = {"rollout.generate": SimpleNamespace(args={}), "rollout.score": node}
    rank, meshes = alone(torch.device("cpu")), SimpleNamespace(has=lambda axis: False)
    found: Any = [rank, meshes, SimpleNamespace(node=nodes.get)]
    resources = {"rank": rank, "meshes": meshes}
    step = Step(index=0, groups=[[made(at(7)), made(at(8))]], sample=sample)
    score(*found[:2], pattern=None, compare="text")(step)
    replacing = replace(SimpleNamespace(steps=10), *found, reader, resources, attempts=3)  # pyright: ignore[reportArgumentType]
    replacing(step)
    # Place 8 has one right answer of two, and stays; place 7 has none, then two, then none, which stays.
    assert asked == [[17], [27]] and [each.prompt.place for each in step.groups[0]] == [27, 8]
    assert step.groups[0][1].rewards.tolist() == [1, 0] and step.groups[0][0].rewards.tolist() == [0, 0]
    assert step.metrics == {"rollout/replaced": 1.0}


def test_a_group_is_a_row_of_which_completions_are_predicted():
    sample = group(["7", "85"])
    sample.advantages = np.array([0.5, -0.5])
    made = pack(capacity=16, unit="sequence", columns=("logprobs", "advantages"), values=("weight",))
    chain = compose([to_tensor(), flatten(), shift_tokens(), made])
    batch = chain([sample.row()])
    assert batch.labels_BS is not None and batch.units is not None and batch.place_B is not None
    none = [IGNORE_INDEX] * 4
    assert batch.labels_BS[0].tolist() == [*none, *b"7", 257, *none, *b"85", 257, *none[1:]]
    valid = batch.labels_BS != IGNORE_INDEX
    assert batch.columns["logprobs"][valid].tolist() == [-0.5, -0.25, -0.5, -0.5, -0.25]
    assert batch.columns["advantages"][valid].tolist() == [0.5, 0.5, -0.5, -0.5, -0.5]
    assert (batch.num_valid, batch.num_units, batch.place_B.tolist()) == (5, 2, [5])
    assert batch.units.values["weight"].tolist() == [2, 2]


def test_what_a_step_counts():
    one, other = group(["7", "8"]), group(["", "123"])
    one.rewards, other.rewards = np.array([1.0, 0.0]), np.array([2.0, 2.0])
    assert summed([[one], [other]]) == [4, 2, 4, 5, 9, 1, 2 + 2 + 1 + 4, 0, 0, 0, 0]
    one.rewards = other.rewards = np.empty(0)
    assert summed([[one], [other]]) == [4, 2, 0, 0, 0, 0, 9, 0, 0, 0, 0]


def test_completions_that_are_cut_may_be_left_out():
    sample = group(["7", "85"])
    sample.completions = [sample.completions[0], evolve(sample.completions[1], cut=True)]
    sample.advantages = np.array([0.5, -0.5])
    _, cut = sample.row(mask_truncated=True).trained or ()
    assert not cut.any() and sum(map(len, sample.row().trained or ())) == sum(map(len, sample.row().segments))
    assert [each.sum() for each in sample.row().trained or ()] == [2, 3]
    assert [each.sum() for each in sample.row(mask_truncated=True).trained or ()] == [2, 0]


def test_the_gap_is_taken_where_there_are_labels():
    labels_BS = torch.tensor([[IGNORE_INDEX, 3, 4, IGNORE_INDEX]])
    losses_BS = torch.tensor([[0.0, 0.5, 1.0, 0.0]])
    batch: Any = SimpleNamespace(
        labels_BS=labels_BS, losses_BS=losses_BS, columns={"logprobs": torch.tensor([[9.0, -0.25, -1.0, 9.0]])}
    )
    step = Step(index=0, valid_tokens=2, batches=[batch], sampled=True)
    nothing: Any = SimpleNamespace(modules=list)
    compare(alone(torch.device("cpu")), nothing)(step)
    assert step.metrics == {"rollout/logprob_gap": 0.125, "rollout/logprob_gap_max": 0.25}
