"""Padam: AMSGrad with a power p of its second moment between SGD's 0 and AMSGrad's 1/2."""

import math

from torch.optim.optimizer import ParamsT

from anon_lab.baselines._base import Baseline, Group, decay, zeros


class Padam(Baseline):
    """Padam (Chen et al., 2018, arXiv:1806.06763).

    At step t:

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        v_max <- max(v_max, v)
        theta <- theta - lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v_max) + eps)^(2 partial)

    The paper prints no bias correction and no eps; both are the authors' code's. That code corrects v as if partial
    were 1/2, which for smaller ones is a warm-up over about 1 / (1 - beta2) steps.

    Written here because pytorch_optimizer 4.1.0's PAdam leaves out the maximum, on which the paper's proof rests.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        partial: float = 0.25,
        decoupled_weight_decay: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "partial": partial,
                "decoupled_weight_decay": decoupled_weight_decay,
            },
        )

    def _update(self, group: Group) -> None:
        beta1, beta2 = group["betas"]
        for p, grad, state in self._gradients(group):
            m, v, v_max = zeros(state, p, "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
            t = state["step"]
            grad = decay(p, grad, group)
            m.lerp_(grad, 1 - beta1)
            v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            v_max.copy_(v_max.maximum(v))
            rate = group["lr"] * math.sqrt(1 - beta2**t) / (1 - beta1**t)
            p.addcdiv_(m, (v_max.sqrt() + group["eps"]) ** (2 * group["partial"]), value=-rate)
