"""What to run: a YAML file, overrides from the command line, and defaults, with the origin of every value."""

from wherry.recipe.load import Resolved, load
from wherry.recipe.schema import Recipe

__all__ = ["Recipe", "Resolved", "load"]
