"""wherry prepare: fetch and check the model and the data, write the token contract.

One process, on a machine with a network (a login node); every later mode runs offline on what it leaves:

    prepare/model       the base model: a link to a folder or hub snapshot, or converted from GGUF
    prepare/tokenizer   the tokenizer of the run, its chat template and generation config
    prepare/train.arrow token ids and labels of every row, of pairs prompt and both answers (eval.arrow: held-out rows)
    prepare/token_lengths.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wherry.cli import open_run, parser, say
from wherry.device import quiet_cpu
from wherry.errors import WherryError
from wherry.rundir import Run


def main(arguments: list[str]) -> int:
    options = parser("prepare", __doc__, "wherry prepare recipes/demo.yaml").parse_args(arguments)
    run = open_run(options)
    if run.is_complete("prepare"):
        say(f"prepare of run {run.name!r} is complete: {run.dir('prepare')}")
        return 0
    quiet_cpu()
    with run.work("prepare") as record:
        prepare(run, record)
    return 0


def prepare(run: Run, record: dict[str, Any]) -> None:
    from wherry.prepare import tokens
    from wherry.prepare.source import identity, stage_model
    from wherry.prepare.tokenise import Counted

    folder, recipe = run.dir("prepare"), run.recipe
    model = folder / "model"
    source = stage_model(recipe.model, model)
    tokenizer = tokens.load_tokenizer(model, recipe)
    added = _add_tokens(tokenizer, recipe.model.add_tokens, model)
    context = tokens.context_length(model)
    asked = recipe.train.args.get("max_length")
    if asked is not None and not (isinstance(asked, int) and 0 < asked <= context):
        raise WherryError(
            f"train.args.max_length is {asked!r}, the model's context is {context}",
            "train.args.max_length",
            f"give a number of tokens up to {context}",
        )

    counted = Counted(stops=tokens.stop_ids(model), rows_of_embedding=tokens.embedding_rows(model))
    _tokenise(run, recipe.data.train, "train", tokenizer, asked or context, counted)
    held_out = Counted(stops=counted.stops, rows_of_embedding=counted.rows_of_embedding)
    if recipe.data.eval:
        _tokenise(run, recipe.data.eval, "eval", tokenizer, asked or context, held_out)

    _settle_pad(tokenizer, model, counted, held_out)
    longest = max(counted.longest, held_out.longest)
    max_length = asked or min(context, -(-longest // 64) * 64)
    tokenizer.model_max_length = context
    largest = max(counted.largest_id, held_out.largest_id)
    made = tokens.contract(tokenizer, model, counted.stops, largest, max_length)
    tokens.check_contract(made)
    tokens.save_tokenizer(tokenizer, counted.stops, model, folder / "tokenizer")
    record["data"] = _report(run, counted, max_length)
    run.update_manifest(contract=made | {"added_token_ids": added}, model=source | identity(model))
    say(f"prepared: {folder}")


def _add_tokens(tokenizer: Any, texts: list[str], model: Path) -> list[int]:
    """Ids of tokens that the model has never seen; its embedding has a row for each of them afterwards."""
    from wherry.prepare.grow import grow
    from wherry.prepare.tokens import embedding_rows

    new = [text for text in texts if text not in tokenizer.get_vocab()]
    if not new:
        return []
    tokenizer.add_special_tokens({"additional_special_tokens": new}, replace_extra_special_tokens=False)
    if len(tokenizer) > embedding_rows(model):
        grow(model, len(tokenizer))
    return sorted(tokenizer.convert_tokens_to_ids(new))


def _tokenise(run: Run, source: str, name: str, tokenizer: Any, limit: int, counted: Any) -> None:
    from wherry.prepare.rows import read_examples, read_pairs
    from wherry.prepare.tokenise import write_pairs, write_tokens

    data, template, target = run.recipe.data, str(tokenizer.chat_template or ""), run.dir("prepare") / f"{name}.arrow"
    if run.recipe.train.objective == "dpo":
        write_pairs(read_pairs(source, data, template), tokenizer, target, limit, data.too_long, counted)
    else:
        write_tokens(read_examples(source, data, template), tokenizer, target, limit, data.too_long, counted)


def _settle_pad(tokenizer: Any, model: Any, *counted: Any) -> None:
    from wherry.prepare.tokens import choose_pad, embedding_rows

    used = set().union(*(c.used_special for c in counted))
    pad = choose_pad(tokenizer, counted[0].stops, embedding_rows(model), used)
    if pad is None:
        raise WherryError(
            f"the pad token is {tokenizer.pad_token!r}, which is also a stop token, and no reserved token is free",
            str(model / "tokenizer_config.json"),
            "give the tokenizer a pad token of its own inside the embedding",
        )
    if pad != tokenizer.pad_token_id:
        say(f"tokens: pad was {tokenizer.pad_token!r}, now {tokenizer.convert_ids_to_tokens(pad)!r} ({pad})")
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)


def _report(run: Run, counted: Any, max_length: int) -> dict[str, Any]:
    import numpy as np

    from wherry.prepare import histogram

    lengths = np.array(counted.lengths)
    seen = histogram.summary(lengths) | {
        "learned_tokens": counted.learned_tokens,
        "dropped_rows": counted.dropped,
        "truncated_rows": counted.truncated,
        "skipped_turns": counted.skipped_turns,
        "equal_pairs": counted.equal_pairs,
    }
    histogram.save_picture(lengths, max_length, run.dir("prepare") / "token_lengths.png")
    say(
        f"data: {seen['rows']} rows, {seen['tokens']} tokens, of which {seen['learned_tokens']} are learned; "
        f"a row has {seen['min']} to {seen['max']}, median {seen['median']:.0f}, limit {max_length}"
    )
    for key in ("dropped_rows", "truncated_rows", "skipped_turns", "equal_pairs"):
        if seen[key]:
            say(f"data: {seen[key]} {key.replace('_', ' ')}")
    say(histogram.as_text(lengths))
    return seen
