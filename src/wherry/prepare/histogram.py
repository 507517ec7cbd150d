"""How long the rows are: as text for the terminal, as a picture for the run directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

BINS = 10


def summary(lengths: np.ndarray) -> dict[str, float]:
    """lengths: tokens of each row, shape (rows,)."""
    return {
        "rows": int(lengths.size),
        "tokens": int(lengths.sum()),
        "min": int(lengths.min()),
        "median": float(np.median(lengths)),
        "p95": float(np.percentile(lengths, 95)),
        "max": int(lengths.max()),
    }


def as_text(lengths: np.ndarray) -> str:
    counts, edges = np.histogram(lengths, bins=min(BINS, len(np.unique(lengths))))
    widest = max(counts)
    return "\n".join(
        f"  {int(low):>6}–{int(high):<6} {'█' * round(30 * count / widest):<30} {count}"
        for count, low, high in zip(counts, edges, edges[1:], strict=False)
    )


def save_picture(lengths: np.ndarray, limit: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.hist(lengths, bins=40, color="#3b6ea5")
    axes.axvline(limit, color="#b03a2e", linestyle="--", label=f"limit: {limit}")
    axes.set(xlabel="tokens in a row", ylabel="rows", title=f"{lengths.size} training rows")
    axes.legend()
    figure.savefig(path, dpi=120)
