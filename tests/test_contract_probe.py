"""What training frameworks ask of an optimizer, each as a small test of Anon at several gammas."""

import copy
import dataclasses
import io
import math
import warnings
import weakref

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Parameter

from anon_optim import Anon, Box, Guard, Storage
from anon_optim._fused import backend
from anon_optim._state import is_released

GAMMAS = (-0.5, 0.0, 1.0, 1.1)
DECAYS = [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": False}]
NUMBERS_OF_A_TENSOR = ("exp_avg", "exp_avg_sq", "preconditioner", "weight", "level")

PATHS = {"loop": {"foreach": False}, "foreach": {"foreach": True}}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # said once where no C compiler is found
    if backend("cpu") is not None:
        PATHS["fused"] = {"fused": True}

every_gamma = pytest.mark.parametrize("gamma", GAMMAS)
every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
unfused_path = pytest.mark.parametrize("path", [PATHS["loop"], PATHS["foreach"]], ids=["loop", "foreach"])


def parameters(dtype=torch.float32, shapes=((4, 3), (5,), ())):
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(params, t):
    """Gradients that depend on `t` alone: of very different scales, some of them zero, some zero for long."""
    generator = torch.Generator().manual_seed(1000 + t)
    for p in params:
        real = torch.view_as_real(p.detach()) if p.is_complex() else p.detach()
        place = torch.arange(real.numel()).view(real.shape)
        noise = torch.randn(real.shape, generator=generator) * 10.0 ** (place % 5 - 3)
        silent = (torch.rand(real.shape, generator=generator) < 0.25) | ((place % 4 == 1) & (t < 6))
        grad = torch.where(silent, 0.0, noise).to(real.dtype)
        p.grad = torch.view_as_complex(grad) if p.is_complex() else grad


def train(params, optimizer, steps):
    for t in steps:
        set_gradients(params, t)
        optimizer.step()


def clone(params):
    return [Parameter(p.detach().clone()) for p in params]


def saved(params, optimizer):
    file = io.BytesIO()
    torch.save({"params": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, file)
    return file.getvalue()


def loaded(checkpoint, **kwargs):
    contents = torch.load(io.BytesIO(checkpoint), weights_only=True)
    params = [Parameter(p) for p in contents["params"]]
    optimizer = Anon(params, **kwargs)
    optimizer.load_state_dict(contents["optimizer"])
    return params, optimizer


def states(params, optimizer):
    return [optimizer.state[p] for p in params]


def assert_equal(actual, expected, rtol=0.0, atol=0.0):
    """Values, shapes and dtypes of tensors, or of lists and dicts of them; to the bit unless told otherwise."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)


def assert_same_run(actual, expected, **tolerance):
    (params, optimizer), (expected_params, expected_optimizer) = actual, expected
    assert_equal([p.detach() for p in params], [p.detach() for p in expected_params], **tolerance)
    assert_equal(states(params, optimizer), states(expected_params, expected_optimizer), **tolerance)


# Gradients


@every_gamma
@every_path
@pytest.mark.parametrize("guard", [Guard(), None], ids=["guarded", "printed"])
def test_zero_gradients_move_nothing_and_teach_nothing(gamma, path, guard):
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = Anon(params, gamma=gamma, **path, guard=guard)
    for _ in range(3):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert_equal([p.detach() for p in params], before)
    for state in states(params, optimizer):
        assert all(state[key].isfinite().all() for key in NUMBERS_OF_A_TENSOR)
        if guard is not None:
            assert (state["preconditioner"] == (1 if gamma == 0 else 0)).all()


@every_gamma
@every_path
def test_gradients_are_left_as_they_were(gamma, path):
    params = parameters()
    optimizer = Anon(
        params,
        gamma=gamma,
        maximize=True,
        weight_decay=0.1,
        decoupled_weight_decay=False,
        statistic="belief",
        **path,
    )
    for t in range(1, 6):
        set_gradients(params, t)
        before = [(p.grad, p.grad.clone(), p.grad._version) for p in params]
        optimizer.step()
        for p, (grad, value, version) in zip(params, before, strict=True):
            assert p.grad is grad
            assert grad._version == version
            assert_equal(grad, value)


@every_gamma
@unfused_path  # the fused kernels know no complex numbers
def test_a_complex_parameter_is_its_real_and_imaginary_parts(gamma, path):
    pairs = parameters(shapes=((4, 3, 2), (5, 2)))
    params = [Parameter(torch.view_as_complex(p.detach().clone())) for p in pairs]
    optimizers = Anon(params, gamma=gamma, **path), Anon(pairs, gamma=gamma, **path)
    for t in range(1, 10):
        set_gradients(pairs, t)
        for p, pair in zip(params, pairs, strict=True):
            p.grad = torch.view_as_complex(pair.grad.clone())
        for optimizer in optimizers:
            optimizer.step()
        assert_equal([torch.view_as_real(p.detach()) for p in params], [p.detach() for p in pairs])


@every_gamma
@every_path
def test_strides_do_not_matter(gamma, path):
    strided = [
        Parameter(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).t()),
        Parameter(torch.randn(5, 2, generator=torch.Generator().manual_seed(1))[:, 0]),
        Parameter(torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(2))),
    ]
    strided[2].data = strided[2].data.contiguous(memory_format=torch.channels_last)
    plain = [Parameter(p.detach().contiguous().clone()) for p in strided]
    of_strided, of_plain = Anon(strided, gamma=gamma, **path), Anon(plain, gamma=gamma, **path)
    for t in range(1, 10):
        set_gradients(plain, t)
        for p, q in zip(strided, plain, strict=True):
            p.grad = q.grad.transpose(0, -1).contiguous().transpose(0, -1)
            q.grad = q.grad.contiguous()
        of_strided.step()
        of_plain.step()
        # The mean over a tensor is summed in the order of its memory.
        assert_same_run((strided, of_strided), (plain, of_plain), rtol=1e-5, atol=1e-7)


@every_gamma
def test_foreach_with_mixed_dtypes_is_the_loop(gamma):
    dtypes = torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float32
    shapes = (4, 3), (5,), (6,), (7,), (2, 2), (0, 3)

    def run(foreach):
        params = [parameters(d, (shape,))[0] for d, shape in zip(dtypes, shapes, strict=True)]
        optimizer = Anon(params, gamma=gamma, weight_decay=0.1, foreach=foreach)
        train(params, optimizer, range(1, 20))
        return params, optimizer

    assert_same_run(run(foreach=True), run(foreach=False))


@every_gamma
@every_path
def test_a_frozen_parameter_keeps_its_own_clock(gamma, path):
    together = parameters()
    alone = clone(together[:1])
    of_all, of_one = Anon(together, gamma=gamma, **path), Anon(alone, gamma=gamma, **path)
    for t in range(1, 13):
        set_gradients(together, t)
        if 3 <= t < 7:
            together[0].grad = None
        else:
            alone[0].grad = together[0].grad.clone()
            of_one.step()
        of_all.step()
    assert [state["step"].item() for state in states(together, of_all)] == [8, 12, 12]
    assert_equal(together[0].detach(), alone[0].detach())
    assert_equal(of_all.state[together[0]], of_one.state[alone[0]])


# Learning rate, groups, names, hooks


@every_gamma
@every_path
@pytest.mark.parametrize("capturable", [False, True])
def test_a_tensor_lr_is_the_float_lr(gamma, path, capturable):
    lr = 0.01
    params, twins = parameters(torch.float64), parameters(torch.float64)
    options = {"gamma": gamma, "weight_decay": 0.1, **path, "capturable": capturable}
    tensor = torch.tensor(lr, dtype=torch.float64)
    with_tensor, with_float = Anon(params, lr=tensor, **options), Anon(twins, lr=lr, **options)
    train(params, with_tensor, range(1, 6))
    train(twins, with_float, range(1, 6))
    assert_same_run((params, with_tensor), (twins, with_float), rtol=1e-12)

    tensor.div_(2)  # a schedule that writes into the tensor
    with_float.param_groups[0]["lr"] = lr / 2
    train(params, with_tensor, range(6, 12))
    train(twins, with_float, range(6, 12))
    assert_same_run((params, with_tensor), (twins, with_float), rtol=1e-12)


OVERRIDES = [
    {"lr": 0.01},
    {"gamma": 0.4},
    {"betas": (0.5, 0.9)},
    {"eps": 1e-2},
    {"weight_decay": 0.2},
    {"beta3": 0.9},
    {"growth": 1.3},
    {"guard": None},
    {"guard": Guard(clip=0.1)},
    {"clip": 0.1},
    {"floor": 0.9},
    {"touch": False},
    {"lr_scale": "tensor"},
    {"statistic": "belief"},
    {"project": Box(-0.5, 0.5)},
    {"bias_correction": False},
    {"decoupled_weight_decay": False},
    {"maximize": True},
    {"foreach": True},
    {"capturable": True},
]
BASE = {"gamma": 1.1, "weight_decay": 0.1}


@pytest.mark.parametrize("override", OVERRIDES, ids=str)
def test_groups_are_independent_optimizers(override):
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    params = [*ours, *theirs]
    both = Anon([{"params": ours}, {"params": theirs, **override}], **BASE)
    train(params, both, range(1, 12))

    apart = parameters(torch.float64) + parameters(torch.float64)
    first = Anon(apart[:3], **BASE)
    second = Anon([{"params": apart[3:], **override}], **BASE)
    for t in range(1, 12):
        set_gradients(apart, t)
        first.step()
        second.step()
    assert_same_run((ours, both), (apart[:3], first))
    assert_same_run((theirs, both), (apart[3:], second))


@pytest.mark.parametrize("override", OVERRIDES, ids=str)
def test_an_option_given_to_a_group_acts_on_it(override):
    params, twins = parameters(torch.float64), parameters(torch.float64)
    train(params, Anon([{"params": params, **override}], **BASE), range(1, 12))
    train(twins, Anon(twins, **BASE), range(1, 12))
    same = all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))
    close = all(torch.allclose(p, q, rtol=1e-12) for p, q in zip(params, twins, strict=True))
    if {"foreach", "capturable"} & set(override):
        assert close
    else:
        assert not same


@pytest.mark.parametrize("override", [o for o in OVERRIDES if "guard" not in o and "capturable" not in o], ids=str)
def test_an_option_may_change_during_training(override):
    params = parameters(torch.float64)
    before = Anon(params, **BASE)
    train(params, before, range(1, 6))
    twins = clone(params)
    after = Anon([{"params": twins, **override}], **BASE)
    state_dict = copy.deepcopy(before.state_dict())
    state_dict["param_groups"] = after.state_dict()["param_groups"]
    after.load_state_dict(state_dict)

    before.param_groups[0].update(override)
    train(params, before, range(6, 12))
    train(twins, after, range(6, 12))
    assert_same_run((params, before), (twins, after))


@pytest.mark.parametrize("gamma", [-1, 0, 1, 2])
@pytest.mark.parametrize("capturable", [False, True])
def test_integers_are_numbers(gamma, capturable):
    params, twins = parameters(), parameters()
    whole = {"lr": 1, "gamma": gamma, "betas": (0, 0), "eps": 1, "weight_decay": 0, "beta3": 0, "growth": 2}
    real = {key: tuple(map(float, x)) if isinstance(x, tuple) else float(x) for key, x in whole.items()}
    with_integers, with_floats = (
        Anon(params, capturable=capturable, **whole),
        Anon(twins, capturable=capturable, **real),
    )
    train(params, with_integers, range(1, 10))
    train(twins, with_floats, range(1, 10))
    assert_same_run((params, with_integers), (twins, with_floats))


def test_a_group_may_be_added_later():
    params = parameters()
    optimizer = Anon(params[:1], lr=0.01, gamma=1.1)
    train(params, optimizer, range(1, 4))
    optimizer.add_param_group({"params": params[1:], "gamma": 0.0, "guard": Guard(floor=0.25)})
    added = optimizer.param_groups[1]
    assert (added["lr"], added["gamma"], added["floor"], added["clip"]) == (0.01, 0.0, 0.25, 0.5)
    assert "guard" not in added
    train(params, optimizer, range(4, 6))
    assert [state["step"].item() for state in states(params, optimizer)] == [5, 2, 2]
    with pytest.raises(ValueError, match=r"gamma.*nan"):
        optimizer.add_param_group({"params": parameters(), "gamma": math.nan})
    assert len(optimizer.param_groups) == 2


@every_gamma
def test_names_are_kept(gamma):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    names = [name for name, _ in model.named_parameters()]
    optimizer = Anon(model.named_parameters(), gamma=gamma)
    train(list(model.parameters()), optimizer, range(1, 4))
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == names
    assert [row.name for row in optimizer.diagnostics()] == names
    unnamed = Anon(model.parameters(), gamma=gamma)
    unnamed.load_state_dict(optimizer.state_dict())
    assert unnamed.param_groups[0]["param_names"] == names


@every_gamma
def test_hooks_run_around_the_step_and_see_loaded_state(gamma):
    params = parameters(torch.bfloat16)
    optimizer = Anon(params, gamma=gamma)
    calls = []
    before = clone(params)
    optimizer.register_step_pre_hook(
        lambda *_: calls.append(("pre", all(torch.equal(p, q) for p, q in zip(params, before, strict=True))))
    )
    optimizer.register_step_post_hook(
        lambda *_: calls.append(("post", any(not torch.equal(p, q) for p, q in zip(params, before, strict=True))))
    )
    train(params, optimizer, [1])
    assert calls == [("pre", True), ("post", True)]

    dtypes = []
    optimizer.register_load_state_dict_post_hook(
        lambda opt: dtypes.extend(state["preconditioner"].dtype for state in states(params, opt))
    )
    optimizer.load_state_dict(optimizer.state_dict())
    assert dtypes == [torch.float32] * 3


def test_a_closure_is_evaluated_with_gradients_and_its_value_returned():
    (p,) = params = parameters(shapes=((3,),))
    optimizer = Anon(params)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        expected = p.square().sum()
        assert_equal(optimizer.step(closure).detach(), expected)
    assert optimizer.state[p]["step"].item() == 1


# Checkpoints


NEXT_PLAIN_STEP = {k: next(a for a in (2, 4, 8, 16, 32) if a > k) + 1 for k in range(1, 21)}


@every_gamma
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_resuming_at_any_step_changes_no_bit(gamma, dtype):
    options = {"gamma": gamma, "weight_decay": 0.1, "lr": 0.01}
    params = parameters(dtype)
    optimizer = Anon(params, **options)
    checkpoints = {}
    for t in range(1, 34):
        train(params, optimizer, [t])
        checkpoints[t] = saved(params, optimizer)
    for stop, finish in NEXT_PLAIN_STEP.items():
        resumed = loaded(checkpoints[stop], **options)
        train(*resumed, range(stop + 1, finish + 1))
        assert_same_run(resumed, loaded(checkpoints[finish], **options))
        for state in states(*resumed):
            assert {state[key].dtype for key in NUMBERS_OF_A_TENSOR} == {torch.float32}
            assert state["step"].item() == finish


@pytest.mark.parametrize(
    "options",
    [
        *PATHS.values(),
        {"capturable": True},
        {"guard": None},
        {"growth": 1.5},
        {"total_steps": 19},
        {"max_grad_norm": 0.1},
        {"storage": Storage(preconditioner=torch.bfloat16)},
    ],
    ids=str,
)
def test_resuming_changes_no_bit_with(options):
    params = parameters(torch.bfloat16)
    optimizer = Anon(params, gamma=1.1, **options)
    train(params, optimizer, range(1, 8))
    resumed = loaded(saved(params, optimizer), gamma=1.1, **options)
    train(params, optimizer, range(8, 20))
    train(*resumed, range(8, 20))
    assert_same_run(resumed, (params, optimizer))


def test_a_checkpoint_brings_its_hyperparameters():
    params = parameters()
    optimizer = Anon(params, lr=0.02, gamma=0.3, growth=1.7, guard=Guard(clip=2.0, floor=0.1), beta3=0.25)
    train(params, optimizer, range(1, 4))
    resumed = loaded(saved(params, optimizer))
    assert resumed[1].state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    train(params, optimizer, range(4, 12))
    train(*resumed, range(4, 12))
    assert_same_run(resumed, (params, optimizer))


def square(grad, exp_avg):
    return grad * grad


def halve_from_ten(t):
    return 2.0 if t < 10 else 1.5


@unfused_path  # the fused kernels take no functions
def test_functions_stay_out_of_the_checkpoint_and_survive_loading(path):
    functions = {"project": Box(-1.0, 1.0), "statistic": square, "growth": halve_from_ten}
    params = parameters()
    optimizer = Anon(params, **path, **functions)
    train(params, optimizer, range(1, 6))
    entries = optimizer.state_dict()["param_groups"][0]
    assert not any(callable(value) for value in entries.values())
    assert optimizer.param_groups[0]["project"] is functions["project"]

    resumed = loaded(saved(params, optimizer), **path, **functions)
    group = resumed[1].param_groups[0]
    assert {key: group[key] for key in functions} == functions
    train(params, optimizer, range(6, 20))
    train(*resumed, range(6, 20))
    assert_same_run(resumed, (params, optimizer))


# torch.distributed.checkpoint, which makes state with a step on zero gradients


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).to(dtype)


@every_gamma
@every_path
@pytest.mark.parametrize("decay", DECAYS, ids=str)
def test_a_dummy_step_moves_and_poisons_nothing(gamma, path, decay):
    params, twins = parameters(), parameters()
    before = [p.detach().clone() for p in params]
    # The clip depends on m_hat, whose bias correction a dummy step does change.
    options = {"gamma": gamma, **path, "lr": 0.01, "guard": Guard(clip=math.inf), **decay}
    optimizer, plain = Anon(params, **options), Anon(twins, **options)
    _init_optim_state(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert_equal([p.detach() for p in params], before)
    for state in states(params, optimizer):
        assert (state["preconditioner"] == (1 if gamma == 0 else 0)).all()

    # A constant gradient has the same second moment on every clock, so psi must be the same at all times. Without
    # a learning rate coupled decay is constant too.
    optimizer.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.0
    for _ in range(10):
        set_gradients(params, 7)
        set_gradients(twins, 7)
        optimizer.step()
        plain.step()
        for key in ["preconditioner"] if gamma == 0 else ["preconditioner", "level"]:
            for state, expected in zip(states(params, optimizer), states(twins, plain), strict=True):
                assert_equal(state[key], expected[key], rtol=1e-5)


@every_gamma
@every_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("total_steps", [None, 7])
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_a_distributed_checkpoint_resumes_exactly(gamma, path, dtype, total_steps, flat):
    options = {"gamma": gamma, "lr": 0.01, "total_steps": total_steps, **path}
    layout = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = model_of(dtype)
    optimizer = Anon(model.parameters(), **options)
    params = list(model.parameters())
    train(params, optimizer, range(1, 6))
    checkpoint = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=layout))

    twin = model_of(dtype)
    twin.load_state_dict(model.state_dict())
    resumed = Anon(twin.parameters(), **options)
    set_optimizer_state_dict(twin, resumed, checkpoint, options=layout)
    twins = list(twin.parameters())
    assert_same_run((twins, resumed), (params, optimizer))
    end = total_steps or 20
    train(params, optimizer, range(6, end + 1))
    train(twins, resumed, range(6, end + 1))
    assert_same_run((twins, resumed), (params, optimizer))


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_a_distributed_checkpoint_works_beside_functions(flat):
    layout = StateDictOptions(flatten_optimizer_state_dict=flat)
    functions = {"project": Box(-1.0, 1.0), "statistic": square, "growth": halve_from_ten}
    model, twin = model_of(), model_of()
    optimizer = Anon(model.parameters(), **functions)
    train(list(model.parameters()), optimizer, range(1, 4))
    resumed = Anon(twin.parameters(), **functions)
    checkpoint = get_optimizer_state_dict(model, optimizer, options=layout)
    set_optimizer_state_dict(twin, resumed, checkpoint, options=layout)
    assert {key: resumed.param_groups[0][key] for key in functions} == functions
    assert_equal(states(twin.parameters(), resumed), states(model.parameters(), optimizer))


# Graphs


class CountingBackend:
    """Runs graphs as they are, and counts them."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, module, example_inputs):
        self.graphs += 1
        return module.forward


# Something that dynamo imports still uses torch.jit.
compiles = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture
def backend():
    torch._dynamo.reset()
    yield CountingBackend()
    torch._dynamo.reset()


def compiled_run(backend, steps, scheduler=None, **options):
    params = parameters(torch.float64, shapes=((4, 3), (5,)))
    optimizer = Anon(params, **options)
    schedule = scheduler(optimizer) if scheduler else None
    step = torch.compile(optimizer.step, backend=backend) if backend else optimizer.step
    graphs = []
    for t in steps:
        set_gradients(params, t)
        step()
        if schedule:
            schedule.step()
        graphs.append(backend.graphs if backend else 0)
    return (params, optimizer), graphs


@compiles
@every_gamma
def test_compiled_steps_equal_eager_ones_and_compile_once(gamma, backend):
    compiled, graphs = compiled_run(backend, range(1, 65), gamma=gamma)
    eager, _ = compiled_run(None, range(1, 65), gamma=gamma)
    assert set(graphs) == {1}
    assert_same_run(compiled, eager, rtol=1e-11, atol=1e-300)


@compiles
@pytest.mark.parametrize(
    "options",
    [
        {"foreach": True},
        {"capturable": True},
        {"guard": None},
        {"lr_scale": "tensor"},
        {"growth": 1.2},
        {"beta3": None},
        {"beta3": None, "foreach": True},
    ],
    ids=str,
)
def test_compiled_steps_equal_eager_ones_with(options, backend):
    compiled, graphs = compiled_run(backend, range(1, 20), gamma=1.1, **options)
    eager, _ = compiled_run(None, range(1, 20), gamma=1.1, **options)
    assert set(graphs) == {1}
    assert_same_run(compiled, eager, rtol=1e-11, atol=1e-300)


@compiles
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01, dtype=torch.float64)], ids=["float", "tensor"])
def test_a_schedule_does_not_recompile(lr, backend):
    def decaying(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (t + 1))

    compiled, graphs = compiled_run(backend, range(1, 65), decaying, lr=copy.deepcopy(lr))
    eager, _ = compiled_run(None, range(1, 65), decaying, lr=copy.deepcopy(lr))
    # The second graph, if any, is the one in which dynamo has learnt that the lr is not a constant.
    assert graphs[2:] == [graphs[1]] * 62
    assert graphs[1] <= 2
    assert_same_run(compiled, eager, rtol=1e-11, atol=1e-300)


@every_gamma
@every_path
@pytest.mark.parametrize("guard", [Guard(), None], ids=["guarded", "printed"])
def test_capturable_is_eager_across_refreshes(gamma, path, guard):
    def run(capturable):
        params = parameters(torch.float64)
        optimizer = Anon(params, gamma=gamma, **path, capturable=capturable, guard=guard, growth=1.5)
        train(params, optimizer, range(1, 41))
        return params, optimizer

    assert_same_run(run(capturable=True), run(capturable=False), rtol=1e-11, atol=1e-300)


@every_gamma
@pytest.mark.parametrize("after", [0, 2, 3], ids="after {} steps".format)
def test_autograd_sees_through_a_differentiable_step(gamma, after):
    """At the step after `after` others: the first refresh, a plain step, and a refresh with a past."""
    start = parameters(torch.float64, shapes=((4,),))[0].detach()
    past = torch.randn(after, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def last_step(theta, grad):
        theta = theta.clone()
        optimizer = Anon([theta], lr=0.1, gamma=gamma, differentiable=True, guard=Guard(clip=10.0))
        for g in past:
            theta.grad = g
            optimizer.step()
        theta.grad = grad
        optimizer.step()
        return theta

    grad = torch.tensor([0.7, -1.3, 0.4, 2.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(last_step, (start.requires_grad_(), grad.requires_grad_()))


# Non-finite gradients


@every_gamma
@every_path
def test_a_skipped_step_of_grad_scaler_does_not_move_the_clock(gamma, path):
    params, twins = parameters(), parameters()
    scaled, plain = Anon(params, gamma=gamma, **path), Anon(twins, gamma=gamma, **path)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for t in range(1, 10):
        set_gradients(twins, t)
        for p, q in zip(params, twins, strict=True):
            p.grad = scaler.scale(q.grad)
        overflow = t in (1, 4)
        if overflow:
            params[1].grad[0] = math.inf
        scaler.step(scaled)
        scaler.update()
        if not overflow:
            plain.step()
    assert {state["step"].item() for state in states(params, scaled)} == {7}
    assert_same_run((params, scaled), (twins, plain))


@every_path
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_non_finite_gradient_can_be_an_error_that_writes_nothing(path, bad, steps_before):
    params = parameters()
    groups = [{"params": params[:1]}, {"params": params[1:], "guard": Guard(error_if_nonfinite=True)}]
    optimizer = Anon(groups, weight_decay=0.1, **path)
    train(params, optimizer, range(1, steps_before + 1))
    before = copy.deepcopy(([p.detach() for p in params], optimizer.state_dict()))
    set_gradients(params, 4)
    params[1].grad[2] = bad
    with pytest.raises(RuntimeError, match="group 1"):
        optimizer.step()
    assert_equal([p.detach() for p in params], before[0])
    assert_equal(optimizer.state_dict()["state"], before[1]["state"])
    set_gradients(params, 4)
    optimizer.step()
    assert {state["step"].item() for state in states(params, optimizer)} == {steps_before + 1}


@every_gamma
@every_path
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_spoils_its_own_coordinate_only(gamma, path, bad):
    (p,) = params = parameters(shapes=((6,),))
    optimizer = Anon(params, lr=0.1, gamma=gamma, **path)
    train(params, optimizer, [1, 2])
    set_gradients(params, 3)
    p.grad[2] = bad
    optimizer.step()
    before = p.detach().clone()
    train(params, optimizer, range(4, 20))
    others = torch.arange(6) != 2
    assert p[others].isfinite().all()
    assert (p[others] != before[others]).all()
    assert optimizer.state[p]["preconditioner"][others].isfinite().all()


# Errors


BAD = [
    ("lr", {"lr": -0.1}, "-0.1"),
    ("lr", {"lr": math.nan}, "nan"),
    ("lr", {"lr": math.inf}, "inf"),
    ("lr", {"lr": "fast"}, "fast"),
    ("lr", {"lr": torch.tensor(-0.5)}, "-0.5"),
    ("lr", {"lr": torch.tensor([0.1, 0.2])}, "0.2"),
    ("gamma", {"gamma": math.nan}, "nan"),
    ("gamma", {"gamma": math.inf}, "inf"),
    ("gamma", {"gamma": None}, "None"),
    ("betas", {"betas": (1.0, 0.999)}, "1.0"),
    ("betas", {"betas": (-0.1, 0.999)}, "-0.1"),
    ("betas", {"betas": (0.9, 1.0)}, "1.0"),
    ("betas", {"betas": (0.9, math.nan)}, "nan"),
    ("betas", {"betas": (0.9,)}, "0.9"),
    ("betas", {"betas": 0.9}, "0.9"),
    ("eps", {"eps": -1e-8}, "-1e-08"),
    ("eps", {"eps": math.nan}, "nan"),
    ("weight_decay", {"weight_decay": -0.1}, "-0.1"),
    ("weight_decay", {"weight_decay": math.nan}, "nan"),
    ("weight_decay", {"lr": 10.0, "weight_decay": 0.2}, "0.2"),
    ("weight_decay", {"lr": torch.tensor(10.0), "weight_decay": 0.2}, "0.2"),
    ("beta3", {"beta3": 1.0}, "1.0"),
    ("beta3", {"beta3": -0.5}, "-0.5"),
    ("growth", {"growth": 1.0}, "1.0"),
    ("growth", {"growth": 0.5}, "0.5"),
    ("growth", {"growth": math.nan}, "nan"),
    ("growth", {"growth": "fast"}, "fast"),
    ("error_if_nonfinite", {"guard": Guard(error_if_nonfinite=True), "capturable": True}, "True"),
    ("guard", {"guard": "strict"}, "strict"),
    ("guard", {"guard": True}, "True"),
    ("storage", {"storage": None}, "None"),
    ("lr_scale", {"lr_scale": "layer"}, "layer"),
    ("lr_scale", {"lr_scale": True}, "True"),
    ("statistic", {"statistic": "variance"}, "variance"),
    ("statistic", {"statistic": None}, "None"),
    ("project", {"project": "box"}, "box"),
    ("bias_correction", {"bias_correction": None}, "None"),
    ("decoupled_weight_decay", {"decoupled_weight_decay": "yes"}, "yes"),
    ("maximize", {"maximize": "yes"}, "yes"),
    ("foreach", {"foreach": "yes"}, "yes"),
    ("capturable", {"capturable": "yes"}, "yes"),
    ("differentiable", {"differentiable": "yes"}, "yes"),
    ("foreach", {"foreach": True, "differentiable": True}, "True"),
    ("fused", {"fused": "yes"}, "yes"),
    ("fused", {"fused": True, "differentiable": True}, "True"),
    ("fused", {"fused": True, "foreach": True}, "True"),
    ("total_steps", {"total_steps": 0}, "0"),
    ("total_steps", {"total_steps": 1.5}, "1.5"),
    ("max_grad_norm", {"max_grad_norm": 0.0}, "0.0"),
    ("max_grad_norm", {"max_grad_norm": math.nan}, "nan"),
]


@pytest.mark.parametrize(("name", "kwargs", "value"), BAD, ids=[f"{name}: {kwargs}" for name, kwargs, _ in BAD])
@pytest.mark.parametrize("place", ["argument", "group"])
def test_a_bad_value_is_named(name, kwargs, value, place):
    given = (parameters(), kwargs) if place == "argument" else ([{"params": parameters(), **kwargs}], {})
    with pytest.raises(ValueError, match=name) as error:
        Anon(given[0], **given[1])
    assert value in str(error.value)


BAD_OPTIONS = [
    (Guard, "clip", 0.0),
    (Guard, "clip", -1.0),
    (Guard, "clip", math.nan),
    (Guard, "clip", None),
    (Guard, "floor", -0.1),
    (Guard, "floor", 1.0),
    (Guard, "floor", math.nan),
    (Guard, "touch", "yes"),
    (Guard, "brake", 1),
    (Guard, "follow", 1),
    (Guard, "error_if_nonfinite", "yes"),
    (Storage, "preconditioner", torch.float16),
    (Storage, "window_tol", 1.0),
    (Storage, "window_tol", -0.1),
    (Storage, "stochastic_round", "yes"),
]


@pytest.mark.parametrize(("options", "name", "value"), BAD_OPTIONS)
def test_a_bad_option_is_named_where_it_is_made(options, name, value):
    for make in (
        lambda: options(**{name: value}),
        lambda: dataclasses.replace(options(), **{name: value}),
        lambda: Anon([{"params": parameters(), name: value}]),  # as a state dict has it
    ):
        with pytest.raises(ValueError, match=f"Invalid {name}: .*{value}"):
            make()


@pytest.mark.parametrize("options", [Guard(), Storage()])
def test_a_group_takes_fields_and_not_whole_options_in_training(options):
    params = parameters()
    optimizer = Anon(params)
    train(params, optimizer, [1])
    name = type(options).__name__.lower()
    optimizer.param_groups[0][name] = options
    with pytest.raises(ValueError, match=f"Invalid {name} in a param group: set its fields"):
        train(params, optimizer, [2])


@pytest.mark.parametrize("lr", [5.0, torch.tensor(5.0)], ids=["number", "tensor"])
def test_a_schedule_that_raises_lr_beyond_what_decay_allows_is_an_error(lr):
    params = parameters()
    optimizer = Anon(params, lr=lr / 10, weight_decay=1.0)
    train(params, optimizer, [1])
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match=r"Invalid weight_decay: 1\.0 with lr 5\.0"):
        train(params, optimizer, [2])


@every_path
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_narrow_gradients_does_not_overflow(path, dtype):
    """10^5 elements of 512 have the norm 1.6e5, which float16 does not hold."""
    p = Parameter(torch.ones(100_000, dtype=dtype))
    wide = Parameter(torch.ones(100_000))
    ours, theirs = (Anon([each], lr=0.1, gamma=0.0, max_grad_norm=1e5, **path) for each in (p, wide))
    p.grad, wide.grad = torch.full_like(p, 512.0), torch.full_like(wide, 512.0)
    ours.step()
    theirs.step()
    torch.testing.assert_close(p.float(), wide, rtol=8e-3, atol=0)
    assert (p < 0).all()


@every_path
def test_an_overflow_under_amp_is_skipped_even_where_it_could_be_an_error(path):
    p = Parameter(torch.ones(8))
    optimizer = Anon([p], lr=0.1, guard=Guard(error_if_nonfinite=True), **path)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(p.sum()).backward()
    p.grad[3] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(p, torch.ones(8))
    assert scaler.get_scale() == 2


@every_path
def test_amp_skips_what_no_kernel_takes_too(path):
    """A capturable step is skipped on the device; parameters with gaps in memory go another way."""
    gaps = Parameter(torch.randn(4, 10)[:, :5])
    odd = Parameter(torch.randn(4, 5))
    for params in ([gaps], [odd], [gaps, odd]):
        before = [p.detach().clone() for p in params]
        optimizer = Anon(params, lr=0.1, capturable=True, **path)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for p in params:
            p.grad = torch.full((5, 4), math.inf).t()  # another layout than the parameter's
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        for p, old in zip(params, before, strict=True):
            assert torch.equal(p, old)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_released_moment_is_freed_at_once(path):
    params = parameters(shapes=((4, 3), (5,)))
    optimizer = Anon(params, total_steps=10, **path)
    train(params, optimizer, range(1, 8))
    held = [weakref.ref(optimizer.state[p]["exp_avg_sq"]) for p in params]
    train(params, optimizer, [8])  # the last refresh
    assert [each() for each in held] == [None, None]


@pytest.mark.parametrize(
    "how",
    [{"differentiable": True}, *({"capturable": True, **path} for path in PATHS.values())],
    ids=str,
)
def test_a_released_moment_that_is_loaded_is_made_anew(how):
    """Where every step writes it: on a device that decides what is due, and under autograd."""
    params, twins = parameters(), parameters()
    plain = Anon(params, foreach=False, total_steps=10)
    for t in range(1, 10):
        set_gradients(params, t)
        plain.step()
    assert any(is_released(plain.state[p]["exp_avg_sq"]) for p in params)
    with torch.no_grad():
        for p, q in zip(params, twins, strict=True):
            q.copy_(p)
    if "differentiable" in how:
        twins = [q.clone() for q in twins]
    loaded = Anon(twins, total_steps=10, **how)
    loaded.load_state_dict(copy.deepcopy(plain.state_dict()))
    for group in loaded.param_groups:
        group.update(how)
    set_gradients(params, 10)
    set_gradients(twins, 10)
    plain.step()
    loaded.step()
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q)
        assert loaded.state[q]["exp_avg_sq"].shape == q.shape
        assert not is_released(loaded.state[q]["exp_avg_sq"])


@compiles
@pytest.mark.parametrize("how", [{"differentiable": True}, {"capturable": True, "foreach": False}, "compiled"], ids=str)
def test_a_released_moment_is_no_hindrance(how):
    """The end of a run of known length, under what writes the second moment on every step."""
    compiled = how == "compiled"
    options = {"foreach": False} if compiled else how
    params, twins = parameters(), parameters()
    if "differentiable" in how:
        params = [p.clone() for p in params]  # autograd refuses to write into leaves
    ours, theirs = Anon(params, total_steps=20, **options), Anon(twins, foreach=False)
    step = torch.compile(ours.step, backend="aot_eager") if compiled else ours.step
    for t in range(1, 21):
        set_gradients(params, t)
        set_gradients(twins, t)
        (step if t > 17 else ours.step)()
        theirs.step()
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q)


def test_coupled_decay_allows_any_product_with_lr():
    params = parameters()
    train(params, Anon(params, lr=10.0, weight_decay=0.2, decoupled_weight_decay=False), [1])


def test_a_misspelt_argument_is_a_type_error():
    with pytest.raises(TypeError, match="weight_decya"):
        Anon(parameters(), weight_decya=0.1)


def test_an_empty_list_is_torchs_error():
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        Anon([])


def test_a_tensor_that_is_no_leaf_is_torchs_error():
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        Anon([parameters()[0] * 2])


@every_path
def test_sparse_gradients_are_an_error_that_writes_nothing(path):
    table = torch.nn.Embedding(5, 3, sparse=True)
    before = table.weight.detach().clone()
    optimizer = Anon(table.parameters(), **path)
    table(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert_equal(table.weight.detach(), before)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
def test_integer_parameters_are_an_error(dtype):
    p = torch.ones(3, dtype=dtype)
    p.grad = torch.ones_like(p)
    optimizer = Anon([p])
    with pytest.raises(RuntimeError, match=str(dtype)):
        optimizer.step()
    assert_equal(p, torch.ones(3, dtype=dtype))
