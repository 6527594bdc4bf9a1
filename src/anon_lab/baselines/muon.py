"""Muon: momentum made orthogonal for matrices, AdamW for everything else, in one optimizer."""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from anon_lab.baselines._base import Baseline, Group, decay, zeros

# The quintic whose iteration takes all singular values in (0, 1] near 1 in five rounds, chosen for speed by the author.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
EMBEDDINGS = frozenset({"tokens", "positions", "place", "wte", "wpe"})
OUTPUTS = frozenset({"head", "lm_head", "classifier", "fc"})


class Muon(Baseline):
    """Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/).

    Weights of two or more axes, flattened to a matrix of shape (first axis, all others):

        m <- momentum m + (1 - momentum) g
        u = (1 - momentum) g + momentum m                                  Nesterov's momentum
        theta <- (1 - lr weight_decay) theta - lr max(1, rows / columns)^(1/2) orthogonal(u)

    where orthogonal(U S V^T) is near U V^T. All other parameters (biases, norms) move by AdamW with learning rate
    adamw_ratio * lr: at the usual lr = 0.02 that is 3e-4. lr is the length, in spectral norm, of a matrix's step.

    Embeddings and the output layer should move by AdamW too, but cannot be told by their shape. Pass
    `model.named_parameters()`, and they are told by the parts of their names: one that contains "emb", or is in
    `EMBEDDINGS` or `OUTPUTS`. Or pass param groups with `use_muon` True or False.

    Written here because torch.optim.Muon takes matrices only and pytorch_optimizer's wants groups made by hand.
    The iteration runs in bfloat16 on CUDA, as the author's, and in the parameter's type elsewhere.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        adamw_ratio: float = 0.015,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
    ) -> None:
        shared = {"weight_decay": weight_decay, "decoupled_weight_decay": True, "adamw_ratio": adamw_ratio}
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "use_muon": True, **shared}
        groups = [group for given in _as_groups(params) for group in _split(given, lr, adamw_ratio)]
        super().__init__(groups, defaults)

    def _update(self, group: Group) -> None:
        move = _muon if group["use_muon"] else _adamw
        for p, grad, state in self._gradients(group):
            move(p, grad, state, group)


def _as_groups(params: ParamsT) -> list[dict[str, Any]]:
    given = list(params)
    if given and isinstance(given[0], dict):
        return [dict(group) for group in given]  # type: ignore[arg-type]
    return [{"params": given}]


def _split(group: dict[str, Any], lr: float, adamw_ratio: float) -> Iterable[dict[str, Any]]:
    """The group as one for Muon and one for AdamW, or as it is where it says `use_muon`."""
    if "use_muon" in group:
        yield group
        return
    params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    matrices = [each for each in params if _is_hidden_matrix(each)]
    others = [each for each in params if not _is_hidden_matrix(each)]
    if matrices:
        yield {**group, "params": matrices, "use_muon": True}
    if others:
        ratio = group.get("adamw_ratio", adamw_ratio)
        yield {**group, "params": others, "use_muon": False, "lr": ratio * group.get("lr", lr)}


def _is_hidden_matrix(param: Tensor | tuple[str, Tensor]) -> bool:
    name, p = param if isinstance(param, tuple) else ("", param)
    parts = name.split(".")
    return p.ndim >= 2 and not any("emb" in part or part in EMBEDDINGS | OUTPUTS for part in parts)


def _muon(p: Tensor, grad: Tensor, state: dict[str, Any], group: Group) -> None:
    (m,) = zeros(state, p, "momentum_buffer")
    m.lerp_(grad, 1 - group["momentum"])
    update = orthogonal(grad.lerp(m, group["momentum"]).flatten(1))
    decay(p, grad, group)
    rate = group["lr"] * math.sqrt(max(1.0, update.shape[0] / update.shape[1]))
    p.add_(update.view_as(p), alpha=-rate)


def orthogonal(matrix: Tensor) -> Tensor:
    """U V^T of the singular value decomposition, roughly: its singular values lie between about 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.mT
    x = x / (x.norm() + 1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).to(matrix.dtype)


def _adamw(p: Tensor, grad: Tensor, state: dict[str, Any], group: Group) -> None:
    beta1, beta2 = group["betas"]
    m, v = zeros(state, p, "exp_avg", "exp_avg_sq")
    t = state["step"]
    grad = decay(p, grad, group)
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    p.addcdiv_(m, v.sqrt() / math.sqrt(1 - beta2**t) + group["eps"], value=-group["lr"] / (1 - beta1**t))
