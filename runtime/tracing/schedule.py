"""Pipelines in a world of one rank."""

from typing import Any

from ..parallelize.pipeline import PipelineSchedule


def skip_vote(pipeline: PipelineSchedule) -> None:
    """Leave out the messages by which stages agree, in their first step, on who works out shapes.

    Stages that are told their shapes vote alike, and here there is nobody to hear it from.
    """
    for schedule in pipeline._schedules.values():
        if hasattr(schedule, "_warmup_p2p"):  # from torch 2.13 on
            schedule._warmup_p2p = _decide


def _decide(stages: list[Any], has_backward: bool, done: bool) -> None:
    from torch.distributed.pipelining._utils import InferenceMode

    for stage in stages:
        assert not InferenceMode.needs_dynamic(stage._user_meta, has_backward), "stages are told their shapes"
        stage._inference_mode = InferenceMode.STATIC
