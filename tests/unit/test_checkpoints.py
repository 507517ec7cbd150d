"""Only a checkpoint with its marker counts."""

from wherry.train.checkpoints import MARKER, mark, newest_complete, remove_old, set_aside_unfinished


def make(root, *steps, whole=True):
    for step in steps:
        path = root / f"checkpoint-{step}"
        path.mkdir(parents=True)
        (path / "weights").write_text(str(step))
        if whole:
            mark(path)


def test_newest_complete_by_number_and_the_rest_set_aside(tmp_path, capsys):
    make(tmp_path, 9, 100)
    make(tmp_path, 110, whole=False)
    assert newest_complete(tmp_path).name == "checkpoint-100"
    set_aside_unfinished(tmp_path)
    assert newest_complete(tmp_path).name == "checkpoint-100"
    assert not (tmp_path / "checkpoint-110").exists()
    (aside,) = tmp_path.glob("checkpoint-110.incomplete-*")
    assert (aside / "weights").read_text() == "110"
    assert "checkpoint-110 was not saved to its end" in capsys.readouterr().err


def test_none_complete(tmp_path):
    assert newest_complete(tmp_path / "none") is None
    make(tmp_path, 5, whole=False)
    assert newest_complete(tmp_path) is None


def test_old_ones_are_removed_newest_last(tmp_path):
    make(tmp_path, 1, 2, 30, 4)
    make(tmp_path, 50, whole=False)  # being written: neither counted nor touched
    remove_old(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-30", "checkpoint-4", "checkpoint-50"]
    remove_old(tmp_path, None)
    assert (tmp_path / "checkpoint-4" / MARKER).is_file()
