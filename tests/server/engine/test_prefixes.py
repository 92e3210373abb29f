"""Texts of a server that begin with a kept prefix: they have the tokens of texts that are computed alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from served import LLAMA, served, server_plan

from xtrain.server.engine_interface import AdapterSettings, Datum, Pass, SampleQueue, SampleRequest

pytestmark = pytest.mark.distributed

PROMPT = np.random.default_rng(0).integers(0, 256, 41).astype(np.int32)
OTHER = np.concatenate([PROMPT[:34], PROMPT[:5]])
REQUEST = SampleRequest(
    id="", weights=None, prompt=PROMPT, count=2, most=7, temperature=1.0, top_k=None, top_p=1.0, seed=5,
    stop_tokens=frozenset(), stop_texts=(), stop_at_end=False, prompt_logprobs=False, prompt_top=0, sample_top=0,
)  # fmt: skip
SIZES = "dim = 32, layers = 3, heads = 4, kv_heads = 2, head_dim = 8, ffn = 48, init_std = 0.2"
LATENT = "q_rank = 12, kv_rank = 10, nope_dim = 6, rope_dim = 4, value_dim = 8, index_heads = 2, index_dim = 8"
MODELS = {
    "llama": LLAMA,
    "windows": f"qwen3 {{ {SIZES}, window = 7, full_layers = [1] }}",
    "delta net": f"qwen3_5 {{ {SIZES}, attention_layers = [1], delta_key_dim = 6, delta_value_dim = 10 }}",
    "Mamba-2": f"falcon_h1 {{ {SIZES}, mamba_state = 6, mamba_heads = 4, mamba_groups = 2 }}",
    "sparse": f"deepseek_v32 {{ dim = 32, layers = 3, heads = 4, ffn = 48, init_std = 0.2, {LATENT}, index_topk = 5, "
    "experts = 4, expert_ffn = 24, experts_per_token = 2, first_dense = 1, router { aux_loss = 0 } }",
}
TP, PP, RING = ("parallel.tp=2",), ("parallel.pp=2",), ("parallel.cp=2", "parallel.cp.ring=2")
CASES = [
    *((name, ()) for name in MODELS),
    *((name, layout) for name in ("windows", "delta net", "sparse") for layout in (TP, PP)),
    ("Mamba-2", RING),
    ("llama", ("parallel.fsdp=2",)),
]


def answered(engine: Any, *requests: SampleRequest) -> tuple[list[list[int]], list[float], int]:
    """Tokens and log-probabilities of the samples, and the number of positions that were computed."""
    from xtrain.runtime.sampling.text_generator import TextGenerator

    found: dict[str, Any] = {}
    asked = [evolve(each, id=str(number)) for number, each in enumerate(requests)]
    computed, logits = [0], TextGenerator.logits

    def counted(self: TextGenerator, batch: Any) -> Any:
        computed[0] += int(batch.real_BS.sum())
        return logits(self, batch)

    TextGenerator.logits = counted
    queue = SampleQueue(requests=asked, arrived=list, finished=lambda one, result: found.update({one.id: result}))
    engine.sample(queue)
    TextGenerator.logits = logits
    samples = [sample for each in asked for sample in found[each.id].samples]
    return [each.tokens.tolist() for each in samples], [x for each in samples for x in each.logprobs], computed[0]


def conversation(engine: Any, folder: Path) -> dict[str, Any]:
    """The same requests after one another, and each after another request has freed the pages."""
    engine.create_model("a", AdapterSettings(rank=4, seed=3))
    inputs = {"target_tokens": PROMPT[1:].astype(np.int64), "weights": np.ones(40, np.float32)}
    data = [Datum(tokens=PROMPT[:-1], inputs=inputs)]
    free = Pass(model="a", data=data, loss="cross_entropy", settings={}, forward_only=True)
    engine.forward_backward([evolve(free, forward_only=False)])
    engine.export("a", folder / "a")
    first = answered(engine, REQUEST)
    turn = np.concatenate([PROMPT, first[0][0], PROMPT[:3]]).astype(np.int32)
    asked = {
        "turn": [evolve(REQUEST, prompt=turn, seed=6)],
        "again": [REQUEST],
        "third": [evolve(REQUEST, temperature=0.0)],
        "other": [evolve(REQUEST, prompt=OTHER), evolve(REQUEST, prompt=PROMPT[:9], seed=7)],
        "adapter": [evolve(REQUEST, weights=folder / "a")],
        "adapter again": [evolve(REQUEST, weights=folder / "a"), REQUEST],
    }
    kept = {name: answered(engine, *each) for name, each in asked.items()}
    alone = {}
    for name, each in asked.items():
        engine.forward_backward([free])
        alone[name] = answered(engine, *each)
    return {"first": first, "kept": kept, "alone": alone}


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*each, marks=() if each == ("delta net", ()) else pytest.mark.matrix) for each in CASES],
)
def test_texts_after_a_kept_prefix_are_those_of_whole_texts(name: str, layout: tuple[str, ...], tmp_path: Path):
    plan = server_plan(tmp_path, *layout, model=MODELS[name])
    found = served(plan, conversation, tmp_path / "run")
    saved = {}
    for each, (tokens, logprobs, computed) in found["kept"].items():
        expected, others, whole = found["alone"][each]
        assert tokens == expected
        np.testing.assert_allclose(logprobs, others, rtol=1e-6)
        saved[each] = whole - computed
    if min(count for _, count in plan.node("request.sample").args["pages"]) < 16:
        return  # prefixes make room for samples
    assert found["first"][0] == found["alone"]["again"][0] and found["first"][2] == len(PROMPT) + 2 * 6
    assert saved["turn"] == len(PROMPT) + 6, "all that was computed of the first sample"
    # States and windows are kept at the ends of texts; elsewhere from the second text on that shows where they help.
    at_ends = name in ("windows", "delta net", "Mamba-2")
    assert saved["again"] == (0 if at_ends else len(PROMPT) - 1)
    assert saved["third"] == (32 if at_ends else len(PROMPT) - 1)
    assert saved["other"] == (32 if at_ends else 34)
    assert saved["adapter"] == 0, "of other weights"
    assert saved["adapter again"] == (32 if at_ends else 2 * (len(PROMPT) - 1))
