"""M-SVAG: momentum SGD, damped in each coordinate by how noisy its gradient is."""

from torch.optim.optimizer import ParamsT

from anon_lab.baselines._base import Baseline, Group, decay, zeros


class MSVAG(Baseline):
    """M-SVAG (Balles and Hennig, 2018, arXiv:1705.07774).

    At step t:

        m <- beta1 m + (1 - beta1) g,      m_hat = m / (1 - beta1^t)
        v <- beta1 v + (1 - beta1) g^2,    v_hat = v / (1 - beta1^t)
        rho = (1 - beta1)^2 (1 - beta1^(2t)) / ((1 - beta1^2) (1 - beta1^t)^2)        at most 0.9999
        s = (v_hat - m_hat^2) / (1 - rho)                                             the gradient's variance
        theta <- theta - lr m_hat^2 / (m_hat^2 + rho s) m_hat                         the factor is in [0, 1]; 0 / 0 = 0

    The cap on rho, without which the first step is 0 / 0, is the authors' code's.
    Written here because pytorch_optimizer 4.1.0's MSVAG takes no weight decay; without it the two agree.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        beta1: float = 0.9,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "beta1": beta1,
                "weight_decay": weight_decay,
                "decoupled_weight_decay": decoupled_weight_decay,
            },
        )

    def _update(self, group: Group) -> None:
        beta1 = group["beta1"]
        for p, grad, state in self._gradients(group):
            m, v = zeros(state, p, "exp_avg", "exp_avg_sq")
            grad = decay(p, grad, group)
            m.lerp_(grad, 1 - beta1)
            v.mul_(beta1).addcmul_(grad, grad, value=1 - beta1)
            power = beta1 ** state["step"]
            m_hat, v_hat = m / (1 - power), v / (1 - power)
            rho = (1 - beta1) ** 2 * (1 - power**2) / ((1 - beta1**2) * (1 - power) ** 2)
            rho = min(rho, 0.9999)
            signal = m_hat**2
            variance = (v_hat - signal) / (1 - rho)
            factor = (signal / (signal + rho * variance)).nan_to_num_(nan=0.0).clamp_(0, 1)
            p.addcmul_(m_hat, factor, value=-group["lr"])
