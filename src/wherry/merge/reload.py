"""python -m wherry.merge.reload names|logits FOLDER [--trust]: does transformers take a folder as a whole model?

A process of its own: transformers needs a second or two and more memory than a merge does. Prints one line of JSON:
null, or what is wrong.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def names(folder: str, trust: bool) -> str | None:
    """Tensors that the model lacks, has too many, or has in another shape. Reads headers: weights stay on the disk."""
    info = _load(folder, trust, device_map="meta", output_loading_info=True)[1]
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            return f"it has {kind.replace('_', ' ')}: {', '.join(map(str, sorted(info[kind])[:3]))}"
    return None


def logits(folder: str, trust: bool) -> str | None:
    import torch

    model = _load(folder, trust, device_map="cpu")
    with torch.no_grad():
        out = model(input_ids=torch.arange(min(16, model.config.get_text_config().vocab_size))[None]).logits
    return None if torch.isfinite(out).all() else "its logits are not finite"


def _load(folder: str, trust: bool, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=trust, **options)


if __name__ == "__main__":
    what, folder, *rest = sys.argv[1:]
    print(json.dumps({"names": names, "logits": logits}[what](folder, "--trust" in rest)))
