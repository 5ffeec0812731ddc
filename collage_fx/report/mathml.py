"""Recurrences as MathML, which browsers set without scripts or fonts of their own."""

from __future__ import annotations

from typing import Any

import sympy
from sympy.printing.mathml import MathMLPresentationPrinter


def recurrence_mathml(symbol: str, expression: sympy.Expr) -> str:
    """The equation ``symbol' = expression`` as one displayed formula."""
    printer = _Printer({"mul_symbol": "dot"})  # factors are words and decimals, which run into each other
    left = printer.doprint(sympy.Symbol(f"{symbol}'"))
    right = printer.doprint(expression).replace("<mo>-</mo>", "<mo>−</mo>").replace("<mn>-", "<mn>−")
    return (
        '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">'
        f"<mrow>{left}<mo>=</mo>{right}</mrow></math>"
    )


class _Printer(MathMLPresentationPrinter):  # type: ignore[misc]  # sympy has no annotations
    """A printer of symbols as they are spelt: the underscore in ``exp_avg`` begins no subscript."""

    def _print_Symbol(self, symbol: sympy.Symbol, style: str = "plain") -> Any:
        element = self.dom.createElement("mi")
        name = f"{symbol.name[:-1]}′" if symbol.name.endswith("'") else symbol.name
        element.appendChild(self.dom.createTextNode(name))
        return element
