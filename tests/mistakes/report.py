"""What is printed of every mistake, and the table by command."""

from __future__ import annotations

from collections.abc import Sequence

from tests.mistakes.case import Ending, Mistake, faults

COLUMNS = {  # word of `faults` -> heading
    "traceback": "tracebacks",
    "ignored": "ignored",
    "hang": "hangs",
    "code": "wrong code",
    "lines": "more lines",
    "words": "other words",
    "late": "late",
    "left": "left behind",
}


def outcome(mistake: Mistake, ending: Ending) -> str:
    """Return the lines that tell how a mistake ended; the second only when something is wrong."""
    wrong = faults(mistake, ending)
    code = "none" if ending.code is None else ending.code
    mark = "FAULT " if wrong else "ok    "
    head = f"{mark}{mistake.title}"
    ended = f"code {code}, {len(ending.lines)} lines, {ending.seconds:.1f} s: {ending.last_line}"
    if not wrong:
        return f"{head}\n       {ended}"
    more = f"\n       left: {', '.join(ending.left)}" if ending.left else ""
    wanted = f"wanted code {mistake.code} and {mistake.says!r}"
    return f"{head}\n       {ended}\n       wrong: {', '.join(wrong)}; {wanted}{more}"


def markdown(endings: Sequence[tuple[Mistake, Ending]]) -> str:
    """Return the table by command: how many mistakes were tried, and how many ended wrongly."""
    rows: dict[str, dict[str, int]] = {}
    for mistake, ending in endings:
        row = rows.setdefault(mistake.command, dict.fromkeys(["tried", *COLUMNS], 0))
        row["tried"] += 1
        for word in faults(mistake, ending):
            row[word] += 1
    total = {name: sum(row[name] for row in rows.values()) for name in ["tried", *COLUMNS]}
    lines = [
        "| command | tried | " + " | ".join(COLUMNS.values()) + " |",
        "|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    for command, row in [*rows.items(), ("all", total)]:
        lines.append(f"| {command} | " + " | ".join(str(count) for count in row.values()) + " |")
    return "\n".join(lines) + "\n"
