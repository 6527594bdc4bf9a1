"""What Anon remembers of a parameter: which entries, in which precision, on which device."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, _get_scalar_dtype

_WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.complex32: torch.complex64,
}


ENTRIES = {"step", "exp_avg", "exp_avg_sq", "weight", "preconditioner", "memory", "level", "brake", "gamma"}
"""What `fresh_state` makes."""


def state_dtype(p: Tensor) -> torch.dtype:
    """The parameter's own dtype, or the 32-bit one above it: (1 - beta2) g^2 does not survive in less."""
    return _WIDER.get(p.dtype, p.dtype)


def fresh_state(p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    dtype = state_dtype(p)
    v_dtype = _preconditioner_dtype(p, group)
    scalar = dtype.to_real()
    # What the host decides by stays on the host, unless a graph is to decide: reading it back would wait.
    host = _host(p, group)
    return {
        "step": torch.zeros((), dtype=_get_scalar_dtype(), device=host),
        "exp_avg": torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format),
        "weight": torch.zeros((), dtype=scalar, device=host),
        "preconditioner": torch.zeros_like(p, dtype=v_dtype, memory_format=torch.preserve_format),
        "memory": torch.zeros((), dtype=torch.float64, device=host),
        "level": p.detach().new_zeros((), dtype=scalar),  # new_zeros: a DTensor's is one too
        "brake": p.detach().new_zeros((), dtype=scalar).expand(3).clone(),
        "gamma": torch.full((), group["gamma"], dtype=torch.float64, device=host),
    }


def raise_if_foreign(state_dict: dict[str, Any]) -> None:
    """Refuse what another optimizer remembers: it would fail later, in the midst of a step."""
    for state in state_dict["state"].values():
        if state and (missing := ENTRIES - set(state)):
            raise ValueError(
                f"Invalid state_dict: its state lacks {', '.join(sorted(missing))}, so it is another optimizer's, "
                "or an earlier version's; `load_adamw_state` takes that of torch's Adam and AdamW"
            )


def placed(p: Tensor, group: dict[str, Any], key: str, value: Any) -> Any:
    """A loaded entry in the dtype and on the device that `fresh_state` gives it."""
    scalar = state_dtype(p).to_real()
    match key:
        case "step":
            return torch.as_tensor(value, dtype=_get_scalar_dtype()).to(_host(p, group))
        case "gamma" | "memory":
            return torch.as_tensor(value, dtype=torch.float64).to(_host(p, group))
        case "weight":
            return torch.as_tensor(value, dtype=scalar).to(_host(p, group))
        case "level" | "brake":
            return torch.as_tensor(value, dtype=scalar).to(p.device)
        case "exp_avg" | "exp_avg_sq":
            return value.to(device=p.device, dtype=state_dtype(p))
        case "preconditioner":
            return value.to(device=p.device, dtype=_preconditioner_dtype(p, group))
        case _:
            return value


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of memory that an optimizer's state takes, any torch optimizer's; what is shared counts once.

    Anon keeps 12 bytes a parameter of four bytes or less, 8 once its second moments are released (`total_steps`), and
    2 less with `Storage(preconditioner=torch.bfloat16)`; eight numbers a tensor come on top."""
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    }
    return sum(storages.values())


def _preconditioner_dtype(p: Tensor, group: dict[str, Any]) -> torch.dtype:
    dtype = state_dtype(p)
    return group["preconditioner"] if dtype == torch.float32 else dtype


def _host(p: Tensor, group: dict[str, Any]) -> torch.device:
    return p.device if group["capturable"] else torch.device("cpu")


def real_view(x: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary coordinates."""
    return torch.view_as_real(x) if x.is_complex() else x


def packed_state(states: list[dict[str, Tensor]]) -> list[Tensor]:
    """The scalars of several parameters, each kind as one vector whose elements the states hold from now on."""
    vectors = []
    for key in ("step", "weight", "memory", "gamma", "level", "brake"):
        vector = torch.stack([state[key] for state in states])
        for state, element in zip(states, vector.unbind(), strict=True):
            state[key] = element
        vectors.append(vector)
    return vectors


def released_moment(p: Tensor) -> Tensor:
    """A second moment that is no longer needed: the right shape, one number of memory."""
    return torch.zeros((), dtype=state_dtype(p), device=p.device).expand(p.shape)


def is_released(exp_avg_sq: Tensor) -> bool:
    return exp_avg_sq.numel() > 1 and not any(exp_avg_sq.stride())
