"""AdaHessian: Adam with the diagonal of the Hessian in the gradient's place under the root."""

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from anon_lab.baselines._base import Group, decay, zeros
from anon_lab.baselines._curvature import Hutchinson


class AdaHessian(Hutchinson):
    """AdaHessian (Yao et al., 2021, arXiv:2006.00719).

    At step t, with z of random signs:

        d = |z * (H z)|, averaged over each convolution kernel (the last two axes of a 4-D weight)
        m <- beta1 m + (1 - beta1) g,      v <- beta2 v + (1 - beta2) d^2
        theta <- theta - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t))^hessian_power + eps)

    The absolute value before the average is the authors' code's; the paper averages z * (H z) itself.
    Written here because pytorch_optimizer 4.1.0's AdaHessian leaves out the average over kernels, and fails on
    parameters that the gradient does not depend on, such as the last bias under a linear loss.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.15,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-4,
        weight_decay: float = 0.0,
        hessian_power: float = 1.0,
        decoupled_weight_decay: bool = True,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "hessian_power": hessian_power,
                "decoupled_weight_decay": decoupled_weight_decay,
                "interval": 1,
            },
        )

    def noise_like(self, p: Tensor) -> Tensor:
        return torch.randint_like(p, 2) * 2 - 1

    def _update(self, group: Group) -> None:
        beta1, beta2 = group["betas"]
        for p, grad, state in self._gradients(group):
            m, v = zeros(state, p, "exp_avg", "exp_hessian_diag_sq")
            t = state["step"]
            d = self._estimate(state).abs()  # type: ignore[union-attr] - due at every step
            if d.ndim == 4:
                d = d.mean(dim=(2, 3), keepdim=True).expand_as(p)
            grad = decay(p, grad, group)
            m.lerp_(grad, 1 - beta1)
            v.mul_(beta2).addcmul_(d, d, value=1 - beta2)
            root = (v / (1 - beta2**t)) ** (group["hessian_power"] / 2)
            p.addcdiv_(m, root + group["eps"], value=-group["lr"] / (1 - beta1**t))
