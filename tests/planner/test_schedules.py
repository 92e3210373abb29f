"""The microbatches a schedule takes are those that torch takes: its own constructors are the judge."""

import pytest

from xtrain.planner.compile import compile_plan
from xtrain.planner.derive.pipeline import IN_ROUNDS

SCHEDULES = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}


def torch_takes(name, pp, each, count):
    """Whether torch lays out the schedule of the first of `pp` ranks with `each` stages for `count` microbatches."""
    from torch.distributed.pipelining import schedules, stage

    class Blank(stage._PipelineStageBase):
        """A stage that knows its place and nothing else."""

        def __init__(self, index):
            self.stage_index, self.num_stages, self.group_size, self.group_rank = index, pp * each, pp, 0
            self.submod, self.has_backward, self.group, self.device = None, True, None, "cpu"
            self.stage_index_to_group_rank = {i: i % pp for i in range(pp * each)}

        def _create_grad_recv_info(self, *unused): ...

        def _prepare_forward_infra(self, *unused): ...

        def _prepare_backward_infra(self, *unused): ...

    schedule_class = getattr(schedules, SCHEDULES[name])
    stages = [Blank(i) for i in ([0, 2 * pp - 1] if name == "zbv" else range(0, pp * each, pp))]
    try:
        schedule_class(stages if len(stages) > 1 or name in IN_ROUNDS else stages[0], count, loss_fn=lambda *_: 0)
    except ValueError:
        return False
    return True


CASES = [("1f1b", 1), ("gpipe", 1), ("zbv", 2)] + [(name, each) for name in IN_ROUNDS for each in (1, 2, 3)]


@pytest.mark.parametrize(("name", "each"), CASES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_the_rule_is_that_of_torch(load, name, each, pp):
    pytest.importorskip("torch")
    for count in range(pp, 3 * pp + 2):
        spec = load(
            model="model llama { dim = 64, layers = 12, heads = 8, kv_heads = 4 }",
            parallel=f'parallel {{ pp {pp} {{ schedule = "{name}", stages_per_rank = {each} }} }}',
            batch=f"batch {{ sequence = 256, accumulate = {count} }}",
        )
        compiled = compile_plan(spec)
        assert (compiled.plan is not None) == torch_takes(name, pp, each, count), (pp, count)
        assert {error.code for error in compiled.diagnostics.errors} <= {"X411"}
