"""Memory on the ranks of a pipeline: the order of its schedule, action by action."""

from attrs import define, field

from ..resolved import Resolved
from .memory_simulator import Handling, Played
from .pipeline_order import Kind, PipelineAction, order
from .stage_play import StagePlay

# torch keeps the parameters of so many stages of a rank gathered, those that compute next.
MOST_GATHERED = 3


@define
class Piped:
    """One rank while its schedule runs, in bytes.

    live: everything but reserve. for_backward: what forwards have left, with the buffers of messages. losses: what
    heads have left. The others are the most that there was: of all, of `for_backward` after a forward, of `losses`.
    """

    live: int
    for_backward: int
    losses: int = 0
    peak: int = 0
    activations: int = 0
    loss: int = 0
    _plays: dict[tuple[Kind, int, bool], Played] = field(factory=dict)

    def play(self, run: Resolved, pp: int, stages: list[StagePlay]) -> None:
        """Run all actions of coordinate `pp`; a stage exchanges its gradients when its last backward is done."""
        schedule, count, sharded = run.spec.parallel.pp.schedule, run.batch.accumulate, run.dense_fsdp
        by_stage, left = {each.stage: each for each in stages}, {each.stage: count for each in stages}
        # A rank of 1f1b still holds the gradient that it sent last while it computes the next forward.
        sent = stages[0].local.stream if schedule == "1f1b" and not stages[0].embeds else 0
        for action in order(schedule, pp, run.size("pp"), run.pipeline.owners[pp], count):
            stage, again = by_stage[action.stage], left[action.stage] < count
            self._do(action, self._played(run, action, stage, again), stage, sent if again else 0)
            if action.kind in ("B", "W"):
                left[action.stage] -= 1
                if sharded and not left[action.stage]:
                    self._add(stage.reduce())

    def _played(self, run: Resolved, action: PipelineAction, stage: StagePlay, again: bool) -> Played:
        key = (action.kind, action.stage, again)
        if key not in self._plays:
            sharded = run.dense_fsdp
            casts = sharded and run.formats.reduce != run.formats.compute
            handling = Handling(sums="keep" if sharded else "own", again=again, casts=casts, frees=False)
            self._plays[key] = {
                "F": lambda: stage.forward(),
                "B": lambda: stage.backward(handling),
                "I": lambda: stage.inputs_only(handling),
                "W": lambda: stage.weights_only(handling),
            }[action.kind]()
        return self._plays[key]

    def _do(self, action: PipelineAction, played: Played, stage: StagePlay, sent: int) -> None:
        self._add(played)
        left = stage.forward().net - stage.loss
        if action.kind == "F":
            self.for_backward += left
            self.losses += stage.loss
            self.activations = max(self.activations, self.for_backward + sent)
            self.loss = max(self.loss, self.losses)
        elif action.kind == "I":
            self.for_backward += played.net
        else:
            captured = stage.captured if action.kind == "W" and not stage.embeds else 0
            self.for_backward -= left + captured
            self.losses -= stage.loss

    def _add(self, played: Played) -> None:
        self.peak = max(self.peak, self.live + played.peak)
        self.live += played.net


def play_pipeline(run: Resolved, stages: list[StagePlay], pp: int, states: int) -> tuple[Piped, int]:
    """A rank of coordinate `pp`, which owns `states` bytes of parameters, at the end of its step; and the most bytes
    that are gathered at once."""
    gathered = sum(sorted(each.unsharded for each in stages)[-MOST_GATHERED:])
    messages = sum((not each.embeds) + (not each.predicts) for each in stages)
    buffers = run.batch.accumulate * stages[0].local.stream * messages
    rank = Piped(live=(1 + run.moments) * states + gathered + buffers, for_backward=buffers)
    rank.play(run, pp, stages)
    return rank, gathered
