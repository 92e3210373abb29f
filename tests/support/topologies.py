"""The table of layouts that must compute what one process computes: one row each, nothing but data.

The rows of ORDINARY run with the ordinary tests, beside those of ELSEWHERE, all of them with `-m matrix`, or one after
the other with topology_table.py.
"""

from itertools import product
from math import prod

from attrs import frozen
from trials import Trial

AXES = ("pp", "replicate", "fsdp", "ring", "ulysses", "tp", "ep")


@frozen(kw_only=True)
class Topology:
    """Sizes of the axes, and what else the layout says.

    accumulate: microbatches of a step on a data rank: 2 unless given, in a pipeline of two stages 4, in a longer one as
    many as there are rows on the rank.
    sets: `--set` texts of the layout alone; shared: of the layout and of one process. note: what they are, in a word.
    formats: in which the row must hold.
    """

    model: str = "dense"
    pp: int = 1
    replicate: int = 1
    fsdp: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    ep: int = 1
    accumulate: int = 0
    rows: int = 8
    clip: str = "0.5"
    sets: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    note: str = ""
    formats: tuple[str, ...] = ("fp64",)

    def is_ordinary(self, params: str) -> bool:
        """Whether it runs with the ordinary tests in this format."""
        return params in ORDINARY.get(self.name, ())

    @property
    def axes(self) -> tuple[str, ...]:
        """Those that are longer than 1."""
        return tuple(axis for axis in AXES if getattr(self, axis) > 1)

    @property
    def microbatches(self) -> int:
        """Of a step, on a data rank."""
        rows = self.rows // (self.replicate * self.fsdp)
        return self.accumulate or (rows if self.pp > 2 else min(rows, 4 if self.pp > 1 else 2))

    @property
    def name(self) -> str:
        """Such as `pp 2 · tp 2, zbv (moe)`: unique in the table."""
        axes = [f"{axis} {getattr(self, axis)}" for axis in self.axes]
        notes = [self.note] if self.note else []
        return ", ".join([" · ".join(axes) or "one rank", *notes]) + f" ({self.model})"

    @property
    def world(self) -> int:
        return prod(getattr(self, axis) for axis in AXES[:-1])

    @property
    def layout(self) -> tuple[str, ...]:
        """All `--set` texts of the layout."""
        sizes = {axis: getattr(self, axis) for axis in ("pp", "tp", "ep") if getattr(self, axis) > 1}
        texts = [f"parallel.{axis}={size}" for axis, size in sizes.items()]
        texts += [f"parallel.fsdp={self.fsdp}"]
        if self.replicate > 1:
            texts += [f"parallel.fsdp.replicate={self.replicate}"]
        if self.ring * self.ulysses > 1:
            texts += [f"parallel.cp={self.ring * self.ulysses}"]
            texts += [f"parallel.cp.ring={self.ring}", f"parallel.cp.ulysses={self.ulysses}"]
        rows = self.rows // (self.replicate * self.fsdp)
        assert rows * self.replicate * self.fsdp == self.rows and rows % self.microbatches == 0, self.name
        texts += [f"batch.micro={rows // self.microbatches}"]
        return (*texts, *self.sets)

    @property
    def shallow(self) -> tuple[str, ...]:
        """For tests of other things: half the layers, unless `sets` may say how these are cut."""
        return () if self.pp > 1 and self.sets else SHALLOW

    @property
    def flat(self) -> tuple[str, ...]:
        """For tests of what ranks do beside computing: one layer, unless there are stages."""
        return self.shallow if self.pp > 1 else FLAT

    def trial(self, params: str, *, shallow: bool = False) -> Trial:
        """What one process computes for comparison. shallow: two steps, so that the first one counts in the second, and
        half the layers."""
        return Trial(
            model=self.model,
            params=params,
            rows=self.rows,
            steps=2 if shallow else 3,
            clip=self.clip,
            align=2 * self.ring if self.ring > 1 else 1,
            settings=(*self.shared, *(self.shallow if shallow else ())),
        )


BOTH = ("fp64", "fp32")
DEEP = ("model.layers=8",)
SHALLOW = ("model.layers=2",)
FLAT = ("model.layers=1",)
TIED = ("model.tie_embeddings=true",)
# Neither two nor four ranks divide it; one more than the tokenizer's.
ODD = ("model.vocab=259",)
# The first step has half the rows; one process takes each half of the second by itself.
RAMP = ("batch.ramp_from=4", "batch.ramp=1 step", "batch.micro=4")


def _pipeline(schedule: str, stages: int = 1) -> tuple[str, ...]:
    more = (f"parallel.pp.stages_per_rank={stages}",) if stages > 1 else ()
    return (f"parallel.pp.schedule={schedule}", *more)


SCHEDULES = {
    "gpipe": _pipeline("gpipe"),
    "1f1b": _pipeline("1f1b"),
    "interleaved_1f1b": _pipeline("interleaved_1f1b", 2),
    "zero_bubble": _pipeline("zero_bubble"),
    "zbv": _pipeline("zbv", 2),
}
ZBV = SCHEDULES["zbv"]


def _data() -> list[Topology]:
    """Data ranks alone."""
    return [
        # What the others are compared with takes a step in one part.
        Topology(accumulate=4, note="four microbatches"),
        Topology(accumulate=4, note="four microbatches", model="moe"),
        *(Topology(fsdp=size, formats=BOTH) for size in (2, 4, 8)),
        Topology(fsdp=2, model="qwen3", clip="none", note="no clipping"),
        Topology(fsdp=2, clip="1e3", note="norm below clip"),
        Topology(fsdp=2, accumulate=3, rows=12, note="three microbatches"),
        Topology(fsdp=2, accumulate=1, note="one microbatch"),
        Topology(fsdp=2, sets=("parallel.fsdp.reshard=false",), note="gathered parameters kept"),
        Topology(fsdp=2, shared=TIED, note="tied"),
        *_summed_often(),
        Topology(replicate=2, formats=BOTH),
        Topology(replicate=4),
        Topology(replicate=2, fsdp=2, formats=BOTH),
        Topology(replicate=2, fsdp=4),
        Topology(replicate=2, sets=("parallel.stack=ddp",), formats=BOTH, note="ddp"),
        Topology(replicate=4, accumulate=2, sets=("parallel.stack=ddp",), shared=TIED, note="ddp, tied"),
        Topology(replicate=2, sets=("parallel.stack=ddp",), model="moe", note="ddp"),
        Topology(replicate=2, sets=("parallel.stack=ddp",), accumulate=3, rows=12, note="ddp, three microbatches"),
    ]


def _summed_often() -> list[Topology]:
    """Gradients summed after every one of two microbatches, where whole ones would be kept until the last."""
    often = {"sets": ("parallel.fsdp.sync=microbatch",), "note": "summed after every microbatch"}
    return [
        Topology(fsdp=2, formats=BOTH, **often),
        Topology(replicate=2, fsdp=2, **often),
        Topology(fsdp=2, tp=2, shared=TIED, **often),
        Topology(fsdp=2, ring=2, sets=(*often["sets"], "parallel.cp.fold=none"), note=f"{often['note']}, fold none"),
        Topology(fsdp=4, ep=2, model="moe", **often),
    ]


def _tensor() -> list[Topology]:
    rows = []
    for size, sequence, loss in product((2, 4), (True, False), (True, False)):
        off = [name for name, on in (("sequence", sequence), ("loss", loss)) if not on]
        note = f"without {' and '.join(off)}" if off else ""
        sets = tuple(f"parallel.tp.{name}=false" for name in off)
        both = size == 2 or not off
        rows.append(Topology(tp=size, sets=sets, note=note, formats=BOTH if both else ("fp64",)))
    return [
        *rows,
        Topology(tp=2, model="qwen3", clip="none", note="no clipping"),
        Topology(tp=2, model="moe", formats=BOTH),
        Topology(tp=4, model="moe", sets=("parallel.tp.sequence=false",), note="without sequence"),
        Topology(tp=2, shared=ODD, note="uneven vocabulary"),
        Topology(tp=4, shared=(*ODD, *TIED), note="uneven vocabulary, tied"),
        Topology(tp=2, shared=TIED, sets=("parallel.tp.loss=false",), note="tied, without loss"),
        Topology(tp=2, shared=("loss=cross_entropy", "loss.z_loss=1e-2"), note="z loss"),
    ]


def _context() -> list[Topology]:
    return [
        Topology(ring=2, formats=BOTH),
        Topology(ring=4, formats=BOTH),
        Topology(ulysses=2, formats=BOTH),
        Topology(ulysses=4, formats=BOTH),
        Topology(ring=2, model="qwen3", clip="none", note="no clipping"),
        Topology(ulysses=2, model="qwen3", shared=TIED, note="tied"),
        Topology(ulysses=2, shared=("model.kv_heads=1",), note="fewer key/value heads than ranks"),
        Topology(ulysses=4, shared=("model.kv_heads=2",), note="fewer key/value heads than ranks"),
        *(
            Topology(ring=2, ulysses=2, sets=(f"parallel.cp.fold={fold}",), note=f"fold {fold}")
            for fold in ("all", "ulysses_only", "ring_only", "none")
        ),
        Topology(ring=2, sets=("parallel.cp.fold=none",), note="fold none"),
        Topology(ulysses=2, model="moe", sets=("parallel.cp.fold=none",), note="fold none"),
    ]


def _experts() -> list[Topology]:
    moe = {"model": "moe"}
    return [
        Topology(fsdp=2, formats=BOTH, **moe),
        Topology(fsdp=4, **moe),
        Topology(fsdp=2, ep=2, formats=BOTH, **moe),
        Topology(fsdp=4, ep=4, formats=BOTH, **moe),
        Topology(fsdp=4, ep=2, **moe),
        Topology(fsdp=8, ep=4, **moe),
        Topology(fsdp=2, ep=2, accumulate=3, rows=12, note="three microbatches", **moe),
        Topology(fsdp=2, ep=2, shared=("model.shared_experts=1",), note="shared expert", **moe),
        Topology(fsdp=2, ep=2, shared=("model.router.score=sigmoid",), note="sigmoid", **moe),
        Topology(fsdp=2, ep=2, shared=("model.router.bias_speed=0.05",), note="balance bias", formats=BOTH, **moe),
        Topology(fsdp=2, ep=2, shared=("model.experts_per_token=1",), clip="none", note="one expert a token", **moe),
    ]


def _pipelines() -> list[Topology]:
    both = {"1f1b", "zbv"}
    return [
        *(
            Topology(pp=2, sets=sets, note=schedule, formats=BOTH if schedule in both else ("fp64",))
            for schedule, sets in SCHEDULES.items()
        ),
        *(Topology(pp=4, sets=sets, shared=DEEP, note=schedule) for schedule, sets in SCHEDULES.items()),
        Topology(pp=2, model="qwen3", clip="none", note="no clipping"),
        Topology(pp=2, shared=TIED, note="tied", formats=BOTH),
        Topology(pp=2, accumulate=3, rows=12, note="three microbatches"),
        Topology(pp=2, model="moe", formats=BOTH),
        Topology(pp=2, sets=("parallel.pp.layers=[3, 1]",), note="uneven stages"),
        # Experts are sharded over ranks that share dense parameters: the stage must be a unit around them.
        Topology(pp=2, tp=2, model="moe", sets=ZBV, note="zbv"),
        Topology(pp=2, tp=2, ep=2, model="moe", sets=ZBV, note="zbv"),
        Topology(pp=2, ulysses=2, model="moe", sets=(*SCHEDULES["zero_bubble"], "parallel.cp.fold=none"),
            note="zero_bubble, fold none"),
        Topology(tp=2, model="moe", accumulate=4, note="four microbatches", formats=BOTH),
    ]  # fmt: skip


def _pairs() -> list[Topology]:
    """Every two of tp, ep, fsdp, replicate, pp, ring, ulysses."""
    moe = {"model": "moe"}
    return [
        Topology(tp=2, fsdp=2, formats=BOTH),
        Topology(tp=2, replicate=2),
        Topology(tp=2, pp=2),
        Topology(tp=2, ring=2),
        Topology(tp=2, ulysses=2),
        Topology(tp=2, ep=2, **moe),
        Topology(replicate=2, tp=2, ep=2, accumulate=1, note="one microbatch", **moe),
        Topology(tp=2, ring=2, ep=2, **moe),
        Topology(tp=2, ulysses=2, ep=2, **moe),
        Topology(tp=2, fsdp=2, ep=2, **moe),
        Topology(tp=2, fsdp=2, ep=4, **moe),
        Topology(replicate=2, fsdp=2, ep=2, **moe),
        Topology(pp=2, fsdp=2, ep=2, **moe),
        Topology(ring=2, ep=2, **moe),
        Topology(ring=2, fsdp=2, ep=4, shared=("model.router.bias_speed=0.05",), note="balance bias", **moe),
        Topology(ulysses=2, ep=2, **moe),
        Topology(ulysses=2, fsdp=2, ep=2, **moe),
        Topology(fsdp=2, pp=2, formats=BOTH),
        Topology(fsdp=2, ring=2),
        Topology(fsdp=2, ulysses=2, accumulate=1, note="one microbatch"),
        Topology(fsdp=2, ring=2, sets=("parallel.cp.fold=none",), note="fold none"),
        Topology(replicate=2, pp=2),
        Topology(replicate=2, ring=2),
        Topology(replicate=2, ring=2, model="qwen3", clip="none", accumulate=1, note="one microbatch, no clipping"),
        Topology(replicate=2, ulysses=2),
        Topology(pp=2, ring=2),
        Topology(pp=2, ulysses=2),
        Topology(pp=2, ulysses=2, model="qwen3", clip="none", note="no clipping"),
        Topology(tp=2, pp=2, shared=(*TIED, *ODD), note="tied, uneven vocabulary"),
        Topology(tp=2, pp=2, sets=("parallel.tp.sequence=false",), note="without sequence"),
        Topology(fsdp=2, pp=2, sets=SCHEDULES["zero_bubble"], note="zero_bubble"),
    ]


def _triples() -> list[Topology]:
    moe = {"model": "moe"}
    return [
        Topology(pp=2, tp=2, fsdp=2, formats=BOTH),
        Topology(pp=2, ep=2, fsdp=2, tp=2, formats=BOTH, **moe),
        Topology(pp=2, ep=4, fsdp=4, formats=BOTH, **moe),
        Topology(ring=2, ulysses=2, fsdp=2, formats=BOTH),
        Topology(tp=2, ep=2, ring=2, fsdp=2, formats=BOTH, **moe),
        Topology(tp=2, ep=4, ring=2, ulysses=2, formats=BOTH, **moe),
        Topology(replicate=2, fsdp=2, tp=2, formats=BOTH),
        Topology(pp=2, ring=2, fsdp=2, formats=BOTH),
        Topology(pp=2, tp=2, ep=2, fsdp=2, sets=ZBV, note="zbv", formats=BOTH, **moe),
        Topology(pp=2, ulysses=2, ep=2, fsdp=2, formats=BOTH, **moe),
        Topology(pp=2, ring=2, ep=4, fsdp=2, sets=SCHEDULES["interleaved_1f1b"], note="interleaved_1f1b", formats=BOTH,
            **moe),
        Topology(replicate=2, pp=2, tp=2, formats=BOTH),
        Topology(replicate=2, ring=2, ulysses=2, sets=("parallel.cp.fold=ring_only",), note="fold ring_only",
            formats=BOTH),
        Topology(replicate=2, fsdp=2, ulysses=2, formats=BOTH),
        Topology(replicate=2, fsdp=2, pp=2, formats=BOTH),
        Topology(replicate=2, fsdp=2, tp=2, ep=4, formats=BOTH, **moe),
        Topology(tp=2, ring=2, fsdp=2, sets=("parallel.cp.fold=none",), note="fold none", formats=BOTH),
        Topology(tp=2, ulysses=2, fsdp=2, formats=BOTH),
        Topology(tp=2, ulysses=2, pp=2, shared=TIED, note="tied", formats=BOTH),
    ]  # fmt: skip


def _recomputing() -> list[Topology]:
    """Activation checkpointing must change nothing, also where routing or a schedule is run twice."""
    full, selective = ("activation.mode=full",), ("activation.mode=selective",)
    return [
        Topology(fsdp=2, sets=full, note="full recomputation"),
        Topology(fsdp=2, sets=selective, note="selective recomputation"),
        Topology(fsdp=2, sets=(*full, "activation.every=2"), note="every second block recomputed"),
        Topology(fsdp=2, ep=2, model="moe", sets=full, note="full recomputation"),
        Topology(fsdp=2, ep=2, model="moe", sets=selective, note="selective recomputation"),
        Topology(pp=2, sets=full, note="full recomputation"),
        Topology(pp=2, sets=selective, note="selective recomputation"),
        Topology(pp=2, sets=(*ZBV, *full), note="zbv, full recomputation"),
        Topology(tp=2, sets=full, note="full recomputation"),
        Topology(tp=2, sets=selective, note="selective recomputation"),
        Topology(ring=2, sets=full, note="full recomputation"),
        Topology(ring=2, sets=selective, note="selective recomputation"),
        Topology(ulysses=2, sets=selective, note="selective recomputation"),
        Topology(pp=2, fsdp=2, ep=2, tp=2, model="moe", sets=selective, note="selective recomputation"),
    ]


def _tiled() -> list[Topology]:
    """Feed-forward layers in pieces of the positions, which ranks cut as they like."""
    cut, full, selective = ("activation.tile_mlp=3",), ("activation.mode=full",), ("activation.mode=selective",)
    return [
        Topology(fsdp=2, sets=cut, note="tiled"),
        Topology(fsdp=2, sets=(*cut, *full), note="tiled, full recomputation"),
        Topology(replicate=2, sets=(*cut, "parallel.stack=ddp"), note="ddp, tiled"),
        Topology(tp=2, sets=cut, note="tiled"),
        Topology(tp=2, sets=(*cut, *selective, "parallel.tp.sequence=false"), note="tiled, without sequence"),
        Topology(ring=2, ulysses=2, sets=cut, note="tiled"),
        Topology(pp=2, sets=(*cut, *full), note="tiled, full recomputation"),
        Topology(pp=2, tp=2, fsdp=2, sets=cut, note="tiled"),
    ]


def _ramps() -> list[Topology]:
    """The first step has fewer microbatches than the second."""
    ramp = {"shared": RAMP, "note": "ramp"}
    return [
        Topology(fsdp=2, **ramp),
        Topology(fsdp=2, sets=("parallel.fsdp.sync=microbatch",), shared=RAMP, note="ramp, summed often"),
        Topology(replicate=2, sets=("parallel.stack=ddp",), shared=RAMP, note="ddp, ramp"),
        Topology(tp=2, **ramp),
        Topology(ring=2, **ramp),
        Topology(pp=2, **ramp),
        Topology(pp=2, sets=ZBV, shared=RAMP, note="zbv, ramp"),
        Topology(fsdp=2, ep=2, model="moe", **ramp),
        Topology(pp=2, fsdp=2, model="moe", **ramp),
    ]


TOPOLOGIES = (
    *_data(),
    *_tensor(),
    *_context(),
    *_experts(),
    *_pipelines(),
    *_pairs(),
    *_triples(),
    *_recomputing(),
    *_tiled(),
    *_ramps(),
)
# Names of rows that tests of another subject run by default, and compare with one process as the table is: the loss,
# the norm, evaluations and all tensors.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "own loss": ("tp 2, without loss (dense)",),
    "smoothed labels": (),
    "norms": ("replicate 2 · tp 2 · ep 2, one microbatch (moe)",),
    "mixture": ("pp 2 · replicate 2 (dense)",),
    "averages": ("fsdp 2 · ep 2 (moe)",),
    "sgd": ("fsdp 2 (dense)",),
    "plain sgd": (),
    "lion": (),
    "muon": (),
    "normuon": ("fsdp 2 · tp 2 (dense)",),
    "ademamix": (),
    "parametrization": (),
    # Beside the layouts on which a run with their state begins, and goes on.
    "adamw in bf16": (),
    "muon in bf16": (),
    "adamw8bit": (),
    "adafactor": ("fsdp 2 · ep 2 (moe)",),
    "adam_mini": (),
    "adam_mini in bf16": (),
    "schedule_free": (),
    "plain muon": (),
    "cautious muon": (),
    "cautious lion": (),
    "groups": (),
}
# Names of the rows that the ordinary tests of the table run, and in which formats: with those above every pair of axes,
# every axis with every model and with one microbatch and several, every schedule; and rows in which
# test_mutations.py puts a fault.
ORDINARY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("one rank, four microbatches (dense)", "one rank, four microbatches (moe)",
            "fsdp 2, no clipping (qwen3)", "fsdp 2, gathered parameters kept (dense)",
            "fsdp 2, summed after every microbatch (dense)", "replicate 2 · fsdp 2 (dense)", "replicate 2, ddp (dense)",
            "tp 2, without sequence (dense)", "tp 2, no clipping (qwen3)", "tp 2 (moe)",
            "ulysses 2, fewer key/value heads than ranks (dense)", "ring 2 · ulysses 2, fold ring_only (dense)",
            "fsdp 2 · ep 2, balance bias (moe)", "pp 2, gpipe (dense)",
            "pp 2, interleaved_1f1b (dense)", "pp 2, zero_bubble (dense)", "pp 2, tied (dense)",
            "pp 2 · ulysses 2, no clipping (qwen3)", "replicate 2 · ring 2, one microbatch, no clipping (qwen3)",
            "replicate 2 · ulysses 2 (dense)", "fsdp 2 · ring 2, fold none (dense)",
            "fsdp 2 · ulysses 2, one microbatch (dense)", "pp 2 · tp 2 · ep 2, zbv (moe)", "ring 2 · tp 2 · ep 2 (moe)",
            "ulysses 2 · tp 2 · ep 2 (moe)", "pp 2 · ring 2 (dense)", "fsdp 2 · ep 2, full recomputation (moe)",
            "fsdp 2, selective recomputation (dense)", "pp 2 · fsdp 2, ramp (moe)", "tp 2, tiled (dense)"), ("fp64",)),
}  # fmt: skip
CASES = tuple((topology, params) for topology in TOPOLOGIES for params in topology.formats)
BY_NAME = {topology.name: topology for topology in TOPOLOGIES}
assert len(BY_NAME) == len(TOPOLOGIES), "names of topologies are unique"
BY_DEFAULT = frozenset((*ORDINARY, *(name for names in ELSEWHERE.values() for name in names)))
assert BY_NAME.keys() >= BY_DEFAULT, BY_DEFAULT - BY_NAME.keys()
