"""The cosines that the paper prints, row by row as printed: its matrix is not symmetric."""

from collections.abc import Mapping

NAMES = ("Anon γ 1", "Anon γ 1.1", "Anon γ 1.15", "AdamW", "Lion", "Muon")
"""The paper's Adam has decoupled decay."""

Matrix = Mapping[str, tuple[float, ...]]

ALL: Matrix = {
    "Anon γ 1": (1, 0.597, 0.355, 0.914, 0.857, 0.901),
    "Anon γ 1.1": (0.597, 1, 0.425, 0.573, 0.522, 0.539),
    "Anon γ 1.15": (0.335, 0.425, 1, 0.335, 0.299, 0.306),
    "AdamW": (0.914, 0.573, 0.355, 1, 0.880, 0.923),
    "Lion": (0.857, 0.522, 0.299, 0.880, 1, 0.925),
    "Muon": (0.901, 0.539, 0.306, 0.923, 0.925, 1),
}
WEIGHTS: Matrix = {
    "Anon γ 1": (1, 0.317, 0.201, 0.511, 0.161, 0.194),
    "Anon γ 1.1": (0.317, 1, 0.328, 0.248, 0.088, 0.098),
    "Anon γ 1.15": (0.201, 0.328, 1, 0.156, 0.056, 0.063),
    "AdamW": (0.511, 0.248, 0.156, 1, 0.191, 0.222),
    "Lion": (0.161, 0.088, 0.056, 0.191, 1, 0.132),
    "Muon": (0.194, 0.098, 0.063, 0.222, 0.132, 1),
}


def both(matrix: Matrix, a: str, b: str) -> str:
    """What stands at (a, b), and at (b, a) where that is another number; nothing where the paper has no such pair."""
    if a not in matrix or b not in matrix:
        return ""
    here, there = matrix[a][NAMES.index(b)], matrix[b][NAMES.index(a)]
    return f"{here:g}" if here == there else f"{here:g} / {there:g}"
