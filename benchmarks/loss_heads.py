"""Memory of the head with a large vocabulary: of the cross-entropy, of pairs, and of learning from a teacher.

    python benchmarks/loss_heads.py
    PYTHONPATH=liger_kernel-0.8.5-py3-none-any.whl python benchmarks/loss_heads.py

Forward and backward of the head alone, in fp32 on the CPU. Memory is what storages take at the most beside what the
head is given. Liger's fused losses are measured if they can be imported: DPO of the same pairs, a pair at a time and
without a reference, which costs less than with one, and JSD with a head of the teacher as large as the student's.
`whole dpo` is DPO, `whole` the divergence, of whole logits, as TRL's GKD computes the latter.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from attrs import evolve
from tiled_mlp import Watched
from torch import Tensor

from xtrain.components.losses.distill import measured_by
from xtrain.components.losses.dpo_torch import preference
from xtrain.dsl.schema.losses import REF, TEACHER_IDS, TEACHER_LOGPROBS
from xtrain.runtime.feed.microbatch import Units
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.distillation import Distillation, Taught, distillation_losses, live_losses
from xtrain.runtime.nn.loss import Head, token_losses
from xtrain.runtime.nn.unit_losses import UnitTerm, unit_losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 512), ("dim", 128), ("vocabulary", 131072), ("top", 64), ("chunk_mib", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokens, dim, vocabulary = args.tokens, args.dim, args.vocabulary
    hidden_TD, weight_VD = torch.randn(tokens, dim), torch.randn(vocabulary, dim) / dim**0.5
    teacher_TD, teacher_VD = torch.randn(tokens, dim), torch.randn(vocabulary, dim) / dim**0.5
    labels_T = torch.randint(0, vocabulary, (tokens,))
    log_TV = (teacher_TD @ teacher_VD.T).log_softmax(-1)
    found = log_TV.topk(args.top)
    rest_T1 = log_TV.scatter(1, found.indices, -torch.inf).logsumexp(-1, keepdim=True)
    stored = {TEACHER_IDS: found.indices.int(), TEACHER_LOGPROBS: torch.cat((found.values, rest_T1), 1)}
    del log_TV
    # Two pairs of equal answers, each a quarter of the tokens.
    sides, each = 4, tokens // 4
    referred_T = torch.randn(tokens) - 11
    units = Units(
        segment_BS=torch.arange(sides).repeat_interleave(each)[None],
        tokens_N=torch.full((sides,), each),
        last_N=torch.arange(1, sides + 1) * each - 1,
        members_KU=torch.tensor([[0, 1], [2, 3]]).T,
        values={},
    )
    given = (hidden_TD, weight_VD, teacher_TD, teacher_VD, labels_T, referred_T, *stored.values())

    columns = {REF: referred_T, "share": units.share_BS.flatten()}

    def head(term: Distillation | UnitTerm | None) -> Head:
        return Head(vocabulary=vocabulary, z_weight=0.0, chunk_bytes=args.chunk_mib * 2**20, term=term)

    def distilled(form: str, temperature: float, mix: float) -> Callable[[Tensor, Tensor], Tensor]:
        names = measured_by(form)
        term = Distillation(form=form, beta=0.5, temperature=temperature, mix=mix, metrics=names)
        return lambda x_TD, w_VD: distillation_losses(x_TD, w_VD, labels_T, head(term), stored).objective

    def live(form: str, temperature: float, mix: float) -> Callable[[Tensor, Tensor], Tensor]:
        term = Distillation(form=form, beta=0.5, temperature=temperature, mix=mix, metrics=measured_by(form))
        own = head(evolve(term, columns=(), live=True))
        taught = Taught(teacher_TD, teacher_VD, own)
        return lambda x_TD, w_VD: live_losses(x_TD, w_VD, labels_T, own, taught).objective

    def paired(x_TD: Tensor, w_VD: Tensor) -> Tensor:
        return unit_losses(x_TD, w_VD, labels_T, head(preference(0.1, "sigmoid")), columns, units, Axes()).objective

    def whole_dpo(x_TD: Tensor, w_VD: Tensor) -> Tensor:
        logprob_T = F.log_softmax(x_TD @ w_VD.T, -1).gather(1, labels_T[:, None])[:, 0]
        chosen_U, rejected_U = (logprob_T - referred_T).view(2, 2, each).sum(-1).T
        return -F.logsigmoid(0.1 * (chosen_U - rejected_U)).sum()

    def whole(x_TD: Tensor, w_VD: Tensor) -> Tensor:
        student_TV, teacher_TV = F.log_softmax(x_TD @ w_VD.T, -1), F.log_softmax(teacher_TD @ teacher_VD.T, -1)
        mixed_TV = torch.logsumexp(torch.stack((student_TV, teacher_TV)) - torch.tensor(2.0).log(), 0)
        apart = (F.kl_div(mixed_TV, each, reduction="none", log_target=True) for each in (student_TV, teacher_TV))
        return sum(apart, torch.zeros(())).sum() / 2

    ways: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "cross-entropy": lambda x_TD, w_VD: token_losses(x_TD, w_VD, labels_T, head(None)).objective,
        "dpo": paired,
        "forward_kl": distilled("forward_kl", 1.0, 0.0),
        "jsd, temperature 2, mix 0.2": distilled("jsd", 2.0, 0.2),
        "live forward_kl": live("forward_kl", 1.0, 0.0),
        "live jsd, temperature 2, mix 0.2": live("jsd", 2.0, 0.2),
    }
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss, LigerFusedLinearJSDLoss
    except ImportError:
        pass
    else:
        liger = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, compiled=False, chunk_size=64)
        ways["liger jsd"] = lambda x_TD, w_VD: liger(x_TD, w_VD, teacher_TD, teacher_VD, labels_T)
        pairs = LigerFusedLinearDPOLoss(use_ref_model=False, compiled=False)
        # It has all chosen answers first.
        order = torch.tensor([0, 2, 1, 3])
        labels_BS = labels_T.view(sides, each)[order]
        ways["liger dpo"] = lambda x_TD, w_VD: pairs(w_VD, x_TD.view(sides, each, dim)[order], labels_BS)[0]
    ways |= {"whole dpo": whole_dpo, "whole": whole}
    base = 0.0
    for name, way in ways.items():
        x_TD, w_VD = hidden_TD.clone().requires_grad_(), weight_VD.clone().requires_grad_()
        with Watched() as watched:
            for tensor in (*given, x_TD, w_VD):
                watched.ledger.see(tensor)
            watched.ledger.begin("given")
            loss = way(x_TD, w_VD)
            loss.backward()
        peak = max(watched.ledger.over_time(but=("given",)))
        base = base or peak
        print(
            json.dumps({"head": name, "peak_mib": round(peak / 2**20, 1), "times": round(peak / base, 2)}), flush=True
        )


if __name__ == "__main__":
    main()
