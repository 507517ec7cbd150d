"""The mask, the stop token, the pad token, and what a row that does not fit does."""

import pytest
from chat_tokenizer import CHATML, DROPS_SYSTEM, NO_STOP, REASONING, SPECIAL, STRICT, chat_tokenizer

from wherry.errors import Exit, WherryError
from wherry.prepare.render import render
from wherry.prepare.rows import Completion, Conversation, Pair
from wherry.prepare.tokenise import IGNORED, Counted, write_pairs, write_tokens
from wherry.prepare.tokens import check_contract, choose_pad, settle_stop

END = 256 + SPECIAL.index("<|im_end|>")


def talk(*turns, train_from=0):
    roles = {"S": "system", "U": "user", "A": "assistant", "T": "tool"}
    return Conversation("d.jsonl:7", [{"role": roles[t[0]], "content": t[2:]} for t in turns], train_from)


def learned(example, tokenizer, tmp_path, limit=10_000, too_long="error", stops=(END,)):
    """Text of the labels of one row, as the model would have to write it."""
    from datasets import Dataset

    counted = Counted(stops=list(stops))
    write_tokens([example], tokenizer, tmp_path / "t.arrow", limit, too_long, counted)
    row = Dataset.from_file(str(tmp_path / "t.arrow"))[0]
    assert len(row["input_ids"]) == len(row["labels"])
    assert all(label in (IGNORED, i) for label, i in zip(row["labels"], row["input_ids"], strict=True))
    return tokenizer.decode([label for label in row["labels"] if label != IGNORED]), row, counted


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (CHATML, ("S:be brief", "U:hi", "A:hello"), "hello<|im_end|>"),
        (CHATML, ("U:hi", "A:one", "U:more", "A:two"), "one<|im_end|>two<|im_end|>"),
        (CHATML, ("U:naïve 😀?", "A:füße 漢字"), "füße 漢字<|im_end|>"),
        (CHATML, ("U:yes", "A:yes"), "yes<|im_end|>"),
        (STRICT, ("U:hi", "A:hello"), "hello<|im_end|>"),
        (DROPS_SYSTEM, ("U:hi", "A:one", "U:more", "A:two"), "one<|im_end|>two<|im_end|>"),
        (REASONING, ("U:hi", "A:<think>hm</think>hello"), "hello<|im_end|>"),
        (REASONING, ("U:hi", "A:hello"), "hello<|im_end|>"),
    ],
)
def test_only_the_assistant_is_learned_and_its_stop_token_is(template, turns, expected, tmp_path):
    text, row, _ = learned(talk(*turns), chat_tokenizer(template), tmp_path)
    assert text == expected
    assert row["labels"].count(END) == expected.count("<|im_end|>")


def test_only_the_completion_of_a_conversation_is_learned(tmp_path):
    text, _, _ = learned(talk("U:hi", "A:one", "U:more", "A:two", train_from=3), chat_tokenizer(), tmp_path)
    assert text == "two<|im_end|>"


def test_plain_completion_ends_with_eos(tmp_path):
    text, row, _ = learned(Completion("d:1", "2 + 2 =", " 4"), chat_tokenizer(), tmp_path)
    assert text == " 4<|im_end|>"
    assert row["input_ids"][-1] == row["labels"][-1] == END


@pytest.mark.parametrize(
    ("template", "turns", "what"),
    [
        (STRICT, ("S:x", "U:hi", "A:a"), "only user and assistant"),
        (DROPS_SYSTEM, ("S:secret", "U:hi", "A:a"), "drops the content of messages[0]"),
        (CHATML, ("U:hi",), "no assistant turn"),
    ],
)
def test_what_the_template_cannot_render_is_named(template, turns, what):
    with pytest.raises(WherryError) as caught:
        render(talk(*turns), chat_tokenizer(template))
    assert what in caught.value.what
    assert caught.value.where == "d.jsonl:7"
    assert "data.chat_template" in caught.value.fix


def test_an_answer_that_cannot_end_is_refused(tmp_path):
    with pytest.raises(WherryError, match="never learn to stop"):
        learned(talk("U:hi", "A:hello"), chat_tokenizer(NO_STOP), tmp_path)


def test_the_turn_end_becomes_a_stop_token_and_eos():
    tokenizer = chat_tokenizer()
    tokenizer.eos_token = "<|im_start|>"  # what a converted tokenizer may say
    assert settle_stop(tokenizer, [256], END, "d:1") == [256, END]
    assert tokenizer.eos_token_id == END


def test_rows_longer_than_the_limit(tmp_path):
    row = talk("U:hi", "A:hello")
    with pytest.raises(WherryError) as caught:
        learned(row, chat_tokenizer(), tmp_path, limit=20)
    assert "tokens, the limit is 20" in caught.value.what
    assert caught.value.where == "d.jsonl:7"
    text, _, counted = learned(row, chat_tokenizer(), tmp_path, limit=26, too_long="truncate")
    assert "hello<|im_end|>".startswith(text)
    assert counted.truncated == 1
    with pytest.raises(WherryError, match="no row is left: 1 are longer"):
        learned(row, chat_tokenizer(), tmp_path, limit=20, too_long="drop")
    assert not list(tmp_path.glob(".*part"))


def pairs(*given, tmp_path, limit=10_000, too_long="error"):
    """Text of (prompt, chosen, rejected) of every pair kept, from (turns before, chosen, rejected)."""
    from datasets import Dataset

    tokenizer, counted = chat_tokenizer(), Counted(stops=[END])
    made = []
    for number, (before, *answers) in enumerate(given, 1):
        both = [talk(*before, f"A:{answer}", train_from=len(before)) for answer in answers]
        made.append(Pair(f"d.jsonl:{number}", *both))
    write_pairs(made, tokenizer, tmp_path / "p.arrow", limit, too_long, counted)
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = Dataset.from_file(str(tmp_path / "p.arrow"))
    return [tuple(tokenizer.decode(row[name]) for name in columns) for row in rows], counted


def test_a_pair_is_one_prompt_and_two_answers_that_end(tmp_path):
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    found, counted = pairs((["U:hi"], "yes, sir", "no"), (["U:hi"], "same", "same"), tmp_path=tmp_path)
    assert found == [(prompt, "yes, sir<|im_end|>", "no<|im_end|>")]
    assert counted.equal_pairs == 1
    assert list(counted.lengths) == [len(chat_tokenizer()(prompt)["input_ids"]) + 9]
    assert counted.learned_tokens == 9 + 3


def test_a_pair_of_plain_text_ends_with_eos(tmp_path):
    from datasets import Dataset

    tokenizer, target = chat_tokenizer(), tmp_path / "p.arrow"
    pair = Pair("d:1", Completion("d:1", "2 + 2 =", " 4"), Completion("d:1", "2 + 2 =", " 5"))
    write_pairs([pair], tokenizer, target, 99, "error", Counted(stops=[END]))
    row = Dataset.from_file(str(target))[0]
    assert tokenizer.decode(row["prompt_ids"]) == "2 + 2 ="
    assert [tokenizer.decode(row[key]) for key in ("chosen_ids", "rejected_ids")] == [" 4<|im_end|>", " 5<|im_end|>"]


def test_pairs_longer_than_the_limit(tmp_path):
    long = (["U:hi"], "a" * 40, "b")
    with pytest.raises(WherryError, match="tokens, the limit is 40"):
        pairs(long, tmp_path=tmp_path, limit=40)
    found, counted = pairs(long, tmp_path=tmp_path, limit=40, too_long="truncate")
    assert counted.truncated == 1
    assert set(found[0][1]) == {"a"}
    assert len(chat_tokenizer()(found[0][0] + found[0][1])["input_ids"]) == 40
    with pytest.raises(WherryError, match="no row is left: 1 are longer"):
        pairs(long, tmp_path=tmp_path, limit=40, too_long="drop")
    with pytest.raises(WherryError, match="no row is left"):  # a prompt that alone fills the limit
        pairs((["U:" + "x" * 60], "a", "b"), tmp_path=tmp_path, limit=40, too_long="truncate")


def test_a_pair_of_two_prompts_is_refused(tmp_path):
    pair = Pair("d:3", talk("U:one", "A:a", train_from=1), talk("U:two", "A:b", train_from=1))
    with pytest.raises(WherryError, match="do not answer the same prompt") as caught:
        write_pairs([pair], chat_tokenizer(), tmp_path / "p.arrow", 99, "error", Counted(stops=[END]))
    assert caught.value.where == "d:3"


def test_pad_is_a_reserved_token_never_a_stop_token():
    tokenizer = chat_tokenizer(pad="<|im_end|>")
    reserved = 256 + SPECIAL.index("<|reserved_0|>")
    assert choose_pad(tokenizer, [END], rows=300) == reserved
    assert choose_pad(tokenizer, [END], rows=300, used=[reserved]) == reserved + 1
    # Nothing beyond the embedding: with 258 rows only <|endoftext|> (bos) and <|im_start|> (in the template) exist.
    assert choose_pad(tokenizer, [END], rows=258) is None
    assert choose_pad(chat_tokenizer(pad="<|bot|>"), [END], rows=300) == 256 + SPECIAL.index("<|bot|>")


CONTRACT = {
    "tokenizer_len": 128256,
    "embedding_rows": 128256,
    "largest_id": 128255,
    "pad_token_id": 128004,
    "eos_token_id": 128001,
    "eos_token_ids": [128001],
}


def test_contract_accepts_llama_3_where_vocab_size_leaves_added_tokens_out():
    check_contract(CONTRACT | {"vocab_size": 128000})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"largest_id": 128256}, "largest_id is 128256, the embedding has 128256 rows"),
        ({"tokenizer_len": 128257}, "tokenizer_len is 128257"),
        ({"pad_token_id": 128256}, "pad_token_id is 128256"),
        ({"pad_token_id": 128001}, "the pad token is a stop token"),
        ({"pad_token_id": None}, "pad_token_id is not set"),
    ],
)
def test_contract_refuses(change, what):
    with pytest.raises(WherryError) as caught:
        check_contract(CONTRACT | change)
    assert what in caught.value.what
    assert caught.value.code == Exit.PREFLIGHT
