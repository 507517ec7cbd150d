"""The command line that every mode shares: [RECIPE] [key=value …] [--run NAME], and the mode's own options."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from wherry.errors import WherryError
from wherry.nearest import nearest
from wherry.rundir import Run


class Parser(argparse.ArgumentParser):
    """argparse whose errors are three lines and exit 2."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self.parse_intermixed_args(args, namespace)  # RECIPE --run NAME key=value, in any order

    def error(self, message: str) -> NoReturn:
        options = [option for action in self._actions for option in action.option_strings]
        wrong = next((word for word in message.split() if word.startswith("-")), "")
        raise WherryError(message, f"{self.prog}: command line", f"{nearest(wrong, options)}{self.prog} --help")


def parser(mode: str, description: str | None, example: str) -> Parser:
    made = Parser(
        f"wherry {mode}",
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("words", nargs="*", metavar="RECIPE | key=value", help="a recipe file, and values in its place")
    made.add_argument("--recipe", metavar="FILE", help="the same as RECIPE")
    made.add_argument("--run", metavar="NAME", help="the run directory's name (default: that of the recipe)")
    return made


def open_run(options: argparse.Namespace) -> Run:
    overrides = [word for word in options.words if "=" in word]
    recipes = [word for word in options.words if "=" not in word] + ([options.recipe] if options.recipe else [])
    if len(recipes) > 1:
        raise WherryError(f"two recipes: {' and '.join(recipes)}", "command line", "give one")
    return Run.open(recipes[0] if recipes else None, options.run, overrides)


def say(text: str) -> None:
    """A line for the person who watches; results go to stdout, this to stderr."""
    print(text, file=sys.stderr, flush=True)
