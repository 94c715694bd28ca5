"""Every mutation changes one line of a function, and leaves the tree as it was."""

import ast

import pytest

from tests.mutants.__main__ import PACKAGES, explained, mutants_of
from tests.mutants.mutations import mutations

CODE = '''
LIMIT = 3


class Box:
    def take(self, wanted: int = 1) -> int | None:
        """Take 1."""
        assert wanted > 0
        del wanted
        if wanted > self.left and not self.full:
            raise ValueError(f"{wanted} > {self.left}")
        self.left -= wanted
        self.log(wanted, "taken")
        return max(self.left, 0)
'''


def test_each_mutation_changes_one_line_and_is_taken_back() -> None:
    tree = ast.parse(CODE)
    before = ast.unparse(tree)
    changes = set()
    for mutation in mutations(tree):
        changed = ast.unparse(tree)
        assert changed != before
        compile(tree, "box", "exec")
        assert CODE.splitlines()[mutation.first - 1].strip()[:8] == mutation.before[:8]
        changes.add((mutation.function, mutation.before, mutation.after))
    assert ast.unparse(tree) == before
    condition = "if wanted > self.left and (not self.full):"
    assert changes == {
        ("Box.take", condition, after)
        for after in (
            "if wanted >= self.left and (not self.full):",
            "if wanted <= self.left and (not self.full):",
            "if wanted > self.left or not self.full:",
            "if not self.full:",
            "if wanted > self.left:",
            "if wanted > self.left and self.full:",
        )
    } | {
        ("Box.take", "raise ValueError(f'{wanted} > {self.left}')", "pass"),
        ("Box.take", "self.left -= wanted", "self.left += wanted"),
        ("Box.take", "self.left -= wanted", "pass"),
        ("Box.take", "self.log(wanted, 'taken')", "self.log('taken', wanted)"),
        ("Box.take", "self.log(wanted, 'taken')", "pass"),
        ("Box.take", "return max(self.left, 0)", "return None"),
        ("Box.take", "return max(self.left, 0)", "return min(self.left, 0)"),
        ("Box.take", "return max(self.left, 0)", "return max(self.left, 1)"),
    }


@pytest.mark.extended
def test_explanations_are_of_mutants_that_exist() -> None:
    assert set().union(*(explained(package, mutants_of(package)) for package in PACKAGES))
