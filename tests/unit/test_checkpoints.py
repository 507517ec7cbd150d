"""Only a checkpoint with its marker counts."""

from wherry.train.checkpoints import MARKER, mark, newest_complete, remove_old, saved_by, set_aside_damaged


def make(root, *steps, whole=True):
    for step in steps:
        path = root / f"checkpoint-{step}"
        path.mkdir(parents=True)
        (path / "weights").write_text(str(step))
        if whole:
            mark(path, 2, 8)


def test_newest_complete_by_number_and_the_rest_set_aside(tmp_path, capsys):
    make(tmp_path, 9, 100)
    make(tmp_path, 110, whole=False)
    assert newest_complete(tmp_path).name == "checkpoint-100"
    set_aside_damaged(tmp_path)
    assert newest_complete(tmp_path).name == "checkpoint-100"
    assert not (tmp_path / "checkpoint-110").exists()
    (aside,) = tmp_path.glob("checkpoint-110.incomplete-*")
    assert (aside / "weights").read_text() == "110"
    assert "checkpoint-110 was not saved to its end" in capsys.readouterr().err


def test_a_damaged_one_is_named_and_the_one_before_it_taken(tmp_path, capsys):
    make(tmp_path, 1, 2, 3)
    (tmp_path / "checkpoint-3/weights").write_text("")
    (tmp_path / "checkpoint-2/weights").unlink()
    assert newest_complete(tmp_path).name == "checkpoint-1"
    set_aside_damaged(tmp_path)
    err = capsys.readouterr().err
    assert "checkpoint-3 has 0 of 1 bytes of weights" in err
    assert "checkpoint-2 has lost weights" in err
    assert len(list(tmp_path.glob("*.incomplete-*"))) == 2


def test_the_marker_knows_ranks_and_rows(tmp_path):
    make(tmp_path, 1)
    assert saved_by(tmp_path / "checkpoint-1") == (2, 8)


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
