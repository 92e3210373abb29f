"""`optimizer adam_mini` in a plan: which numbers share an average, what it keeps, and the sums that are sent."""

MODEL = (
    "model qwen3_moe { dim = 32, layers = 2, heads = 4, kv_heads = 1, ffn = 64, vocab = 300, tie_embeddings = false\n"
    "experts = 4, experts_per_token = 2, expert_ffn = 16 }"
)
BLOCK = "optimizer adam_mini { lr = 1e-3 }"


def test_blocks_are_heads_outputs_tokens_and_vectors(make_plan):
    plan = make_plan(model=MODEL, optimizer=BLOCK)
    args = plan.node("setup.optimizer").args
    assert args["heads"] == {"layers.*.self_attn.q_proj.weight": 4, "layers.*.self_attn.k_proj.weight": 1}
    experts = {f"layers.*.mlp.experts.{name}_proj" for name in ("down", "gate", "up")}
    assert {*args["columns"]} == experts
    assert {"embed_tokens.weight", "lm_head.weight", "layers.*.mlp.gate.weight"} < {*args["rows"]}
    assert {"norm.weight", "layers.*.self_attn.q_norm.weight"} < {*args["whole"]}
    averages = 0
    for each in plan.parameters.tensors:
        averages += each.size // each.shape[-2 if each.expert else -1] if len(each.shape) > 1 else each.size
    (only,) = plan.estimates.classes
    assert only.memory.optimizer == 4 * (plan.parameters.total + averages)
    assert averages < 0.06 * plan.parameters.total
    assert not [call for call in only.traffic if call.node == "step.optimizer"]


def test_formats_of_momentum_and_averages_are_chosen_apart(make_plan):
    """2 bytes for the momentum, 4 for averages: also where parameters are in bf16."""
    small = make_plan(model=MODEL, optimizer=BLOCK.replace(" }", ", states = bf16 }"))
    halves = make_plan(model=MODEL, optimizer=BLOCK, precision="precision { params = bf16 }")
    whole = make_plan(model=MODEL, optimizer=BLOCK)
    kept = [plan.estimates.classes[0].memory.optimizer for plan in (small, halves, whole)]
    assert kept[0] == kept[1] == kept[2] - 2 * whole.parameters.total


def test_sums_are_traffic(make_plan):
    """Along fsdp a number for each head of queries and keys and each vector; of experts, which are cut by their
    inputs, one for each output."""
    plan = make_plan(model=MODEL, optimizer=BLOCK, parallel="parallel { fsdp 2 }")
    vectors = sum(len(each.shape) == 1 for each in plan.parameters.tensors)
    outputs = sum(each.shape[0] * each.shape[2] for each in plan.parameters.tensors if each.expert)
    (only,) = plan.estimates.classes
    found = sorted(call.bytes for call in only.traffic if call.node == "step.optimizer")
    assert found == [4 * (vectors + 2 * (4 + 1)), 4 * outputs]
