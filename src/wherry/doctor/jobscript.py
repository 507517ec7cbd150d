"""A job script as Slurm reads it: its #SBATCH options, those of the command line before them, and its commands."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from wherry.errors import WherryError

SHORT = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "t": "time", "G": "gpus", "J": "job-name", "p": "partition"}
SHORT |= {"A": "account", "o": "output", "e": "error", "C": "constraint", "w": "nodelist"}


@dataclass(frozen=True)
class JobScript:
    """options: name → value ("" for a switch). late: directives below the first command. commands: joined lines."""

    path: Path
    options: dict[str, str]
    late: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)

    def number(self, name: str, default: int = 0) -> int:
        found = re.match(r"\d+", self.options.get(name, ""))
        return int(found[0]) if found else default

    @property
    def nodes(self) -> int:
        return max(1, self.number("nodes", 1))

    @property
    def gpus_per_node(self) -> int:
        """GPUs a node, however they are asked for; 0 where they are not."""
        if found := re.search(r"(\d+)$", self.options.get("gpus-per-node", "")):
            return int(found[1])
        if found := re.search(r"\bgpu(?::[A-Za-z][^:,]*)?(?::(\d+))?(?=,|\(|$)", self.options.get("gres", "")):
            return int(found[1] or 1)
        for name, share in (("gpus", self.nodes), ("gpus-per-task", 1)):
            if found := re.search(r"(\d+)$", self.options.get(name, "")):
                each = int(found[1]) // share
                return each * self.tasks_per_node if name == "gpus-per-task" else max(1, each)
        return 0

    @property
    def tasks_per_node(self) -> int:
        if "ntasks-per-node" in self.options:
            return self.number("ntasks-per-node", 1)
        return max(1, -(-self.number("ntasks", 1) // self.nodes))

    @property
    def hours(self) -> float | None:
        """The time limit, as sbatch reads it: minutes, M:S, H:M:S, or D-H[:M[:S]]."""
        found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", self.options.get("time", ""))
        if not found:
            return None
        days, *rest = (int(part) if part else None for part in found.groups())
        first, second, third = rest
        if days is not None:
            return days * 24 + (first or 0) + (second or 0) / 60 + (third or 0) / 3600
        if third is not None:
            return (first or 0) + (second or 0) / 60 + third / 3600
        return (first or 0) / 60 + (second or 0) / 3600

    @property
    def trains(self) -> bool:
        return "train" in self.path.stem or any(re.search(r"\btrain\b", line) for line in self.commands)

    @property
    def steps(self) -> list[str]:
        """Commands that srun starts."""
        return [line for line in self.commands if re.search(r"\bsrun\b", line)]


def is_script(word: str) -> bool:
    """Whether a word of the command line is a job script and no recipe."""
    path = Path(word)
    return word.endswith((".sh", ".sbatch", ".slurm")) or (path.is_file() and path.read_bytes()[:2] == b"#!")


def read(path: Path, more: str = "") -> JobScript:
    """more: options of sbatch's command line, which win. Raises WherryError (exit 2) where there is no such script."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise WherryError(f"no job script {path}", str(path.absolute()), "give one, such as slurm/train.sh") from None
    options: dict[str, str] = {}
    late: list[str] = []
    commands: list[str] = []
    joined = ""
    for line in lines:
        if line.startswith("#SBATCH"):
            directive = line.removeprefix("#SBATCH").partition(" #")[0].strip()
            if commands:
                late.append(directive)
            else:
                options |= _options(directive)
        elif line.strip() and not line.lstrip().startswith("#"):
            line = re.sub(r"\s#\s.*", "", line)
            joined += line.rstrip().removesuffix("\\")
            if not line.rstrip().endswith("\\"):
                commands.append(joined.strip())
                joined = ""
    return JobScript(path, options | _options(more), late, commands)


def _options(text: str) -> dict[str, str]:
    """--name=value, --name value, -x value, -xvalue."""
    found: dict[str, str] = {}
    name = ""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            found[name] = value
        elif re.match(r"-[A-Za-z]", word):
            name = SHORT.get(word[1], word[1])
            found[name] = word[2:]
        elif name and not found[name]:
            found[name] = word
    return found
