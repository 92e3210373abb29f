"""`generate` in a plan: the bytes of its cache, and by which template it writes prompts."""

import pytest

from xtrain.text.units import bytes_text

PROMPTS = '["def ", "grüß dich"]'  # the longest has 11 bytes
MODEL = "model qwen3 { dim = 64, layers = 5, heads = 8, kv_heads = 4, head_dim = 12 }"
MOST = 'dataset talk { source = jsonl("talk.jsonl"), messages = "messages", template = "llama3" }'


def node_of(plan):
    (found,) = (node for node in plan.nodes if node.op == "tick.generate")
    return found


@pytest.mark.parametrize(("parallel", "world", "layers", "kv_heads"), [
    ("", 1, 5, 4),
    ("parallel { tp 2 }", 2, 5, 2),
    ("parallel { pp 2 { layers = [2, 3] } }", 2, 3, 4),
    ("parallel { pp 2 { schedule = interleaved_1f1b, layers = [2, 1, 1, 1] } }", 2, 3, 4),
    ("parallel { cp 2 { ring = 2 } }", 2, 5, 4),
    ("parallel { fsdp 2 }", 2, 5, 4),
])  # fmt: skip
def test_the_bytes_of_the_cache(make_plan, parallel, world, layers, kv_heads):
    more = f"on finish generate {{ prompts = {PROMPTS}, tokens = 20 }}"
    plan = make_plan(
        world, model=MODEL, parallel=parallel, precision="precision { params = fp64 }", more=more,
        batch="batch { sequence = 64, micro = 2, rows = 8 }",
    )  # fmt: skip
    node = node_of(plan)
    assert node.args["positions"] == 11 + 20
    size = 2 * layers * kv_heads * 12 * 31 * 8 * 2
    assert node.does == f"continue 2 prompts by 20 tokens; key-value cache: {size / 1024:.3g} KiB a rank"


def test_layers_with_a_window_keep_its_positions(make_plan):
    more = f"on finish generate {{ prompts = {PROMPTS}, tokens = 20 }}"
    sizes = []
    for window in ("", ", window = 9, full_layers = [1, 4]", ", window = 9", ", window = 40"):
        plan = make_plan(model=MODEL.replace(" }", f"{window} }}"), more=more)
        sizes.append(node_of(plan).does.partition("cache: ")[2])
    each = 2 * 4 * 12 * 4 * 2  # bytes of a position of a layer, in fp32, for both prompts
    numbers = (5 * 31, 2 * 31 + 3 * 9, 5 * 9, 5 * 31)
    assert sizes == [f"{each * number / 1024:.3g} KiB a rank" for number in numbers]


KEYS_AND_VALUES, VECTORS = 2 * 4 * 32, 40 + 8


@pytest.mark.parametrize(("blocks", "numbers"), [
    ({}, VECTORS),
    ({"parallel": "parallel { tp 2 }"}, VECTORS),  # of which every rank has all
    ({"adapter": 'adapter lora { targets = ["o_proj"] }'}, VECTORS),
    ({"adapter": 'adapter lora { targets = ["kv_b_proj"] }'}, KEYS_AND_VALUES),
    ({"adapter": 'adapter lora { targets = ["kv_b_proj"] }', "parallel": "parallel { tp 2 }"}, KEYS_AND_VALUES // 2),
    ({"adapter": 'adapter lora { targets = ["o_proj"] }', "precision": "precision { base int8 { block = 32 } }"},
        KEYS_AND_VALUES),
])  # fmt: skip
def test_latent_attention_keeps_narrow_vectors_where_it_can(make_plan, blocks, numbers):
    """Where the matrix to keys and values is as it is: `LatentAttention` multiplies others with it."""
    sizes = "dim = 64, layers = 3, heads = 4, kv_rank = 40, nope_dim = 24, rope_dim = 8, value_dim = 16"
    model = f"model deepseek_v3 {{ {sizes}, ffn = 64, experts = 4, experts_per_token = 2, expert_ffn = 64 }}"
    action = f"on finish generate {{ prompts = {PROMPTS}, tokens = 20 }}"
    plan = make_plan(2 if "parallel" in blocks else 1, model=model, more=action, **blocks)
    assert node_of(plan).does.partition("cache: ")[2] == f"{bytes_text(3 * numbers * 31 * 4 * 2)} a rank"


def test_a_cache_can_be_what_a_rank_holds_most_of(make_plan):
    def total(tokens: int) -> int:
        more = f'on finish generate {{ prompts = ["a"], tokens = {tokens} }}'
        return make_plan(model=MODEL, more=more).estimates.classes[0].memory.total_bytes

    assert total(100) == total(1)
    assert total(2_000_000) - total(1_000_000) == 1_000_000 * 2 * 5 * 4 * 12 * 4


def test_texts_are_no_longer_than_the_model_reads(make_plan):
    rope = MODEL.replace(" }", ", rope { scaling = dynamic, factor = 2.0, original = 600 } }")
    plan = make_plan(model=rope, more='on finish generate { prompts = ["a"], tokens = 900 }')
    assert node_of(plan).args["positions"] == 600


def test_the_template_is_that_of_the_conversations_that_are_read(make_plan, compiled):
    action = 'on finish generate { prompts = ["a"], tokens = 5, chat = auto, system = "Be kind." }'
    args = node_of(make_plan(dataset=MOST, more=action)).args
    assert (args["chat"], args["system"], args["positions"]) == ("llama3", "Be kind.", 1 + 8 + 256 + 5)
    (error,) = compiled(more=action).diagnostics.errors
    assert error.code == "X507" and "`chat` needs a template" in error.message
    plain = action.replace(", chat = auto", "")
    assert [each.code for each in compiled(more=plain).diagnostics.warnings if "system" in each.message] == ["W401"]


def test_settings_that_are_left_out_are_in_no_plan(make_plan):
    args = node_of(make_plan(more='on finish generate { prompts = ["a"] }')).args
    assert args.keys() == {"prompts", "tokens", "temperature", "top_p", "seed", "positions"}
    more = 'on finish generate { prompts = ["a"], top_k = 5, min_p = 0.1, stop = ["b"], seed = 9 }'
    args = node_of(make_plan(more=more)).args
    assert (args["top_k"], args["min_p"], args["stop"], args["seed"]) == (5, 0.1, ["b"], 9)
