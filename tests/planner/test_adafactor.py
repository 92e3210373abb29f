"""`optimizer adafactor` in a plan: what it keeps, and the sums that go over the ranks that share a matrix."""

MODEL = "model qwen3 { dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 64, vocab = 300, tie_embeddings = false }"
BLOCK = "optimizer adafactor { lr = 1e-2 }"


def test_rows_and_columns_are_kept_of_matrices(make_plan):
    plan = make_plan(model=MODEL, optimizer=BLOCK)
    kept = sum(sum(t.shape) if len(t.shape) == 2 else t.size for t in plan.parameters.tensors)
    (only,) = plan.estimates.classes
    assert only.memory.optimizer == 4 * kept
    assert plan.estimates.checkpoint_bytes == 4 * (plan.parameters.total + kept)
    assert not [call for call in only.traffic if call.node == "step.optimizer"]
    halves = make_plan(model=MODEL, optimizer=BLOCK, precision="precision { params = bf16 }")
    assert halves.estimates.classes[0].memory.optimizer == 4 * kept
    assert "in fp32" in halves.node("setup.optimizer").does


def test_sums_are_traffic(make_plan):
    """Along fsdp: of every tensor two sums of squares, and of a matrix its columns and a sum by rows."""
    plan = make_plan(model=MODEL, optimizer=BLOCK, parallel="parallel { fsdp 2 }")
    (only,) = plan.estimates.classes
    (traffic,) = (call for call in only.traffic if call.node == "step.optimizer")
    shapes = [t.shape for t in plan.parameters.tensors]
    numbers = 2 * len(shapes) + sum(1 + shape[1] for shape in shapes if len(shape) == 2)
    assert (traffic.op, traffic.count, traffic.bytes) == ("all_reduce", 3, 4 * numbers)
