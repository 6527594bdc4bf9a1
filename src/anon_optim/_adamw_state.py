"""What a checkpoint of torch's Adam or AdamW holds of which parameter."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

Group = dict[str, Any]


def adamw_states(groups: list[Group], state_dict: dict[str, Any]) -> list[tuple[Group, Tensor, float, dict[str, Any]]]:
    """Of each parameter that the checkpoint has a state of: our group, the parameter, its beta2, its state."""
    if not {"state", "param_groups"} <= set(state_dict):
        raise ValueError(
            f"Invalid state_dict: it has the entries {', '.join(map(str, state_dict)) or 'none'}, expected "
            "state and param_groups, as `AdamW.state_dict()` returns them"
        )
    found = []
    for (group, name, p), (saved_group, _, key) in _pairs(groups, state_dict["param_groups"]):
        saved = state_dict["state"].get(key)
        if saved is None:
            continue
        if not {"step", "exp_avg", "exp_avg_sq"} <= set(saved) or "preconditioner" in saved:
            raise ValueError(
                f"Invalid state_dict: its state has the entries {', '.join(saved) or 'none'}, expected step, "
                "exp_avg and exp_avg_sq, as Adam and AdamW have"
            )
        if saved["exp_avg"].shape != p.shape:
            shapes = tuple(saved["exp_avg"].shape), tuple(p.shape)
            raise ValueError(f"Invalid state_dict: {name} has the shape {shapes[0]} in it, expected {shapes[1]}")
        found.append((group, p, float(saved_group["betas"][1]), saved))
    return found


def _pairs(groups: list[Group], saved_groups: list[Group]) -> Iterator[tuple[tuple[Group, str, Any], ...]]:
    """Every parameter beside what is saved of it: by its name where both have names, else by its place."""
    ours, theirs = _named(groups), _named(saved_groups)
    if all("param_names" in group for group in (*groups, *saved_groups)):
        by_name = {name: (group, name, key) for group, name, key in theirs}
        if strange := {name for _, name, _ in ours} ^ by_name.keys():
            raise ValueError(f"Invalid state_dict: {min(strange)!r} is a parameter of one of the two optimizers alone")
        return ((mine, by_name[mine[1]]) for mine in ours)
    sizes, saved_sizes = ([len(group["params"]) for group in each] for each in (groups, saved_groups))
    if sizes != saved_sizes:
        raise ValueError(
            f"Invalid state_dict: its groups have {saved_sizes} parameters, expected {sizes}; where groups differ, "
            "give both optimizers `model.named_parameters()` or groups of it, so that names tell"
        )
    return zip(ours, theirs, strict=True)


def _named(groups: list[Group]) -> list[tuple[Group, str, Any]]:
    """Each group's parameters, or their keys in a state dict."""
    return [
        (group, name, param)
        for group in groups
        for name, param in zip(
            group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))],
            group["params"],
            strict=True,
        )
    ]
