"""Parser of PTX: a kernel as a list of instructions, with the bodies of functions in place of calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.support.fake_cuda.floats import size_of

#: Directives, and instructions without an effect here: threads that are ahead wait for the others anyway.
_SKIPPED = re.compile(
    r"\.reg|\.shared|bar\.|barrier\.|membar|fence|nanosleep|griddepcontrol|prefetch|discard|applypriority"
    r"|createpolicy"
)
_LABEL = re.compile(r"(\$?[\w$]+):\s*")
_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)", re.DOTALL)
_TABLE = re.compile(r"(\$?[\w$]+):\s*\.branchtargets\s*([^;]*);")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)([^,;\n]*?)\b([\w$]+)\s*(?:,|;|\)|\n|$)")


@dataclass(frozen=True)
class Instruction:
    """An instruction.

    Attributes:
        guard: the predicate on which it depends, or "".
        negated: whether it is done where the predicate is false.
        opcode: with its modifiers, such as ``ld.global.b32``.
        operands: as they are written.
        text: the whole of it.
    """

    guard: str
    negated: bool
    opcode: str
    operands: tuple[str, ...]
    text: str

    def renamed(self, names: Mapping[str, str], prefix: str) -> Instruction:
        """Return the instruction with other names: of registers by a prefix, of others by a table."""

        def rename(text: str) -> str:
            text = re.sub(r"%(?!tid|ntid|ctaid|nctaid|laneid|warpid)(?=[a-z])", f"%{prefix}", text)
            return re.sub(r"[\w$]+", lambda word: names.get(word[0], word[0]), text)

        operands = tuple(rename(each) for each in self.operands)
        return replace(self, guard=rename(self.guard), operands=operands)


@dataclass
class Body:
    """Code of a kernel or a function.

    Attributes:
        parameters: bytes of each parameter, in order.
        results: bytes of what a function returns.
        registers: bytes by the letters of registers, 0 for predicates.
        passed: bytes of the parameters of calls.
        code: the instructions.
        labels: places in the code.
        tables: labels to which ``brx`` branches.
    """

    parameters: dict[str, int]
    results: dict[str, int]
    registers: dict[str, int] = field(default_factory=dict)
    passed: dict[str, int] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)

    def width(self, name: str) -> int:
        """Return the bytes of a register, 0 of a predicate."""
        return self.passed[name] if name in self.passed else self.registers[name.rstrip("0123456789")]


@dataclass
class Program(Body):
    """A kernel.

    Attributes:
        name: the kernel's.
        threads: of a block.
        shared: symbols in shared memory, which begin at its begin.
    """

    name: str = ""
    threads: int = 0
    shared: frozenset[str] = frozenset()


def parse(text: str, name: str) -> Program:
    """Return a kernel of a module."""
    text = re.sub(r"//.*", "", text)
    entry = re.search(rf"\.entry\s+{re.escape(name)}\s*\(([^)]*)\)([^{{]*)\{{", text)
    if entry is None:
        raise NotImplementedError(f"no kernel {name} in a module")
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", entry[2])
    assert threads is not None
    shared = frozenset(re.findall(r"\.shared[^;]*?\b(\w+)\[", text))
    program = Program(_parameters(entry[1]), {}, name=name, threads=int(threads[1]), shared=shared)
    _fill(program, _braced(text, entry.end()))
    _inline(program, text)
    return program


def _braced(text: str, start: int) -> str:
    """Return the text from a place behind a brace to the brace that closes."""
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[start : start + brace.start()]
    raise NotImplementedError("a module without its end")


def split(text: str) -> list[str]:
    """Split operands at commas outside of brackets."""
    return [each.strip() for each in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,{\[(])+", text)]


def _parameters(text: str) -> dict[str, int]:
    found = {}
    for kind, rest, parameter in _PARAMETER.findall(text):
        length = re.search(rf"{re.escape(parameter)}\[(\d+)\]", text)
        assert length is None, f"an array as a parameter: {rest}{parameter}"
        found[parameter] = size_of(kind)
    return found


def _fill(body: Body, text: str) -> None:
    """Read instructions, labels and declarations."""
    body.tables = {label: split(targets) for label, targets in _TABLE.findall(text)}
    text = re.sub(r"(?m)^\s*\.(loc|file|section|pragma)\b[^\n]*$", "", _TABLE.sub("", text))
    body.passed = _parameters("\n".join(re.findall(r"\.param[^;]*;", text)))
    for kind, letters in re.findall(r"\.reg\s+\.(\w+)\s+(%[a-z]+)<", text):
        body.registers[letters] = 0 if kind == "pred" else size_of(kind)
    for line in text.split(";"):
        statement = " ".join(line.split()).lstrip("{} ")
        while label := _LABEL.match(statement):
            body.labels[label[1]] = len(body.code)
            statement = statement[label.end() :].lstrip("{} ")
        if not statement or statement.startswith(".param") or _SKIPPED.match(statement):
            continue
        found = _INSTRUCTION.match(statement)
        if found is None:
            raise NotImplementedError(statement)
        negated, guard, opcode, operands = found.groups()
        body.code.append(Instruction(guard or "", bool(negated), opcode, tuple(split(operands)), statement))


# Functions. -------------------------------------------------------------------------------------------------


def _inline(body: Body, text: str, depth: str = "") -> None:
    """Put the functions of a module in place of calls, with registers of their own."""
    code, moved = list[Instruction](), list[int]()
    for i, instruction in enumerate(body.code):
        moved.append(len(code))
        if instruction.opcode.startswith("call"):
            code += _called(body, instruction, text, f"call{i}_{depth}", len(code))
        else:
            code.append(instruction)
    moved.append(len(code))
    inlined = {label: at for label, at in body.labels.items() if label.startswith("inlined$")}
    own = {label: moved[at] for label, at in body.labels.items() if label not in inlined}
    body.code, body.labels = code, own | inlined


def _called(body: Body, call: Instruction, text: str, prefix: str, start: int) -> list[Instruction]:
    """Return the instructions of a called function; its registers and labels become those of the caller."""
    results, name, given = _call(call.operands)
    function = _function(text, name)
    _inline(function, text, prefix)
    names = dict(zip([*function.results, *function.parameters], [*results, *given], strict=True))
    names |= {passed: f"{prefix}{passed}" for passed in function.passed}
    names |= {label: f"inlined${prefix}{label}" for label in [*function.labels, *function.tables]}
    end = f"inlined${prefix}end"
    body.labels |= {names[label]: start + at for label, at in function.labels.items()}
    body.labels[end] = start + len(function.code)
    body.tables |= {names[label]: [names[each] for each in to] for label, to in function.tables.items()}
    body.registers |= {f"%{prefix}{letters[1:]}": size for letters, size in function.registers.items()}
    body.passed |= {f"{prefix}{passed}": size for passed, size in function.passed.items()}
    return [
        replace(each.renamed(names, prefix), opcode="bra", operands=(end,))
        if each.opcode.startswith("ret")
        else each.renamed(names, prefix)
        for each in function.code
    ]


def _call(operands: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Return the results, the function and the arguments of ``call (results), function, (arguments)``."""
    parts = [split(each.strip("() ")) for each in operands]
    if not operands[0].startswith("("):
        parts.insert(0, [])
    results, (name,), given = [*parts, []][:3]
    return results, name, given


def _function(text: str, name: str) -> Body:
    pattern = rf"\.func\s*(?:\(([^)]*)\))?\s*{re.escape(name)}\s*\(([^)]*)\)[^;{{]*\{{"
    found = re.search(pattern, text)
    if found is None:
        raise NotImplementedError(f"a call of {name}, which is not in the module")
    function = Body(_parameters(found[2]), _parameters(found[1] or ""))
    _fill(function, _braced(text, found.end()))
    return function
