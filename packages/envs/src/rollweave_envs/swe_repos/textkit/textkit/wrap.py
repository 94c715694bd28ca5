"""Lines of a given width."""


def wrap(text, width):
    """Lines of at most `width` characters, broken between words; a longer word is cut."""
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    lines = []
    line = ""
    for word in text.split():
        while len(word) > width:
            if line:
                lines.append(line)
                line = ""
            lines.append(word[:width])
            word = word[width:]
        if not word:
            continue
        if not line:
            line = word
        elif len(line) + 1 + len(word) <= width:
            line += " " + word
        else:
            lines.append(line)
            line = word
    if line:
        lines.append(line)
    return lines


def justify(line, width):
    """Spread the words so that the line has `width` characters; the first gaps are the wider ones. One word stays left."""
    words = line.split()
    if len(words) < 2:
        return line.strip().ljust(width)
    gaps = len(words) - 1
    spaces, more = divmod(width - sum(len(word) for word in words), gaps)
    parts = []
    for number, word in enumerate(words[:-1]):
        parts.append(word + " " * (spaces + (1 if number < more else 0)))
    return "".join(parts) + words[-1]


def shorten(text, width, mark="..."):
    """At most `width` characters, cut at a word where it can be, with `mark` at the end of what was cut."""
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    room = width - len(mark)
    if room <= 0:
        return mark[:width]
    head = text[:room]
    if text[room] != " " and " " in head:
        head = head[: head.rindex(" ")]
    return head.rstrip() + mark


def indent(text, prefix, *, first=None):
    """`prefix` before each line that is not blank; before the first line `first`, if given."""
    lines = text.split("\n")
    start = prefix if first is None else first
    return "\n".join((start if number == 0 else prefix) + line if line.strip() else line for number, line in enumerate(lines))
