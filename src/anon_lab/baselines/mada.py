"""MADA: mixes Adam, AVGrad, Yogi, Adan and Lion, and learns the mixture while it trains."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from anon_lab.baselines._base import Baseline, Group, decay

# What is learned, with the interval each is kept in. "lion" is the share of Lion's step, the paper's 1 - gamma.
INTERVALS: Mapping[str, tuple[float, float]] = {
    "beta1": (0.01, 0.99),
    "beta2": (0.501, 0.99),
    "beta3": (0.0, 0.99),
    "rho": (0.0, 1.0),
    "c": (0.0, 1.0),
    "lion": (0.0, 1.0),
}
LION_BETAS = (0.95, 0.98)


class MADA(Baseline):
    """The meta-adaptive optimizer (Ozkara et al., 2024, arXiv:2401.08893).

    Its coefficients q = (beta1, beta2, beta3, rho, c, lion) start at Adam's and follow the hyper-gradient. At step t

        m <- beta1 m + (1 - beta1) g
        n <- beta3 n + (1 - beta3) (g - g_before),                 y = g + beta3 (g - g_before)                 (Adan)
        v <- beta2 v + (1 - beta2) (c y^2 + (1 - c) (v + y^2 sign(y^2 - v)))                                    (Yogi)
        v_mean <- ((t - 1) v_mean + v) / t                                                                      (AVGrad)
        adam = (m / (1 - beta1^t) + beta3 n) / (sqrt((rho v + (1 - rho) v_mean) / (1 - beta2^t)) + eps)
        u = sign(0.95 l + 0.05 g),                                 l <- 0.98 l + 0.02 g                         (Lion)
        theta_t = theta_{t-1} - lr ((1 - lion) adam + lion u)

    and before that, from step 2 on, with the loss's new gradient g_t at theta_{t-1}, which the last q has led to,

        h = sum of g_t d theta_{t-1} / d q,      b <- hyper_momentum b + h,      q <- clip(q - hyper_lr b)

    differentiating the last update only: m, n, v, v_mean from before it count as constants. Every param group learns
    its own q, in group["coefficients"]. To differentiate, the moments of two steps are kept: twelve times the
    parameters' memory.

    Decisions where the authors' code departs from the formulas: n starts at 0 and the first difference of gradients is
    0, as in Adan (there: g^2 and g); Lion's u uses l from before its update, as in Lion; v_mean is differentiated too;
    where v is 0, so that there was never a gradient, the step and its derivatives are 0. Intervals, hyper_lr,
    hyper_momentum and Lion's betas are theirs, as is the decoupled decay.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        beta3: float = 0.0,
        rho: float = 1.0,
        c: float = 1.0,
        lion: float = 0.0,
        hyper_lr: float = 2.5e-3,
        hyper_momentum: float = 0.5,
        decoupled_weight_decay: bool = True,
    ) -> None:
        start = {"beta1": betas[0], "beta2": betas[1], "beta3": beta3, "rho": rho, "c": c, "lion": lion}
        for name, (low, high) in INTERVALS.items():
            if not low <= start[name] <= high:
                raise ValueError(f"Invalid {name}: {start[name]}, expected a number in [{low}, {high}]")
        super().__init__(
            params,
            {
                "lr": lr,
                "eps": eps,
                "weight_decay": weight_decay,
                "hyper_lr": hyper_lr,
                "hyper_momentum": hyper_momentum,
                "decoupled_weight_decay": decoupled_weight_decay,
                "coefficients": start,
                "hyper_buffer": dict.fromkeys(INTERVALS, 0.0),
            },
        )

    def _update(self, group: Group) -> None:
        if group["hyper_lr"] > 0:
            self._learn(group)
        for p, grad, state in self._gradients(group):
            grad = decay(p, grad, group)
            before = state["moments"] if "moments" in state else _start(grad)
            step, moments = _direction(_coefficients(group, p), grad, before, state["step"], group["eps"])
            state.update(before=before, moments=moments, lr=float(group["lr"]))
            p.sub_(step, alpha=group["lr"])

    def _learn(self, group: Group) -> None:
        """One step of the coefficients down the hyper-gradient, for which the last update is done over."""
        parts = [torch.zeros(len(INTERVALS), dtype=torch.float64, device=group["params"][0].device)]
        for p in group["params"]:
            state = self.state[p]
            if p.grad is None or "before" not in state:
                continue
            q = _coefficients(group, p).requires_grad_()
            with torch.enable_grad():
                step, _ = _direction(q, state["moments"]["grad"], state["before"], state["step"], group["eps"])
            (h,) = torch.autograd.grad(step, q, -state["lr"] * p.grad)
            parts.append(h.to(parts[0].device))
        hyper_gradient = torch.stack(parts).sum(0).tolist()
        coefficients, buffer = dict(group["coefficients"]), dict(group["hyper_buffer"])
        for (name, (low, high)), h in zip(INTERVALS.items(), hyper_gradient, strict=True):
            buffer[name] = group["hyper_momentum"] * buffer[name] + h
            coefficients[name] = min(max(coefficients[name] - group["hyper_lr"] * buffer[name], low), high)
        group["coefficients"], group["hyper_buffer"] = coefficients, buffer


def _coefficients(group: Group, p: Tensor) -> Tensor:
    """In float64, which leaves results in the parameter's type: each coefficient is a scalar."""
    return torch.tensor(list(group["coefficients"].values()), dtype=torch.float64, device=p.device)


def _start(grad: Tensor) -> dict[str, Tensor]:
    zero = torch.zeros_like(grad)
    return {"m": zero, "n": zero, "v": zero, "v_mean": zero, "l": zero, "grad": grad.clone()}


def _direction(q: Tensor, g: Tensor, before: dict[str, Tensor], t: int, eps: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The step per lr, and the new moments, as functions of the coefficients."""
    beta1, beta2, beta3, rho, c, lion = q
    difference = g - before["grad"]
    m = beta1 * before["m"] + (1 - beta1) * g
    n = beta3 * before["n"] + (1 - beta3) * difference
    y2 = (g + beta3 * difference) ** 2
    v_before = before["v"]
    v = beta2 * v_before + (1 - beta2) * (c * y2 + (1 - c) * (v_before + y2 * torch.sign(y2 - v_before)))
    v_mean = ((t - 1) * before["v_mean"] + v) / t
    v_hat = (rho * v + (1 - rho) * v_mean) / (1 - beta2**t)
    seen = v_hat > 0
    # Both where: the root of 0 has no derivative, and 0 times infinity would be none either.
    root = torch.where(seen, v_hat, torch.ones_like(v_hat)).sqrt()
    adam = torch.where(seen, (m / (1 - beta1**t) + beta3 * n) / (root + eps), torch.zeros_like(m))
    u = torch.sign(LION_BETAS[0] * before["l"] + (1 - LION_BETAS[0]) * g)
    lion_m = LION_BETAS[1] * before["l"] + (1 - LION_BETAS[1]) * g
    moments = {"m": m, "n": n, "v": v, "v_mean": v_mean, "l": lion_m, "grad": g.clone()}
    return (1 - lion) * adam + lion * u, moments
