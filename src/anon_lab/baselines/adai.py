"""Adai: SGD whose momentum, not learning rate, adapts to each coordinate."""

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from anon_lab.baselines._base import Baseline, State, decay, zeros


class Adai(Baseline):
    """Adaptive inertia (Xie et al., 2022, arXiv:2006.15815).

    `betas` are beta0 and beta2. At step t, coordinate by coordinate:

        v <- beta2 v + (1 - beta2) g^2,    v_hat = v / (1 - beta2^t)
        beta1 = clip(1 - beta0 v_hat / mean(v_hat), 0, 1 - eps)       mean over all coordinates of all parameters
        m <- beta1 m + (1 - beta1) g,      m_hat = m / (1 - product of all beta1 so far)
        theta <- theta - lr m_hat

    Written here because pytorch_optimizer 4.1.0's Adai never lets mean(v_hat) fall below eps = 1e-3. Squared gradients
    of networks lie far below that, and then every coordinate gets the largest beta1 and nothing adapts.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        betas: tuple[float, float] = (0.1, 0.99),
        eps: float = 1e-3,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "decoupled_weight_decay": decoupled_weight_decay,
            },
        )

    def _update_all(self) -> None:
        todo: list[tuple[dict, Tensor, Tensor, State, Tensor]] = []
        for group in self.param_groups:
            beta2 = group["betas"][1]
            for p, grad, state in self._gradients(group):
                (v,) = zeros(state, p, "exp_avg_sq")
                grad = decay(p, grad, group)
                v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                todo.append((group, p, grad, state, v / (1 - beta2 ** state["step"])))
        if not todo:
            return
        device = todo[0][1].device
        total = torch.stack([v_hat.sum().to(device) for *_, v_hat in todo]).sum()
        mean = total / sum(v_hat.numel() for *_, v_hat in todo)
        for group, p, grad, state, v_hat in todo:
            (m,) = zeros(state, p, "exp_avg")
            product = state.setdefault("beta1_product", torch.ones_like(p))
            # Where no coordinate has a gradient, 0 / 0 means that none is larger than the others.
            relative = (v_hat / mean.to(p.device)).nan_to_num_(nan=1.0)
            beta1 = (1 - group["betas"][0] * relative).clamp_(0, 1 - group["eps"])
            m.mul_(beta1).add_((1 - beta1) * grad)
            product.mul_(beta1)
            p.addcdiv_(m, 1 - product, value=-group["lr"])
