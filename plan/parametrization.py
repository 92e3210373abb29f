"""Roles of parameters in a parametrization, and how initial values, rates and decays follow from sizes.

n = dim / base_width; l = layers / base_depth, 1 without a base depth. The rules are CompleteP's (Dey et al. 2025,
arXiv 2505.01618, table 1 with α = 1), which for l = 1 are µP's for Adam (Yang et al. 2022, arXiv 2203.03466).
There logits have a factor 1 / n, and the outputs of layers, before they are added to the residual stream, 1 / l. Here
these factors are inside the matrices before them: a factor f on the output of a matrix is the same as initial
values and learning rate times f, decay and `eps` divided by f, because the size of an update does not depend on the
size of the gradient. So the model computes as any other of its family, and exports need nothing.
"""

from typing import Final, Literal

from attrs import evolve

from xtrain.dsl.schema.optimizers import OPTIMIZERS, Parametrization
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import EMBEDDING, Architecture, BlockParameter, parameters
from xtrain.plan.findings import Findings, checks
from xtrain.plan.groups import optimizers_of

CODE: Final = "X451"

Role = Literal["embedding", "hidden", "residual", "choice", "vector", "residual vector", "head", "last norm"]
"""hidden: a matrix of a block whose inputs and outputs grow with the model; residual: its outputs are added to the
residual stream; residual vector: bias of such a matrix; choice: few outputs, such as a router's."""


@frozen
class Scales:
    """Factors on the standard deviation of initial values, the learning rate, the weight decay and `eps`."""

    std: float = 1.0
    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0

    def times(self, factor: float) -> "Scales":
        """Return the scales of a matrix that contains a factor on its output."""
        return Scales(self.std * factor, self.lr * factor, self.weight_decay / factor, self.eps / factor)

    @property
    def args(self) -> dict[str, float]:
        """Return the factors on rates that are not 1, by name."""
        named = {"lr": self.lr, "weight_decay": self.weight_decay, "eps": self.eps}
        return {name: value for name, value in named.items() if value != 1}

    @property
    def text(self) -> str:
        """Factors as text: `learning rate × 0.25, decay × 4`."""
        names = {"lr": "learning rate", "weight_decay": "decay", "eps": "eps"}
        return ", ".join(f"{names[name]} × {value:.4g}" for name, value in self.args.items())


def roles_of(arch: Architecture) -> dict[str, Role]:
    """Return the role of each parameter by name."""
    roles: dict[str, Role] = {each.name: "last norm" for each in parameters(arch)}
    for kind in arch.kinds:
        inside = tuple(kind.block.parameters(arch))
        last = {each.owner for each in inside if each.initial == "residual"}
        for each in inside:
            role = _role(each, each.owner in last)
            roles |= dict.fromkeys((f"layers.{layer}.{each.name}" for layer in kind.layers), role)
    head: dict[str, Role] = {} if arch.tie_embeddings else {f"{arch.head_module}.weight": "head"}
    return {**roles, f"{EMBEDDING}.weight": "embedding", **head}


def _role(each: BlockParameter, adds: bool) -> Role:
    """Return the role of a parameter of a block. adds: outputs of its module are added to the residual stream."""
    if each.router or (each.decays and each.initial == "normal" and each.shape[-2:-1] == (1,)):
        return "choice"
    if each.is_matrix:
        return "residual" if each.initial == "residual" else "hidden"
    return "residual vector" if adds else "vector"


def ratios(chosen: Parametrization, arch: Architecture) -> tuple[float, float]:
    """Return how many times as wide and as deep as the base the model is."""
    return arch.dim / chosen.base_width, arch.blocks / (chosen.base_depth or arch.blocks)


def scales_of(chosen: Parametrization, arch: Architecture) -> dict[Role, Scales]:
    """Return the factors of each role that the model has."""
    wider, deeper = ratios(chosen, arch)
    outside, inside = Scales(eps=1 / wider), Scales(eps=1 / (wider * deeper))
    hidden = evolve(inside, std=wider**-0.5, lr=1 / wider, weight_decay=wider)
    every: dict[Role, Scales] = {
        "embedding": outside,
        "hidden": hidden,
        # Their standard deviation has a factor 1/√(2 · layers), with the layers of the base.
        "residual": evolve(hidden, std=(deeper / wider) ** 0.5).times(1 / deeper),
        "choice": inside.times(1 / wider),
        "vector": inside,
        "residual vector": inside.times(1 / deeper),
        "head": outside.times(1 / wider),
        "last norm": outside,
    }
    present = set(roles_of(arch).values())
    return {role: scales for role, scales in every.items() if role in present}


@checks(
    "parametrization",
    reads="parametrization parametrization.* model model.* tokenizer.source adapter task optimizer.kind "
    "group group.*.optimizer.kind loss.kind",
)
def check_parametrization(spec: Spec, arch: Architecture, found: Findings) -> None:
    """Check that values which suit the base suit the model: its weights are drawn, its optimizers take the rules, and
    head and branches can contain the factors."""
    chosen = spec.parametrization
    if chosen is None:
        return
    wrong = _wrong(spec, chosen, arch)
    if wrong is not None:
        found.fail("parametrization", CODE, *wrong)
        return
    wider, deeper = ratios(chosen, arch)
    depth = f", depth {arch.blocks:,} {deeper:g} times" if chosen.base_depth is not None else ""
    found.passed("parametrization", f"width {arch.dim:,} is {wider:g} times the base's{depth}")


def _wrong(spec: Spec, chosen: Parametrization, arch: Architecture) -> tuple[str, str, str] | None:
    """Return (setting, error, remedy) for the first thing that does not go with a parametrization."""
    path = "parametrization"
    if chosen.kind == "complete_p" and chosen.base_depth is None:
        return path, "complete_p has rules for depth, and the base has none", f"write `base_depth = {arch.blocks}`"
    if chosen.kind == "mup" and chosen.base_depth is not None:
        return f"{path}.base_depth", "mup has no rules for depth", "write `kind = complete_p`, or remove it"
    if "code" in arch.own:
        return path, "transformers' code draws its own initial values", "use a native family"
    if spec.is_adapted or (spec.model.folder is not None and spec.model.weights == "auto"):
        what = "adapters are trained" if spec.is_adapted else "the weights are read"
        return path, f"{what}, and a parametrization is of a model that starts from drawn weights", "remove it"
    if not arch.has_logits:
        return path, f"loss {spec.loss.kind} trains a reward head, which has no rule", "remove it"
    if arch.tie_embeddings:
        return path, "the tied head would need a factor on the logits", "write `tie_embeddings = false` in `model`"
    for name, optimizer in optimizers_of(spec).items():
        if not optimizer.scale_free:
            where = f"group.{name}.optimizer" if name else "optimizer"
            kinds = ", ".join(kind for kind in OPTIMIZERS if OPTIMIZERS[kind].scale_free)
            return where, f"the rules are derived for Adam and Lion, not for {optimizer.kind}", f"choose one of {kinds}"
    if ratios(chosen, arch)[1] != 1 and any(list(kind.block.layers())[-1].name.endswith("norm") for kind in arch.kinds):
        message = f"blocks of {arch.family} end in norms, which undo a factor of the matrices before them"
        return f"{path}.kind", message, "write `kind = mup`, or use a family without norms after its layers"
    return None
