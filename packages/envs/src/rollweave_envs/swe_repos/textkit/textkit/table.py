"""Rows of values as aligned columns."""


def table(rows, headers=None, *, align=None, gap="  "):
    """Lines; `align` has a character for each column: l, r, c, or d for the decimal point. Short rows are filled up."""
    rows = [[_text(value) for value in row] for row in rows]
    if headers is not None:
        rows.insert(0, [str(header) for header in headers])
    if not rows:
        return []
    count = max(len(row) for row in rows)
    for row in rows:
        row.extend([""] * (count - len(row)))
    align = (align or "").ljust(count, "l")
    columns = [_column([row[i] for row in rows], align[i]) for i in range(count)]
    lines = [gap.join(parts).rstrip() for parts in zip(*columns)]
    if headers is not None:
        lines.insert(1, gap.join("-" * len(column[0]) for column in columns))
    return lines


def _text(value):
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}"
    return str(value)


def _column(cells, how):
    if how == "d":
        tails = [len(cell) - cell.index(".") if "." in cell else 0 for cell in cells]
        longest = max(tails)
        cells = [cell + " " * (longest - tail) for cell, tail in zip(cells, tails)]
        how = "r"
    width = max(len(cell) for cell in cells)
    if how == "r":
        return [cell.rjust(width) for cell in cells]
    if how == "c":
        return [" " * ((width - len(cell)) // 2) + cell + " " * ((width - len(cell) + 1) // 2) for cell in cells]
    return [cell.ljust(width) for cell in cells]


def group(rows, by):
    """[(value, rows)] with the rows that have the value in column `by`; values in the order in which they come first."""
    found = {}
    for row in rows:
        found.setdefault(row[by], []).append(row)
    return list(found.items())


def sort(rows, *columns):
    """Sorted by these columns, the first one first; a negative number -n sorts column n-1 downwards. Stable."""
    rows = list(rows)
    for column in reversed(columns):
        if column < 0:
            rows.sort(key=lambda row: row[-column - 1], reverse=True)
        else:
            rows.sort(key=lambda row: row[column])
    return rows
