"""Stacked bars: a bar an option, a colour a part, and a line where the GPU's memory ends."""

from __future__ import annotations

from pathlib import Path

from wherry.plan.choose import Option
from wherry.plan.memory import GIB, NAMES

# Parts that are drawn as one in text, the sign that they are drawn with, and their name.
GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("█", "weights", ("weights", "quantisation")),
    ("▓", "adapter, gradients, optimizer", ("adapter", "gradients", "optimizer")),
    ("▒", "activations", ("kept", "layer")),
    ("░", "logits and loss", ("loss",)),
    ("+", "buffers", ("gather",)),
    ("·", "context, fragmentation", ("context", "fragmentation")),
)
WIDTH = 60


def as_text(options: list[Option], chosen: Option | None) -> str:
    """Bars of up to WIDTH signs; one that is longer than the GPU's memory by more than half ends in '»'."""
    limit = options[0].gpus.memory * GIB
    scale = max(limit, min(1.5 * limit, max(option.peak.total for option in options))) / WIDTH
    end = round(limit / scale)
    lines = []
    for option in options:
        bar, done = "", 0.0
        for sign, _, names in GROUPS:
            done += sum(option.peak.parts[name].size for name in names if name in option.peak.parts)
            bar += sign * (round(done / scale) - len(bar))
        bar = bar[: WIDTH - 1] + "»" if len(bar) > WIDTH else bar
        bar = bar.ljust(WIDTH)
        marked = bar[:end] + "|" + bar[end:]
        verdict = option.verdict + ("  ← the choice" if option is chosen else "")
        lines.append(f"{option.setting!s:<32}{option.peak.total / GIB:8.1f} GiB  {marked} {verdict}")
    legend = "   ".join(f"{sign} {name}" for sign, name, _ in GROUPS)
    return "\n".join([*lines, f"{legend}   | {options[0].gpus.memory:.1f} GiB"])


def save(options: list[Option], path: Path) -> None:
    """The same as a picture; the suffix says of which kind (.svg, .png, .pdf)."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.6 * len(options)), layout="constrained")
    axes = figure.add_subplot()
    names = [str(option.setting) for option in options]
    done = [0.0] * len(options)
    colours = iter(colormaps["tab20"].colors)  # type: ignore[attr-defined]
    for part, label in NAMES.items():
        sizes = [option.peak.parts[part].size / GIB if part in option.peak.parts else 0.0 for option in options]
        if any(sizes):
            axes.barh(names, sizes, left=done, label=label, color=next(colours))
            done = [before + size for before, size in zip(done, sizes, strict=True)]
    end = min(max(done), 2.5 * options[0].gpus.memory)  # beyond that it matters no more by how much
    for row, size in enumerate(done):
        axes.text(min(size, end), row, f" {size:,.1f}", va="center")
    axes.axvline(options[0].gpus.memory, color="black", linestyle="--", label=f"memory of {options[0].gpus.name}")
    axes.set(xlabel="GiB of one GPU, at the fullest moment of a step", xlim=(0, 1.12 * end))
    axes.invert_yaxis()
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path)
