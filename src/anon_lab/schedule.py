"""The learning rate over a run, as a share of its peak."""

import math

from anon_lab.tasks import Recipe


def lr_share(step: int, total: int, recipe: Recipe) -> float:
    """The share at a step, counted from 0, of a run of `total` steps.

    A linear rise over the warm-up that reaches the peak with its last step; then, over the rest,
    cosine: final + (1 - final) (1 + cos(pi x)) / 2 with x from 0 to 1, or steps: drop^(milestones passed).
    """
    warmup = round(recipe.warmup * total)
    if step < warmup:
        return (step + 1) / warmup
    if recipe.schedule == "cosine":
        x = (step - warmup) / max(total - warmup, 1)
        return recipe.final_lr + (1 - recipe.final_lr) * (1 + math.cos(math.pi * x)) / 2
    if recipe.schedule == "step":
        return recipe.drop ** sum(step >= round(share * total) for share in recipe.milestones)
    return 1.0
