"""Correct solutions of the families in `code_tasks.py`: from the complete input to the
complete output.

Invariant: each is self-contained, including its imports, because its source is shown as
a program.
"""


def divisible(text: str, *, k: int, what: str) -> str:
    lines = []
    for line in text.splitlines():
        hits = [number for number in map(int, line.split()) if number % k == 0]
        value = {"sum": sum(hits), "count": len(hits), "maximum": max(hits, default=0)}[what]
        lines.append(str(value))
    return "\n".join(lines)


def frequent(text: str, *, k: int, least: int) -> str:
    counts: dict[str, int] = {}
    for word in text.split():
        if len(word) >= least:
            counts[word] = counts.get(word, 0) + 1
    best = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:k]
    return "\n".join(f"{word} {count}" for word, count in best)


def shift(text: str, *, k: int, what: str) -> str:
    def moved(letter: str) -> str:
        if "a" <= letter <= "z":
            return chr((ord(letter) - 97 + k) % 26 + 97)
        if "A" <= letter <= "Z":
            return chr((ord(letter) - 65 + k) % 26 + 65)
        return letter

    lines = []
    for line in text.splitlines():
        turned = "".join(map(moved, line))
        lines.append(
            turned[::-1] if what == "line" else " ".join(word[::-1] for word in turned.split(" "))
        )
    return "\n".join(lines)


def runs(text: str, *, least: int, mark: str) -> str:
    import itertools

    lines = []
    for line in text.splitlines():
        parts = [(letter, len(list(same))) for letter, same in itertools.groupby(line)]
        lines.append(
            "".join(
                f"{letter}{mark}{count}" if count >= least else letter * count
                for letter, count in parts
            )
        )
    return "\n".join(lines)


def maze(text: str, *, ways: int, none: object) -> str:
    rows = text.split()
    end = len(rows) - 1
    steps = [
        (a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if (a or b) and (ways == 8 or not (a and b))
    ]
    far = {(0, 0): 0}
    queue = [(0, 0)]
    for x, y in queue:
        for a, b in steps:
            place = (x + a, y + b)
            if (
                0 <= place[0] <= end
                and 0 <= place[1] <= end
                and place not in far
                and rows[place[0]][place[1]] == "."
            ):
                far[place] = far[(x, y)] + 1
                queue.append(place)
    return str(far.get((end, end), none))


def groups(text: str, *, least: int, which: str) -> str:
    numbers = [int(part) for part in text.split()]
    leader = list(range(numbers[0] + 1))

    def find(node: int) -> int:
        while leader[node] != node:
            node = leader[node]
        return node

    for a, b in zip(numbers[1::2], numbers[2::2], strict=True):
        leader[find(a)] = find(b)
    sizes: dict[int, int] = {}
    for node in range(1, numbers[0] + 1):
        sizes[find(node)] = sizes.get(find(node), 0) + 1
    edge = max(sizes.values()) if which == "largest" else min(sizes.values())
    return f"{sum(size >= least for size in sizes.values())} {edge}"


def order(text: str, *, which: str, mark: str) -> str:
    numbers = [int(part) for part in text.split()]
    pairs = list(zip(numbers[1::2], numbers[2::2], strict=True))
    left = set(range(1, numbers[0] + 1))
    ordered = []
    while left:
        ready = left - {b for a, b in pairs if a in left}
        chosen = min(ready) if which == "smallest" else max(ready)
        left.remove(chosen)
        ordered.append(str(chosen))
    return mark.join(ordered)


def brackets(text: str, *, pairs: list[str], good: str, first: int) -> str:
    closing = {pair[1]: pair[0] for pair in pairs}
    lines = []
    for line in text.splitlines():
        opened: list[str] = []
        verdict = ""
        for place, letter in enumerate(line, first):
            if letter not in closing:
                opened.append(letter)
            elif not opened or opened.pop() != closing[letter]:
                verdict = str(place)
                break
        lines.append(verdict or ("open" if opened else good))
    return "\n".join(lines)


def bases(text: str, *, source: int, target: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    lines = []
    for line in text.split():
        number = int(line, source)
        numeral = ""
        while number:
            number, digit = divmod(number, target)
            numeral = digits[digit] + numeral
        lines.append(numeral or "0")
    return "\n".join(lines)


def covered(text: str, *, gap: int, what: str) -> str:
    numbers = [int(part) for part in text.split()]
    merged: list[list[int]] = []
    for start, end in sorted(zip(numbers[::2], numbers[1::2], strict=True)):
        if merged and start - merged[-1][1] <= gap:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    lengths = [end - start for start, end in merged]
    return str(
        {"number": len(lengths), "total length": sum(lengths), "greatest length": max(lengths)}[
            what
        ]
    )


def sales(text: str, *, least: int, by: str) -> str:
    sums: dict[str, int] = {}
    for line in text.split():
        _, shop, amount = line.split(",")
        sums[shop] = sums.get(shop, 0) + int(amount)
    kept = [(shop, total) for shop, total in sums.items() if total >= least]
    kept.sort(key=lambda item: item[0] if by == "name" else (-item[1], item[0]))
    return "\n".join(f"{shop}: {total}" for shop, total in kept)


def sums(text: str, *, rule: str, k: int) -> str:
    def product_first(parts: list[str]) -> int:
        terms = [int(parts[0])]
        for sign, number in zip(parts[1::2], map(int, parts[2::2]), strict=True):
            if sign == "*":
                terms[-1] *= number
            else:
                terms.append(number if sign == "+" else -number)
        return sum(terms)

    def from_the_left(parts: list[str]) -> int:
        value = int(parts[0])
        for sign, number in zip(parts[1::2], map(int, parts[2::2]), strict=True):
            value = (
                value + number if sign == "+" else value - number if sign == "-" else value * number
            )
        return value

    def sum_first(parts: list[str]) -> int:
        value = 1
        for factor in " ".join(parts).split(" * "):
            value *= from_the_left(factor.split())
        return value

    solve_line = {"`*`": product_first, "`+`": sum_first}.get(rule[:3], from_the_left)
    return "\n".join(str(solve_line(line.split()) % k) for line in text.splitlines())
