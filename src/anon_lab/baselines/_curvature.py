"""The diagonal of the Hessian, estimated from products with random vectors, for the optimizers that want it."""

import torch
from torch import Tensor

from anon_lab.baselines._base import Baseline


class Hutchinson(Baseline):
    """An optimizer that is given its gradients by `optimizer.backward(loss)` in the place of `loss.backward()`.

    Every `interval` steps that also leaves an estimate of diag(H) in each parameter's state, as "estimate":

        z * (H z)     with z random, of mean 0 and covariance 1

    This differentiates the gradient, so everything in the model must be twice differentiable.
    """

    def noise_like(self, p: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def hessian_due(self) -> bool:
        """Whether the coming step needs a new estimate: the first does, and every `interval`-th after it."""
        return self._steps_taken % self.param_groups[0]["interval"] == 0

    def backward(self, loss: Tensor) -> None:
        """Put the loss's gradients where `loss.backward()` would, and the estimates, where due, into the state."""
        if not self.hessian_due:
            loss.backward()
            return
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        # Not loss.backward(create_graph=True): that would tie parameters and gradients into cycles that leak.
        grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
        reached = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
        noises = [self.noise_like(p) for p, _ in reached]
        curved = [(g, z) for (_, g), z in zip(reached, noises, strict=True) if g.requires_grad]
        outputs, weights = [g for g, _ in curved], [z for _, z in curved]
        inputs = [p for p, _ in reached]
        products = torch.autograd.grad(outputs, inputs, weights, allow_unused=True) if curved else [None] * len(inputs)
        for (p, g), z, product in zip(reached, noises, products, strict=True):
            p.grad = g.detach() if p.grad is None else p.grad + g.detach()
            self.state[p]["estimate"] = torch.zeros_like(p) if product is None else z * product

    def _estimate(self, state: dict) -> Tensor | None:
        """The estimate for this step, which is then forgotten, or None where none was due."""
        return state.pop("estimate", None)

    def _update_all(self) -> None:
        with_gradient = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.hessian_due and not all("estimate" in self.state[p] for p in with_gradient):
            raise RuntimeError(
                f"{type(self).__name__} needs an estimate of the Hessian for this step: "
                "call optimizer.backward(loss) instead of loss.backward()"
            )
        super()._update_all()
