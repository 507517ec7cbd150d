"""Which base is the adapter better merged into? Measured on prompts, against base + adapter as they were trained.

For QLoRA the question is open: the 16-bit weights are more exact, the 4-bit ones are what the adapter was trained on.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from wherry import cli
from wherry.errors import Exit, WherryError
from wherry.files import write_json
from wherry.merge import model, stream
from wherry.merge.journal import Attempt
from wherry.rundir import Run
from wherry.safetensors_file import checkpoint

PROMPTS = 32
MAX_TOKENS = 512  # of each row; a mean over positions needs no more


def compare(run: Run) -> str:
    """Merge the adapter as merge.base: bf16 and, for qlora, nf4 would; measure both. Returns the table.

    Writes merge/compare.json. Raises WherryError (exit 3) where two copies of the model do not fit into memory.
    """
    _require_memory(run)
    rows = _rows(run)
    reference = _log_probabilities(_as_trained(run), rows)
    run.dir("merge").mkdir(exist_ok=True)
    found = {"no adapter": _distance(reference, _log_probabilities(_load(run.dir("prepare") / "model", run), rows))}
    for base in ("bf16", "nf4") if run.recipe.train.tuning == "qlora" else ("bf16",):
        with tempfile.TemporaryDirectory(prefix=".compare.", dir=run.dir("merge")) as folder:
            found[base] = _distance(reference, _log_probabilities(_merged(run, base, Path(folder)), rows))
    measured = {"rows": len(rows), "positions": sum(map(len, rows)), "merged_into": found}
    write_json(run.dir("merge") / "compare.json", measured)
    return _table(measured)


def _require_memory(run: Run) -> None:
    import psutil

    needed = 2 * checkpoint(run.dir("prepare") / "model").total_size
    free = psutil.virtual_memory().available
    if free < needed:
        raise WherryError(
            f"--compare holds the model twice: {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB of memory are free",
            str(run.dir("prepare") / "model"),
            "compare on a small model of the same family, or on a machine with more memory",
            Exit.PREFLIGHT,
        )


def _rows(run: Run) -> list[Any]:
    """Token ids of the first rows of the held-out data, else of the training data."""
    import torch
    from datasets import Dataset

    paths = [run.dir("prepare") / f"{name}.arrow" for name in ("eval", "train")]
    data = Dataset.from_file(str(next(path for path in paths if path.is_file())))
    return [torch.tensor(data[i]["input_ids"][:MAX_TOKENS]) for i in range(min(PROMPTS, len(data)))]


def _as_trained(run: Run) -> Any:
    """Base and adapter side by side; for qlora the base has the values that it had in training, after quantisation."""
    from peft import PeftModel

    from wherry.train.config import quantization_config

    quantization = quantization_config(run.recipe.train)
    base = _load(run.dir("prepare") / "model", run, quantization_config=quantization)
    return PeftModel.from_pretrained(base.dequantize() if quantization else base, run.dir("train") / "adapter")


def _load(folder: Path, run: Run, **options: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        device_map="cpu",
        trust_remote_code=run.recipe.model.trust_remote_code,
        **options,
    )


def _merged(run: Run, base: str, folder: Path) -> Any:
    cli.say(f"compare: the adapter merged into {base}")
    parts = model.planned(run, base)
    with stream.made_for_pieces(), Attempt(folder / "model", plan="compare") as attempt:
        model.write_files(attempt, run, parts)
        attempt.finish()
    return _load(folder / "model", run)


def _log_probabilities(network: Any, rows: list[Any]) -> list[Any]:
    """Of the next token at every position: [tokens, vocabulary] in fp32, a row each."""
    import torch

    network.eval()
    with torch.no_grad():
        return [network(input_ids=row[None]).logits[0].float().log_softmax(dim=-1) for row in rows]


def _distance(reference: list[Any], found: list[Any]) -> dict[str, float]:
    """KL(reference ‖ found), mean and largest over positions; share of positions with the same first choice."""
    import torch

    kl = torch.cat([(p.exp() * (p - q)).sum(dim=-1) for p, q in zip(reference, found, strict=True)])
    same = torch.cat([p.argmax(dim=-1) == q.argmax(dim=-1) for p, q in zip(reference, found, strict=True)])
    return {"kl_mean": kl.mean().item(), "kl_max": kl.max().item(), "same_top": same.float().mean().item()}


def _table(measured: dict[str, Any]) -> str:
    lines = [
        f"distance to base + adapter: {measured['rows']} rows, {measured['positions']} positions; KL in nats",
        "",
        "| merged into | mean KL | largest KL | same most likely token |",
        "|---|---:|---:|---:|",
    ]
    for name, d in measured["merged_into"].items():
        lines.append(f"| {name} | {d['kl_mean']:.6f} | {d['kl_max']:.4f} | {100 * d['same_top']:.1f} % |")
    return "\n".join(lines) + "\n"
