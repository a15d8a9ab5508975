"""The results of scripts/gpu to read: a page, a table for the README, a summary for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench_step import KEEPS
from bench_tokens import ranged

Found = dict[str, Any]


def markdown(result: Found, about: str) -> str:
    """All parts that have run."""
    parts = result["parts"]
    setting = ", ".join(f"{key} {value}" for key, value in result["setting"].items())
    lines = [
        "# On a GPU",
        "",
        f"`{result['command']}`: {setting}",
        "",
        *about.partition("\n\n")[2].strip().splitlines(),
    ]
    if result["dry"]:
        lines += ["", "A dry run on the CPU at tiny sizes: it shows that every part runs, and its times mean nothing."]
    lines += ["", *summary(result).splitlines()]
    sections = {
        "tests": ("Tests marked gpu", tests), "verify": ("Gradients in bfloat16", verify),
        "tokens": ("Training steps on tokens", tokens),
        "eager": ("Training steps", steps),
        "compiled": ("Training steps of compiled models", steps),
        "graphs": ("Training steps of compiled models, replayed as CUDA graphs", steps),
    }  # fmt: skip
    for part, (title, write) in sections.items():
        if part in parts:
            lines += ["", f"## {title}", "", *write(parts[part]["found"])]
    if readme := list(readme_table(result)):
        lines += ["", "## For the README", "", *readme]
    return "\n".join(lines) + "\n"


def summary(result: Found) -> str:
    """A line for each part."""
    lines = [f"{result['seconds']:.0f} s in all."]
    for part, ran in result["parts"].items():
        bad = [name for name, found in ran["found"].items() if "failed" in found or found.get("failures")]
        bad += [name for name, found in ran["found"].items() if found.get("status") == "disagrees"]
        said = f", {len(bad)} not as they should be: {', '.join(bad)}" if bad else ""
        lines.append(f"* {part}: {ran['status']}, {len(ran['found'])} findings{said}; {ran['seconds']:.0f} s")
    return "\n".join(lines)


def table(columns: str, rows: list[list[object]]) -> list[str]:
    """A table; the columns' names are separated by commas."""
    heads = columns.split(", ")
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(map(str, r))} |" for r in rows)]


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def failures(found: Found) -> list[str]:
    """The findings that there are none of."""
    return [
        line for name, each in found.items() if "failed" in each for line in ("", f"{name} failed: {each['failed']}")
    ]


def tests(found: Found) -> list[str]:
    """The counts by file, and the tests that failed."""
    ran = {name: each for name, each in found.items() if "failed" not in each}
    rows = [[name, t["passed"], t["skipped"], len(t["failures"])] for name, t in ran.items()]
    lines = table("file, passed, skipped, failed", rows)
    for name, each in ran.items():
        lines += [line for test, why in each["failures"].items() for line in ("", f"{name}: `{test}`: {why}")]
    return lines + failures(found)


def verify(found: Found) -> list[str]:
    """The verdicts."""
    ran = {name: each for name, each in found.items() if "failed" not in each}
    rows = [
        [name, v["status"], f"{v['num_kept']} of {v['num_rows']}", f"{v['flops_ratio']:.3f}", v["verdict"]]
        for name, v in ran.items()
    ]
    return table("model, status, rows, FLOPs, verdict", rows) + failures(found)


def tokens(found: Found) -> list[str]:
    """Every variant of every decoder."""
    lines: list[str] = []
    for w in (each for each in found.values() if "failed" not in each):
        full, exact, cut = (w["backward_flops"][variant] for variant in ("full", "exact", "cut"))
        lines += [
            f"### {w['workload']}: {w['size']}", "",
            f"Plain step: F {ms(w['forward_s']['median'])} ms, B {ms(w['backward_s']['median'])} ms. FLOPs of the "
            f"backward from a quarter of the tokens, of the plain one's: {exact / full:.3f} exact, {cut / full:.3f} "
            "cut.", "",
        ]  # fmt: skip
        rows = [
            [v["keep"], v["attention"], f"{v['share']:.3f}", ranged(v["ratio"]), f"{v['limit']['value']:.3f}",
             ranged(v["over_limit"])]
            for v in w["variants"]
        ]  # fmt: skip
        lines += [*table("keep, attention, share of B, ratio (range), limit, over limit (range)", rows), ""]
    return lines[:-1] + failures(found)


def steps(found: Found) -> list[str]:
    """Every variant of every workload."""
    lines: list[str] = []
    for w in (each for each in found.values() if "failed" not in each):
        f, b, u, host = (1000 * w[f"{phase}_s"]["median"] for phase in ("forward", "backward", "update", "host"))
        gib = w["plain"][0]["peak_bytes"] / 2**30
        lines += [
            f"### {w['title']}: {w['sizes']}", "",
            f"Plain step: F {f:.1f} ms, B {b:.1f} ms, U {u:.1f} ms, host {host:.1f} ms, peak {gib:.2f} GiB; medians of "
            f"{w['rounds']} steps of each kind."
            + (f" First steps, in which it compiles: {w['first_steps_s']:.0f} s." if "first_steps_s" in w else ""), "",
        ]  # fmt: skip
        lines += [line for engine, why in w["left_out"].items() for line in (f"{engine} is left out: {why}.", "")]
        rows = [
            [
                v["keep"], v["kept"], v["engine"], ratio(v), f"{v['limit']:.3f}", ms(v["gradient_s"]["median"]),
                ms(v["host_s"]["median"]), f"{v['peak_bytes'] / 2**30:.2f}",
            ]
            for v in w["variants"]
        ]  # fmt: skip
        lines += [*table("keep, K, engine, ratio (quartiles), limit, device ms, host ms, peak GiB", rows), ""]
        if "flops" in w:
            dense = {op for each in w["flops"] for op in each["densified"]}
            shares = [f"{e['backward_flops'] / e['full_backward_flops']:.3f} at K = {e['kept']}" for e in w["flops"]]
            said = f"on all rows: {', '.join(sorted(dense))}" if dense else "nothing ran on all rows"
            lines += [f"FLOPs of the sliced backward over the plain one's: {', '.join(shares)}; {said}.", ""]
    return lines[:-1] + failures(found)


def ratio(variant: Found) -> str:
    spread = variant["ratio"]
    return f"{spread['median']:.3f} ({spread['q1']:.3f} to {spread['q3']:.3f})"


def readme_table(result: Found) -> Iterator[str]:
    """Ratios beside their limits, by model and engine: the README's table, for this device."""
    setting = result["setting"]
    for part in ("eager", "compiled", "graphs"):
        found = result["parts"].get(part, {"found": {}})["found"]
        measured = [each for each in found.values() if "failed" not in each]
        if not measured:
            continue
        yield from (
            f"`{result['command']}`: {setting['device']}, torch {setting['torch']}, CUDA {setting['cuda']}, bfloat16 "
            f"autocast, {part}, medians of interleaved rounds.", "",
        )  # fmt: skip
        rows = [
            [f"{w['title']}, N = {w['num_rows']}" if place == 0 else "", f"`{engine}`", *cells(w, engine)]
            for w in measured
            for place, engine in enumerate(e for e in ("sliced", "recompute") if e not in w["left_out"])
        ]
        yield from table(", ".join(["", "engine", *(f"keep {keep}" for keep in KEEPS)]), rows)
        yield ""


def cells(workload: Found, engine: str) -> list[str]:
    """The ratios of an engine; with their limits where it is ``sliced``."""
    found = {v["keep"]: v for v in workload["variants"] if v["engine"] == engine}
    limits = {keep: f" ({v['limit']:.2f})" if engine == "sliced" else "" for keep, v in found.items()}
    return [f"{found[keep]['ratio']['median']:.2f}{limits[keep]}" for keep in KEEPS]
