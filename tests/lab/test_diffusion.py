"""The diffusion task: its process against closed forms, its samplers against known distributions, its network."""

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from anon_lab.gaussian_diffusion import Diffusion, Losses, cosine_betas, pixel_log_likelihood
from anon_lab.models import inception
from anon_lab.models.unet import Attention, Stage, UNet, waves
from anon_lab.tasks import _cifar10, diffusion
from anon_lab.tasks._images import IDENTITY, Images, InMemory
from anon_lab.tasks.diffusion import PRESETS, DiffusionTask

CPU = torch.device("cpu")
T = 40


@pytest.fixture
def process() -> Diffusion:
    return Diffusion(cosine_betas(T))


def image(value: float) -> Tensor:
    return torch.full((1, 1, 1, 1), value)


def at(t: int) -> Tensor:
    return torch.tensor([t])


def test_cosine_schedule() -> None:
    """abar_t = f(t) / f(0) with f(t) = cos^2((t / T + 0.008) / 1.008 * pi / 2), wherever beta is below its bound."""
    betas = cosine_betas(4000)
    abar = np.cumprod(1 - betas)
    for t in (1, 2, 1000, 2000, 3999):
        f = [math.cos((u / 4000 + 0.008) / 1.008 * math.pi / 2) ** 2 for u in (0, t)]
        assert abar[t - 1] == pytest.approx(f[1] / f[0], rel=1e-9)
    assert betas[-1] == 0.999
    assert (betas > 0).all()
    assert betas.max() == 0.999


def test_noising_at_once_equals_noising_step_by_step(process: Diffusion) -> None:
    """x_t = sqrt(1 - beta) x_{t-1} + sqrt(beta) e multiplies the signal and adds variances."""
    signal, variance = 1.0, 0.0
    for t, beta in enumerate(process.betas):
        signal *= math.sqrt(1 - beta)
        variance = (1 - beta) * variance + beta
        assert process.noised(image(1), at(t), image(0)).item() == pytest.approx(signal, rel=1e-6)
        assert process.noised(image(0), at(t), image(1)).item() ** 2 == pytest.approx(variance, rel=1e-6)
        assert process._tables["time"][t] == t * 1000 / T


def test_posterior_is_bayes_rule(process: Diffusion) -> None:
    """q(x_{t-1} | x_t, x_0) is proportional to q(x_t | x_{t-1}) q(x_{t-1} | x_0): two parabolas in x_{t-1}."""
    x0, xt = 0.3, -0.7
    for t in range(1, T):
        beta, before = process.betas[t], np.prod(1 - process.betas[:t])
        precision = (1 - beta) / beta + 1 / (1 - before)
        mean = (math.sqrt(1 - beta) * xt / beta + math.sqrt(before) * x0 / (1 - before)) / precision
        got, log_variance = process.posterior(image(x0), image(xt), at(t))
        assert got.item() == pytest.approx(mean, rel=1e-5)
        assert log_variance.item() == pytest.approx(-math.log(precision), abs=1e-5)
    got, log_variance = process.posterior(image(x0), image(xt), at(0))
    assert got.item() == pytest.approx(x0)  # the variance is 0 there; its logarithm is that of t = 1
    assert torch.equal(log_variance, process.posterior(image(x0), image(xt), at(1))[1])


def test_learned_variance_lies_between_the_posteriors_and_beta(process: Diffusion) -> None:
    xt = image(0.4)
    for t in range(1, T):
        least = process.posterior(xt, xt, at(t))[1].item()
        most = math.log(process.betas[t])
        for v, want in ((-1.0, least), (1.0, most), (0.0, (least + most) / 2)):
            output = torch.cat([image(0.2), image(v)], 1)
            assert process.predict(output, xt, at(t), False).log_variance.item() == pytest.approx(want, abs=1e-5)


def test_prediction_recovers_the_image_from_its_noise(process: Diffusion) -> None:
    x0, noise = torch.rand(T - 1, 3, 4, 4) * 2 - 1, torch.randn(T - 1, 3, 4, 4)
    t = torch.arange(T - 1)
    xt = process.noised(x0, t, noise)
    p = process.predict(torch.cat([noise, noise], 1), xt, t, clip=False)
    torch.testing.assert_close(p.x0, x0, rtol=0, atol=2e-4)  # errors grow by 1 / sqrt(abar), up to 600
    assert process.predict(torch.cat([noise + 1, noise], 1), xt, t, clip=True).x0.abs().max() <= 1


def test_terms_of_the_bound_are_kl_divergences(process: Diffusion) -> None:
    torch.manual_seed(0)
    t = torch.arange(1, T - 1)
    x0, noise = torch.randn(T - 2, 3, 2, 2).clamp(-1, 1), torch.randn(T - 2, 3, 2, 2)
    xt = process.noised(x0, t, noise)
    output = torch.randn(T - 2, 6, 2, 2)
    mean, log_variance = process.posterior(x0.double(), xt.double(), t)
    p = process.predict(output, xt, t, clip=False)
    q_p = kl_divergence(Normal(mean, (log_variance / 2).exp()), Normal(p.mean, (p.log_variance / 2).exp()))
    want = q_p.mean((1, 2, 3)) / math.log(2)
    torch.testing.assert_close(process.vlb_term(output, x0, xt, t).double(), want, rtol=1e-4, atol=1e-6)
    exact = torch.cat([noise, -torch.ones_like(noise)], 1)  # the true noise and the posterior's variance
    assert process.vlb_term(exact, x0, xt, t).abs().max() < 1e-4


def test_pixel_probabilities_sum_to_one_and_follow_the_normal() -> None:
    values = (torch.arange(256) / 127.5 - 1)[:, None]
    mean, log_variance = torch.tensor([-1.2, 0.0, 0.3, 0.99]), torch.tensor([-2.0, -6.0, 0.5, -9.0])
    p = pixel_log_likelihood(values, mean.expand(256, 4), log_variance.expand(256, 4)).exp()
    torch.testing.assert_close(p.sum(0), torch.ones(4), rtol=0, atol=1e-5)
    normal = Normal(0.3, math.exp(0.25))
    assert p[200, 2].item() == pytest.approx(normal.log_prob(values[200]).exp().item() * 2 / 255, rel=1e-3)
    assert p[255, 2].item() == pytest.approx(1 - normal.cdf(values[255] - 1 / 255).item(), rel=1e-5)


def test_the_first_term_is_the_likelihood_of_the_pixels(process: Diffusion) -> None:
    x0 = (torch.randint(256, (2, 3, 2, 2)) / 127.5 - 1).float()
    xt = process.noised(x0, torch.zeros(2).long(), torch.randn_like(x0))
    output = torch.randn(2, 6, 2, 2)
    p = process.predict(output, xt, torch.zeros(2).long(), clip=False)
    want = -pixel_log_likelihood(x0, p.mean, p.log_variance).mean((1, 2, 3)) / math.log(2)
    torch.testing.assert_close(process.vlb_term(output, x0, xt, torch.zeros(2).long()), want)


def test_the_bound_teaches_the_variance_alone(process: Diffusion) -> None:
    torch.manual_seed(0)
    x0, noise, t = torch.randn(4, 3, 2, 2).clamp(-1, 1), torch.randn(4, 3, 2, 2), torch.tensor([0, 3, 20, 30])
    output = torch.randn(4, 6, 2, 2, requires_grad=True)
    losses = process.losses(lambda x, time: output, x0, t, noise)
    torch.testing.assert_close(process.hybrid(losses), losses.mse + 0.001 * T * losses.vlb)
    (gradient,) = torch.autograd.grad(process.hybrid(losses).sum(), output)
    eps = output.detach()[:, :3]
    torch.testing.assert_close(gradient[:, :3], 2 * (eps - noise) / eps[0].numel())
    assert (gradient[:, 3:] != 0).all()


def test_the_network_is_told_the_time_in_thousandths(process: Diffusion) -> None:
    seen = []

    def net(x: Tensor, time: Tensor) -> Tensor:
        seen.append(time.tolist())
        return torch.cat([x, x], 1)

    x = torch.zeros(2, 3, 2, 2)
    process.losses(net, x, torch.tensor([1, 39]), x)
    process.respaced(3).sample(net, x)
    assert seen == [[25, 975], [975, 975], [500, 500], [0, 0]]  # 19.5 rounds to 20


def test_respacing_keeps_the_noise_levels(process: Diffusion) -> None:
    spaced = process.respaced(5)
    # 1 - beta of the last step is 1e-5, so that it keeps 11 of float64's 16 digits.
    np.testing.assert_allclose(spaced.abar, process.abar[[0, 10, 20, 29, 39]], rtol=2e-11)
    np.testing.assert_allclose(process.respaced(T).betas, process.betas, rtol=1e-9)
    np.testing.assert_allclose(process.respaced(1).abar, process.abar[-1:])
    for steps in (0, T + 1):
        with pytest.raises(ValueError, match=f"between 1 and 40, but is {steps}"):
            process.respaced(steps)


def test_the_prior_term_is_a_kl_to_the_standard_normal(process: Diffusion) -> None:
    x0 = torch.rand(2, 3, 2, 2)
    abar = process.abar[-1]
    want = kl_divergence(Normal(math.sqrt(abar) * x0.double(), math.sqrt(1 - abar)), Normal(0.0, 1.0))
    torch.testing.assert_close(process.prior(x0).double(), want.mean((1, 2, 3)) / math.log(2), rtol=1e-2, atol=1e-7)


class Ideal:
    """The best network for pixels that are N(mean, std^2) independently, from Bayes' rule."""

    def __init__(self, process: Diffusion, mean: float, std: float):
        self.process, self.mean, self.variance = process, mean, std**2

    def __call__(self, x: Tensor, time: Tensor) -> Tensor:
        t = int(np.abs(self.process.times - time[0].item()).argmin())
        abar, beta = self.process.abar[t], self.process.betas[t]
        before = abar / (1 - beta)
        # E[noise | x_t] and Var(x_0 | x_t) of jointly normal x_0 and x_t
        spread = abar * self.variance + 1 - abar
        eps = math.sqrt(1 - abar) * (x - math.sqrt(abar) * self.mean) / spread
        if t == 0:  # nothing is drawn there
            return torch.cat([eps, eps], 1)
        # Var(x_{t-1} | x_t) = posterior variance + from_x0^2 Var(x_0 | x_t)
        posterior = beta * (1 - before) / (1 - abar)
        from_x0 = beta * math.sqrt(before) / (1 - abar)
        wanted = posterior + from_x0**2 * self.variance * (1 - abar) / spread
        w = math.log(wanted / posterior) / math.log(beta / posterior)
        return torch.cat([eps, torch.full_like(x, 2 * w - 1)], 1)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.6, 0.2)])
def test_ddpm_draws_from_the_distribution_that_the_ideal_network_knows(mean: float, std: float) -> None:
    process = Diffusion(cosine_betas(1000)).respaced(100)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2000, 3, 2, 2, generator=generator)
    x = process.sample(Ideal(process, mean, std), noise, "ddpm", generator, clip=False)
    n = x.numel()
    assert abs(x.mean().item() - mean) < 4 * std / math.sqrt(n)
    # The last step gives E[x_0 | x_1], whose variance is smaller by Var(x_0 | x_1).
    abar = process.abar[0]
    variance = std**2 - std**2 * (1 - abar) / (abar * std**2 + 1 - abar)
    assert abs(x.var().item() / variance - 1) < 4 * math.sqrt(2 / n)


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_both_samplers_find_a_point(process: Diffusion, sampler: diffusion.Sampler) -> None:
    x = process.sample(Ideal(process, 0.37, 0.0), torch.randn(4, 3, 2, 2), sampler)
    torch.testing.assert_close(x, torch.full_like(x, 0.37), rtol=0, atol=1e-3)


def test_ddim_draws_nothing_and_follows_its_closed_form() -> None:
    """For data N(0, 1) each step multiplies x by cos(theta_t - theta_{t-1}), where abar_t = cos^2(theta_t)."""
    process = Diffusion(cosine_betas(1000)).respaced(20)
    noise = torch.randn(8, 3, 2, 2)
    before = torch.get_rng_state()
    x = process.sample(Ideal(process, 0.0, 1.0), noise, "ddim", clip=False)
    assert torch.equal(torch.get_rng_state(), before)
    theta = np.arccos(np.sqrt(np.append(1.0, process.abar)))
    torch.testing.assert_close(x, noise * float(np.cos(np.diff(theta)).prod()), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="but is 'euler'"):
        process.sample(Ideal(process, 0.0, 1.0), noise, "euler")  # pyright: ignore[reportArgumentType]


def test_the_papers_network_has_the_official_size() -> None:
    with torch.device("meta"):
        net = UNet()
    assert sum(p.numel() for p in net.parameters()) == 52_546_438  # as OpenAI's code counts its CIFAR-10 model


def test_waves_are_cosines_and_sines() -> None:
    got = waves(torch.tensor([0.0, 2.5]), 8)
    angles = [2.5 / 10_000 ** (k / 4) for k in range(4)]
    want = [[1.0] * 4 + [0.0] * 4, [*map(math.cos, angles), *map(math.sin, angles)]]
    torch.testing.assert_close(got, torch.tensor(want))


def test_attention_by_hand() -> None:
    torch.manual_seed(0)
    layer = Attention(64, heads=2).double()
    torch.nn.init.normal_(layer.out.weight)
    x = torch.randn(2, 64, 3, 2, dtype=torch.float64)
    h = layer.norm(x).flatten(2)
    qkv = torch.einsum("oc,ncp->nop", layer.qkv.weight[:, :, 0, 0], h) + layer.qkv.bias[:, None]
    heads = []
    for head in range(2):
        q, k, v = (qkv[:, i * 64 + head * 32 : i * 64 + (head + 1) * 32] for i in range(3))
        heads.append(v @ (q.transpose(1, 2) @ k / math.sqrt(32)).softmax(-1).transpose(1, 2))
    y = torch.einsum("oc,ncp->nop", layer.out.weight[:, :, 0, 0], torch.cat(heads, 1)).view_as(x)
    torch.testing.assert_close(layer(x), x + y)


def test_a_stage_scales_and_shifts_its_second_norm_by_the_time() -> None:
    """skip(x) + conv(silu((1 + scale) norm(conv(silu(norm(x)))) + shift)), with linear maps of the time."""
    torch.manual_seed(0)
    stage = Stage(32, 64, time=8, dropout=0.5, heads=0).eval()
    torch.nn.init.normal_(stage.second[2].weight)
    x, emb = torch.randn(2, 32, 4, 4), torch.randn(2, 8)
    p = dict(stage.named_parameters())
    h = F.group_norm(x, 32, p["first.0.weight"], p["first.0.bias"])
    h = F.conv2d(h * h.sigmoid(), p["first.2.weight"], p["first.2.bias"], padding=1)
    h = F.group_norm(h, 32, p["norm.weight"], p["norm.bias"])
    told = emb @ p["time.weight"].T + p["time.bias"]
    h = (1 + told[:, :64, None, None]) * h + told[:, 64:, None, None]
    h = F.conv2d(h * h.sigmoid(), p["second.2.weight"], padding=1)
    torch.testing.assert_close(stage(x, emb), F.conv2d(x, p["skip.weight"], p["skip.bias"]) + h, rtol=1e-4, atol=1e-4)


def test_network_starts_at_zero_and_every_parameter_learns() -> None:
    torch.manual_seed(0)
    net = UNet(channels=32, multipliers=(1, 2), blocks=1, attention=(8,), heads=2, dropout=0.1, size=16).eval()
    x, time = torch.randn(2, 3, 16, 16), torch.tensor([10.0, 900.0])
    out = net(x, time)
    assert out.shape == (2, 6, 16, 16)
    assert not out.any()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    out = net(x, time)
    assert not torch.allclose(out, net(x, time.flip(0)))
    out.square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


@pytest.fixture
def task() -> Iterator[DiffusionTask]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make(PRESETS["tiny"])
    torch.set_num_threads(threads)


def make(preset: diffusion.Preset) -> DiffusionTask:
    """On images of one colour each, half of them held out."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (24, 3, 1, 1), dtype=torch.uint8, generator=generator).expand(-1, -1, 16, 16).clone()
    parts = [Images(part, torch.zeros(len(part), dtype=torch.int64)) for part in pixels.split(8)]
    images = InMemory("diffusion", preset.recipe, preset.build, IDENTITY, *parts, flip=preset.flip)
    return DiffusionTask(preset, images, pixels)


def test_batches_are_pixels(task: DiffusionTask) -> None:
    (pixels,) = next(task.stream(4, 0, 0, CPU))
    assert pixels.shape == (4, 3, 16, 16)
    assert pixels.dtype == torch.uint8
    assert task.units((pixels,)) == 4
    assert task.examples() == 8
    assert diffusion.scaled(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1, 1]


def test_loss_is_a_function_of_torchs_generator(task: DiffusionTask) -> None:
    batch, net = next(task.stream(4, 0, 0, CPU)), task.model()
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(task.loss(net, batch).item())
    assert losses[0] == losses[1] != losses[2]


def test_evaluation_is_fixed_and_its_numbers_belong_together(task: DiffusionTask) -> None:
    net = task.model()
    before = torch.get_rng_state()
    first = task.evaluate(net, "validation", CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert first == task.evaluate(net, "validation", CPU) != task.evaluate(net, "test", CPU)
    assert net.training
    # An untrained network says 0, and the mean square of n normals is 1 within sqrt(2 / n).
    assert first["mse"] == pytest.approx(1, abs=4 * math.sqrt(2 / (8 * 3 * 16 * 16)))
    # bits = T L + prior and loss = mse + 0.001 T L; the prior is below 1e-3 bits
    assert first["bits per dimension"] / 1000 == pytest.approx(first["loss"] - first["mse"], rel=1e-3)


def test_evaluation_takes_every_strength_of_noise_alike(task: DiffusionTask) -> None:
    """With as many images as steps, each t occurs once: the sum of L_t is then exact in t."""
    seen = []

    class Watching(torch.nn.Module):
        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            seen.extend(time.tolist())
            return torch.cat([x, x], 1)

    task.diffusion = Diffusion(cosine_betas(8))
    task.evaluate(Watching(), "test", CPU)
    assert sorted(seen) == [t * 125 for t in range(8)]


def test_samples(task: DiffusionTask) -> None:
    net = task.model()
    first = list(task.samples(net, 3, CPU, steps=2, batch=2, seed=1))
    assert [(each.shape, each.dtype) for each in first] == [
        ((2, 3, 32, 32), torch.uint8),
        ((1, 3, 32, 32), torch.uint8),
    ]
    again = task.samples(net, 3, CPU, steps=2, batch=2, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], next(task.samples(net, 3, CPU, steps=2, batch=2, seed=2)))
    assert net.training


def test_fid_compares_samples_with_the_reference(
    task: DiffusionTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Means(torch.nn.Module):  # three features in Inception's place
        def forward(self, images: Tensor) -> Tensor:
            return images.float().mean((2, 3))

    monkeypatch.setenv("ANON_CACHE", str(tmp_path))
    monkeypatch.setattr(inception, "load", lambda path: Means())
    weights = tmp_path / "weights.npz"
    weights.write_bytes(b"")
    net = task.model()
    made = torch.cat(list(task.samples(net, 6, CPU, steps=2, sampler="ddim")))
    for against in (None, 7):
        got = task.fid(net, CPU, count=6, steps=2, sampler="ddim", weights=weights, against=against)
        x, y = (pixels.double().mean((2, 3)).numpy() for pixels in (made, task._reference[:against]))
        root = np.real(np.sqrt(np.linalg.eigvals(np.cov(x.T) @ np.cov(y.T)).astype(complex))).sum()
        want = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(np.cov(x.T)) + np.trace(np.cov(y.T)) - 2 * root
        assert got == pytest.approx(want, rel=1e-4)


def test_it_learns(task: DiffusionTask) -> None:
    torch.manual_seed(0)
    net = task.model()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for batch in islice(task.stream(8, 0, 0, CPU), 25):
        optimizer.zero_grad()
        task.loss(net, batch).backward()
        optimizer.step()
    assert task.evaluate(net, "test", CPU)["mse"] < 0.7


def test_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.randint(256, (10_000, 3, 2, 2), dtype=torch.uint8)
    images = Images(pixels, torch.zeros(10_000, dtype=torch.int64))
    monkeypatch.setattr(_cifar10, "load", lambda data: (images, images))
    task = diffusion.load(Path("anywhere"), hold_out=True, model="paper")
    assert task.examples() == 5_000
    assert len(task._reference) == 10_000  # FID compares with all of them
    assert task.diffusion.steps == 4000
    assert (task.recipe.batch_size, task.recipe.ema, task.recipe.schedule) == (128, 0.9999, "constant")
    with pytest.raises(ValueError, match="load it with hold_out"):
        diffusion.load(None).evaluate(torch.nn.Identity(), "validation", CPU)
    with pytest.raises(ValueError, match="one of paper, small, 16px, tiny, but is 'huge'"):
        diffusion.load(None, model="huge")
    with pytest.raises(ValueError, match="options model, flip, but was given width"):
        diffusion.load(None, width=3)


def test_smaller_images_are_means_of_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4).repeat(6_000, 3, 8, 8)
    images = Images(pixels, torch.zeros(6_000, dtype=torch.int64))
    monkeypatch.setattr(_cifar10, "load", lambda data: (images, images))
    task = diffusion.load(Path("anywhere"), hold_out=True, model="16px", flip=False)
    (batch,) = next(task.stream(2, 0, 0, CPU))
    corner = torch.tensor([[2, 4], [10, 12]], dtype=torch.uint8)  # of (0, 1, 4, 5) the mean is 2.5, rounded to even
    assert torch.equal(batch, corner.repeat(2, 3, 8, 8))
    assert torch.equal(task._reference[0], batch[0])
    (made,) = task.samples(task.model(), 2, CPU, steps=1)
    assert made.shape == (2, 3, 16, 16)


def test_hybrid_weight_is_the_papers(process: Diffusion) -> None:
    one = torch.ones(())
    assert process.hybrid(Losses(0 * one, one / T)).item() == pytest.approx(0.001)
