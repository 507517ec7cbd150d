"""Tokenise every row once and write what training reads: an Arrow file that all ranks map into memory."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from wherry.errors import WherryError
from wherry.prepare.render import Rendered, render
from wherry.prepare.rows import Completion, Example, Pair
from wherry.prepare.tokens import settle_stop

BATCH = 256
IGNORED = -100  # torch.nn.CrossEntropyLoss leaves such labels out
T = TypeVar("T")


@dataclass
class Counted:
    """What tokenising saw. lengths: tokens of every row kept; ids must be below rows_of_embedding."""

    stops: list[int]
    rows_of_embedding: int = 1 << 31
    lengths: array.array[int] = field(default_factory=lambda: array.array("I"))
    learned_tokens: int = 0
    largest_id: int = 0
    dropped: int = 0
    truncated: int = 0
    skipped_turns: int = 0
    equal_pairs: int = 0
    used_special: set[int] = field(default_factory=set)

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    def add(self, ids: list[int], length: int, learned: int, special: set[int]) -> None:
        """A row that is kept: all its ids, the tokens of its longest sequence, and how many of them are learned."""
        self.lengths.append(length)
        self.learned_tokens += learned
        self.largest_id = max(self.largest_id, *ids)
        self.used_special |= special.intersection(ids)


def write_tokens(
    examples: Iterable[Example], tokenizer: Any, target: Path, limit: int, too_long: str, counted: Counted
) -> None:
    """Write target with columns input_ids and labels (lists of int32, one row an example).

    limit: most tokens a row may have; too_long: error, drop or truncate.
    Raises WherryError (exit 2) naming the row.
    """
    special = set(tokenizer.added_tokens_decoder)
    with _arrow(target, ("input_ids", "labels"), limit, counted) as write:
        for batch in _batches(examples):
            rows = []
            for example, ids, labels in _encode(batch, tokenizer, counted):
                ids, labels = _fit(example, ids, labels, limit, too_long, counted)
                if ids:
                    counted.add(ids, len(ids), sum(label != IGNORED for label in labels), special)
                    rows.append((ids, labels))
            write(rows)


def write_pairs(
    pairs: Iterable[Pair], tokenizer: Any, target: Path, limit: int, too_long: str, counted: Counted
) -> None:
    """Write target with columns prompt_ids, chosen_ids and rejected_ids, as TRL's DPOTrainer has them.

    Pairs of two equal answers teach nothing: they are left out and counted. Raises WherryError as write_tokens does.
    """
    special = set(tokenizer.added_tokens_decoder)
    with _arrow(target, ("prompt_ids", "chosen_ids", "rejected_ids"), limit, counted) as write:
        for batch in _batches(pairs):
            both = _encode([answer for pair in batch for answer in (pair.chosen, pair.rejected)], tokenizer, counted)
            rows = []
            for pair in batch:
                (prompt, chosen), (other, rejected) = _split(*next(both)), _split(*next(both))
                if prompt != other:
                    raise WherryError(
                        "chosen and rejected do not answer the same prompt",
                        pair.where,
                        "give both the same turns before",
                    )
                longest = len(prompt) + max(len(chosen), len(rejected))
                room = limit - len(prompt)
                if longest > limit and not _may_cut(pair.where, longest, limit, too_long, room > 0, counted):
                    continue
                chosen, rejected = chosen[:room], rejected[:room]
                if chosen == rejected:
                    counted.equal_pairs += 1
                    continue
                counted.add(prompt + chosen + rejected, min(longest, limit), len(chosen) + len(rejected), special)
                rows.append((prompt, chosen, rejected))
            write(rows)


def _split(example: Example, ids: list[int], labels: list[int]) -> tuple[list[int], list[int]]:
    """A row's prompt and its answer, up to the token that ends the turn."""
    begin = next(i for i, label in enumerate(labels) if label != IGNORED)
    end = len(labels) - next(i for i, label in enumerate(reversed(labels)) if label != IGNORED)
    if IGNORED in labels[begin:end]:
        raise WherryError("an answer of a pair has several turns", example.where, "give one assistant turn an answer")
    return ids[:begin], ids[begin:end]


@contextmanager
def _arrow(
    target: Path, columns: tuple[str, ...], limit: int, counted: Counted
) -> Iterator[Callable[[Sequence[tuple[list[int], ...]]], None]]:
    """Yields a function that writes rows of token lists; target appears when all are written."""
    import pyarrow as pa

    schema = pa.schema([(name, pa.list_(pa.int32())) for name in columns])
    part = target.with_name(f".{target.name}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(part), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:

        def write(rows: Sequence[tuple[list[int], ...]]) -> None:
            lists = zip(*rows, strict=True) if rows else [[] for _ in columns]
            writer.write_batch(pa.record_batch([pa.array(c, pa.list_(pa.int32())) for c in lists], schema=schema))

        yield write
    if counted.rows == 0:
        part.unlink()
        reason = f"{counted.dropped} are longer than {limit} tokens"
        if counted.equal_pairs:
            reason += f", {counted.equal_pairs} are pairs of equal answers"
        raise WherryError(f"no row is left: {reason}", "data", "raise train.args.max_length, or give other data")
    part.replace(target)


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
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
        if ids and max(ids) >= counted.rows_of_embedding:
            raise WherryError(
                f"token {tokenizer.convert_ids_to_tokens(max(ids))!r} is id {max(ids)}, the model's embedding has "
                f"{counted.rows_of_embedding} rows",
                example.where,
                "use the tokenizer that belongs to the model, or name the token in model.add_tokens",
            )
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
    """The row, cut to limit where that is allowed and leaves something to learn; empty where it is dropped."""
    learns = any(label != IGNORED for label in labels[:limit])
    if len(ids) <= limit or _may_cut(example.where, len(ids), limit, too_long, learns, counted):
        return ids[:limit], labels[:limit]
    return [], []


def _may_cut(where: str, length: int, limit: int, too_long: str, learns: bool, counted: Counted) -> bool:
    """Whether a row that is too long is cut (True) or dropped; learns: whether its cut form would teach anything."""
    if too_long == "error":
        raise WherryError(
            f"the row has {length} tokens, the limit is {limit}",
            where,
            "raise train.args.max_length (at most the model's context), or set data.too_long to drop or truncate",
        )
    if too_long == "truncate" and learns:
        counted.truncated += 1
        return True
    counted.dropped += 1
    return False
