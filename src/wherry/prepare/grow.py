"""More rows for the embedding and the output head, where tokens were added that have none.

Done once, in the prepared model, so that training (under any sharding), merging and serving see a model that fits its
tokenizer. Never done unasked, and never the other way: fewer rows than the tokenizer is the mistake, not its cure.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from wherry.cli import say
from wherry.files import atomic_directory, read_json, require_space, write_json
from wherry.safetensors_file import INDEX, Checkpoint, checkpoint

MULTIPLE = 64
"""Rows are a multiple of it: matrix units want one, and vLLM splits rows over GPUs."""
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in")
HEADS = ("lm_head", "embed_out")


def token_modules(model: Checkpoint) -> list[str]:
    """Last names of the modules with a row for each token: the embedding, and the output head where it is its own."""
    names = [name.split(".")[-2] for name in model.tensors if name.endswith(".weight") and "." in name]
    return [module for module in (*EMBEDDINGS, *HEADS) if module in names]


def grow(folder: Path, tokens: int) -> None:
    """Give a model folder rows for so many tokens; a new one is the mean of the old, which no answer prefers.

    Other files stay where they are: the new folder links to them.
    """
    before = checkpoint(folder)
    wanted = {f"{module}.weight" for module in token_modules(before)}
    grown = [name for name in before.tensors if ".".join(name.split(".")[-2:]) in wanted]
    rows = -(-tokens // MULTIPLE) * MULTIPLE
    shards = {path for name, (path, _) in before.tensors.items() if name in grown}
    say(f"tokens: {tokens} need more rows than the embedding has: now {rows}, new ones are the mean of the others")
    require_space(folder.parent, sum(path.stat().st_size for path in shards) * 2, "giving the embedding more rows")
    source = folder.resolve()
    link = os.symlink if folder.is_symlink() else os.link  # files of our own would go with the folder that they are in
    with atomic_directory(folder) as part:
        for path in sorted(source.iterdir()):
            if path.name not in (*(shard.name for shard in shards), "config.json", INDEX):
                link(path, part / path.name)
        added = sum(_write_shard(shard, part / shard.name, grown, rows) for shard in shards)
        write_json(part / "config.json", _with_rows(read_json(source / "config.json"), rows))
        if before.sharded:
            index = read_json(source / INDEX)
            index["metadata"] = {**index.get("metadata", {}), "total_size": before.total_size + added}
            write_json(part / INDEX, index)


def _write_shard(source: Path, target: Path, names: list[str], rows: int) -> int:
    """Returns the bytes that were added."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    added = 0
    with safe_open(source, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        metadata = file.metadata()
    for name in {*names} & {*tensors}:
        old = tensors[name]
        mean = old.float().mean(dim=0, keepdim=True).to(old.dtype)
        tensors[name] = torch.cat([old, mean.expand(rows - old.shape[0], -1)]).contiguous()
        added += (rows - old.shape[0]) * old.shape[1] * old.element_size()
    save_file(tensors, target, metadata=metadata)
    return added


def _with_rows(config: dict[str, Any], rows: int) -> dict[str, Any]:
    text = {"text_config": config["text_config"] | {"vocab_size": rows}} if "text_config" in config else {}
    return config | text | ({} if text and "vocab_size" not in config else {"vocab_size": rows})
