"""torch.optim's own contract for Anon: the checks of torch's test suite by their names, on its OptimizerInfo."""

# ruff: noqa: PT009 - torch's assertEqual compares tensors, and its TestCase seeds every test

import contextlib
import copy
import functools
import gc
import inspect
import io
import pickle
import warnings
from unittest import mock

import torch
from torch.nn import Parameter
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from anon_optim import Anon
from anon_optim._fused import backend

# On import torch's test helpers freeze torch.backends for the whole process, though other tests may want to set its
# flags, and in some versions they use what NumPy has deprecated.
with torch.backends.__allow_nonbracketed_mutation(), warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.testing._internal.common_device_type import instantiate_device_type_tests, onlyCUDA
    from torch.testing._internal.common_optimizers import (
        ErrorOptimizerInput,
        OptimizerErrorEnum,
        OptimizerInfo,
        OptimizerInput,
        TensorTracker,
        get_error_inputs_for_all_optims,
        optims,
    )
    from torch.testing._internal.common_utils import TestCase, parametrize

GAMMAS = (-0.5, 0.0, 1.0, 1.1)

VARIANTS = {
    "default": {},
    "decoupled decay": {"weight_decay": 0.1},
    "coupled decay": {"weight_decay": 0.1, "decoupled_weight_decay": False},
    "maximize, coupled decay": {"weight_decay": 0.1, "decoupled_weight_decay": False, "maximize": True},
    "printed algorithm": {"guard": None},
    "lr per tensor": {"lr_scale": "tensor"},
    "growth 1.5": {"growth": 1.5},
    "belief": {"statistic": "belief"},
    "capturable": {"capturable": True},
    "capturable, tensor lr, decay": {"capturable": True, "lr": torch.tensor(0.001), "weight_decay": 0.1},
}

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # said once where no C compiler is found
    FUSED_ON = tuple(device_type for device_type in ("cpu", "cuda") if backend(device_type) is not None)

STEPS_ACROSS_REFRESHES = 5  # refreshes at 1, 2 and 4, a plain step at 3 and 5


def inputs(device, dtype=None, *, gamma):
    return [
        OptimizerInput(params=None, kwargs={"gamma": gamma, **copy.deepcopy(kwargs)}, desc=desc)
        for desc, kwargs in VARIANTS.items()
    ]


def error_inputs(device, dtype, *, gamma):
    def rejected(message, **kwargs):
        return ErrorOptimizerInput(
            OptimizerInput(params=None, kwargs={"gamma": gamma, **kwargs}, desc=str(kwargs)),
            error_type=ValueError,
            error_regex=message,
        )

    return [
        *get_error_inputs_for_all_optims(device, dtype),
        rejected(r"beta.*1\.0", betas=(1.0, 0.0)),
        rejected(r"weight_decay.*-1", weight_decay=-1),
        rejected(r"lr.*-0\.1", lr=-0.1),
        rejected(r"eps.*-1", eps=-1),
        rejected(r"growth.*1\.0", growth=1.0),
    ]


class GammaInfo(OptimizerInfo):
    """Anon at one gamma, so that each gamma is a test of its own with its own name."""

    def __init__(self, gamma):
        super().__init__(
            Anon,
            optim_inputs_func=functools.partial(inputs, gamma=gamma),
            optim_error_inputs_func=functools.partial(error_inputs, gamma=gamma),
            scheduler_inputs=(
                [lambda opt: StepLR(opt, gamma=0.9, step_size=10), lambda opt: ReduceLROnPlateau(opt)],
                [lambda opt: ExponentialLR(opt, gamma=0.9)],
            ),
            supported_impls=("foreach", "differentiable", "fused"),
            # What a checkpoint lacks that was written before these arguments existed.
            not_og_supported_flags=tuple(
                key for key in Anon([torch.zeros(1)]).defaults if key not in ("lr", "gamma", "betas", "eps")
            ),
            has_capturable_arg=True,
            supports_fused_on=FUSED_ON,
        )
        self.gamma = gamma

    @property
    def name(self):
        return "Anon_gamma_" + str(self.gamma).replace("-", "minus_").replace(".", "_")


ANON = [GammaInfo(gamma) for gamma in GAMMAS]


def with_implementations(optim_info, device, optim_inputs, skip):
    """Each input in the plain loop and in every other implementation. torch's own helper leaves foreach out on the
    CPU, where Anon has it too."""
    on_device = torch.device(device).type in optim_info.supports_fused_on
    impls = [i for i in optim_info.supported_impls if i not in skip and (on_device or i != "fused")]
    for optim_input in optim_inputs:
        for chosen in (None, *impls):
            flags = {impl: impl == chosen for impl in optim_info.supported_impls}
            kwargs = {**copy.deepcopy(optim_input.kwargs), **flags}
            yield OptimizerInput(params=None, kwargs=kwargs, desc=f"{optim_input.desc}, {chosen or 'loop'}")


def each_input(*, skip=("differentiable",), including_impls=True):
    """Run the check once for every variant of Anon, by default in every implementation but the differentiable one.

    With differentiable=True a step may not write to a leaf that requires a gradient, hence the default for skip.
    """

    def decorate(check):
        @functools.wraps(check)
        def test(self, device, dtype, optim_info, **options):
            optim_inputs = optim_info.optim_inputs_func(device=device, dtype=dtype)
            if including_impls:
                optim_inputs = with_implementations(optim_info, device, optim_inputs, skip)
            for optim_input in optim_inputs:
                with self.subTest(config=optim_input.desc):
                    check(self, device, dtype, optim_info, optim_input.kwargs, **options)

        return test

    return decorate


class Regression:
    """The least-squares problem of torch's tests: a weight, a bias, and the loss |weight x + bias|^2."""

    def __init__(self, device, dtype, *, rows=10, columns=5, contiguous=True):
        stride = 1 if contiguous else 2
        self.weight = Parameter(torch.randn(rows, columns * stride, device=device, dtype=dtype)[:, ::stride])
        self.bias = Parameter(torch.randn(rows * stride, device=device, dtype=dtype)[::stride])
        self.x = torch.randn(columns, device=device, dtype=dtype)

    @property
    def params(self):
        return [self.weight, self.bias]

    def clone(self):
        twin = copy.copy(self)
        twin.weight = Parameter(self.weight.detach().clone())
        twin.bias = Parameter(self.bias.detach().clone())
        return twin

    def loss(self):
        return (self.weight.mv(self.x) + self.bias).pow(2).sum()

    def backward(self):
        self.weight.grad = self.bias.grad = None
        loss = self.loss()
        loss.backward()
        return loss

    def train(self, optimizer, steps):
        for _ in range(steps):
            self.backward()
            optimizer.step()


def named(params, yes):
    return [(f"name{i}", p) for i, p in enumerate(params)] if yes else params


def without_names(state_dict):
    groups = [{k: v for k, v in g.items() if k != "param_names"} for g in state_dict["param_groups"]]
    return {"state": state_dict["state"], "param_groups": groups}


def rosenbrock(z):
    x, y = z
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def acts_on_coordinates_alone(kwargs):
    """Whether no number of the update is taken over the whole tensor, as the guard's and lr_scale's are."""
    guarded = kwargs.get("guard", "default") is not None and kwargs["gamma"] != 0
    return not guarded and kwargs.get("lr_scale") is None


def small_network(device, dtype):
    torch.manual_seed(1)
    layers = torch.nn.Linear(2, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 1), torch.nn.Sigmoid()
    return torch.nn.Sequential(*layers).to(device=device, dtype=dtype)


def convolution(device, dtype):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 2, 1, stride=2), torch.nn.BatchNorm2d(2))
    return model.to(device=device, dtype=dtype), torch.rand(1, 4, 16, 16, device=device, dtype=dtype)


def train_model(model, optimizer, x, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


def one_uneven_iteration(iteration, model, extra, optimizer, x):
    """No gradients at all at iteration 2, and a layer frozen from 3 up to 5, so that steps drift apart."""
    optimizer.zero_grad()
    model[2].requires_grad_(not 3 <= iteration < 5)
    if iteration != 2:
        model(x).sum().backward()
        for p in extra:
            p.grad = torch.full_like(p, 0.1 * (iteration + 1))
    optimizer.step()


def optimizer_of_one_parameter(device, dtype, kwargs):
    return Anon([torch.rand(2, 3, device=device, dtype=dtype, requires_grad=True)], **kwargs)


def add_to_state(optimizer):
    optimizer.state["test"] = 1


def note_addition(optimizer, state_dict):
    state_dict["saw addition"] = state_dict["state"].pop("test", None) == 1
    return state_dict


def set_lr_in_place(optimizer, state_dict):
    state_dict["param_groups"][0]["lr"] = 0.002


def return_other_lr(optimizer, state_dict):
    other = copy.deepcopy(state_dict)
    other["param_groups"][0]["lr"] = 0.003
    return other


def note_loading(optimizer):
    optimizer.state["saw other lr"] = optimizer.param_groups[0]["lr"] == 0.003
    optimizer.state["post hook ran"] = True


class TestAnonContract(TestCase):
    exact_dtype = True

    def assert_bits_equal(self, actual, expected):
        """Dtypes, shapes and values, or lists and dicts of them, without any tolerance."""
        self.assertEqual(actual, expected, rtol=0, atol=0)

    def assert_went_the_right_way(self, value, initial, kwargs):
        if kwargs.get("maximize", False):
            self.assertGreater(value, initial)
        else:
            self.assertLess(value, initial)

    @optims(ANON)
    def test_optim_infos_do_not_specify_global_cliquey_kwargs(self, device, dtype, optim_info):
        for flag in ("foreach", "fused", "differentiable"):
            for optim_input in optim_info.optim_inputs_func(device=device):
                self.assertNotIn(flag, optim_input.kwargs)

    @optims(ANON)
    def test_errors(self, device, dtype, optim_info):
        for error_input in optim_info.optim_error_inputs_func(device=device, dtype=dtype):
            optim_input = error_input.optimizer_error_input
            self.assertEqual(error_input.error_on, OptimizerErrorEnum.CONSTRUCTION_ERROR)
            warns = issubclass(error_input.error_type, Warning)
            expectation = self.assertWarnsRegex if warns else self.assertRaisesRegex
            with (
                self.subTest(config=optim_input.desc),
                expectation(error_input.error_type, error_input.error_regex),
            ):
                Anon(optim_input.params, **optim_input.kwargs)

    @parametrize("contiguous", [True, False])
    @parametrize("with_lrsched", [True, False])
    @optims(ANON)
    def test_forloop_goes_right_direction(self, device, dtype, optim_info, contiguous, with_lrsched):
        for constructors in optim_info.scheduler_inputs if with_lrsched else [[]]:
            for optim_input in optim_info.optim_inputs_func(device=device):
                with self.subTest(config=optim_input.desc):
                    problem = Regression(device, dtype, contiguous=contiguous)
                    self.assertEqual(problem.weight.is_contiguous(), contiguous)
                    optimizer = Anon(problem.params, foreach=False, fused=False, **optim_input.kwargs)
                    self.train_with_schedulers(problem, optimizer, constructors, optim_input.kwargs)

    def train_with_schedulers(self, problem, optimizer, constructors, kwargs):
        schedulers = [constructor(optimizer) for constructor in constructors]
        initial = problem.loss().item()
        for _ in range(20):
            loss = optimizer.step(problem.backward).detach()
            for scheduler in schedulers:
                scheduler.step(*([loss] if isinstance(scheduler, ReduceLROnPlateau) else []))
        self.assert_went_the_right_way(problem.loss().item(), initial, kwargs)

    @optims(ANON)
    @each_input(including_impls=False)
    def test_param_group_with_lrscheduler_goes_right_direction(self, device, dtype, optim_info, kwargs):
        for constructors in optim_info.scheduler_inputs:
            problem = Regression(device, dtype)
            lr = torch.tensor(0.01) if isinstance(kwargs.get("lr"), torch.Tensor) else 0.01
            groups = [{"params": [problem.weight]}, {"params": [problem.bias], "lr": lr}]
            optimizer = Anon(groups, **copy.deepcopy(kwargs))
            self.train_with_schedulers(problem, optimizer, constructors, kwargs)

    @optims(ANON)
    @each_input()
    def test_tensor_lr(self, device, dtype, optim_info, kwargs):
        with_float = Regression(device, dtype)
        with_tensor = with_float.clone()
        kwargs["lr"] = 1e-3
        expected = Anon(with_float.params, **kwargs)
        kwargs["lr"] = torch.tensor(1e-3)
        actual = Anon(with_tensor.params, **kwargs)
        for _ in range(STEPS_ACROSS_REFRESHES):
            with_float.train(expected, 1)
            with_tensor.train(actual, 1)
            self.assertEqual(with_tensor.params, with_float.params)
        self.assertIs(actual.param_groups[0]["lr"], kwargs["lr"])

    @optims(ANON, dtypes=[torch.complex64])
    @each_input(skip=("differentiable", "fused"))  # the fused kernels know no complex numbers
    def test_complex(self, device, dtype, optim_info, kwargs):
        # The last parameter is real: real and complex ones may share a group.
        shapes = ((10, 5), dtype), ((10,), dtype), ((10, 5), torch.float32)
        complex_params = [torch.randn(shape, device=device, dtype=d, requires_grad=True) for shape, d in shapes]
        as_real = [torch.view_as_real(p) if p.is_complex() else p for p in complex_params]
        real_params = [p.detach().clone().requires_grad_() for p in as_real]
        complex_optimizer = Anon(complex_params, **copy.deepcopy(kwargs))
        real_optimizer = Anon(real_params, **copy.deepcopy(kwargs))
        for _ in range(STEPS_ACROSS_REFRESHES):
            for c, r in zip(complex_params, real_params, strict=True):
                c.grad = torch.randn_like(c)
                r.grad = torch.view_as_real(c.grad).clone() if c.is_complex() else c.grad.clone()
            complex_optimizer.step()
            real_optimizer.step()
            actual = [torch.view_as_real(p) if p.is_complex() else p for p in complex_params]
            self.assert_bits_equal(actual, real_params)

    @optims(ANON, dtypes=[torch.complex64])
    @each_input(skip=("differentiable", "fused"))  # the fused kernels know no complex numbers
    def test_complex_2d(self, device, dtype, optim_info, kwargs):
        # A guard takes means over a tensor, so there real and imaginary parts may not become two tensors.
        apart = acts_on_coordinates_alone(kwargs)
        z = torch.randn(2, device=device, dtype=dtype, requires_grad=True)
        parts = [z.real.detach().clone(), z.imag.detach().clone()]
        twins = [p.requires_grad_() for p in (parts if apart else [torch.stack(parts, -1)])]
        optimizer = Anon([z], **copy.deepcopy(kwargs))
        optimizer_of_twins = Anon(twins, **copy.deepcopy(kwargs))

        def split(complex_tensor):
            return [complex_tensor.real, complex_tensor.imag] if apart else [torch.view_as_real(complex_tensor)]

        def joined():
            return torch.complex(*twins) if apart else torch.view_as_complex(twins[0])

        tracker = TensorTracker()
        for _ in range(STEPS_ACROSS_REFRESHES):
            optimizer.zero_grad()
            optimizer_of_twins.zero_grad()
            loss = rosenbrock(z).abs()
            loss.backward()
            loss_of_twins = rosenbrock(joined()).abs()
            loss_of_twins.backward()
            for tensor in (loss, *split(z.grad)):
                tracker.add(tensor)
            for tensor in (loss_of_twins, *(p.grad for p in twins)):
                tracker.pop_check_set(tensor, self)
            optimizer.step()
            optimizer_of_twins.step()
            for tensor in split(z):
                tracker.add(tensor)
            for twin in twins:
                tracker.pop_check_set(twin, self)
        self.assertTrue(tracker.all_popped())

    @optims(ANON, dtypes=[torch.float64])
    @each_input(including_impls=False)
    def test_foreach_matches_forloop(self, device, dtype, optim_info, kwargs):
        self.compare_with_loop("foreach", device, dtype, kwargs)

    @optims(ANON, dtypes=[torch.float32, torch.bfloat16, torch.float16])
    @each_input(including_impls=False)
    def test_fused_matches_forloop(self, device, dtype, optim_info, kwargs):
        if torch.device(device).type not in optim_info.supports_fused_on:
            self.skipTest("no fused kernel for this device")
        self.compare_with_loop("fused", device, dtype, kwargs)

    def compare_with_loop(self, impl, device, dtype, kwargs, assert_eq_kwargs=None, step_dtype=None):
        models, extras, optimizers = [], [], []
        for chosen in (None, impl):
            model = small_network(device, dtype)
            # foreach kernels have tripped over tensors without dimensions and without elements.
            extra = [torch.ones(shape, device=device, dtype=dtype, requires_grad=True) for shape in ((), (0, 3))]
            models.append(model)
            extras.append(extra)
            flags = {i: i == chosen for i in ("foreach", "fused")}
            optimizers.append(Anon([*model.parameters(), *extra], **flags, **copy.deepcopy(kwargs)))
        x = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], device=device, dtype=dtype)
        for iteration in range(7):
            for model, extra, optimizer in zip(models, extras, optimizers, strict=True):
                one_uneven_iteration(iteration, model, extra, optimizer, x)
            self.compare_params_and_states(optimizers, assert_eq_kwargs, step_dtype)

    def compare_params_and_states(self, optimizers, assert_eq_kwargs, step_dtype):
        tracker = TensorTracker(assert_eq_kwargs)
        loop, other = optimizers
        for expected, actual in zip(loop.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
            expected_state, actual_state = loop.state[expected], other.state[actual]
            self.assertEqual(list(actual_state), list(expected_state))
            if step_dtype is not None:
                self.assertEqual({expected_state["step"].dtype, actual_state["step"].dtype}, {step_dtype})
            tracker.add(expected)
            tracker.pop_check_set(actual, self)
            for key, value in expected_state.items():
                tracker.add(value)
                tracker.pop_check_set(actual_state[key], self)
        self.assertTrue(tracker.all_popped())

    @optims(ANON, dtypes=[torch.float64])
    def test_set_default_dtype_works_with_foreach(self, device, dtype, optim_info):
        previous = torch.get_default_dtype()
        half = {"atol": 1e-5, "rtol": 1e-3}
        cases = (torch.float64, torch.float64, None), (torch.float16, torch.float32, half)
        for default_dtype, step_dtype, tolerance in cases:
            for optim_input in optim_info.optim_inputs_func(device=device):
                if optim_input.desc not in ("default", "printed algorithm", "lr per tensor", "capturable"):
                    continue
                try:
                    torch.set_default_dtype(default_dtype)
                    with self.subTest(config=optim_input.desc, default_dtype=default_dtype):
                        self.compare_with_loop("foreach", device, dtype, optim_input.kwargs, tolerance, step_dtype)
                finally:
                    torch.set_default_dtype(previous)

    @optims(ANON)
    @each_input()
    def test_param_groups_weight_decay(self, device, dtype, optim_info, kwargs):
        problem = Regression(device, dtype)
        without_decay = {**copy.deepcopy(kwargs), "weight_decay": 0.0}
        optimizer = Anon([{"params": [problem.weight], **kwargs}, {"params": [problem.bias], **without_decay}])
        self.assertEqual(optimizer.param_groups[1]["weight_decay"], 0.0)
        initial = problem.loss().item()
        problem.train(optimizer, 20)
        self.assert_went_the_right_way(problem.loss().item(), initial, kwargs)

    @optims(ANON)
    @each_input()
    def test_param_groups_lr(self, device, dtype, optim_info, kwargs):
        problem = Regression(device, dtype)
        irrelevant = Parameter(torch.randn(2, device=device, dtype=dtype))
        before = irrelevant.detach().clone()
        optimizer = Anon(
            [{"params": problem.params, "lr": 1e-3, **kwargs}, {"params": [irrelevant]}],
            lr=1e-28,
            gamma=kwargs["gamma"],
        )
        initial = problem.loss().item()
        for _ in range(20):
            irrelevant.grad = torch.rand_like(irrelevant)
            problem.train(optimizer, 1)
        self.assert_went_the_right_way(problem.loss().item(), initial, kwargs)
        self.assert_bits_equal(irrelevant, before)

    @optims(ANON)
    @each_input(skip=())
    def test_step_is_noop_when_params_have_no_grad(self, device, dtype, optim_info, kwargs):
        params = [torch.randn(2, 3, device=device, dtype=dtype) for _ in range(2)]
        before = [p.clone() for p in params]
        optimizer = Anon(params, **kwargs)
        returned = optimizer.step(lambda: torch.tensor([1], device=device, dtype=dtype))
        self.assertEqual(returned, torch.tensor([1], device=device, dtype=dtype))
        self.assert_bits_equal(params, before)
        self.assertEqual(len(optimizer.state), 0)

    @optims(ANON)
    @each_input(skip=())
    def test_step_is_noop_for_zero_grads(self, device, dtype, optim_info, kwargs):
        if kwargs.get("weight_decay", 0) != 0:
            return  # decay moves parameters whatever the gradient
        param = torch.randn(5, 1, device=device, dtype=dtype, requires_grad=True)
        before = param.detach().clone()
        params = [param.clone() if kwargs["differentiable"] else param]
        optimizer = Anon(params, **kwargs)
        for _ in range(STEPS_ACROSS_REFRESHES):
            params[0].grad = torch.zeros_like(params[0])
            optimizer.step(lambda: torch.tensor([1], device=device, dtype=dtype))
            self.assert_bits_equal(params[0].detach(), before)

    @optims(ANON)
    @each_input()
    def test_grads_are_never_inplaced_into(self, device, dtype, optim_info, kwargs):
        params = [Parameter(torch.randn(2, 3, device=device, dtype=dtype)) for _ in range(2)]
        optimizer = Anon(params, **kwargs)
        for _ in range(STEPS_ACROSS_REFRESHES):
            for p in params:
                p.grad = torch.randn_like(p)
            grads = [(p.grad, p.grad.clone(), p.grad._version) for p in params]
            optimizer.step()
            for p, (grad, value, version) in zip(params, grads, strict=True):
                self.assertIs(p.grad, grad)
                self.assertEqual(p.grad._version, version)
                self.assert_bits_equal(p.grad, value)

    @optims(ANON)
    @each_input(skip=())
    def test_optimizer_can_be_printed(self, device, dtype, optim_info, kwargs):
        params = [Parameter(torch.randn(2, 3, device=device, dtype=dtype)) for _ in range(2)]
        text = repr(Anon(params, **kwargs))
        self.assertTrue(text.startswith("Anon ("))
        self.assertIn(f"gamma: {kwargs['gamma']}", text)

    @parametrize("is_named_optim0", [True, False])
    @parametrize("is_named_optim1", [True, False])
    @optims(ANON)
    @each_input()
    def test_state_dict_deterministic(self, device, dtype, optim_info, kwargs, is_named_optim0, is_named_optim1):
        problem = Regression(device, dtype, rows=2, columns=3)
        optimizer = Anon(named(problem.params, is_named_optim0), **copy.deepcopy(kwargs))
        problem.train(optimizer, 3)

        twin = problem.clone()
        optimizer_of_twin = Anon(named(twin.params, is_named_optim1), **copy.deepcopy(kwargs))
        optimizer_of_twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for _ in range(6):  # across the refreshes at 4 and 8
            problem.train(optimizer, 1)
            twin.train(optimizer_of_twin, 1)
            self.assert_bits_equal(twin.params, problem.params)
        expected = without_names(optimizer.state_dict())
        self.assert_bits_equal(without_names(optimizer_of_twin.state_dict()), expected)

        # A parameter that occurs twice is written the same way both times.
        optimizer_of_twin.param_groups.extend(optimizer_of_twin.param_groups)
        repeated = without_names(optimizer_of_twin.state_dict())
        self.assertEqual(repeated["param_groups"][-1], expected["param_groups"][-1])

    @optims(ANON)
    @each_input()
    def test_can_load_older_state_dict(self, device, dtype, optim_info, kwargs):
        model, x = convolution(device, dtype)
        optimizer = Anon(model.parameters(), **kwargs)
        train_model(model, optimizer, x, steps=3)
        old = copy.deepcopy(optimizer.state_dict())
        for group in old["param_groups"]:
            for key in optim_info.not_og_supported_flags:
                group.pop(key, None)
        optimizer.load_state_dict(old)
        train_model(model, optimizer, x)
        self.assertEqual({state["step"].item() for state in optimizer.state.values()}, {4.0})
        for key in optim_info.not_og_supported_flags:
            self.assertIn(key, optimizer.param_groups[0])

    @parametrize("is_named_optim0", [True, False])
    @parametrize("is_named_optim1", [True, False])
    @optims(ANON)
    @each_input(including_impls=False)
    def test_can_load_from_to_named_state_dict(
        self, device, dtype, optim_info, kwargs, is_named_optim0, is_named_optim1
    ):
        model, x = convolution(device, dtype)

        def parameters(is_named):
            return model.named_parameters() if is_named else model.parameters()

        optimizer = Anon(parameters(is_named_optim0), **copy.deepcopy(kwargs))
        train_model(model, optimizer, x, steps=3)
        loaded = Anon(parameters(is_named_optim1), **copy.deepcopy(kwargs))
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train_model(model, loaded, x)
        if is_named_optim0 or is_named_optim1:
            names = loaded.state_dict()["param_groups"][0]["param_names"]
            self.assertEqual(names, ["0.weight", "0.bias", "1.weight", "1.bias"])

    @parametrize("is_named_optim", [True, False])
    @optims(ANON)
    @each_input()
    def test_save_load_equality_with_weights_only(self, device, dtype, optim_info, kwargs, is_named_optim):
        problem = Regression(device, dtype, rows=2, columns=3)
        optimizer = Anon(named(problem.params, is_named_optim), **kwargs)
        problem.train(optimizer, 3)
        state_dict = optimizer.state_dict()
        for weights_only in (False, True):
            file = io.BytesIO()
            torch.save(state_dict, file)
            file.seek(0)
            self.assert_bits_equal(torch.load(file, weights_only=weights_only), state_dict)

    @optims(ANON)
    @each_input()
    def test_load_nontensor_step(self, device, dtype, optim_info, kwargs):
        problem = Regression(device, dtype, rows=2, columns=3)
        optimizer = Anon(problem.params, **kwargs)
        problem.train(optimizer, 3)
        old = copy.deepcopy(optimizer.state_dict())
        for state in old["state"].values():
            state["step"] = state["step"].item()
        twin = problem.clone()
        loaded = Anon(twin.params, **copy.deepcopy(kwargs))
        loaded.load_state_dict(old)
        problem.train(optimizer, 2)
        twin.train(loaded, 2)
        self.assert_bits_equal(twin.params, problem.params)
        self.assertTrue(all(torch.is_tensor(state["step"]) for state in loaded.state.values()))

    @onlyCUDA
    @optims(ANON)
    @each_input()
    def test_state_dict_with_cuda_params(self, device, dtype, optim_info, kwargs):
        params = [Parameter(torch.randn(2, 3, dtype=dtype)) for _ in range(2)]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer = Anon(params, **copy.deepcopy(kwargs))
        for _ in range(3):
            optimizer.step()
        params_cuda = [p.detach().to(device) for p in params]
        for p, p_cuda in zip(params, params_cuda, strict=True):
            p_cuda.grad = p.grad.to(device)
        optimizer_cuda = Anon(params_cuda, **copy.deepcopy(kwargs))
        state_dict = copy.deepcopy(optimizer.state_dict())
        optimizer_cuda.load_state_dict(state_dict)
        self.assertEqual(state_dict, optimizer.state_dict())  # loading left the dict itself alone
        for state in optimizer_cuda.state.values():
            self.assertEqual(state["step"].device.type, "cuda" if kwargs.get("capturable") else "cpu")
        for _ in range(5):
            optimizer.step()
            optimizer_cuda.step()
            self.assertEqual(params_cuda, params, exact_device=False)
            self.assertEqual(optimizer_cuda.state_dict(), optimizer.state_dict(), exact_device=False)

    @onlyCUDA
    @parametrize("impl", ["fused", "capturable"])
    @optims(ANON)
    @each_input(including_impls=False)
    def test_cpu_load_state_dict(self, device, dtype, optim_info, kwargs, impl):
        """A checkpoint that was moved to the CPU, of an optimizer whose step counter belongs on the device."""
        on_cpu = Parameter(torch.tensor([0.1, 0.2], dtype=dtype))
        optimizer = Anon([on_cpu], **copy.deepcopy(kwargs))
        on_cpu.grad = torch.rand_like(on_cpu)
        optimizer.step()
        checkpoint = copy.deepcopy(optimizer.state_dict())
        checkpoint["param_groups"][0][impl] = True
        on_device = Parameter(on_cpu.detach().to(device))
        loaded = Anon([on_device], **{**copy.deepcopy(kwargs), impl: True})
        loaded.load_state_dict(checkpoint)
        for _ in range(STEPS_ACROSS_REFRESHES):
            on_cpu.grad = torch.rand_like(on_cpu)
            on_device.grad = on_cpu.grad.to(device)
            optimizer.step()
            loaded.step()
        self.assertEqual(on_device, on_cpu, exact_device=False)

    @optims(ANON)
    @each_input(including_impls=False)
    def test_fused_does_not_step_if_foundinf(self, device, dtype, optim_info, kwargs):
        if torch.device(device).type not in optim_info.supports_fused_on:
            self.skipTest("no fused kernel for this device")
        for grad_scale in (None, torch.ones(1, device=device)):
            params = [torch.ones(1, device=device, dtype=dtype) for _ in range(5)]
            optimizer = Anon(params, fused=True, **copy.deepcopy(kwargs))
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.grad_scale = grad_scale
            optimizer.found_inf = torch.ones((), device=device)
            optimizer.step()
            self.assert_bits_equal(params, [torch.ones(1, device=device, dtype=dtype)] * 5)
            for state in optimizer.state.values():
                self.assertEqual(state["step"].item(), 0)

    @optims(ANON)
    @each_input(skip=())
    def test_state_dict_pre_hook(self, device, dtype, optim_info, kwargs):
        optimizer = optimizer_of_one_parameter(device, dtype, kwargs)
        optimizer.register_state_dict_pre_hook(add_to_state)
        self.assertEqual(optimizer.state_dict()["state"]["test"], 1)

    @optims(ANON)
    @each_input(skip=())
    def test_state_dict_post_hook(self, device, dtype, optim_info, kwargs):
        optimizer = optimizer_of_one_parameter(device, dtype, kwargs)
        optimizer.register_state_dict_post_hook(note_addition)
        self.assertFalse(optimizer.state_dict()["saw addition"])

    @optims(ANON)
    @each_input(skip=())
    def test_state_dict_pre_post_hook(self, device, dtype, optim_info, kwargs):
        optimizer = optimizer_of_one_parameter(device, dtype, kwargs)
        optimizer.register_state_dict_pre_hook(add_to_state)
        optimizer.register_state_dict_post_hook(note_addition)
        state_dict = optimizer.state_dict()
        self.assertNotIn("test", state_dict["state"])
        self.assertTrue(state_dict["saw addition"])

    @optims(ANON)
    @each_input(skip=())
    def test_load_state_dict_pre_hook_and_prepend(self, device, dtype, optim_info, kwargs):
        optimizer = optimizer_of_one_parameter(device, dtype, kwargs)
        state_dict = optimizer.state_dict()
        optimizer.register_load_state_dict_pre_hook(set_lr_in_place)
        optimizer.load_state_dict(state_dict)
        self.assertEqual(optimizer.param_groups[0]["lr"], 0.002)
        optimizer.register_load_state_dict_pre_hook(return_other_lr, prepend=True)
        optimizer.load_state_dict(state_dict)
        self.assertEqual(optimizer.param_groups[0]["lr"], 0.002)  # the prepended hook ran first

    @optims(ANON)
    @each_input(skip=())
    def test_load_state_dict_post_hook(self, device, dtype, optim_info, kwargs):
        optimizer = optimizer_of_one_parameter(device, dtype, kwargs)
        optimizer.register_load_state_dict_post_hook(note_loading)
        optimizer.load_state_dict(optimizer.state_dict())
        self.assertFalse(optimizer.state["saw other lr"])
        self.assertTrue(optimizer.state["post hook ran"])

    @optims(ANON)
    @each_input(skip=())
    def test_load_state_dict_pre_post_hook(self, device, dtype, optim_info, kwargs):
        optimizer = optimizer_of_one_parameter(device, dtype, kwargs)
        optimizer.register_load_state_dict_pre_hook(return_other_lr)
        optimizer.register_load_state_dict_post_hook(note_loading)
        optimizer.load_state_dict(optimizer.state_dict())
        self.assertTrue(optimizer.state["saw other lr"])
        self.assertTrue(optimizer.state["post hook ran"])

    @optims(ANON)
    @each_input(skip=())
    def test_step_post_hook(self, device, dtype, optim_info, kwargs):
        self.check_step_hook(device, dtype, kwargs, "register_step_post_hook")

    @optims(ANON)
    @each_input(skip=())
    def test_step_pre_hook(self, device, dtype, optim_info, kwargs):
        self.check_step_hook(device, dtype, kwargs, "register_step_pre_hook")

    def check_step_hook(self, device, dtype, kwargs, register):
        optimizer = Anon([torch.tensor([1, 1], device=device, dtype=dtype)], **kwargs)
        calls = []
        handle = getattr(optimizer, register)(lambda opt, args, kwargs: calls.append(opt))
        optimizer.step()
        optimizer.step()
        self.assertEqual(len(calls), 2)
        self.assertIs(calls[0], optimizer)
        handle.remove()
        optimizer.step()
        self.assertEqual(len(calls), 2)

    @optims(ANON)
    @each_input(skip=())
    def test_step_all_hooks(self, device, dtype, optim_info, kwargs):
        params = [torch.tensor([1, 1], device=device, dtype=dtype)]
        optimizers = [Anon(params, **kwargs), SGD(params)]
        calls = []

        def note(what):
            return lambda opt, args, kwargs: calls.append(what)

        handles = [
            register_optimizer_step_pre_hook(note("global pre")),
            register_optimizer_step_post_hook(note("global post")),
        ]
        try:
            for optimizer in optimizers:
                handles.append(optimizer.register_step_pre_hook(note("pre")))
                handles.append(optimizer.register_step_post_hook(note("post")))
            once = ["global pre", "pre", "post", "global post"]
            for n, optimizer in enumerate([*optimizers, optimizers[0]], start=1):
                optimizer.step()
                self.assertEqual(calls, once * n)
        finally:
            for handle in handles:
                handle.remove()
        for optimizer in optimizers:
            optimizer.step()
        self.assertEqual(calls, once * 3)

    @optims(ANON)
    @each_input()
    def test_deepcopy_copies_all_public_attrs(self, device, dtype, optim_info, kwargs):
        problem = Regression(device, dtype, rows=2, columns=3)
        optimizer = Anon(problem.params, **kwargs)
        problem.train(optimizer, 3)

        def public(obj):
            return {k for k in vars(obj) if not k.startswith("_")}

        # torch warns once for each optimizer, and a copy is another.
        warnings.filterwarnings("ignore", "This instance was constructed with capturable=True", UserWarning)

        for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
            twin, optimizer_of_twin = copied((problem, optimizer))
            self.assertEqual(public(optimizer_of_twin), public(optimizer))
            self.assert_bits_equal(optimizer_of_twin.state_dict(), optimizer.state_dict())
            # The copies belong together, and continue as the originals would have.
            original, optimizer_of_original = copy.deepcopy((problem, optimizer))
            twin.train(optimizer_of_twin, 2)
            original.train(optimizer_of_original, 2)
            self.assert_bits_equal(twin.params, original.params)

    @optims(ANON)
    @each_input(including_impls=False)
    def test_non_empty_state(self, device, dtype, optim_info, kwargs):
        model = torch.nn.Linear(5, 5).to(device=device, dtype=dtype)
        optimizer = Anon(model.parameters(), **kwargs)
        train_model(model, optimizer, torch.rand(2, 5, device=device, dtype=dtype))
        self.assertEqual(len(optimizer.state), 2)
        for state in optimizer.state.values():
            self.assertGreater(len(state), 0)

    @onlyCUDA
    @optims(ANON)
    @each_input(including_impls=False)
    def test_defaults_changed_to_foreach(self, device, dtype, optim_info, kwargs):
        module = inspect.getmodule(Anon)
        for fused, expected in ((False, "_multi_tensor_anon"), (None, None)):
            model = torch.nn.Linear(5, 5).to(device=device, dtype=dtype)
            optimizer = Anon(model.parameters(), fused=fused, **copy.deepcopy(kwargs))
            with contextlib.ExitStack() as stack:
                paths = {
                    name: stack.enter_context(mock.patch.object(module, name, wraps=getattr(module, name)))
                    for name in ("_single_tensor_anon", "_multi_tensor_anon")
                }
                train_model(model, optimizer, torch.rand(2, 5, device=device, dtype=dtype))
            called = [name for name, path in paths.items() if path.called]
            self.assertEqual(called, [expected] if expected else [])

    @onlyCUDA
    @optims(ANON)
    @each_input(including_impls=False)
    def test_peak_memory_foreach(self, device, dtype, optim_info, kwargs):
        """The budget over the loop is three lists of intermediates (the clipped preconditioners, the updates and the
        new parameters), and one more for each option that needs its own: coupled gradients or decayed parameters,
        negated gradients, step sizes or clocks on the device. torch's is one, and three with capturable."""
        n_params = 10
        budget = 3 + sum(bool(kwargs.get(key)) for key in ("weight_decay", "maximize", "lr_scale", "capturable"))
        for refreshing in (True, False):
            peaks = []
            for foreach in (False, True):
                # 128 floats fill one 512-byte block of the allocator, so that sizes add up exactly.
                params = [torch.rand(16, 8, device=device, dtype=dtype) for _ in range(n_params)]
                optimizer = Anon(params, foreach=foreach, fused=False, **copy.deepcopy(kwargs))
                for p in params:
                    p.grad = torch.rand_like(p)
                for _ in range(1 if refreshing else 2):
                    optimizer.step()
                gc.collect()
                torch.cuda.reset_peak_memory_stats()
                optimizer.step()
                peaks.append(torch.cuda.max_memory_allocated())
            intermediate = n_params * 128 * 4
            self.assertLessEqual(peaks[1], peaks[0] + budget * intermediate)


instantiate_device_type_tests(TestAnonContract, globals(), only_for=("cpu", "cuda"))
