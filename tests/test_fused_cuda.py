"""The Triton kernels against the oracle and the readable path: on a GPU, or else in Triton's interpreter."""

import math
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from anon_optim import Anon, Guard, Storage, _fused
from oracle import Guarded

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(5, 3), (4,), (1,), (700,), (4, 2, 3, 3)]  # 700 takes a full block and a part of one


@pytest.fixture(autouse=True)
def _triton_everywhere(monkeypatch):
    from anon_optim._fused_cuda import launch

    monkeypatch.setattr(_fused, "backend", lambda device_type: launch)


def test_kernels_compile_for_a_gpu():
    """The interpreter computes what a kernel says, but accepts much that the compiler does not."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "of brake_kernel, levels_kernel, moments_kernel, plain_kernel, refresh_kernel" in done.stdout


def gradients(steps, seed=0, shapes=SHAPES):
    """For each step one array a shape: scales over four decades, zeros, columns that start late."""
    rng = np.random.default_rng(seed)
    scales = [10.0 ** rng.uniform(-3, 1, shape) for shape in shapes]
    history = []
    for t in range(steps):
        step = [rng.normal(size=shape) * scale for shape, scale in zip(shapes, scales, strict=True)]
        step[0] = step[0] * (np.arange(3) < 1 + t // 5)
        step[3][:100] = 0.0
        history.append(step)
    return history


def starts(dtype, device, seed=1):
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in SHAPES]
    params[4].data = params[4].data.contiguous(memory_format=torch.channels_last)
    return params


def train(history, *, device, dtype=torch.float32, before_step=None, **options):
    params = starts(dtype, device)
    optimizer = Anon(params, **options)
    for t, step in enumerate(history, start=1):
        if before_step is not None:
            before_step(t, optimizer, params)
        for p, g in zip(params, step, strict=True):
            grad = torch.as_tensor(g).to(device, dtype)
            p.grad = torch.empty_like(p).copy_(grad)
        optimizer.step()
    return [p.detach().double().cpu() for p in params], optimizer


def assert_equal(actual, expected, tolerance):
    """Relative to the size of each tensor: an update is a sum whose terms are rounded one by one."""
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).abs().max() <= tolerance * e.abs().max()


def fused(**options):
    return {"device": DEVICE, "fused": True, **options}


def single(**options):
    return {"device": "cpu", "foreach": False, **options}


OPTIONS = {
    "default": {},
    "printed": {"guard": None},
    "no clip": {"guard": Guard(clip=math.inf)},
    "tight clip": {"guard": Guard(clip=0.1)},
    "no floor": {"guard": Guard(floor=0.0)},
    "no touch": {"guard": Guard(touch=False)},
    "no brake": {"guard": Guard(brake=False)},
    "follow": {"guard": Guard(follow=True)},
    "follow alone": {"guard": Guard(math.inf, 0.0, touch=False, brake=False, follow=True)},
    "follow, a large eps": {"guard": Guard(math.inf, 0.0, touch=False, brake=False, follow=True), "eps": 1e-2},
    "decoupled decay": {"weight_decay": 0.1},
    "coupled decay": {"weight_decay": 0.1, "decoupled_weight_decay": False},
    "maximize": {"maximize": True},
    "lr_scale": {"lr_scale": "tensor"},
    "belief": {"statistic": "belief"},
    "no bias correction": {"bias_correction": False},
    "beta3 0": {"beta3": 0.0},
    "beta3 None": {"beta3": None},
    "growth 1.5": {"growth": 1.5},
    "growth inf": {"growth": math.inf},
}


@pytest.mark.parametrize("gamma", [-0.5, 0.0, 0.5, 1.0, 1.1])
def test_equals_the_oracle(gamma):
    history = gradients(12)
    lr = 0.01
    actual, _ = train(history, **fused(lr=lr, gamma=gamma))
    for i, (theta, start) in enumerate(zip(actual, starts(torch.float32, "cpu"), strict=True)):
        oracle = Guarded(start.detach().double().numpy(), lr=lr, gamma=gamma)
        for step in history:
            oracle.step(step[i].astype(np.float32).astype(np.float64))
        assert_equal([theta], [torch.as_tensor(oracle.theta)], 5e-6)


@pytest.mark.parametrize("capturable", [False, True], ids=["host clock", "device clock"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_equals_the_readable_path(options, capturable):
    for gamma in (-0.5, 1.1):
        history = gradients(9)
        expected, _ = train(history, **single(lr=0.01, gamma=gamma, **options))
        actual, _ = train(history, **fused(lr=0.01, gamma=gamma, capturable=capturable, **options))
        # The printed form divides by sqrt(eps) where there was no gradient, which magnifies rounding.
        assert_equal(actual, expected, 2e-6)


@pytest.mark.parametrize("capturable", [False, True], ids=["host clock", "device clock"])
@pytest.mark.parametrize("gamma", [1.0, 1.5])
def test_psi_follows_gradients_that_grow(gamma, capturable):
    """Ten times as large from step 5 on, of which psi hears at step 8 otherwise."""
    history = [[gradient * (10 if t >= 4 else 1) for gradient in step] for t, step in enumerate(gradients(8))]
    options = {"lr": 0.01, "gamma": gamma, "guard": Guard(math.inf, 0.0, touch=False, brake=False, follow=True)}
    expected, _ = train(history, **single(**options))
    actual, _ = train(history, **fused(capturable=capturable, **options))
    assert_equal(actual, expected, 2e-6)
    frozen, _ = train(history, **fused(**{**options, "guard": None}))
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(actual, frozen, strict=True))


@pytest.mark.parametrize("capturable", [False, True], ids=["host clock", "device clock"])
def test_each_tensor_has_a_memory_of_its_own(capturable):
    """One batch, whose tensors remember differently, and on whose way gamma changes and somebody refreshes."""
    history = gradients(14)

    def change(t, optimizer, params):
        if t == 6:
            for p, share in zip(params, np.linspace(0.1, 1, len(params)), strict=True):
                optimizer.state[p]["memory"].mul_(float(share))
        if t == 8:
            optimizer.param_groups[0]["gamma"] = 1.1
        if t == 12:
            optimizer.refresh()

    options = {"lr": 0.01, "gamma": 1.5, "beta3": None, "growth": 1.25, "betas": (0.9, 0.99), "before_step": change}
    expected, _ = train(history, **single(**options))
    actual, optimizer = train(history, **fused(capturable=capturable, **options))
    assert_equal(actual, expected, 2e-6)
    memories = [state["memory"].item() for state in optimizer.state.values()]
    assert len(set(memories)) == len(memories)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_are_rounded_once(dtype):
    history = gradients(9)
    expected, _ = train(history, dtype=dtype, **single(lr=0.01, gamma=1.1))
    actual, optimizer = train(history, dtype=dtype, **fused(lr=0.01, gamma=1.1))
    # float32 arithmetic that differs in its last bit can round to the neighbour
    assert_equal(actual, expected, torch.finfo(dtype).eps)
    assert all(state["exp_avg"].dtype == torch.float32 for state in optimizer.state.values())


def test_preconditioner_in_bfloat16():
    history = gradients(9)
    storage = Storage(preconditioner=torch.bfloat16)
    expected, _ = train(history, **single(lr=0.01, gamma=1.1, storage=storage))
    actual, optimizer = train(history, **fused(lr=0.01, gamma=1.1, storage=storage))
    assert all(state["preconditioner"].dtype == torch.bfloat16 for state in optimizer.state.values())
    assert_equal(actual, expected, 2e-4)  # updates of 0.01 in which v may differ by one unit of 2^-8


@pytest.mark.parametrize("capturable", [False, True], ids=["host clock", "device clock"])
def test_window_and_total_steps(capturable):
    """A window of 3 steps (0.5^3 < 0.2) skips most of s, and total_steps the rest."""
    options = {"lr": 0.01, "gamma": 1.1, "betas": (0.9, 0.5), "storage": Storage(window_tol=0.2), "total_steps": 20}
    history = gradients(20)
    expected, _ = train(history, **single(**options))
    actual, optimizer = train(history, **fused(capturable=capturable, **options))
    assert_equal(actual, expected, 2e-6)
    if not capturable:
        assert all(not any(state["exp_avg_sq"].stride()) for p, state in optimizer.state.items() if p.numel() > 1)


def test_max_grad_norm_is_clip_grad_norm():
    history = gradients(9)
    params = starts(torch.float32, DEVICE)
    optimizer = Anon(params, lr=0.01, gamma=1.1, fused=True)
    for step in history:
        for p, g in zip(params, step, strict=True):
            p.grad = torch.empty_like(p).copy_(torch.as_tensor(g).to(DEVICE, p.dtype))
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
    actual, _ = train(history, **fused(lr=0.01, gamma=1.1, max_grad_norm=0.5))
    assert_equal(actual, [p.detach().double().cpu() for p in params], 2e-6)


def test_a_change_of_gamma_takes_effect_at_the_next_refresh():
    def change(t, optimizer, _):
        if t == 6:
            optimizer.param_groups[0]["gamma"] = -0.5
        if t == 12:
            optimizer.param_groups[0]["gamma"] = 0.0

    history = gradients(18)
    for capturable in (False, True):
        expected, _ = train(history, before_step=change, **single(lr=0.01, gamma=1.0))
        actual, _ = train(history, before_step=change, **fused(lr=0.01, gamma=1.0, capturable=capturable))
        assert_equal(actual, expected, 2e-6)


def test_parameters_come_and_go():
    """Gradients that are missing for a while, a parameter that moves, and a changed dtype make the batches anew."""

    def freeze(t, _, params):
        for p in params:
            p.requires_grad_(True)
        if t == 7:
            params[3].data = params[3].data.clone()

    def run(**options):
        history = gradients(12)
        params = starts(torch.float32, options["device"])
        optimizer = Anon(params, lr=0.01, gamma=1.1, **{k: v for k, v in options.items() if k != "device"})
        for t, step in enumerate(history, start=1):
            freeze(t, optimizer, params)
            for i, (p, g) in enumerate(zip(params, step, strict=True)):
                missing = i == 1 and 3 <= t <= 5
                p.grad = None if missing else torch.empty_like(p).copy_(torch.as_tensor(g).to(p.device, p.dtype))
            optimizer.step()
        steps = [optimizer.state[p]["step"].item() for p in params]
        return [p.detach().double().cpu() for p in params], steps

    expected, expected_steps = run(**single())
    actual, steps = run(**fused())
    assert steps == expected_steps == [12, 9, 12, 12, 12]
    assert_equal(actual, expected, 2e-6)


def test_what_cannot_be_fused_takes_another_path():
    def run(device, **options):
        generator = torch.Generator().manual_seed(0)
        wide = torch.randn(6, 8, generator=generator).to(device)
        params = [
            torch.nn.Parameter(wide[:, ::2]),  # not dense
            torch.nn.Parameter(torch.randn(3, dtype=torch.float64, generator=generator).to(device)),
            torch.nn.Parameter(torch.randn(3, dtype=torch.complex64, generator=generator).to(device)),
            torch.nn.Parameter(torch.randn(5, generator=generator).to(device)[1:]),  # not aligned
            torch.nn.Parameter(torch.randn(4, 3, generator=generator).to(device).t()),  # dense, another order
            torch.nn.Parameter(torch.empty(0, device=device)),
        ]
        optimizer = Anon(params, lr=0.01, gamma=1.1, **options)
        for _ in range(9):
            for p in params:
                p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, dtype=p.dtype, generator=generator))
            optimizer.step()
        return [torch.view_as_real(p.detach().to(torch.complex128)).cpu() for p in params[:-1]]

    assert_equal(run(DEVICE, fused=True), run("cpu", foreach=False), 2e-6)


def test_stochastic_rounding_is_unbiased_and_seeded():
    def run(seed):
        torch.manual_seed(seed)
        p = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16, device=DEVICE))
        p.grad = torch.ones_like(p)
        # The clip halves a first step, whose update is the typical one.
        Anon([p], lr=2e-3, gamma=1.0, fused=True, storage=Storage(stochastic_round=True)).step()
        return p.detach().float().cpu()

    once = run(0)
    assert torch.equal(once, run(0))
    assert not torch.equal(once, run(1))
    unit = 2**-8  # bfloat16's below 1
    assert set(once.unique().tolist()) == {1.0, 1.0 - unit}
    share = 1e-3 / unit
    error = math.sqrt(share * (1 - share) / 4096) * unit
    assert abs(once.mean().item() - (1 - 1e-3)) < 4 * error


@contextmanager
def scaled(optimizer, scale, found_inf):
    """What torch.amp.GradScaler does around a step it leaves to the optimizer."""
    optimizer.grad_scale = torch.tensor([scale], device=DEVICE)
    optimizer.found_inf = torch.tensor([found_inf], device=DEVICE)
    yield
    del optimizer.grad_scale, optimizer.found_inf


@pytest.mark.parametrize("capturable", [False, True], ids=["host clock", "device clock"])
def test_amp_unscales_in_the_step_and_skips_it_on_inf(capturable):
    history = gradients(9)
    expected, _ = train(history, **single(lr=0.01, gamma=1.1))
    params = starts(torch.float32, DEVICE)
    optimizer = Anon(params, lr=0.01, gamma=1.1, fused=True, capturable=capturable)
    assert optimizer._step_supports_amp_scaling
    for t, step in enumerate(history):
        for p, g in zip(params, step, strict=True):
            p.grad = torch.empty_like(p).copy_(1024 * torch.as_tensor(g).to(DEVICE, p.dtype))
        if t == 3:
            with scaled(optimizer, 1024.0, 1.0):
                optimizer.step()
        with scaled(optimizer, 1024.0, 0.0):
            optimizer.step()
    assert [state["step"].item() for state in optimizer.state.values()] == [9.0] * len(params)
    assert_equal([p.detach().double().cpu() for p in params], expected, 2e-6)


def test_resume_is_exact():
    history = gradients(14)
    straight, _ = train(history, **fused(lr=0.01, gamma=1.1))
    for cut in (1, 3, 4, 8, 11):
        _, first = train(history[:cut], **fused(lr=0.01, gamma=1.1))
        params = [torch.nn.Parameter(p.detach().clone()) for group in first.param_groups for p in group["params"]]
        second = Anon(params, lr=0.5, gamma=0.3, fused=True)
        second.load_state_dict(first.state_dict())
        for step in history[cut:]:
            for p, g in zip(params, step, strict=True):
                p.grad = torch.empty_like(p).copy_(torch.as_tensor(g).to(DEVICE, p.dtype))
            second.step()
        assert all(torch.equal(p.detach().double().cpu(), q) for p, q in zip(params, straight, strict=True))


def test_an_unaligned_parameter_stays_so_when_its_second_moment_is_released():
    p = torch.nn.Parameter(torch.randn(9, generator=torch.Generator().manual_seed(0)).to(DEVICE)[1:])
    optimizer = Anon([p], fused=True, total_steps=5)
    for _ in range(5):
        p.grad = torch.ones_like(p)
        optimizer.step()
    (plan,) = optimizer._plans.values()
    assert plan.batches[0].released
    assert not plan.batches[0].kind.aligned


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("path", ["fused", "foreach"])
def test_a_captured_step_is_replayed_across_refreshes(path):
    history = gradients(40)
    expected, _ = train(history, **single(lr=0.01, gamma=1.1))
    params = starts(torch.float32, DEVICE)
    optimizer = Anon(params, lr=0.01, gamma=1.1, capturable=True, **{path: True})
    for p in params:
        p.grad = torch.zeros_like(p)

    def feed(step):
        for p, g in zip(params, step, strict=True):
            p.grad.copy_(torch.as_tensor(g).to(DEVICE, p.dtype))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in history[:3]:
            feed(step)
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in history[3:]:
        feed(step)
        graph.replay()
    assert_equal([p.detach().double().cpu() for p in params], expected, 5e-6)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.skipif(DEVICE == "cpu", reason="there is no device to wait for")
def test_no_step_waits_for_the_device():
    params = starts(torch.float32, DEVICE)
    optimizer = Anon(params, lr=0.01, gamma=1.1, max_grad_norm=1.0)  # fused is the default here
    grads = [torch.randn_like(p) for p in params]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            for p, g in zip(params, grads, strict=True):
                p.grad = g.clone()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(DEVICE == "cpu", reason="it offloads from a GPU")
def test_works_under_torchao_cpu_offload(monkeypatch):
    """Large parameters step on the CPU, small ones stay on the GPU; both as without the wrapper."""
    offload = pytest.importorskip("torchao.optim").CPUOffloadOptimizer
    monkeypatch.undo()  # each device its own kernels

    def run(wrap):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8)).cuda()
        optimizer = wrap(model.parameters())
        data = torch.randn(20, 16, 64, device="cuda")
        for batch in data:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return [p.detach().double().cpu() for p in model.parameters()]

    expected = run(lambda ps: Anon(ps, lr=1e-3, gamma=1.1))
    offloaded = run(lambda ps: offload(list(ps), Anon, lr=1e-3, gamma=1.1))
    assert_equal(offloaded, expected, 1e-4)  # the gradients differ by what the parameters do, and grow from there
