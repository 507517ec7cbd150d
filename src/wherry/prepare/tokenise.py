"""Tokenise every row once and write what training reads: an Arrow file that all ranks map into memory."""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from wherry.errors import WherryError
from wherry.prepare.render import Rendered, render
from wherry.prepare.rows import Completion, Example
from wherry.prepare.tokens import settle_stop

BATCH = 256
IGNORED = -100  # torch.nn.CrossEntropyLoss leaves such labels out


@dataclass
class Counted:
    """What tokenising saw. lengths: tokens of every row kept."""

    stops: list[int]
    lengths: array.array[int] = field(default_factory=lambda: array.array("I"))
    learned_tokens: int = 0
    largest_id: int = 0
    dropped: int = 0
    truncated: int = 0
    skipped_turns: int = 0
    used_special: set[int] = field(default_factory=set)

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)


def write_tokens(
    examples: Iterable[Example], tokenizer: Any, target: Path, limit: int, too_long: str, counted: Counted
) -> None:
    """Write target with columns input_ids and labels (lists of int32, one row an example).

    limit: most tokens a row may have; too_long: error, drop or truncate.
    Raises WherryError (exit 2) naming the row.
    """
    import pyarrow as pa

    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32()))])
    part = target.with_name(f".{target.name}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    special = set(tokenizer.added_tokens_decoder)
    with pa.OSFile(str(part), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for batch in _batches(examples):
            columns: dict[str, list[Any]] = {"input_ids": [], "labels": []}
            for example, ids, labels in _encode(batch, tokenizer, counted):
                ids, labels = _fit(example, ids, labels, limit, too_long, counted)
                if not ids:
                    continue
                counted.lengths.append(len(ids))
                counted.learned_tokens += sum(label != IGNORED for label in labels)
                counted.largest_id = max(counted.largest_id, *ids)
                counted.used_special |= special.intersection(ids)
                columns["input_ids"].append(ids)
                columns["labels"].append(labels)
            writer.write_batch(pa.record_batch(columns, schema=schema))
    if counted.rows == 0:
        part.unlink()
        raise WherryError(
            f"no row is left: all {counted.dropped} are longer than {limit} tokens",
            "data",
            "raise train.args.max_length",
        )
    part.replace(target)


def _batches(examples: Iterable[Example]) -> Iterator[list[Example]]:
    iterator = iter(examples)
    while batch := list(islice(iterator, BATCH)):
        yield batch


def _encode(batch: list[Example], tokenizer: Any, counted: Counted) -> Iterator[tuple[Example, list[int], list[int]]]:
    rendered = [render(example, tokenizer) for example in batch]
    plain = isinstance(batch[0], Completion)
    # A chat template writes its special tokens itself; plain text gets the tokenizer's (Llama's bos).
    encoded = tokenizer([r.text for r in rendered], add_special_tokens=plain, return_offsets_mapping=True)
    for i, (example, text) in enumerate(zip(batch, rendered, strict=True)):
        ids = encoded["input_ids"][i]
        labels = _labels(ids, encoded["offset_mapping"][i], text)
        if isinstance(example, Completion) and (not ids or ids[-1] != tokenizer.eos_token_id):
            ids, labels = [*ids, tokenizer.eos_token_id], [*labels, tokenizer.eos_token_id]
        counted.skipped_turns += text.skipped_turns
        learned = [label for label in labels if label != IGNORED]
        if not learned:
            raise WherryError("nothing to learn in the row: its answer has no tokens", example.where, "remove it")
        if counted.rows == 0 and i == 0:
            counted.stops = settle_stop(tokenizer, counted.stops, learned[-1], example.where)
        yield example, ids, labels


def _labels(ids: list[int], offsets: list[tuple[int, int]], text: Rendered) -> list[int]:
    """The ids that begin inside a learned range, IGNORED elsewhere."""
    labels = [IGNORED] * len(ids)
    ranges = iter(text.learned)
    begin, end = next(ranges)
    for position, (first, last) in enumerate(offsets):
        while first >= end:
            following = next(ranges, None)
            if following is None:
                return labels
            begin, end = following
        if first >= begin and last > first:
            labels[position] = ids[position]
    return labels


def _fit(
    example: Example, ids: list[int], labels: list[int], limit: int, too_long: str, counted: Counted
) -> tuple[list[int], list[int]]:
    if len(ids) <= limit:
        return ids, labels
    cut = labels[:limit]
    if too_long == "truncate" and any(label != IGNORED for label in cut):
        counted.truncated += 1
        return ids[:limit], cut
    if too_long != "error":
        counted.dropped += 1
        return [], []
    raise WherryError(
        f"the row has {len(ids)} tokens, the limit is {limit}",
        example.where,
        "raise train.args.max_length (at most the model's context), or set data.too_long to drop or truncate",
    )
