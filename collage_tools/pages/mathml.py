"""Recurrences as MathML, which browsers set without scripts or fonts of their own."""

from __future__ import annotations

from typing import Any

import sympy
from sympy.printing.mathml import MathMLPresentationPrinter


def recurrence_mathml(symbol: str, expression: sympy.Expr) -> str:
    """Typeset the equation ``symbol' = expression`` as a displayed formula."""
    printer = _Printer({"mul_symbol": "dot"})  # factors are words and decimals
    left = printer.doprint(sympy.Symbol(f"{symbol}'"))
    right = printer.doprint(expression).replace("<mo>-</mo>", "<mo>−</mo>").replace("<mn>-", "<mn>−")
    return (
        '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">'
        f"<mrow>{left}<mo>=</mo>{right}</mrow></math>"
    )


class _Printer(MathMLPresentationPrinter):  # type: ignore[misc]  # sympy has no annotations
    """Printer that spells symbols as they are: an underscore, as in ``exp_avg``, begins no subscript."""

    def _print_Symbol(self, symbol: sympy.Symbol, style: str = "plain") -> Any:
        element = self.dom.createElement("mi")
        name = f"{symbol.name[:-1]}′" if symbol.name.endswith("'") else symbol.name
        element.appendChild(self.dom.createTextNode(name))
        return element
