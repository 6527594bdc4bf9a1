"""HVAdam: Adam, plus a step along the part of the gradient that stays the same."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from anon_lab.baselines._base import Baseline, Group, decay, zeros

RESTART_BELOW = 0.1


class HVAdam(Baseline):
    """HVAdam with its restarts (Zhang et al., 2025, arXiv:2511.20277).

    The hidden vector v is the shortest mixture of its old self and the momentum; dot products run over a param group.
    At step t, first Adam's part, with a second moment of the gradient's distance from v:

        m <- beta1 m + (1 - beta1) g,      m_hat = m / (1 - beta1^t)
        e = (g - v)^2
        eta = e / ((g - m)^2 + damping e + eps)
        s <- beta2 s + (1 - beta2) eta e + eps
        theta <- theta - lr m_hat / (sqrt(s / (1 - beta2^t)) + eps)

    then the hidden vector's; at the first step, and at the one after a restart, only v <- m_hat, n <- 0, a <- 0; else

        k = m_hat.(m_hat - v) / |m_hat - v|^2                        or 0 where v = m_hat
        u = k v + (1 - k) m_hat,           n <- n + 1
        a <- beta2 a + (1 - beta2) cos(u, m_hat)
        restart at the next step and change nothing now if a / (1 - beta2^n) < 0.1, else
        v <- u,                            theta <- theta - lr 10^(6 a - 3) v

    Where paper and the authors' code differ this follows the code, with which their results came about: a is not
    bias-corrected in the exponent, both parts have one learning rate, and a step whose cosine leaves [-1, 1] by
    rounding is skipped by its second part. The paper's gamma, which bounds eta by 1 / gamma, is `damping` here.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-16,
        weight_decay: float = 0.0,
        damping: float = 0.0,
        decoupled_weight_decay: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "damping": damping,
                "decoupled_weight_decay": decoupled_weight_decay,
                "hidden": None,
            },
        )

    def _update(self, group: Group) -> None:
        moved = self._adam_part(group)
        if moved:
            self._hidden_part(group, moved)

    def _adam_part(self, group: Group) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Move every parameter; return each with its m_hat and v."""
        beta1, beta2 = group["betas"]
        eps = group["eps"]
        moved = []
        for p, grad, state in self._gradients(group):
            m, s, v = zeros(state, p, "exp_avg", "exp_avg_var", "hidden")
            t = state["step"]
            grad = decay(p, grad, group)
            m.lerp_(grad, 1 - beta1)
            m_hat = m / (1 - beta1**t)
            e = (grad - v) ** 2
            eta = e / ((grad - m) ** 2 + group["damping"] * e + eps)
            s.mul_(beta2).add_(eta * e, alpha=1 - beta2).add_(eps)
            p.addcdiv_(m_hat, s.sqrt() / math.sqrt(1 - beta2**t) + eps, value=-group["lr"])
            moved.append((p, m_hat, v))
        return moved

    def _hidden_part(self, group: Group, moved: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        hidden: dict[str, Any] | None = group["hidden"]
        if hidden is None:
            group["hidden"] = {"steps": 0, "alignment": 0.0}
            for _, m_hat, v in moved:
                v.copy_(m_hat)
            return
        mm, mv, vv = _dot_products(moved)
        distance = mm + vv - 2 * mv
        k = (mm - mv) / distance if distance != 0 else 0.0
        # u.m_hat and u.u, from the products already there
        um = k * mv + (1 - k) * mm
        uu = abs(k * k * vv + 2 * k * (1 - k) * mv + (1 - k) ** 2 * mm)
        cosine = um / math.sqrt(uu * mm) if uu * mm > 0 else math.nan
        if not abs(cosine) <= 1:
            return
        beta2 = group["betas"][1]
        steps = hidden["steps"] + 1
        alignment = beta2 * hidden["alignment"] + (1 - beta2) * cosine
        if alignment / (1 - beta2**steps) < RESTART_BELOW:
            group["hidden"] = None
            return
        group["hidden"] = {"steps": steps, "alignment": alignment}
        for p, m_hat, v in moved:
            v.mul_(k).add_(m_hat, alpha=1 - k)
            p.add_(v, alpha=-group["lr"] * 10 ** (6 * alignment - 3))


def _dot_products(moved: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[float, float, float]:
    """m_hat.m_hat, m_hat.v and v.v over all parameters, in float64 and with one wait for the device."""
    products = [
        torch.stack([(a * b).sum(dtype=torch.float64) for a, b in ((m, m), (m, v), (v, v))]).to(moved[0][0].device)
        for _, m, v in moved
    ]
    mm, mv, vv = torch.stack(products).sum(0).tolist()
    return mm, mv, vv
