"""Every row is checked, and an error names its file and line."""

import json

import pytest

from wherry.errors import Exit, WherryError
from wherry.prepare.rows import Completion, Conversation, Pair, read_examples, read_pairs
from wherry.recipe.schema import Data

USER, BOT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def read(path, template=""):
    return list(read_examples(str(path), Data(train=str(path)), template))


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_the_three_forms(tmp_path):
    path = tmp_path / "d.jsonl"
    (chat,) = read(write(path, {"messages": [USER, BOT]}))
    assert chat == Conversation(f"{path}:1", [USER, BOT], 0)
    (plain,) = read(write(path, {"prompt": "p", "completion": "c"}))
    assert plain == Completion(f"{path}:1", "p", "c")
    (talk,) = read(write(path, {"prompt": [USER], "completion": [BOT]}))
    assert talk == Conversation(f"{path}:1", [USER, BOT], 1)
    (pair,) = read(write(path, {"prompt": "p", "chosen": "good", "rejected": "bad"}))
    assert pair == Completion(f"{path}:1", "p", "good")
    (implicit,) = read(write(path, {"chosen": [USER, BOT], "rejected": [USER, BOT]}))
    assert implicit.train_from == 1


def test_pairs(tmp_path):
    path = tmp_path / "d.jsonl"
    data = Data(train=str(path))
    write(path, {"prompt": "p", "chosen": "good", "rejected": "bad"})
    assert list(read_pairs(str(path), data, "")) == [
        Pair(f"{path}:1", Completion(f"{path}:1", "p", "good"), Completion(f"{path}:1", "p", "bad"))
    ]
    for row in ({"prompt": "p", "chosen": "good", "rejected": " "}, {"messages": [USER, BOT]}):
        write(path, row)
        with pytest.raises(WherryError, match=r"rejected is empty|needs preference rows, this one is chat") as caught:
            list(read_pairs(str(path), data, ""))
        assert caught.value.where == f"{path}:1"


def test_blank_lines_are_skipped_and_do_not_shift_line_numbers(tmp_path):
    path = write(tmp_path / "d.jsonl", {"messages": [USER, BOT]}, "", {"messages": [USER, BOT]})
    assert [row.where for row in read(path)] == [f"{path}:1", f"{path}:3"]


def test_parquet(tmp_path):
    import pyarrow as pa
    from pyarrow.parquet import write_table

    path = tmp_path / "d.parquet"
    write_table(pa.table({"prompt": ["p1", "p2"], "completion": ["c1", "c2"], "note": [None, None]}), path)
    assert [(row.prompt, row.where) for row in read(path)] == [("p1", f"{path} row 1"), ("p2", f"{path} row 2")]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(WherryError, match="not a whole Parquet file"):
        read(path)


@pytest.mark.parametrize(
    ("row", "what", "fix"),
    [
        ('{"messages": [}', "broken JSON", "correct that line"),
        ("[1, 2]", "not an object", "one JSON object a line"),
        ({"text": "x"}, "the row has text", "use messages"),
        ({"conversations": []}, "ShareGPT", "rename"),
        ({"messages": []}, "not a list of messages", '"role"'),
        ({"messages": [{"content": "x"}]}, "messages[0] has no role", '"role"'),
        ({"messages": [USER, {"role": "asistant", "content": "a"}]}, "role 'asistant'", "did you mean assistant?"),
        ({"messages": [{"role": "user", "content": 3}]}, "content of messages[0] is int", "give text"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "messages[1] is an empty answer", "remove"),
        ({"prompt": "p", "completion": " "}, "completion is empty", "write the answer"),
        ({"prompt": [USER], "completion": "c"}, "prompt is list", "both as text"),
        ({"chosen": "a", "rejected": [BOT]}, "different types", "both as"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, what, fix):
    good = {"messages": [USER, BOT]} if isinstance(row, str) or "messages" in row else None
    path = write(tmp_path / "d.jsonl", *([good] if good else []), row)
    with pytest.raises(WherryError) as caught:
        read(path)
    assert what in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.where == f"{path}:{2 if good else 1}"
    assert caught.value.code == Exit.USAGE


def test_a_role_that_the_template_names_is_known(tmp_path):
    path = write(tmp_path / "d.jsonl", {"messages": [{"role": "ipython", "content": "x"}, BOT]})
    assert len(read(path, template="{% if m.role == 'ipython' %}")) == 1
    with pytest.raises(WherryError, match="ipython"):
        read(path)


def test_forms_do_not_mix(tmp_path):
    path = write(tmp_path / "d.jsonl", {"messages": [USER, BOT]}, {"prompt": "p", "completion": "c"})
    with pytest.raises(WherryError, match="this row is prompt/completion, the ones before are chat"):
        read(path)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("d.jsonl", "", "holds no rows"),
        ("d.jsonl", "[{}]", "one JSON array"),
        ("d.jsonl", b'{"prompt": "\xff"}', "not UTF-8"),
        ("d.csv", "a,b", "no data at"),
        ("none.jsonl", None, "no file"),
    ],
)
def test_bad_files(tmp_path, name, content, what):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(WherryError) as caught:
        read(path)
    assert what in caught.value.what
