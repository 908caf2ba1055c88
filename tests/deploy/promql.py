"""What an expression of PromQL asks for, compared with a scrape: a name or a label that is missing is an error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import promql_parser as ast
from prometheus_client import Metric
from promql_parser import MatchOp

TARGET = frozenset(("job", "instance"))
"""Labels that Prometheus adds."""
Series = Mapping[str, Sequence[Mapping[str, str]]]
"""The labels of every series of each name."""
Labels = frozenset[str]


class LabelNotFound(Exception):
    """The scrape has nothing of this name."""


def series_of(families: Iterable[Metric]) -> Series:
    """The series that Prometheus has of a scrape, without the labels that it adds."""
    found: dict[str, list[Mapping[str, str]]] = {"up": [{}]}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def labels_of(text: str, series: Series) -> Labels | None:
    """The labels of an expression's result, None for a number.

    Raise `LabelNotFound` for a metric, a label or a value of no series, and for two sides whose labels differ,
    which never match; `ValueError` for what is no PromQL. Of the language it knows what deploy/ uses.
    """
    return _labels(ast.parse(text), series)


def _labels(node: ast.Expr, series: Series) -> Labels | None:
    match node:
        case ast.NumberLiteral():
            return None
        case ast.ParenExpr():
            return _labels(node.expr, series)
        case ast.VectorSelector() | ast.MatrixSelector():
            return _selected(node.vector_selector if isinstance(node, ast.MatrixSelector) else node, series)
        case ast.AggregateExpr() if node.modifier is None or node.modifier.type == ast.AggModifierType.By:
            named = frozenset(node.modifier.labels if node.modifier else ())
            _expect(named, _labels(node.expr, series), node)
            return named
        case ast.BinaryExpr() if node.modifier is None or node.modifier.matching is None:
            return _joined(node, series)
        case ast.Call():
            return _called(node, series)
    raise AssertionError(f"{node.prettify()}: not known here")


def _selected(selector: ast.VectorSelector, series: Series) -> Labels:
    found = series.get(selector.name or "")
    if found is None:
        raise LabelNotFound(f"metric {selector.name}")
    labels = TARGET.union(*found)
    for matcher in selector.matchers.matchers:
        if matcher.name not in labels:
            raise LabelNotFound(f"label {matcher.name} of {selector.name}")
        if matcher.name in TARGET or matcher.op not in (MatchOp.Equal, MatchOp.Re):
            continue
        wanted = re.escape(matcher.value) if matcher.op == MatchOp.Equal else matcher.value
        if not any(re.fullmatch(wanted, labels.get(matcher.name, "")) for labels in found):
            raise LabelNotFound(f"value {matcher.value!r} of label {matcher.name} of {selector.name}")
    return labels


def _called(node: ast.Call, series: Series) -> Labels:
    if node.func.name == "vector":
        return frozenset()
    (inner,) = [labels for argument in node.args if (labels := _labels(argument, series)) is not None]
    if node.func.name == "histogram_quantile":
        _expect(frozenset(("le",)), inner, node)
        return inner - {"le"}
    return frozenset(("job",)) if node.func.name == "absent" else inner


def _joined(node: ast.BinaryExpr, series: Series) -> Labels | None:
    left, right = _labels(node.lhs, series), _labels(node.rhs, series)
    if left is None or right is None:
        return right if left is None else left
    if str(node.op) == "or":
        return left | right
    if left != right:
        raise LabelNotFound(
            f"{sorted(left)} on the left, {sorted(right)} on the right of {node.op} in {node.prettify()}"
        )
    return left


def _expect(named: Labels, labels: Labels | None, node: ast.Expr) -> None:
    if missing := named - (labels or frozenset()):
        raise LabelNotFound(f"label {', '.join(sorted(missing))} in {node.prettify()}")
