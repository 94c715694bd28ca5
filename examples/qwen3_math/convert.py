"""Convert a JSONL file of problems to that of this recipe:

    python convert.py gsm8k/train.jsonl > train.jsonl

In GSM8K, the answer follows `####` at the end of the solution. The fields of other data
sets are named by --problem and --answer.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator


def converted(lines: Iterable[str], *, problem: str, answer: str) -> Iterator[dict[str, str]]:
    """Yield the records of the recipe. Raises ValueError with the number of a line
    without a problem or an answer.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            question, solution = record[problem].strip(), str(record[answer])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"line {number}: must be an object with text {problem!r} and {answer!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        final = solution.rpartition("####")[2].strip()
        if not question or not final:
            raise ValueError(
                f"line {number}: must have a problem and an answer, got {line.strip():.60}"
            )
        yield {"problem": question, "answer": final}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file")
    parser.add_argument("--problem", default="question", help="field of the problem's text")
    parser.add_argument("--answer", default="answer", help="field of the answer or solution")
    arguments = parser.parse_args()
    try:
        with open(arguments.file, encoding="utf-8-sig") as file:
            for record in converted(file, problem=arguments.problem, answer=arguments.answer):
                print(json.dumps(record, ensure_ascii=False))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {arguments.file}: {error}")


if __name__ == "__main__":
    main()
