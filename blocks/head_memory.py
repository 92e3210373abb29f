"""Memory of both ends of the model: the embedding, and the last norm with the chunked loss or rewards after it."""

from collections.abc import Set

from xtrain.blocks.op_trace import INDEX
from xtrain.blocks.tracer import Local
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import EMBEDDING
from xtrain.plan.kernels import compiles_loss
from xtrain.plan.mesh import piece, tokens_in
from xtrain.plan.parameters import head_factors
from xtrain.plan.resolved import Resolved

FP64 = 8
IDS = 8  # bytes of the id of a token


@frozen(kw_only=True)
class Ends:
    """Bytes on a rank that holds both ends of a model; the bytes of one end count where it is.

    below: something before the last norm is trained, so that it passes a gradient down. passes: something before the
    head is trained. embedded: kept by the embedding. embedding: its gradient. saved: kept by the last norm in addition
    to its input. loss: left by the chunked loss, of which `weight` are the gradients of the head and of its adapter.
    learns: the head itself is trained. trains: the head, its adapter or the last norm is trained. forward: peak of the
    head's forward in addition to its input, including the bytes that it leaves. backward: peak of the backward, in
    addition to the bytes left. start: peak of the backward of the embedding in addition to the incoming gradient.
    product: FLOPs of the head's product; again: the same, if the backward recomputes it. keeps: the input of the last
    norm is kept for its backward. further: peaks of the forward and the backward of the head of a module that predicts
    further tokens, in addition to its input, or to the bytes left.
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


def ends_of(resolved: Resolved, local: Local, taught: tuple[int, int] | None = None) -> Ends:
    """Return the memory of both ends. The loss takes `chunk` bytes of logits at a time, as in `runtime/nn/loss.py`. If
    it looks across tokens, as in `token_statistics.py`, it keeps the inputs of the logits for the backward. taught:
    see `StageCosts.taught`."""
    tp, sequence = resolved.size("tp"), resolved.spec.parallel.tp.sequence
    casts = local.width != local.exact
    hidden, stream, exact = local.whole, local.stream, local.between * local.dim * local.exact
    trained = {tensor.name for tensor in resolved.inventory.tensors if tensor.trained}
    table = local.vocab * local.dim * local.width
    embedding = table if f"{EMBEDDING}.weight" in trained else 0
    # The gradient before it is scaled.
    scaled = stream if resolved.architecture.ends.embedding_scale is not None else 0
    masked = local.tokens * (INDEX + 1) if tp > 1 else 0
    start = max(scaled, embedding + (2 * hidden if tp > 1 else 0)) if embedding else 0
    embedded = masked if embedding else 0
    if not resolved.architecture.has_logits:
        return _ends_of_rewards(resolved, local, trained, embedded=embedded, embedding=embedding, start=start)
    learns = f"{resolved.architecture.head_module}.weight" in trained
    factors = {each.name for each in resolved.architecture.head_adapters()}
    beside = resolved.cuts.gathered(each for each in resolved.inventory.tensors if each.name in factors)
    weight, sums = (table if learns else 0) + beside * local.width, beside * local.exact
    below = resolved.passes_head
    passes = below or "norm.weight" in trained
    gathers = 2 * hidden if tp > 1 and sequence else 0
    norm = stream + (2 * exact if casts else 0)
    each = local.tokens * local.exact if len(resolved.training) > 1 else 0  # losses are reported by dataset
    chunk = 2 * hidden + _chunk(resolved, local, trained=learns) + sums + each  # inputs of the loss and their gradient
    # The norm's backward. After a gather, the exchange comes first: it replaces the gradient of all tokens by that of
    # this rank's tokens and frees the former.
    down = exact * (1 if local.fused else 5 if casts else 3)
    if gathers:
        down = max(stream + hidden, stream - hidden + down)
    product = (
        2
        * local.tokens
        * (local.vocab * local.dim + sum(head_factors(resolved.architecture)) // (1 + resolved.architecture.mtp))
    )
    left, forward, backward, again = (hidden if passes else 0) + weight, chunk, down if passes else 0, 0
    numbers = 0
    if resolved.spec.loss.across and (passes or weight):
        # Numbers [T] in fp64: summed values stay for the backward, next to segments and log-probabilities.
        numbers = (resolved.spec.loss.summed + 2) * local.tokens * FP64
        left = hidden + local.tokens * local.exact * (1 + ("entropy_T" in reads_of(resolved)))
        forward = left + max(_chunk(resolved, local, trained=False, passes=2), 2 * numbers) + each
        second = (hidden if passes else 0) + _chunk(resolved, local, trained=learns, passes=2, again=True) + sums
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
    resolved: Resolved, local: Local, trained: Set[str], *, embedded: int, embedding: int, start: int
) -> Ends:
    """Return the memory of the ends with a reward head. Only the last position of each row is normed and multiplied, in
    the exact format, by the head, whose gradient comes in the backward. The residual stream's gradient is 0 at all
    other positions. trained: names of parameters."""
    below, casts = resolved.passes_head, local.width != local.exact
    taken, exact = local.rows * local.dim * local.width, local.rows * local.dim * local.exact
    weight = local.dim * local.width if f"{resolved.architecture.head_module}.weight" in trained else 0
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


def reads_of(resolved: Resolved) -> tuple[str, ...]:
    """Return the values that the loss reads of each token's logits."""
    return resolved.spec.loss.reads(resolved.spec.loss.args())


def _chunk(resolved: Resolved, local: Local, *, trained: bool, passes: int = 1, again: bool = False) -> int:
    """Return the peak while the loss goes through the tokens, in addition to its inputs and their gradients. trained:
    the head has a gradient. passes: number of passes over the logits. In the first of two, and in the second, which
    is `again` and already has their log-sum-exp, nothing of the previous piece is alive.

    Softmax and gradient of a piece are alive until the next piece's replace them. Entropy also needs the logarithm of
    the softmax, which the gradient then overwrites.
    """
    arch, tp, shared = resolved.architecture, resolved.size("tp"), resolved.spec.parallel.tp.loss
    teacher = resolved.spec.loss.learns_from
    tokens = tokens_at_once(resolved, local)
    casts = local.width != local.exact
    logits, rounded = tokens * local.vocab * local.exact, tokens * local.vocab * local.width if casts else 0
    slope = logits if arch.ends.logit_cap is not None else 0
    if teacher is not None and teacher.live:
        return (local.vocab * local.dim * local.exact if trained else 0) + _live_chunk(resolved, local, trained=trained)
    if teacher is not None:
        # Nothing of the previous piece is alive. In addition to the logits: exponentials of all logits. For stored
        # tokens: ids, their places in the vocabulary, whether they are on this rank, logits and log-probabilities.
        stored = tokens * teacher.top * (2 * IDS + 1 + 3 * local.exact)
        whole = logits * (1 + 2 * tp if tp > 1 and not shared else 1)  # gathered and concatenated
        product = local.vocab * local.dim * local.width if casts and trained else 0
        most = max(logits + rounded + product, slope + logits + whole + stored)
        return (local.vocab * local.dim * local.exact if trained else 0) + most
    entropy = "entropy_T" in reads_of(resolved)
    # Added in place where no format changes.
    product = local.vocab * local.dim * local.width if casts and trained else 0
    gathered = tp if tp > 1 and not shared else 0

    def left(tokens: int) -> int:
        return tokens * local.vocab * ((2 if entropy else 1) * local.exact + (local.width if casts else 0))

    def alive(tokens: int, before: int) -> int:
        """Return the peak of a piece of `tokens` tokens. before: bytes left of the previous piece."""
        logits, rounded = tokens * local.vocab * local.exact, tokens * local.vocab * local.width if casts else 0
        slope = logits if arch.ends.logit_cap is not None else 0
        before += slope
        steps = [before + logits + rounded, left(tokens) + max(slope, product), product]
        if again:
            return max(steps)
        if gathered:
            steps.append(before + logits * (2 + 2 * tp))  # padded, gathered and concatenated
        elif tp > 1:
            steps.append(before + 2 * logits)
        if entropy:  # of the concatenated logits: minus log-sum-exp, and the exponential
            steps.append(before + logits * (1 + 3 * gathered if gathered else 3))
        return max(steps)

    second = min(tokens, local.tokens - tokens)  # the last piece has the remaining tokens
    pieces = max(alive(tokens, 0), alive(second, left(tokens)) if second and passes == 1 else 0)
    return (local.vocab * local.dim * local.exact if trained else 0) + pieces


def _live_chunk(resolved: Resolved, local: Local, *, trained: bool) -> int:
    """Return the peak of a piece of tokens with logits of both models: both logits, and exponentials that the gradient
    overwrites; one more of each for jsd, for a cap, and for cross-entropy next to logits / temperature."""
    loss, tp = resolved.spec.loss, resolved.size("tp")
    args = loss.args()
    logits, rounded = (
        tokens_at_once(resolved, local, models=2) * local.vocab * each for each in (local.exact, local.width)
    )
    rounded = rounded if local.width != local.exact else 0
    slope = logits if resolved.architecture.ends.logit_cap is not None else 0
    apart = args["temperature"] != 1 and (args["mix"] or loss.z_loss)
    several = 3 + (args["form"] == "jsd") + bool(apart)
    several -= bool(loss.columns) and tp == 1  # a policy gradient overwrites its logits by their exponentials
    whole = logits if tp == 1 or resolved.spec.parallel.tp.loss else logits * tp
    product = local.vocab * local.dim * local.width if rounded and trained else 0
    steps = [slope + 2 * logits + rounded, whole + rounded + product]
    if whole == logits:
        return max(*steps, slope + several * logits)
    if loss.columns:  # one model after the other
        return max(*steps, slope + 3 * logits + 2 * whole)
    # Of the second model: padded, gathered and concatenated.
    return max(*steps, slope + 2 * logits + several * whole, slope + 3 * logits + 3 * whole)


def tokens_at_once(resolved: Resolved, local: Local, *, models: int = 1) -> int:
    """Return the number of tokens whose logits, of `models` models, are alive at once, as in `Head.at_once`."""
    shared = resolved.size("tp") == 1 or resolved.spec.parallel.tp.loss
    alive = piece(resolved.architecture.vocab, resolved.size("tp"), 0) if shared else resolved.architecture.vocab
    at_once = tokens_in(int(resolved.spec.loss.chunk.value), alive * models, whole=compiles_loss(resolved))
    return min(local.tokens, at_once)
