"""What a history of losses remembers, as a plain dictionary: one row at a time."""

from __future__ import annotations

import math


class Remembered:
    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def row(self, number: int) -> dict[str, float]:
        return self.rows.setdefault(number, {"loss": math.nan, "age": 0, "count": 0, "scored": False})

    def store(self, ids: list[int], losses: list[float]) -> None:
        for number, loss in zip(ids, losses, strict=True):
            if not math.isnan(loss):
                self.row(number).update(loss=loss, scored=True)

    def update(self, ids: list[int], losses: list[float], rows: list[int]) -> None:
        for place in rows:
            self.row(ids[place])["count"] += 1
        last = {number: loss for number, loss in zip(ids, losses, strict=True) if not math.isnan(loss)}
        for number in set(ids):
            row = self.row(number)
            row["loss"] = last.get(number, row["loss"])
            row["age"] = 0 if number in last or row["scored"] else row["age"] + 1
            row["scored"] = False
