"""Make the demo's data: cargo notes in free text, answered by one line in a strict format.

    python recipes/demo/make_data.py        writes train.jsonl and heldout.jsonl beside this file, always the same

Held-out notes name goods and ports that no training note names, and a third of them are worded in ways that no
training note is: a model that only remembers scores nothing.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SYSTEM = "Rewrite the cargo note as: qty=<number> unit=<unit> goods=<goods> port=<port> day=<day>"
UNITS = ["crates", "barrels", "sacks", "pallets", "boxes", "drums", "bales", "chests"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
GOODS = {
    "train": "oranges tea copper wool salt rope timber rice coffee tar cheese glass paper cotton nails wheat "
    "olives soap sugar lamps tin herring silk honey bricks cocoa pepper flour leather wine onions candles "
    "ropes apples beans figs dates raisins almonds marble slate hides oats rye peas plums cherries "
    "carpets clocks pumps bottles shoes hats blankets nuts lead zinc chalk clay sand gravel wax resin "
    "dyes hemp sails anchors".split(),
    "heldout": "lemons iron barley cider tiles ginger linen butter coal pears vinegar brass".split(),
}
PORTS = {
    "train": "Rotterdam Hamburg Lisbon Genoa Bergen Dublin Cadiz Riga Oslo Bristol Naples Antwerp Malaga Gdansk "
    "Marseille Leith Bilbao Tunis Varna Porto Turku Cork Bari Calais Valencia Palermo Trieste Bremen "
    "Aarhus Malmo Tallinn Odessa Izmir Haifa Alexandria Casablanca Dakar Lagos Mombasa Mumbai Colombo "
    "Penang Manila Osaka Busan Seattle Halifax Savannah Havana Santos Montevideo Valparaiso Auckland "
    "Hobart Galway Swansea Ostend Brest Nantes Ancona".split(),
    "heldout": "London Venice Athens Stockholm Barcelona Boston Helsinki Toronto Sydney Plymouth".split(),
}
WORDINGS = {
    "train": [
        "Please send {qty} {unit} of {goods} to {port} by {day}.",
        "{port} wants {qty} {unit} of {goods} on {day}.",
        "On {day} we ship {goods} to {port}, {qty} {unit} in all.",
        "The harbour master at {port} expects {goods} this {day}: {qty} {unit}.",
        "Load {qty} {unit} of {goods} today; they must reach {port} by {day}.",
        "Can you bring {goods} to {port}? We need {qty} {unit} before {day}.",
        "{qty} {unit} of {goods} leave for {port} on {day}.",
        "For {day}: {goods}, {qty} {unit}, destination {port}.",
        "Our agent in {port} ordered {qty} {unit} of {goods}, due {day}.",
        "By {day} the {goods} should be in {port}. It is {qty} {unit}.",
    ],
    "heldout": [
        "{day} is the day {port} gets its {goods}, all {qty} {unit}.",
        "Take {goods} down the river to {port}, {qty} {unit}, no later than {day}.",
        "We promised {port} {qty} {unit} of {goods} for {day}.",
    ],
}


def note(rng: random.Random, split: str, wordings: list[str]) -> dict[str, str]:
    cargo = {
        "qty": rng.randint(2, 99),
        "unit": rng.choice(UNITS),
        "goods": rng.choice(GOODS[split]),
        "port": rng.choice(PORTS[split]),
        "day": rng.choice(DAYS),
    }
    return {
        "note": rng.choice(wordings).format(**cargo),
        "line": " ".join(f"{key}={value}" for key, value in cargo.items()),
    }


def ask(note: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": note}]


def main(train: int = 640, heldout: int = 120) -> None:
    rng = random.Random(20)
    here = Path(__file__).parent
    rows = [note(rng, "train", WORDINGS["train"]) for _ in range(train)]
    with (here / "train.jsonl").open("w") as file:
        for row in rows:
            messages = [*ask(row["note"]), {"role": "assistant", "content": row["line"]}]
            file.write(json.dumps({"messages": messages}) + "\n")
    with (here / "heldout.jsonl").open("w") as file:
        for index in range(heldout):
            wordings = WORDINGS["heldout"] if index % 3 == 0 else WORDINGS["train"]
            row = note(rng, "heldout", wordings)
            file.write(json.dumps({"id": f"note-{index:03}", "input": ask(row["note"]), "target": row["line"]}) + "\n")


if __name__ == "__main__":
    main()
