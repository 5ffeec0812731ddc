"""An extension of griffe, which reads the signatures: ``**options`` is shown as the options that there are.

``help()`` shows them by ``collage_fx.choices.takes_options``, when a function is defined. The site reads the
source, without running it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from griffe import Extension, Function, Module, Object, Parameter, ParameterKind

from collage_fx.choices import PLACE, OptionFields

#: The item on ``**options`` of a docstring's arguments, with its further lines.
ITEM = re.compile(r"^( +)options: .*\n(?:\1 +.*\n)*", re.MULTILINE)


class Options(Extension):
    """Options as keywords in signatures; their texts are shown for ``CollageBackend`` alone."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        for function in _functions(pkg):
            given = [each for each in function.parameters if "GivenOptions" in str(each.annotation)]
            if not given or given[0].kind is not ParameterKind.var_keyword:
                continue
            function.parameters._params.remove(given[0])
            for each in fields(OptionFields):
                if each.name not in function.parameters:
                    kind, default = ParameterKind.keyword_only, repr(each.default)
                    function.parameters.add(
                        Parameter(each.name, annotation=str(each.type), kind=kind, default=default)
                    )
            of = function.parent if function.name == "__init__" else function
            if of is not None and of.docstring is not None:
                of.docstring.value = _told(of.docstring.value)


def _functions(found: Object) -> Iterator[Function]:
    for member in found.members.values():
        if isinstance(member, Function):
            yield member
        elif isinstance(member, Object) and not member.is_alias:
            yield from _functions(member)


def _told(text: str) -> str:
    """Return a docstring without its item on ``**options``, or with one for each of them."""

    def items(match: re.Match[str]) -> str:
        if PLACE not in match[0]:
            return ""
        told = (f"{each.name}: {' '.join(each.metadata['text'].split())}" for each in fields(OptionFields))
        return "".join(
            textwrap.fill(x, 110, initial_indent=match[1], subsequent_indent=f"{match[1]}    ") + "\n"
            for x in told
        )

    return ITEM.sub(items, f"{text}\n").rstrip("\n")
