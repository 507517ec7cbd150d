"""Read a recipe: YAML with line numbers, then overrides, then pydantic, then the libraries' own names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from wherry.errors import WherryError
from wherry.library_names import OBJECTIVES, SOURCES, accepted, sources
from wherry.nearest import closest, nearest
from wherry.recipe.schema import DECIDED_HERE, Recipe


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-4 as a string; every user means the number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


@dataclass(frozen=True)
class Resolved:
    """A checked recipe and, for every dotted key, where its value came from."""

    recipe: Recipe
    origin: dict[str, str]

    def to_yaml(self) -> str:
        """The whole recipe, defaults included; a comment behind each value says where it came from."""
        lines = ["# Resolved recipe: every value, and where it came from."]
        for key, value in leaves(self.recipe.model_dump()):
            *parents, name = key.split(".")
            for depth in range(len(parents)):
                header = f"{'  ' * depth}{parents[depth]}:"
                if _open_section(lines, depth, header):
                    lines.append(header)
            text = json.dumps(value, ensure_ascii=False)
            lines.append(f"{'  ' * len(parents)}{name}: {text}  # {self.origin.get(key, 'default')}")
        return "\n".join(lines) + "\n"


def _open_section(lines: list[str], depth: int, header: str) -> bool:
    """Whether header must be written: it is not the section that the last lines are in."""
    for line in reversed(lines):
        indent = (len(line) - len(line.lstrip())) // 2
        if indent < depth:
            return True
        if indent == depth and not line.startswith("#"):
            return line != header
    return True


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is not a mapping with entries."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def load(path: Path, overrides: list[str]) -> Resolved:
    """Read path and key.path=value overrides. Raises WherryError (exit 2) naming file, line and the nearest key."""
    tree, origin = _read(path)
    for override in overrides:
        _override(tree, origin, override)
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, origin, str(path)) from None
    for key in SOURCES:
        section, field = key.split(".")
        _check_names(key, getattr(getattr(recipe, section), field), recipe.train.objective, origin, str(path))
    _check_meaning(recipe, origin)
    return Resolved(recipe, origin)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = sorted(p.name for p in Path("recipes").glob("*.yaml"))
        raise WherryError(
            f"no recipe {path}", str(path.absolute()), f"one of recipes/: {', '.join(siblings) or '(none here)'}"
        ) from None
    except (IsADirectoryError, UnicodeDecodeError):
        raise WherryError(f"{path} is not a YAML file", str(path), "give a file such as recipes/demo.yaml") from None
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be read"
        raise WherryError(f"not valid YAML: {problem}", f"{path}{line}", "correct that line") from None
    if not isinstance(root, yaml.MappingNode):
        raise WherryError("a recipe is a mapping", str(path), "begin with model:, data:, train:")
    origin: dict[str, str] = {}
    return _mapping(root, path, "", origin), origin


def _mapping(node: yaml.MappingNode, path: Path, prefix: str, origin: dict[str, str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key_node, value_node in node.value:
        name, where = str(key_node.value), f"{path}:{key_node.start_mark.line + 1}"
        if name in tree:
            raise WherryError(f"{prefix}{name} is given twice", where, f"keep one (the other: {origin[prefix + name]})")
        origin[prefix + name] = where
        if isinstance(value_node, yaml.MappingNode):
            tree[name] = _mapping(value_node, path, f"{prefix}{name}.", origin)
        else:
            tree[name] = _construct(value_node)
    return tree


def _construct(node: yaml.Node) -> Any:
    loader = _Loader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


def _override(tree: dict[str, Any], origin: dict[str, str], override: str) -> None:
    key, separator, text = override.partition("=")
    names = key.split(".")
    if not separator or not all(names):
        raise WherryError(f"{override!r} is not key=value", "command line", "for example train.args.learning_rate=2e-4")
    try:
        value = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError:
        raise WherryError(f"{text!r} is not a YAML value", f"command line: {key}", "quote it") from None
    for name in names[:-1]:
        below = tree.setdefault(name, {})
        if not isinstance(below, dict):
            raise WherryError(f"{name} is a value, not a section", f"command line: {key}", f"set {name}=… itself")
        tree = below
    tree[names[-1]] = value
    for depth in range(1, len(names) + 1):
        origin.setdefault(".".join(names[:depth]), "command line")
    origin[key] = "command line"


def _explain(error: ValidationError, origin: dict[str, str], path: str) -> WherryError:
    first = error.errors()[0]
    names = [str(part) for part in first["loc"]]
    key = ".".join(names)
    where = _where(origin, key, path)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        known = _fields_at(names[:-1])
        return WherryError(f"unknown key {key}{more}", where, _suggest(names[-1], known, ".".join(names[:-1])))
    if first["type"] == "missing":
        return WherryError(f"{key} is missing{more}", where, f"add {key} to the recipe")
    return WherryError(
        f"{key} = {first.get('input')!r}: {first['msg'].lower()}{more}", where, f"correct {key} (docs/recipe.md)"
    )


def _fields_at(names: list[str]) -> list[str]:
    model: Any = Recipe
    for name in names:
        model = model.model_fields[name].annotation
    return list(getattr(model, "model_fields", ()))


def _suggest(name: str, known: list[str], prefix: str) -> str:
    """The nearest key beside the wrong one, else the place where exactly this name belongs."""
    if closest(name, known):
        return f"{nearest(name, known)}known here: {', '.join(known)}"
    for key in SOURCES:
        if name in accepted(key):
            return f"did you mean {key}.{name}?"
    return f"known in {prefix or 'a recipe'}: {', '.join(known)}"


def _where(origin: dict[str, str], key: str, path: str) -> str:
    while key and key not in origin:
        key = key.rpartition(".")[0]
    found = origin.get(key, path)
    return f"command line: {key}" if found == "command line" else found


def _check_names(key: str, given: dict[str, Any], objective: str, origin: dict[str, str], path: str) -> None:
    for name in given:
        where = _where(origin, f"{key}.{name}", path)
        if name in DECIDED_HERE.get(key, {}):
            raise WherryError(f"{key}.{name} cannot be set", where, DECIDED_HERE[key][name])
        known = accepted(key, objective)
        if name not in known:
            package, _, cls = sources(key, objective)[0]
            if others := [o for o in OBJECTIVES if key == "train.args" and name in accepted(key, o)]:
                raise WherryError(
                    f"{key}.{name} belongs to {' and '.join(others)}, train.objective is {objective}",
                    where,
                    f"remove it, or set train.objective: {others[0]}",
                )
            raise WherryError(
                f"unknown key {key}.{name}",
                where,
                f"{nearest(name, known)}{key} takes the arguments of {package}.{cls}",
            )


def _check_meaning(recipe: Recipe, origin: dict[str, str]) -> None:
    if recipe.train.lora and recipe.train.tuning == "full":
        raise WherryError(
            "train.lora is given but train.tuning is full",
            origin.get("train.lora", "recipe"),
            "remove train.lora, or use train.tuning: lora",
        )
    if recipe.train.quantization and recipe.train.tuning != "qlora":
        raise WherryError(
            f"train.quantization is given but train.tuning is {recipe.train.tuning}",
            origin.get("train.quantization", "recipe"),
            "remove train.quantization, or use train.tuning: qlora",
        )
