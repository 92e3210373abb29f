"""Memory of both ends of the model: the embedding, and the last norm with the chunked loss or rewards after it."""

from collections.abc import Set

from attrs import frozen

from xtrain.blocks.op_trace import INDEX
from xtrain.plan.architecture import EMBEDDING
from xtrain.plan.mesh import piece
from xtrain.plan.parameters import head_factors
from xtrain.planner.costs.block_trace import Local
from xtrain.planner.resolved import Resolved

FP64 = 8
IDS = 8  # bytes of the id of a token


@frozen(kw_only=True)
class Ends:
    """Bytes on a rank that holds both ends of a model; those of one end count where it is.

    below: something before the last norm is trained, so that a gradient goes down from it. passes: so is something
    before the head. embedded: what the embedding keeps. embedding: its gradient. saved: what the last norm keeps beside
    its input. loss: what the chunked loss leaves, of which `weight` are the gradients of the head and of what an
    adapter has beside it. learns: the head itself is trained. trains: it, what is beside it or the last norm is.
    forward: the most alive in the head's forward beside its input, with what it leaves. backward:
    the same for the backward, beside what was left. start: the most alive in the backward of the embedding beside the
    gradient that comes to it. product: operations of the head's product; again: the same, where the backward computes
    that a second time. keeps: what the last norm is given stays for its backward. further: the most alive in the
    forward and in the backward of the head of a module that predicts further tokens, beside what that head reads, or
    what was left.
    """

    below: bool
    passes: bool
    embedded: int
    embedding: int
    saved: int
    loss: int
    weight: int
    learns: bool
    trains: bool
    forward: int
    backward: int
    start: int
    keeps: bool
    product: int = 0
    again: int = 0
    further: tuple[int, int] = (0, 0)


def ends_of(run: Resolved, local: Local, taught: tuple[int, int] | None = None) -> Ends:
    """The loss takes `chunk` bytes of logits at a time, as `runtime/nn/loss.py` does, or where it looks across
    tokens `token_statistics.py`, which leaves to the backward what logits are computed of. taught: see
    `StageCosts.taught`."""
    tp, sequence = run.size("tp"), run.spec.parallel.tp.sequence
    casts = local.width != local.exact
    hidden, stream, exact = local.whole, local.stream, local.between * local.dim * local.exact
    trained = {tensor.name for tensor in run.inventory.tensors if tensor.trained}
    table = local.vocab * local.dim * local.width
    embedding = table if f"{EMBEDDING}.weight" in trained else 0
    # Its gradient, before that is scaled.
    scaled = stream if run.architecture.ends.embedding_scale is not None else 0
    masked = local.tokens * (INDEX + 1) if tp > 1 else 0
    start = max(scaled, embedding + (2 * hidden if tp > 1 else 0)) if embedding else 0
    embedded = masked if embedding else 0
    if run.architecture.head == "reward":
        return _ends_of_rewards(run, local, trained, embedded=embedded, embedding=embedding, start=start)
    learns = f"{run.architecture.head_module}.weight" in trained
    factors = {each.name for each in run.architecture.head_adapters()}
    beside = run.cuts.gathered(each for each in run.inventory.tensors if each.name in factors)
    weight, sums = (table if learns else 0) + beside * local.width, beside * local.exact
    below = run.passes_head
    passes = below or "norm.weight" in trained
    gathers = 2 * hidden if tp > 1 and sequence else 0
    norm = stream + (2 * exact if casts else 0)
    each = local.tokens * local.exact if len(run.training) > 1 else 0  # losses that are told apart by dataset
    chunk = 2 * hidden + _chunk(run, local, trained=learns) + sums + each  # what the loss is taken of, and its gradient
    # The norm's backward. Behind a gather the exchange comes before it, which gives the gradient of this rank's tokens
    # for that of all, and lets the latter go.
    down = exact * (1 if local.fused else 5 if casts else 3)
    if gathers:
        down = max(stream + hidden, stream - hidden + down)
    product = (
        2 * local.tokens * (local.vocab * local.dim + sum(head_factors(run.architecture)) // (1 + run.architecture.mtp))
    )
    left, forward, backward, again = (hidden if passes else 0) + weight, chunk, down if passes else 0, 0
    numbers = 0
    if run.spec.loss.across and (passes or weight):
        # Numbers [T] in fp64: what is summed stays for the backward, side by side, with segments and log-probabilities.
        numbers = (run.spec.loss.summed + 2) * local.tokens * FP64
        left = hidden + local.tokens * local.exact * (1 + ("entropy_T" in reads_of(run)))
        forward = left + max(_chunk(run, local, trained=False, passes=2), 2 * numbers) + each
        second = (hidden if passes else 0) + _chunk(run, local, trained=learns, passes=2, again=True) + sums
        backward = max(second, weight + backward)
        again = product
    forward, computing = max(norm, stream + gathers, forward), 0
    if taught is not None:
        computing, stays = taught
        forward = max(computing, stays + forward)
    return Ends(
        below=below,
        passes=passes,
        embedded=embedded,
        embedding=embedding,
        saved=(local.between * local.exact if passes else 0) + numbers,
        loss=left,
        weight=weight,
        learns=learns,
        trains=weight > 0 or "norm.weight" in trained,
        forward=forward,
        backward=backward,
        keeps=passes,
        product=product,
        again=again,
        start=start,
        further=(max(gathers, chunk - (0 if gathers else hidden)), stream + gathers // 2 if gathers else 0),
    )


def _ends_of_rewards(
    run: Resolved, local: Local, trained: Set[str], *, embedded: int, embedding: int, start: int
) -> Ends:
    """Of each row the last position alone is normed, and multiplied in the exact format by the head, whose gradient
    comes in the backward; what comes to the residual stream is 0 at all others. trained: names of parameters."""
    below, casts = run.passes_head, local.width != local.exact
    taken, exact = local.rows * local.dim * local.width, local.rows * local.dim * local.exact
    weight = local.dim * local.width if f"{run.architecture.head_module}.weight" in trained else 0
    passes = below or "norm.weight" in trained
    saved = (taken + local.rows * local.exact if passes else 0) + exact + (local.dim * local.exact if casts else 0)
    return Ends(
        below=below,
        passes=passes,
        embedded=embedded,
        embedding=embedding,
        saved=saved,
        loss=0,
        weight=weight,
        learns=weight > 0,
        trains=weight > 0 or "norm.weight" in trained,
        forward=saved + taken + 2 * exact,
        backward=(local.stream if below else 0) + 4 * exact,
        start=start,
        keeps=False,
    )


def reads_of(run: Resolved) -> tuple[str, ...]:
    """What the loss reads of each token's logits."""
    return run.spec.loss.reads(run.spec.loss.args())


def _chunk(run: Resolved, local: Local, *, trained: bool, passes: int = 1, again: bool = False) -> int:
    """The most alive while the loss goes through the tokens, beside what it is given and the gradient of that. trained:
    the head has a gradient. passes: over the logits; in the first of two, and in the second one, which is
    `again` and has their log-sum-exp at hand, nothing of the piece before is alive.

    Of one piece softmax and gradient are alive until those of the next take their names; for the entropy the logarithm
    of the softmax too, which the gradient then takes the place of.
    """
    arch, tp, shared = run.architecture, run.size("tp"), run.spec.parallel.tp.loss
    teacher = run.spec.loss.learns_from
    tokens = tokens_at_once(run, local)
    casts = local.width != local.exact
    logits, rounded = tokens * local.vocab * local.exact, tokens * local.vocab * local.width if casts else 0
    slope = logits if arch.ends.logit_cap is not None else 0
    if teacher is not None and teacher.live:
        return (local.vocab * local.dim * local.exact if trained else 0) + _live_chunk(run, local, trained=trained)
    if teacher is not None:
        # Nothing of the piece before is alive. Exponentials of all logits beside them; of stored tokens ids, where each
        # stands in the vocabulary, whether that is on this rank, logits and log-probabilities.
        stored = tokens * teacher.top * (2 * IDS + 1 + 3 * local.exact)
        whole = logits * (1 + 2 * tp if tp > 1 and not shared else 1)  # gathered, and put side by side
        product = local.vocab * local.dim * local.width if casts and trained else 0
        most = max(logits + rounded + product, slope + logits + whole + stored)
        return (local.vocab * local.dim * local.exact if trained else 0) + most
    entropy = "entropy_T" in reads_of(run)
    # Added in place where no format changes.
    product = local.vocab * local.dim * local.width if casts and trained else 0
    gathered = tp if tp > 1 and not shared else 0

    def left(tokens: int) -> int:
        return tokens * local.vocab * ((2 if entropy else 1) * local.exact + (local.width if casts else 0))

    def alive(tokens: int, before: int) -> int:
        """Of a piece of so many tokens, beside what is left of the piece before."""
        logits, rounded = tokens * local.vocab * local.exact, tokens * local.vocab * local.width if casts else 0
        slope = logits if arch.ends.logit_cap is not None else 0
        before += slope
        steps = [before + logits + rounded, left(tokens) + max(slope, product), product]
        if again:
            return max(steps)
        if gathered:
            steps.append(before + logits * (2 + 2 * tp))  # padded, gathered, and put side by side
        elif tp > 1:
            steps.append(before + 2 * logits)
        if entropy:  # of what is put side by side: less the log-sum-exp, and its exponential
            steps.append(before + logits * (1 + 3 * gathered if gathered else 3))
        return max(steps)

    second = min(tokens, local.tokens - tokens)  # the last piece has what is left
    pieces = max(alive(tokens, 0), alive(second, left(tokens)) if second and passes == 1 else 0)
    return (local.vocab * local.dim * local.exact if trained else 0) + pieces


def _live_chunk(run: Resolved, local: Local, *, trained: bool) -> int:
    """The most alive of a piece of the tokens whose logits both models give: both, exponentials in place of which the
    gradient comes, and for jsd, for a cap and for cross-entropy beside logits / temperature one more of each."""
    loss, tp = run.spec.loss, run.size("tp")
    args = loss.args()
    logits, rounded = (tokens_at_once(run, local, models=2) * local.vocab * each for each in (local.exact, local.width))
    rounded = rounded if local.width != local.exact else 0
    slope = logits if run.architecture.ends.logit_cap is not None else 0
    apart = args["temperature"] != 1 and (args["mix"] or loss.z_loss)
    several = 3 + (args["form"] == "jsd") + bool(apart)
    whole = logits if tp == 1 or run.spec.parallel.tp.loss else logits * tp
    product = local.vocab * local.dim * local.width if rounded and trained else 0
    steps = [slope + 2 * logits + rounded, whole + rounded + product]
    if whole == logits:
        return max(*steps, slope + several * logits)
    # Of the second one, padded, gathered, and put side by side.
    return max(*steps, slope + 2 * logits + several * whole, slope + 3 * logits + 3 * whole)


def tokens_at_once(run: Resolved, local: Local, *, models: int = 1) -> int:
    """Those whose logits of so many models are alive, as `Head.at_once` has them."""
    shared = run.size("tp") == 1 or run.spec.parallel.tp.loss
    alive = piece(run.architecture.vocab, run.size("tp"), 0) if shared else run.architecture.vocab
    return min(local.tokens, max(1, int(run.spec.loss.chunk.value) // (4 * alive * models)))
