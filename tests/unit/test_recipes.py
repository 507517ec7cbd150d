"""The recipes that are shipped: each loads, and its header's own commands name it and the GPUs that it fits."""

import re
import shlex
from pathlib import Path

import pytest

from wherry.recipe import load

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
LARGE = [path for path in RECIPES if path.name != "demo.yaml"]


def header(path):
    return "\n".join(line for line in path.read_text().splitlines() if line.startswith("#"))


def test_they_are_found():
    assert len(LARGE) >= 5


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_it_loads(path):
    load(path, [])


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.name)
def test_its_header_names_gpus_that_it_fits(path, wherry, monkeypatch):
    monkeypatch.chdir(ROOT)
    (plan,) = re.findall(r"wherry (plan \S+ --gpus \S+)", header(path))
    words = shlex.split(plan)
    assert words[1] == f"recipes/{path.name}"
    code, out, err = wherry(*words)
    assert code == 0, out + err
    assert ": fits" in out


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.name)
def test_its_header_has_the_commands(path):
    for command in (rf"slurm/prepare\.sh recipes/{path.name}", rf"sbatch .*slurm/train\.sh recipes/{path.name}"):
        assert re.search(command, header(path)), command
