"""The results of `make gpu-check` as text: what happened in the first lines, then a table, then what failed."""

from __future__ import annotations

from collections import Counter

from gpu_parts import PARTS

_SAID = "summary: "  # begins the line that a script sums itself up in
_MOST_SAID = 300  # characters
_MOST_TAIL = 3000  # characters of the log of a part that went wrong


def said(log: str) -> str:
    """The line in which a part's log sums the part up, or else its last one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    summary = next((line.removeprefix(_SAID) for line in reversed(lines) if line.startswith(_SAID)), None)
    return (summary or (lines[-1] if lines else ""))[:_MOST_SAID]


def tail(log: str) -> str:
    return log[-_MOST_TAIL:]


def tests_result(tests: list[dict]) -> dict:
    """Counts of tests by outcome, the tests that failed, why tests were skipped, and the slowest tests."""
    counts = Counter(test["outcome"] for test in tests)
    return {
        "tests": {outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "failures": [test for test in tests if test["outcome"] == "failed"],
        "skipped": dict(Counter(test["why"] for test in tests if test["outcome"] == "skipped")),
        "slowest": {t["test"]: t["seconds"] for t in sorted(tests, key=lambda t: -t["seconds"])[:5]},
    }


def first_lines(result: dict) -> list[str]:
    """The first lines of the report: the card, the numbers of parts by outcome, and a line for each that failed."""
    parts = result["parts"]
    device = parts.get("device", {}).get("result", {})
    ok = [name for name, part in parts.items() if part["outcome"] == "ok"]
    left_out = [name for name, part in parts.items() if part["outcome"].startswith("not run")]
    wrong = [name for name in parts if name not in ok and name not in left_out]
    counts = f"{len(ok)} parts ok, {len(wrong)} not ok, {len(left_out)} not run"
    lines = [f"GPU check on {device.get('gpu', 'no GPU')}: {counts}, {sum(p['seconds'] for p in parts.values()):.0f} s"]
    for name in wrong:
        lines.append(f"NOT OK {name}: {parts[name]['outcome']}: {parts[name]['said']}")
    for name in left_out:
        lines.append(f"{parts[name]['outcome']}: {name}")
    return lines + [f"no capacity in the archives for {name}" for name in result.get("left_out", ())]


def table(result: dict) -> str:
    """All of a result, in Markdown."""
    lines = [*(f"{line}  " for line in first_lines(result)), "", "| part | outcome | s | |", "|---|---|---|---|"]
    for name, part in result["parts"].items():
        lines.append(f"| {name} | {part['outcome']} | {part['seconds']:.0f} | {_figures(part)} |")
    for name, part in result["parts"].items():
        if part.get("tail"):
            lines += ["", f"## {name}", "", "```text", part["tail"], "```"]
        lines += [f"- {test['test']}: {_last_line(test['why'])}" for test in part.get("failures", ())]
    return "\n".join(lines) + "\n"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    marked = [line for line in lines if line.startswith("E  ")]
    return ((marked or lines or [""])[0 if marked else -1])[:_MOST_SAID]


def _figures(part: dict) -> str:
    if "tests" in part:
        counts = part["tests"]
        return ", ".join(
            f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped") if counts[outcome]
        )
    return part.get("said", "").replace("|", "/")


def merged(results: list[dict]) -> dict:
    """The parts of several results; of those that several have, the last, unless it did not run there."""
    parts: dict[str, dict] = {}
    for result in results:
        for name, part in result["parts"].items():
            if name not in parts or not part["outcome"].startswith("not run"):
                parts[name] = part
    order = {name: number for number, name in enumerate(PARTS)}
    return {"parts": dict(sorted(parts.items(), key=lambda item: order.get(item[0], -1)))}
