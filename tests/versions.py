"""The last word of ``scripts/versions``: what passed in the environment of each torch, and why tests were skipped."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree


def counted(results: Path) -> tuple[Counter[str], Counter[str]]:
    """How many tests passed, failed and were skipped, and how often for which reason."""
    outcomes, reasons = Counter[str](), Counter[str]()
    for case in ElementTree.parse(results).iter("testcase"):
        skipped = case.find("skipped")
        broke = case.find("failure") is not None or case.find("error") is not None
        outcomes["failed" if broke else "passed" if skipped is None else "skipped"] += 1
        if skipped is not None and not broke:
            reasons[skipped.get("message", "")] += 1
    return outcomes, reasons


def main(versions: list[str]) -> None:
    """Print the table and the reasons."""
    whys: list[str] = []
    print("| torch | Python | passed | failed | skipped |\n|---|---|---|---|---|")
    for torch in versions:
        venv = Path(f".venv-{torch}")
        python = re.search(r"^version = (\d+\.\d+)", (venv / "pyvenv.cfg").read_text(), re.MULTILINE)
        outcomes, reasons = counted(venv / "results.xml")
        numbers = " | ".join(str(outcomes[kind]) for kind in ("passed", "failed", "skipped"))
        print(f"| {torch} | {python and python[1]} | {numbers} |")
        whys += [f"{torch}: {times} skipped: {reason}" for reason, times in reasons.most_common()]
    print("\n".join(["", *whys]))


if __name__ == "__main__":
    main(sys.argv[1:])
