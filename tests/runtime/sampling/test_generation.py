"""Texts that a cache continues: the tokens that the whole text gives, those of transformers, and each row its own."""

import random
from types import SimpleNamespace

import pytest
import torch
from reference_models import UNBOUNDED
from small_generators import CONFIGS, beside, generator_of, plan_of, recomputed_logits

from xtrain.components.actions.generate_torch import generate
from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.dsl.schema.model import FAMILIES, expert_families
from xtrain.dsl.schema.setting import settings_of
from xtrain.runtime.nn.texts import NO_TOKEN, Draws, Sampling
from xtrain.runtime.sampling.text_generator import LogitsNotFinite, Prompts

GREEDY = Sampling(temperature=0)
PROMPTS = [[256, *b"def f"], [256, *b"a"], [256, *b"while true:"]]
SIZES = "dim = 32, layers = 2, heads = 4, ffn = 40"
LATENT = "q_rank = 14, kv_rank = 12, nope_dim = 6, rope_dim = 4, value_dim = 8, first_dense = 1, expert_groups = 2"


def model_text(family: str) -> str:
    more = ", experts = 4, experts_per_token = 2, expert_ffn = 24" if family in expert_families() else ""
    more += ", mamba_state = 4" if "mamba_state" in settings_of(FAMILIES[family]) else ""
    more += ", window = 7" if "window" in settings_of(FAMILIES[family]) else ""
    more += ", index_heads = 12, index_dim = 6, index_topk = 9" if "index_topk" in settings_of(FAMILIES[family]) else ""
    return f"{family} {{ {SIZES}{more}, {LATENT if 'kv_rank' in settings_of(FAMILIES[family]) else 'kv_heads = 2'} }}"


def taken(author, prompts, count: int, sampling: Sampling = GREEDY) -> list[list[int]]:
    """The tokens behind prompts, [prompt][token]."""
    length = max(map(len, prompts)) + count - 1
    return [list(row) for row in zip(*author.tokens(prompts, sampling, length), strict=True)]


def grown(author) -> Prompts:
    """Prompts that have grown to 20 positions; logits behind each are those of the whole text."""
    texts = [list(each) for each in PROMPTS]
    rows = Prompts.of(PROMPTS, 20, torch.device("cpu"))
    batch = rows.first()
    for _ in range(20 - 12 + 1):
        logits_BV = author.logits(batch)
        assert logits_BV is not None
        for row, ids in enumerate(texts):
            whole_V = recomputed_logits(author, ids)
            assert (logits_BV[row] - whole_V).abs().max() < 1e-12 * whole_V.abs().max()
        following = logits_BV.argmax(-1).tolist()
        for ids, token in zip(texts, following, strict=True):
            ids.append(token)
        batch = rows.next(following)
    return rows


# Full attention, windows, shared keys, sinks, latent attention, both kinds of recurrent mixers; and masks.
KEPT = {
    (family, "documents")
    for family in ("llama", "gemma3", "gemma4_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "nemotron_h")
} | {("gemma3", "mask")}


@pytest.mark.parametrize(("family", "attention"), [pytest.param(
    family,
    attention,
    marks=() if (family, attention) in KEPT else pytest.mark.slow,
) for family in FAMILIES for attention in ("documents", "mask")])  # fmt: skip
def test_logits_of_the_cache_are_those_of_the_whole_text(family, attention):
    author = generator_of(plan_of(model_text(family).replace(" }", f", attention = {attention} }}")))
    rows, arch = grown(author), author.model.whole.arch
    layers = [layer for at in range(arch.layers) for layer in arch.kind_of(at).block.layers() if layer.attends]
    if "kv_rank" in arch.own:
        each = len(layers) * 20 * (arch.own["kv_rank"] + arch.own["rope_dim"] + arch.own.get("index_dim", 0))
    elif any(layer.keeps_state for layer in layers):
        each = sum(layer.cached(arch, 1, 20, frozenset()) for layer in layers)
        assert each < len(layers) * 20 * 2 * arch.kv_heads * arch.head_dim
    else:
        each = sum(layer.window or 20 for layer in layers) * 2 * arch.kv_heads * arch.head_dim
    assert rows.cache.bytes == 3 * each * 8


@pytest.mark.parametrize(("target", "numbers"), [("o_proj", 12 + 4), ("kv_b_proj", 2 * 4 * 10)])
def test_latent_attention_keeps_keys_and_values_that_an_adapter_changes(target, numbers):
    adapter = f'adapter lora {{ rank = 2, targets = ["{target}"] }}'
    author = generator_of(plan_of(f"{model_text('deepseek_v3')}\n{adapter}"))
    assert grown(author).cache.bytes == 3 * 2 * 20 * numbers * 8


# By default the model of a family in which a cache may go wrong; how losses and gradients agree of all of them
# tests/distributed/test_model_folders.py shows.
CACHED = {
    "llama": "scaled as llama3",
    "smollm3": "windows with positions",
    "deepseek_v3": "biased, scaled by yarn",
    "deepseek_v32": "biased, scaled by yarn",
    "glm_moe_dsa": "plain",
    "mistral": "windows of two, wide heads",
    "gemma3": "odd heads, scaled positions",
    "gemma4": "per-layer inputs, shared keys",
    "gemma4_moe": "all experts a token, tied",
    "gpt_oss": "odd heads",
    "qwen3_next": "odd heads",
    "nemotron_h": "odd heads",
}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(
            family,
            name,
            marks=() if CACHED.get(family) == name else pytest.mark.slow,
        )
        for family, names in CONFIGS.items()
        for name in names
        if (family, name) != UNBOUNDED
    ],
)
def test_greedy_tokens_are_those_of_transformers(family, name, tmp_path):
    ours, theirs = beside(family, name, tmp_path)
    prompt = [3, 17, 99, 4, 250]
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None)
    assert taken(ours, [prompt], 32) == [expected[0, len(prompt) :].tolist()]


def test_a_prompt_is_continued_as_if_it_were_alone():
    author = generator_of(plan_of(model_text("qwen3_moe")))
    for sampling in (GREEDY, Sampling(temperature=1.3, top_p=0.9, seed=5), Sampling(top_k=7, min_p=0.01, seed=6)):
        together = taken(author, PROMPTS, 12, sampling)
        assert together == [taken(author, [prompt], 12, sampling)[0] for prompt in PROMPTS]
        assert len({tuple(each) for each in together}) == len(PROMPTS)
        assert together == taken(author, PROMPTS, 12, sampling)
    other = taken(author, PROMPTS, 12, Sampling(top_k=7, min_p=0.01, seed=7))
    assert other != together


@pytest.mark.parametrize("settings", [
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.05},
    {"temperature": 0.6, "top_k": 40, "top_p": 0.8},
    {"temperature": 2.5, "top_k": 30, "top_p": 0.9, "min_p": 0.03},
    {"top_p": 0.01},
    {"top_k": 1},
    {"top_k": 500},
    {"temperature": 1.7},
])  # fmt: skip
def test_candidates_are_those_that_transformers_leaves(settings):
    import transformers

    logits_BV = 3 * torch.randn(6, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    warpers = {
        "temperature": transformers.TemperatureLogitsWarper,
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }
    processors = transformers.LogitsProcessorList(
        [make(settings[name]) for name, make in warpers.items() if name in settings]
    )
    expected_BV = processors(torch.zeros(6, 1, dtype=torch.int64), logits_BV).softmax(-1)
    weights_BN, tokens_BN = Sampling(**settings).candidates(logits_BV)
    found_BV = weights_BN if tokens_BN is None else torch.zeros_like(logits_BV).scatter_(1, tokens_BN, weights_BN)
    torch.testing.assert_close(found_BV / found_BV.sum(-1, keepdim=True), expected_BV, rtol=1e-12, atol=0)


def test_draws_have_the_probabilities_of_the_candidates():
    logits_V = torch.tensor([0.3, -1.0, 2.0, 1.1, -5.0])
    sampling = Sampling(temperature=1.5, top_p=0.9)
    rows = 40_000
    draws = Draws(sampling, [random.Random(row) for row in range(rows)])
    found = draws.next(logits_V.expand(rows, 5)).bincount(minlength=5) / rows
    weights, tokens = sampling.candidates(logits_V[None])
    expected = torch.zeros(5).scatter_(0, tokens[0], weights[0] / weights.sum())
    assert expected[4] == 0 == found[4]
    assert (found - expected).abs().max() < 0.01


@pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_no_token_is_chosen_by_logits_that_are_not_finite(settings):
    """In these rows alone; tokens that never follow have -inf."""
    logits_BV = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    logits_BV[0, 3], logits_BV[1, 2], logits_BV[2] = float("nan"), float("inf"), float("-inf")
    logits_BV[3, :6] = float("-inf")
    *wrong, only, chosen = Draws.of(Sampling(**settings), 5).next(logits_BV).tolist()
    assert wrong == [NO_TOKEN] * 3 and only == 6
    assert chosen == Draws.of(Sampling(**settings), 1).next(logits_BV[4:]).item()


def test_a_very_low_temperature_is_that_of_the_likeliest_token():
    logits_BV = 30 * torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    found = Draws.of(Sampling(temperature=1e-44), 9).next(logits_BV)
    assert torch.equal(found, logits_BV.argmax(-1))


def test_a_model_whose_weights_are_not_finite_ends_texts_and_not_the_run():
    plan = plan_of(model_text("llama"))
    author = generator_of(plan)
    author.model.whole.norm.weight.data[3] = float("nan")
    with pytest.raises(LogitsNotFinite, match="after prompt 1: logits of the model are NaN or infinite"):
        next(author.tokens(PROMPTS, GREEDY, 20))
    warned: list[str] = []
    records = SimpleNamespace(warn=lambda message, step: warned.append(f"{step}: {message}"))
    run = generate(
        plan, author.model, ByteTokenizer(), author.rank, records, SimpleNamespace(step=7), "tick.0",  # pyright: ignore
        prompts=["a"], tokens=3, temperature=0.8, top_p=1.0, seed=0,
    )  # fmt: skip
    run(None)  # pyright: ignore
    assert len(warned) == 1 and warned[0].startswith("7: no text is generated: no token can be chosen after prompt 1")
    assert author.model.whole.training
