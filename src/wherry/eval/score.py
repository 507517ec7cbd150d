"""From outcomes to a score that says what it counts."""

from __future__ import annotations

import math
from typing import Any

Z95 = 1.959963984540054  # standard normal quantile of 0.975


def wilson(successes: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927, doi:10.1080/01621459.1927.10502953)."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(values: list[float], z: float = Z95) -> tuple[float, float]:
    """Normal interval of a mean, for scores that are not only 0 or 1."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, mean
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return mean - z * error, mean + z * error


def summarise(outcome: dict[str, Any]) -> dict[str, Any]:
    """The result of one task. Items that failed or have no verdict stay in n and count as 0."""
    items = outcome["items"]
    values = [item["value"] or 0.0 for item in items]
    binary = all(v in (0.0, 1.0) for v in values)
    low, high = wilson(sum(values), len(values)) if binary else mean_interval(values)
    return {
        "task": outcome["task"],
        "n": len(items),
        "N": outcome["dataset_size"],
        "score": sum(values) / len(values) if values else 0.0,
        "interval": [low, high],
        "interval_kind": "Wilson 95 %" if binary else "normal 95 %",
        "truncated": sum(item["stop_reason"] in ("max_tokens", "model_length") for item in items),
        "unparsed": sum(item["error"] is None and not item["answer"] for item in items),
        "errors": sum(item["error"] is not None for item in items),
        "sampling": outcome["sampling"],
        "inspect_ai": outcome["inspect_ai"],
        "log": outcome["log"],
    }


def line(result: dict[str, Any]) -> str:
    """One result for a terminal."""
    low, high = result["interval"]
    return (
        f"{result['task']}: {100 * result['score']:.1f} % [{100 * low:.1f}, {100 * high:.1f}] "
        f"({result['interval_kind']}, {result['n']} of {result['N']} items; {result['truncated']} truncated, "
        f"{result['unparsed']} unparsed, {result['errors']} errors)"
    )
