"""Mutations: small changes to the body of a function that a test should notice.

One mutation changes one node of the syntax tree: a comparison, an operator, a number, a
condition, the order of two arguments, a returned value, or a statement that is left
out. Texts, annotations, assertions and the arguments of exceptions stay as they are:
they are no behavior, or check themselves.
"""

import ast
import dataclasses
from collections.abc import Iterator

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
LARGE = 1000
"""Numbers from here on are doubled: 1 more is less than what a test should look at."""
SYMMETRIC = {"staleness", "np.maximum", "torch.minimum"}
"""Functions of two arguments whose order has no effect."""
FIELDS_LEFT_ALONE = {"annotation", "returns", "decorator_list"}
NODES_LEFT_ALONE = (ast.JoinedStr, ast.Assert)
DELETABLE = (ast.Expr, ast.AugAssign, ast.Delete, ast.Continue, ast.Break, ast.Raise)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Line = ast.stmt | ast.match_case
"""The syntax nodes that one line of code shows."""


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change of a function; while it is yielded, the tree contains it.

    `before` and `after` are the changed line in normal form; `first` and `last` are the
    lines of the file that it stands on.
    """

    function: str
    line: int
    before: str
    after: str
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class _Owner:
    """The function that is changed, and the type that it returns."""

    name: str
    returns: str


def mutations(tree: ast.Module) -> Iterator[Mutation]:
    """Change `tree` in place to each of its mutants in turn; afterwards it is as
    before.
    """
    for name, function in _functions(tree, ""):
        for statement in _body(function):
            owner = _Owner(name, ast.unparse(function.returns) if function.returns else "")
            yield from _of_node(statement, function, "body", None, statement, owner)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    """Yield functions and methods with their qualified names, outermost ones only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If):
            yield from _functions(child, prefix)


def _body(function: Function) -> list[ast.stmt]:
    return [statement for statement in function.body if not _is_text(statement)]


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _of_node(
    node: ast.AST, parent: ast.AST, field: str, index: int | None, line: Line, owner: _Owner
) -> Iterator[Mutation]:
    if isinstance(node, NODES_LEFT_ALONE) or _is_text(node):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return  # an assertion about lengths
    if isinstance(node, Line):
        line = node
    before = _shown(line)
    position = index
    if index is None and isinstance(getattr(parent, field), list):
        position = getattr(parent, field).index(node)
    for replacement in _replacements(node, parent, field, owner):
        ast.fix_missing_locations(ast.copy_location(replacement, node))
        _put(parent, field, position, replacement)
        shown = _shown(replacement if node is line else line)
        if shown != before:
            yield Mutation(owner.name, line_number(line), before, shown, *_lines(line))
        _put(parent, field, position, node)
    if isinstance(node, ast.Raise):
        return
    for child_field, value in ast.iter_fields(node):
        if child_field in FIELDS_LEFT_ALONE or (
            child_field == "args" and isinstance(node, Function)
        ):
            continue
        if isinstance(value, ast.AST):
            yield from _of_node(value, node, child_field, None, line, owner)
        elif isinstance(value, list):
            for number, child in enumerate(value):
                if isinstance(child, ast.AST):
                    yield from _of_node(child, node, child_field, number, line, owner)


def _put(parent: ast.AST, field: str, position: int | None, node: ast.AST) -> None:
    if position is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[position] = node


def _shown(line: ast.AST) -> str:
    return ast.unparse(line).split("\n", 1)[0]


def line_number(line: Line) -> int:
    return line.pattern.lineno if isinstance(line, ast.match_case) else line.lineno


def _lines(line: Line) -> tuple[int, int]:
    """Return the first and last line of the file that the head of a statement
    covers.
    """
    first = line_number(line)
    body = getattr(line, "body", None)
    if isinstance(body, list) and body:
        return first, max(first, body[0].lineno - 1)
    if isinstance(line, ast.stmt) and not isinstance(line, ast.Match):
        return first, line.end_lineno or first
    return first, first


def _replacements(node: ast.AST, parent: ast.AST, field: str, owner: _Owner) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            for number, operator in enumerate(ops):
                for other in COMPARISONS[type(operator)]:
                    changed = [*ops[:number], other(), *ops[number + 1 :]]
                    yield ast.Compare(left=left, ops=changed, comparators=comparators)
        case ast.BoolOp(op=operator, values=values):
            other_way = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield ast.BoolOp(op=other_way, values=values)
            for number in range(len(values)):
                rest = [*values[:number], *values[number + 1 :]]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(op=operator, values=rest)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS:
            yield ast.BinOp(left=left, op=OPERATORS[type(operator)](), right=right)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(value=not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value=2 * value if value >= LARGE else value + 1)
        case ast.Call(func=func, args=arguments, keywords=keywords):
            if isinstance(func, ast.Name) and func.id in FUNCTIONS:
                renamed = ast.Name(id=FUNCTIONS[func.id], ctx=ast.Load())
                ast.copy_location(renamed, func)
                yield ast.Call(func=renamed, args=arguments, keywords=keywords)
                return  # the order of their arguments has no effect
            if ast.unparse(func) in SYMMETRIC:
                return
            for number in range(len(arguments) - 1):
                one, other_one = arguments[number : number + 2]
                if _may_swap(one) and _may_swap(other_one):
                    swapped = [*arguments[:number], other_one, one, *arguments[number + 2 :]]
                    yield ast.Call(func=func, args=swapped, keywords=keywords)
        case ast.Return(value=None):
            yield ast.Pass()
        case ast.Return(value=ast.Constant(value=None)):
            pass
        case ast.Return() if "None" in owner.returns:
            yield ast.Return(value=ast.Constant(value=None))
        case ast.Return(value=ast.Call(func=called)) if owner.returns == "bool" and not (
            isinstance(called, ast.Name) and called.id in FUNCTIONS
        ):
            assert isinstance(node, ast.Return)
            assert node.value is not None
            yield ast.Return(value=ast.UnaryOp(op=ast.Not(), operand=node.value))
    if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        yield ast.AugAssign(target=node.target, op=OPERATORS[type(node.op)](), value=node.value)
    if (isinstance(node, DELETABLE) and not _is_mark(node)) or (
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    ):
        yield ast.Pass()
    if (_is_condition(parent, field)) and isinstance(
        node, ast.Name | ast.Attribute | ast.Call | ast.NamedExpr | ast.Subscript
    ):
        yield ast.UnaryOp(op=ast.Not(), operand=node)


def _is_mark(node: ast.AST) -> bool:
    """Return whether a statement only marks arguments as unused: `del name`."""
    return isinstance(node, ast.Delete) and all(isinstance(t, ast.Name) for t in node.targets)


def _is_condition(parent: ast.AST, field: str) -> bool:
    return field in ("test", "ifs", "guard") or (
        isinstance(parent, ast.UnaryOp | ast.BoolOp) and field == "values"
    )


def _may_swap(argument: ast.expr) -> bool:
    """Tell whether the type checker may overlook the argument in another's place."""
    return not isinstance(argument, ast.Starred) and not (
        isinstance(argument, ast.Name) and argument.id in ("run", "self")
    )
