"""The paper's adaptivity formulas against the adaptivity that the real implementations are measured to have."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_optimizer import AdaBelief, AdaBound, PAdam
from torch import Tensor
from torch.optim import SGD, Adam, RMSprop

from anon_lab import closed_forms
from anon_optim import Anon, measure_adaptivity

EPS = [1e-2, 1e-4]  # large, because at 1e-8 every formula says 1


def history(steps: int = 30, scale: float = 0.1, seed: int = 0) -> list[Tensor]:
    """Gradients whose scale falls and whose mean is not zero, so that maxima, variances and moments all differ."""
    random = torch.Generator().manual_seed(seed)
    return [
        scale / t**0.5 * (0.5 + torch.randn(4, 3, generator=random, dtype=torch.float64)) for t in range(1, steps + 1)
    ]


def agree(make: Callable, form: Tensor, gradients: Sequence[Tensor]) -> None:
    measured = measure_adaptivity(make, gradients)
    assert measured.defined.all()
    torch.testing.assert_close(measured.coordinates, form, rtol=0, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(momentum: float) -> None:
    form = closed_forms.sgdm if momentum else closed_forms.sgd
    agree(lambda params: SGD(params, lr=0.1, momentum=momentum), form(history()), history())


@pytest.mark.parametrize("eps", EPS)
def test_rmsprop_of_torch_is_not_bias_corrected(eps: float) -> None:
    torchs = closed_forms.rmsprop(history(), eps=eps, bias_correction=False)
    agree(lambda params: RMSprop(params, eps=eps), torchs, history())
    assert (closed_forms.rmsprop(history(), eps=eps) - torchs).min() > 1e-4


@pytest.mark.parametrize("eps", EPS)
def test_adam(eps: float) -> None:
    agree(lambda params: Adam(params, eps=eps), closed_forms.adam(history(), eps=eps), history())


@pytest.mark.parametrize("eps", EPS)
def test_amsgrad_of_torch_corrects_after_the_maximum(eps: float) -> None:
    torchs = closed_forms.amsgrad(history(), eps=eps, bias_correction=False)
    agree(lambda params: Adam(params, eps=eps, amsgrad=True), torchs, history())
    assert (closed_forms.amsgrad(history(), eps=eps) - torchs).max() > 1e-4


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("partial", [0.1, 0.25, 0.5])
def test_padam_of_pytorch_optimizer(partial: float, eps: float) -> None:
    packages = closed_forms.padam(history(), partial=partial, eps=eps, paper=False)
    agree(lambda params: PAdam(params, partial=partial, eps=eps), packages, history())
    assert (closed_forms.padam(history(), partial=partial, eps=eps) - packages).max() > 1e-4


class PaperPadam(torch.optim.Optimizer):
    """psi = (max_i sqrt(EMA(g_1..i^2)) + eps)^(2p), which also is AMSGrad as the paper's table has it at p = 1/2."""

    def __init__(self, params: list, partial: float, eps: float, beta2: float = 0.999) -> None:
        super().__init__(params, {"partial": partial, "eps": eps, "beta2": beta2})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                t = state["t"] = state.get("t", 0) + 1
                v = state["v"] = group["beta2"] * state.get("v", 0.0) + (1 - group["beta2"]) * p.grad**2
                top = state["top"] = (v / (1 - group["beta2"] ** t)).maximum(state.get("top", torch.zeros_like(v)))
                p -= p.grad / (top.sqrt() + group["eps"]) ** (2 * group["partial"])


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("partial", [0.125, 0.5])
def test_padam_and_amsgrad_as_the_paper_has_them(partial: float, eps: float) -> None:
    form = closed_forms.padam(history(), partial=partial, eps=eps)
    agree(lambda params: PaperPadam(params, partial, eps), form, history())
    if partial == 0.5:
        torch.testing.assert_close(closed_forms.amsgrad(history(), eps=eps), form, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("eps", "some"), [(1e-2, 0.039), (1e-4, 0.111)], ids=["lower bound", "upper bound"])
def test_adabound_of_pytorch_optimizer_is_held_at_its_bounds(eps: float, some: float) -> None:
    options = {"lr": 1e-3, "final_lr": 0.02}
    for convergence, held in ((1e-3, "none"), (some, "some"), (1e4, "all")):
        form = closed_forms.adabound(history(), convergence=convergence, eps=eps, paper=False, **options)
        agree(lambda params, c=convergence: AdaBound(params, gamma=c, eps=eps, **options), form, history())
        free = int((form > 0).sum())
        assert {"none": free == 12, "some": 0 < free < 12, "all": free == 0}[held], (convergence, free)


def test_adabound_between_its_bounds_is_rmsprop() -> None:
    free = closed_forms.adabound(history(), eps=1e-2, convergence=1e-9)
    torch.testing.assert_close(free, closed_forms.rmsprop(history(), beta2=0.999, eps=1e-2))
    assert not closed_forms.adabound(history(), eps=1e-2, convergence=1e9).any()


@pytest.mark.parametrize("eps", [1e-4, 1e-6])
def test_adabelief_of_pytorch_optimizer_subtracts_the_uncorrected_mean(eps: float) -> None:
    packages = closed_forms.adabelief(history(), eps=eps, paper=False)
    agree(lambda params: AdaBelief(params, eps=eps, rectify=False), packages, history())
    assert (closed_forms.adabelief(history(), eps=eps) - packages).abs().max() > 1e-4


def test_adabelief_of_two_gradients_by_hand() -> None:
    # g = 1, 3 with both betas 1/2: m = 1, 7/3 (corrected) and 1/2, 7/4 (not), EMA weights 1/3 and 2/3
    gradients, eps = [torch.tensor([1.0]), torch.tensor([3.0])], 0.01
    for paper, e in ((True, 2 / 3 * (2 / 3) ** 2), (False, 1 / 3 * 0.5**2 + 2 / 3 * 1.25**2)):
        f = e + eps / 0.5
        found = closed_forms.adabelief(gradients, betas=(0.5, 0.5), eps=eps, paper=paper)
        assert found.item() == pytest.approx(1 / (1 + eps * (1 / 0.5 + math.sqrt(f)) / e), rel=1e-12)


@settings(deadline=None, max_examples=25)
@given(
    gamma=st.floats(-2, 2),
    eps=st.sampled_from([1e-2, 1e-4, 1e-8]),
    beta3=st.sampled_from([0.0, 0.5, 0.9, None]),
    growth=st.sampled_from([1.5, 2.0]),
    steps=st.integers(1, 20),
    seed=st.integers(0, 1000),
)
def test_anon_and_the_interval_of_theorem_2(
    gamma: float, eps: float, beta3: float | None, growth: float, steps: int, seed: int
) -> None:
    gradients = history(steps, seed=seed)
    form = closed_forms.anon(gradients, gamma=gamma, eps=eps, beta3=beta3, growth=growth)
    agree(lambda params: Anon.paper(params, gamma=gamma, eps=eps, beta3=beta3, growth=growth), form, gradients)

    lowest, highest = closed_forms.anon_bounds(gradients, gamma=gamma, eps=eps, growth=growth)
    rounding = 1e-12
    assert (lowest - rounding <= form).all()
    assert (form <= highest + rounding).all()
    if abs(gamma) > 1e-3 and eps > 1e-8:
        assert (form.abs() < abs(gamma)).all(), "eps always takes some adaptivity away, whatever the sign"


def test_printed_interval_of_theorem_2_is_reversed_below_zero() -> None:
    a = closed_forms.anon(history(), gamma=-1.0, eps=1e-4)
    assert (a > -1.0).all(), "the paper prints A < gamma"
