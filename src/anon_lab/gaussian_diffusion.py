"""Gaussian diffusion with learned variances: the noising process, its losses and its samplers (arXiv:2102.09672)."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

Network = Callable[[Tensor, Tensor], Tensor]
"""From noisy images (n, c, h, w) and times (n,) in [0, 1000) to (n, 2 c, h, w): the noise eps, then v."""
Sampler = Literal["ddpm", "ddim"]
VLB_WEIGHT = 0.001
"""lambda of L_hybrid = L_simple + lambda L_vlb."""


def cosine_betas(steps: int) -> np.ndarray:
    """beta_t = 1 - abar_t / abar_{t-1}, at most 0.999, with abar_t = f(t / T) and f(u) = cos^2(pi/2 (u + s)/(1 + s)).

    The offset s = 0.008 keeps the first steps from being too small. (f / f(0) gives the same betas.)
    """
    u = np.arange(steps + 1) / steps
    f = np.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2
    return np.minimum(1 - f[1:] / f[:-1], 0.999)


class Prediction(NamedTuple):
    """p(x_{t-1} | x_t) and the image that it aims at."""

    mean: Tensor
    log_variance: Tensor
    x0: Tensor


class Losses(NamedTuple):
    """Of each image: the mean squared error of eps, and the bound's term at its t in bits per dimension."""

    mse: Tensor
    vlb: Tensor


class Diffusion:
    """T steps of noise. t counts from 0, so that x_t has had t + 1 steps.

    **Arguments:**
    - `betas`: the variance each step adds, (T,) float64.
    - `times`: what the network is told at each step; None: t * 1000 / T.
    """

    def __init__(self, betas: np.ndarray, times: np.ndarray | None = None):
        self.steps = steps = len(betas)
        self.betas = betas
        self.times = np.arange(steps) * 1000 / steps if times is None else times
        self.abar = abar = np.cumprod(1 - betas)
        before = np.append(1.0, abar[:-1])
        # q(x_{t-1} | x_t, x_0) = N(from_x0 x_0 + from_xt x_t, posterior variance)
        variance = betas * (1 - before) / (1 - abar)
        # At t = 0 it is 0; its logarithm takes the next one's place there.
        least = np.append(variance[1] if steps > 1 else betas[0], variance[1:])
        self._tables = {
            "time": self.times,
            "abar": abar,
            "abar_before": before,
            "signal": np.sqrt(abar),
            "noise": np.sqrt(1 - abar),
            "x0_from_xt": np.sqrt(1 / abar),
            "x0_from_eps": np.sqrt(1 / abar - 1),
            "from_x0": betas * np.sqrt(before) / (1 - abar),
            "from_xt": (1 - before) * np.sqrt(1 - betas) / (1 - abar),
            "log_least": np.log(least),
            "log_beta": np.log(betas),
        }
        self._on: dict[torch.device, dict[str, Tensor]] = {}

    def _at(self, name: str, t: Tensor) -> Tensor:
        """The table's values at t, float32, to be multiplied with images."""
        if t.device not in self._on:  # once, since a CUDA graph cannot hold a copy from the host
            self._on[t.device] = {
                key: torch.tensor(values, dtype=torch.float32, device=t.device) for key, values in self._tables.items()
            }
        return self._on[t.device][name][t][:, None, None, None]

    def respaced(self, steps: int) -> "Diffusion":
        """The same process seen only at `steps` times, evenly apart from the first to the last."""
        if not 1 <= steps <= self.steps:
            raise ValueError(f"steps must lie between 1 and {self.steps}, but is {steps}")
        kept = np.round(np.linspace(self.steps - 1, 0, steps)).astype(int)[::-1]
        abar = self.abar[kept]
        return Diffusion(1 - abar / np.append(1.0, abar[:-1]), self.times[kept])

    def noised(self, x0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise."""
        return self._at("signal", t) * x0 + self._at("noise", t) * noise

    def posterior(self, x0: Tensor, xt: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of q(x_{t-1} | x_t, x_0)."""
        return self._at("from_x0", t) * x0 + self._at("from_xt", t) * xt, self._at("log_least", t).expand_as(xt)

    def predict(self, output: Tensor, xt: Tensor, t: Tensor, clip: bool) -> Prediction:
        """p(x_{t-1} | x_t), from the network's output; `clip` keeps the predicted image in [-1, 1].

        The variance lies between the posterior's and beta: log = w log beta + (1 - w) log posterior, w = (v + 1) / 2.
        """
        eps, v = output.float().chunk(2, 1)
        x0 = self._at("x0_from_xt", t) * xt - self._at("x0_from_eps", t) * eps
        if clip:
            x0 = x0.clamp(-1, 1)
        mean, least = self.posterior(x0, xt, t)
        w = (v + 1) / 2
        return Prediction(mean, w * self._at("log_beta", t) + (1 - w) * least, x0)

    def vlb_term(self, output: Tensor, x0: Tensor, xt: Tensor, t: Tensor) -> Tensor:
        """L_t of each image, bits per dimension: KL(q(x_{t-1} | x_t, x_0) || p), and -log p(x_0 | x_1) at t = 0."""
        mean, log_variance = self.posterior(x0, xt, t)
        p = self.predict(output, xt, t, clip=False)
        kl = normal_kl(mean, log_variance, p.mean, p.log_variance)
        nll = -pixel_log_likelihood(x0, p.mean, p.log_variance)
        return torch.where(t == 0, per_image(nll), per_image(kl)) / math.log(2)

    def losses(self, net: Network, x0: Tensor, t: Tensor, noise: Tensor) -> Losses:
        """Both parts of L_hybrid; the bound teaches v alone, since its gradient stops at eps."""
        xt = self.noised(x0, t, noise)
        eps, v = net(xt, self._at("time", t).flatten()).float().chunk(2, 1)
        vlb = self.vlb_term(torch.cat([eps.detach(), v], 1), x0, xt, t)
        return Losses(per_image((noise - eps) ** 2), vlb)

    def hybrid(self, losses: Losses) -> Tensor:
        """L_simple + lambda L_vlb of each image; T L_t at a random t estimates L_vlb, the sum over t."""
        return losses.mse + VLB_WEIGHT * self.steps * losses.vlb

    def prior(self, x0: Tensor) -> Tensor:
        """KL(q(x_T | x_0) || N(0, 1)) of each image, bits per dimension: the bound's part that no network changes."""
        t = torch.full((len(x0),), self.steps - 1, device=x0.device)
        log_variance = self._at("noise", t).square().log()
        zero = torch.zeros_like(x0)
        return per_image(normal_kl(self._at("signal", t) * x0, log_variance, zero, zero)) / math.log(2)

    @torch.no_grad()
    def sample(
        self,
        net: Network,
        noise: Tensor,
        sampler: Sampler = "ddpm",
        generator: torch.Generator | None = None,
        clip: bool = True,
    ) -> Tensor:
        """Images from x_T = noise, through every step of this process.

        **Arguments:**
        - `sampler`: "ddpm" draws each step from p(x_{t-1} | x_t); "ddim" draws nothing (arXiv:2010.02502, eta = 0).
        """
        if sampler not in ("ddpm", "ddim"):
            raise ValueError(f"sampler must be 'ddpm' or 'ddim', but is {sampler!r}")
        x = noise
        for step in reversed(range(self.steps)):
            t = torch.full((len(x),), step, device=x.device)
            p = self.predict(net(x, self._at("time", t).flatten()), x, t, clip)
            if sampler == "ddim":
                # x_{t-1} = sqrt(abar_{t-1}) x_0 + sqrt(1 - abar_{t-1}) eps, with the eps that leads from x_0 to x_t
                eps = (x - self._at("signal", t) * p.x0) / self._at("noise", t)
                before = self._at("abar_before", t)
                x = before.sqrt() * p.x0 + (1 - before).sqrt() * eps
            elif step:
                drawn = torch.randn(x.shape, generator=generator, device=x.device)
                x = p.mean + (0.5 * p.log_variance).exp() * drawn
            else:
                x = p.mean
        return x


def per_image(values: Tensor) -> Tensor:
    """Mean over all but the first dimension."""
    return values.flatten(1).mean(1)


def normal_kl(mean1: Tensor, log_variance1: Tensor, mean2: Tensor, log_variance2: Tensor) -> Tensor:
    """KL(N1 || N2) = (log v2 - log v1 + v1 / v2 + (m1 - m2)^2 / v2 - 1) / 2, in nats."""
    gap = log_variance1 - log_variance2
    return 0.5 * (gap.exp() - gap - 1 + (mean1 - mean2) ** 2 * (-log_variance2).exp())


def pixel_log_likelihood(x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """Log probability of each pixel under a normal that is cut into the 256 values, 2 / 255 apart, of [-1, 1].

    The first and the last value also take what lies beyond them. No probability is taken below 1e-12.
    """
    inverse = (-0.5 * log_variance).exp()
    above = torch.special.ndtr((x - mean + 1 / 255) * inverse)
    below = torch.special.ndtr((x - mean - 1 / 255) * inverse)
    above = torch.where(x > 0.999, torch.ones_like(above), above)
    below = torch.where(x < -0.999, torch.zeros_like(below), below)
    return (above - below).clamp(min=1e-12).log()
