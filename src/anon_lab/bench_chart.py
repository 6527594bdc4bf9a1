"""The bar chart of `anon bench`."""

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from anon_lab.bench import Report

COLOURS = {"AdamW": "#D55E00", "SGD": "#0072B2", "Anon": "#009E73"}  # Okabe and Ito's, safe for colour-blind eyes


def draw(report: "Report", path: Path) -> Path:
    """One panel a workload: time of a step as a ratio to torch's fused AdamW."""
    panels = len(report.rows)
    figure, axes = plt.subplots(1, panels, figsize=(4.2 * panels + 1.5, 4.6), squeeze=False, sharey=False)
    for axis, (name, rows) in zip(axes[0], report.rows.items(), strict=True):
        shown = [row for row in rows if row.ratio < 4][::-1]
        colours = [next((c for k, c in COLOURS.items() if row.name.startswith(k)), "#888888") for row in shown]
        axis.barh([row.name for row in shown], [row.ratio for row in shown], color=colours)
        axis.axvline(1.0, color="black", linewidth=1, linestyle=":")
        for index, row in enumerate(shown):
            axis.text(row.ratio + 0.02, index, f"{row.ratio:.2f}", va="center", fontsize=8)
        best = min((row for row in rows if row.name.startswith("Anon fused")), key=lambda row: row.ratio)
        axis.set_title(f"{name}: {best.ratio:.2f} at best", fontsize=10)
        axis.set_xlabel("time of a step / AdamW fused")
        axis.set_xlim(0, max(row.ratio for row in shown) * 1.15)
        axis.tick_params(axis="y", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"One optimizer step on {report.device}, {report.day}", fontsize=11)
    figure.tight_layout()
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=130)
    plt.close(figure)
    partial.replace(path)
    return path
