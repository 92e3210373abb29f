"""Which layers belong to which pipeline stage, and which stages to which rank."""


def stage_layers(layers: int, stages: int) -> list[list[int]]:
    """[first, last] layer of every stage, both included, in the order of the pipeline.

    Layers that do not divide evenly go to the middle first: the first stage has the embedding to do as well, the last
    one the head (Llama 3, arXiv 2407.21783, section 3.3.2). `layers` must be at least `stages`.
    """
    base, extra = divmod(layers, stages)
    middle = [*range(1, stages - 1), 0, stages - 1] if stages > 1 else [0]
    longer = set(middle[:extra])
    spans = []
    first = 0
    for stage in range(stages):
        count = base + (stage in longer)
        spans.append([first, first + count - 1])
        first += count
    return spans


def stages_of_rank(pp: int, size: int, stages_per_rank: int) -> list[int]:
    """The stages of pipeline coordinate `pp`: dealt out in turn, so that a microbatch visits every rank each round."""
    return [pp + size * turn for turn in range(stages_per_rank)]
