"""AGD: scales by how fast the mean gradient changes, and turns into SGD where it hardly does."""

import math

from torch.optim.optimizer import ParamsT

from anon_lab.baselines._base import Baseline, Group, decay, zeros


class AGD(Baseline):
    """The auto-switchable optimizer with stepwise gradient difference (Yue et al., 2023, arXiv:2312.01658).

    At step t:

        m <- beta1 m + (1 - beta1) g
        s = m_t / (1 - beta1^t) - m_{t-1} / (1 - beta1^(t-1))        the second term is left out at t = 1
        b <- beta2 b + (1 - beta2) s^2
        theta <- theta - lr / (1 - beta1^t) m / max(sqrt(b / (1 - beta2^t)), delta)

    Where the root is below `delta` a coordinate moves by SGD with learning rate lr / delta, elsewhere adaptively.
    The paper writes the factor sqrt(1 - beta2^t) outside the maximum; this is the same. Weight decay is decoupled, as
    in the authors' code, of which the options amsgrad, win and clip are left out: they are not the paper's method.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        delta: float = 1e-5,
        decoupled_weight_decay: bool = True,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "weight_decay": weight_decay,
                "delta": delta,
                "decoupled_weight_decay": decoupled_weight_decay,
            },
        )

    def _update(self, group: Group) -> None:
        beta1, beta2 = group["betas"]
        for p, grad, state in self._gradients(group):
            m, b = zeros(state, p, "exp_avg", "exp_avg_diff_sq")
            t = state["step"]
            grad = decay(p, grad, group)
            before = m / (1 - beta1 ** (t - 1)) if t > 1 else 0.0
            m.lerp_(grad, 1 - beta1)
            m_hat = m / (1 - beta1**t)
            s = m_hat - before
            b.mul_(beta2).addcmul_(s, s, value=1 - beta2)
            denominator = (b.sqrt() / math.sqrt(1 - beta2**t)).clamp_(min=group["delta"])
            p.addcdiv_(m_hat, denominator, value=-group["lr"])
