"""`tick.generate`: continue prompts with the model as it is, to look at what it has learned."""

import time

import torch

from ...records.step_events import GeneratedText, GenerateEvent
from ...runtime.checkpoint.saver import Saver
from ...runtime.data.documents.tokenizers import TextTokenizer
from ...runtime.generation.text_generator import continue_text, writer
from ...runtime.input.feed import Feed
from ...runtime.models.parts import ModelParts
from ...runtime.monitoring.heartbeat import HeartbeatWriter
from ...runtime.ops import op
from ...runtime.parallelize.fsdp import reshard
from ...runtime.parallelize.pipeline import PipelineSchedule
from ...runtime.reporting.records import Records
from ...runtime.state import Progress, Rank, Step
from ...runtime.training.ema import WeightAverages, Weights


@op("tick.generate")
def generate(
    model: ModelParts,
    tokenizer: TextTokenizer,
    rank: Rank,
    records: Records,
    progress: Progress,
    feed: Feed,
    node_id: str,
    prompts: list[str],
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    pipeline: PipelineSchedule | None = None,
    averaged: bool = False,
    ema: WeightAverages | None = None,
    saver: Saver | None = None,
    beat: HeartbeatWriter | None = None,
):
    """Every rank runs the model, one draws; the draw depends on the seed and the prompt alone.

    averaged: with the averaged weights, once there are any.
    """
    author = writer(model, rank, feed, pipeline, beat)
    weights = Weights(ema=ema if averaged else None, saver=saver)

    def run(step: Step) -> None:
        begin = time.perf_counter()
        model.train(False)
        # A text is longer with every token: compiled for one length, a block is of no use for the next.
        with weights.in_place() as which, torch.compiler.set_stance("force_eager"):
            samples = [
                GeneratedText(p, continue_text(author, tokenizer, p, tokens, temperature, top_p, seed)) for p in prompts
            ]
            reshard(model)
        model.train()
        seconds = time.perf_counter() - begin
        records.event(GenerateEvent(step=progress.step, node=node_id, weights=which, samples=samples, seconds=seconds))

    return run
