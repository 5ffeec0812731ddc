"""Command line: ``collage-fx``, or ``python -m collage_fx``.

Help and usage errors need no torch, which takes seconds to import: a command imports what it runs.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import os
import pkgutil
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import collage_fx
from collage_fx.choices import AUDIT_STEPS, Architecture, Dtype, OptionFields, did_you_mean, names_of
from collage_fx.clock import clock

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

    from collage_fx import CollageReport

#: Exit statuses: FAILED if the command found a failure, MISUSED for a mistake on the command line.
FAILED, MISUSED, INTERRUPTED = 1, 2, 130
STATUSES = """\
exit status: 0 = done, and nothing is wrong; 1 = the command found a failure, or the step is refused;
2 = a mistake on the command line, or options that do not fit the optimizer; 130 = interrupted"""
#: Options of a backend that the command line offers.
OPTIONS = [each for each in fields(OptionFields) if each.metadata["in_shell"]]


class UsageError(Exception):
    """Mistake on the command line; its text says what is allowed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # the terminal's encoding may not be UTF-8
    try:
        command, options, rest = _parsed(list(sys.argv[1:] if arguments is None else arguments))
        status = _run(command, options, rest)
        sys.stdout.flush()
        return status
    except UsageError as error:
        print(f"collage-fx: {error}", file=sys.stderr)
        return MISUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more
        return FAILED


def _run(command: Command, options: argparse.Namespace, rest: list[str]) -> int:
    """Run a command; return its exit status, also of a refused step."""
    command.check(options)
    if not command.needs_torch:
        return command.run(options, rest)
    with clock("collage-fx: importing torch"):
        collage_fx._complete()
    from collage_fx.errors import CollageError, InvalidOptionError

    try:
        return command.run(options, rest)
    except CollageError as error:
        print(f"collage-fx: {error}", file=sys.stderr)
        return MISUSED if isinstance(error, InvalidOptionError) else FAILED


def _parsed(arguments: list[str]) -> tuple[Command, argparse.Namespace, list[str]]:
    """Return the command, its options, and the arguments that it passes on."""
    parser = _Parser(
        prog="collage-fx",
        description="Precise optimizers in pure bf16 and fp16.",
        epilog=STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    parsers = {
        name: subparsers.add_parser(
            name,
            help=command.help,
            description=command.help,
            allow_abbrev=False,
            add_help=not command.passes_on,
        )
        for name, command in COMMANDS.items()
    }
    for name, command in COMMANDS.items():
        command.add_options(parsers[name])
    if not arguments:
        raise UsageError(f"give a command: {', '.join(COMMANDS)}; collage-fx --help describes them")
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        raise UsageError(f"no command {arguments[0]!r}; {did_you_mean(arguments[0], COMMANDS)}")
    if arguments[0] in COMMANDS and not COMMANDS[arguments[0]].passes_on:
        _check_words(arguments, parsers)  # before argparse asks for required options
    options, rest = parser.parse_known_args(arguments)
    command = COMMANDS[options.command]
    if rest and not command.passes_on:
        hint = _hint(parsers[options.command])
        raise UsageError(f"{options.command} takes no argument {rest[0]!r}{hint}")
    return command, options, rest


def _check_words(arguments: Sequence[str], parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Raise for an unknown option, and for an optimizer that is named without its option."""
    name, *words = arguments
    taken = {each: re.findall(r"--[\w-]+", parser.format_usage()) for each, parser in parsers.items()}
    known = [*taken[name], "--help"]
    for word in (each.partition("=")[0] for each in words if each.startswith("--") and each != "--"):
        if word not in known:
            others = [each for each, options in taken.items() if word in options]
            several = f"{', '.join(others[:-1])} and {others[-1]} have it" if others[1:] else ""
            hint = several or "".join(f"{other} has it" for other in others)
            raise UsageError(f"{name} has no option {word!r}; {hint or did_you_mean(word, known)}")
    usage = parsers[name].format_usage()
    is_required = "--optimizer" in usage and "[--optimizer" not in usage
    if words and not words[0].startswith("-") and is_required and "--optimizer" not in words:
        raise UsageError(f"{name} takes its optimizer by an option: --optimizer {words[0]}")


class _Version(argparse.Action):
    """Option that prints the versions and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        try:
            torch = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            torch = "not installed"
        print(f"collage-fx {collage_fx.__version__} (torch {torch}, Python {platform.python_version()})")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Parser of the command line that raises :class:`UsageError` instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}{_hint(self)}")


def _hint(parser: argparse.ArgumentParser) -> str:
    """Return a usage of up to three lines; instead of a longer usage, the option that shows it."""
    usage = parser.format_usage().rstrip()
    return f"\n{usage}" if usage.count("\n") < 3 else f"; {parser.prog} --help lists all options"


def _choice(names: Collection[str], registry: str = "") -> Callable[[str], str]:
    """Return an argparse type for an option whose values are names, also names in a registry of formats.

    The registry has no names before something has imported it.
    """

    def check(value: str) -> str:
        registered = getattr(sys.modules.get("collage_fx.numerics"), registry, ())
        known = list(dict.fromkeys([*names, *registered]))
        if value not in known:
            raise argparse.ArgumentTypeError(f"{value!r} is not allowed; {did_you_mean(value, known)}")
        return value

    return check


def _number_or(choice: Callable[[str], str]) -> Callable[[str], float | str]:
    """Return an argparse type for an option that takes a number or a name."""
    return lambda value: choice(value) if value.isalpha() else float(value)


def _file(text: str) -> Path:
    """Return the path of a file to write; an argparse type."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file in it")
    return path


def _existing(text: str) -> Path:
    """Return the path of a file or folder to read; an argparse type, before torch is imported."""
    if not (path := Path(text)).exists():
        raise UsageError(f"there is no file or folder {text!r}")
    return path


# explain ----------------------------------------------------------------------------------------------------


def _add_optimizer(
    parser: argparse.ArgumentParser, *, required: bool, dtypes: Sequence[str] = get_args(Dtype)
) -> None:
    add = parser.add_argument
    default = "" if required else " (torch.optim.AdamW)"
    add(
        "--optimizer",
        required=required,
        default="torch.optim.AdamW",
        help=f"its class, such as torch.optim.AdamW or package.module.Class{default}",
    )
    add("--lr", type=float, help="learning rate (default: the class's)")
    _add_values(parser, "--kw", "any other argument of the class")
    add("--dtype", type=_choice(dtypes), default="bfloat16", help="dtype of the parameters (bfloat16)")


def _add_values(parser: argparse.ArgumentParser, option: str, text: str) -> None:
    kind = partial(_value, option)
    parser.add_argument(option, type=kind, action="append", default=[], metavar="NAME=VALUE", help=text)


def _add_optimizer_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--import",
        type=_module,
        action="append",
        dest="imported",
        metavar="MODULE",
        help="module to import first; it may register formats for the options after it",
    )
    _add_optimizer(parser, required=True)
    add(
        "--shape",
        type=_shape,
        action="append",
        metavar="M,N",
        help="shape of a parameter; may be repeated (64,64 and 64)",
    )
    for option in OPTIONS:
        names = names_of(option.name)
        default = option.default if isinstance(option.default, str) else "the backend's"
        choice = _choice(names, option.metadata["registry"])
        kind = _number_or(choice) if "float" in str(option.type) else choice
        values = f": {', '.join(names)} ({default})" if names else ""
        add(
            f"--{option.name.replace('_', '-')}",
            type=kind,
            default=option.default,
            help=option.metadata["summary"].replace("``", "") + values,
        )


def _add_explain_options(parser: argparse.ArgumentParser) -> None:
    _add_optimizer_options(parser)
    add = parser.add_argument
    add("--full", action="store_true", help="print one row per tensor, and no text shortened")
    add("--why", action="store_true", help="print how each graph is compiled, and why not in a faster way")
    add("--graphs", action="store_true", help="print one tensor's update before and after")
    add("--markdown", action="store_true", help="print Markdown")
    add("--html", type=_file, metavar="FILE", help="write an HTML page that also shows the graphs")
    add("--kernels", action="store_true", help="compile the step; the HTML page then shows the kernels")
    add("--code", type=_choice(("triton",)), help="print code for a GPU, which need not be present: triton")
    architectures = get_args(Architecture)
    known = ", ".join(architectures)
    add("--arch", type=_choice(architectures), help=f"GPU architecture for --code: {known} (sm_90)")


def _check_explain(options: argparse.Namespace) -> None:
    """Raise for an option without the option that it depends on."""
    if options.kernels and not options.html:
        raise UsageError("--kernels adds kernels to the HTML page: add --html FILE, or remove --kernels")
    if options.arch and not options.code:
        raise UsageError("--arch chooses the GPU of --code: add --code triton, or remove --arch")


def _explain(options: argparse.Namespace, _: list[str]) -> int:
    from collage_fx.report import treatments
    from collage_tools.gpu_code import gpu_code

    choices = _choices(options)
    with clock(f"collage-fx: compiling the step of {options.optimizer}"):
        optimizer = _maker(options)(_parameters(options))
        code = gpu_code(optimizer, arch=options.arch or "sm_90", **choices) if options.code else None
        if code is not None:
            report = code.report
        elif options.kernels:
            report = _compiled(optimizer, choices)
        else:
            report = collage_fx.explain(optimizer, **choices)
    print(report.to_markdown(full=options.full) if options.markdown else report.to_text(full=options.full))
    if options.why:
        print(f"\n{report.why()}")
    if code is not None:
        print(f"\n{code}")
    if options.graphs:
        for group in treatments(report.tensors):
            found = next(each for each in reversed(report.graphs) if group.example in each.tensors)
            print(f"\nThe update of {group.example.name}:\n\n{found.to_text(group.example.name)}")
    if options.html:
        _write(options.html, lambda path: report.save_html(path, kernels=options.kernels))
    return 0


def _write(path: Path, save: Callable[[Path], object], *, aside: bool = False) -> None:
    """Write the page of ``--html``, and print its path; ``aside`` prints to stderr."""
    try:
        save(path)
    except OSError as error:
        raise UsageError(f"--html {path} cannot be written: {error.strerror}") from error
    print(f"\nWritten: {path}", file=sys.stderr if aside else sys.stdout)


def _compiled(optimizer: Optimizer, choices: dict[str, Any]) -> CollageReport:
    """Run two real steps and return their report; some optimizers create their state in the first step."""
    import torch

    backend = collage_fx.CollageBackend(**choices)
    step = torch.compile(optimizer.step, backend=backend)
    for _ in range(2):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        step()
    return backend.report()


def _choices(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a backend that were given."""
    return {each.name: getattr(options, each.name) for each in OPTIONS}


def _shapes(options: argparse.Namespace) -> list[tuple[int, ...]]:
    return options.shape or [(64, 64), (64,)]


def _parameters(options: argparse.Namespace) -> list[torch.nn.Parameter]:
    import torch

    dtype = getattr(torch, options.dtype)
    return [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in _shapes(options)]


def _maker(options: argparse.Namespace) -> Callable[[list[torch.nn.Parameter]], Optimizer]:
    """Return a function that creates the requested optimizer for a list of parameters."""
    kind = _optimizer_class(options.optimizer)
    for name, _ in options.kw:
        _check_keyword(kind, name)
    keywords = dict(options.kw)
    if options.lr is not None:
        keywords["lr"] = options.lr
    hint = "; set others with --shape" if "shape" in options else ""

    def make(params: list[torch.nn.Parameter]) -> Optimizer:
        try:
            optimizer: Optimizer = kind(params, **keywords)
        except (TypeError, ValueError) as error:
            given = ", ".join(f"{name}={value!r}" for name, value in keywords.items())
            raise UsageError(
                f"{options.optimizer}({given}) is refused: {error} (its parameters have the shapes "
                f"{', '.join(str(tuple(p.shape)) for p in params)}{hint})"
            ) from error
        if callable(train := getattr(optimizer, "train", None)):  # schedule-free optimizers need the call
            train()
        return optimizer

    return make


def _optimizer_class(name: str) -> Any:
    from torch.optim import Optimizer

    module_name, _, class_name = name.rpartition(".")
    module = _module(module_name or "torch.optim")
    classes = {
        each: value
        for each, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if class_name not in classes:
        raise UsageError(
            f"no optimizer {class_name!r} in {module.__name__}; {did_you_mean(class_name, classes)}"
        )
    return classes[class_name]


def _module(name: str) -> ModuleType:
    """Import a module; raise for the first part of its name that does not exist."""
    collage_fx._complete()
    found: ModuleType | None = None
    for part in name.split("."):
        whole = part if found is None else f"{found.__name__}.{part}"
        if importlib.util.find_spec(whole) is None:
            path = None if found is None else getattr(found, "__path__", [])
            known = [each.name for each in pkgutil.iter_modules(path) if not each.name.startswith("_")]
            hint = did_you_mean(part, known)
            if found is None and not hint.startswith("did"):
                hint = "is it installed, or its folder in PYTHONPATH?"
            raise UsageError(f"no module {whole!r}; {hint}")
        found = importlib.import_module(whole)
    assert found is not None
    return found


def _check_keyword(kind: Any, name: str) -> None:
    parameters = inspect.signature(kind).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    if name not in parameters and not takes_any:
        known = ["--lr" if each == "lr" else each for each in parameters if each != "params"]
        raise UsageError(f"{kind.__name__} has no argument {name!r}; {did_you_mean(name, known)}")


def _value(option: str, text: str) -> tuple[str, Any]:
    """Return the name and the value, a Python literal or a word, that an option is given."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"{option} takes NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError) as error:
        if any(each in value for each in "()[]{},'\""):
            hint = f"write it as in Python, and quote it for the shell, as in {option} 'betas=(0.9, 0.95)'"
            raise UsageError(f"{option} {text}: the value is incomplete or no constant; {hint}") from error
        return name, value


def _shape(text: str) -> tuple[int, ...]:
    """Return the sizes of a tensor; an argparse type."""
    sizes = text.split(",")
    if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise UsageError(f"--shape takes positive integers, such as 64,64, got {text!r}")
    return tuple(map(int, sizes))


# doctor and demo --------------------------------------------------------------------------------------------


def _add_doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--patches", action="store_true", help="list what is replaced in torch, and what would make it go"
    )


def _doctor(options: argparse.Namespace, _: list[str]) -> int:
    from collage_tools.doctor import examine, patches

    if options.patches:
        text, ok = patches()
    else:
        with clock("collage-fx: compiling steps on each device"):
            text, ok = examine()
    print(text)
    return 0 if ok else FAILED


def _require(user: str, *packages: str, install: str) -> None:
    """Raise for packages that are not installed."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise UsageError(f"{user} needs {' and '.join(missing)}: pip install {install}")


def _demo(options: argparse.Namespace, rest: list[str]) -> int:
    """Run the example as a program of its own; print its help without the packages that it needs."""
    program = Path(collage_fx.__file__).parent / "examples" / "train_gpt.py"
    if {"-h", "--help"} & set(rest):
        print(ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))))
        return 0
    _require("the demo", "matplotlib", "tqdm", install="'collage-fx[demo]'")
    command = [sys.executable, str(program), *rest]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # a checkout may not be installed
    status = subprocess.run(command, env=environment, check=False).returncode
    return status if status >= 0 else 128 - status  # a signal, as a shell gives it


# audit ------------------------------------------------------------------------------------------------------


def _add_audit_options(parser: argparse.ArgumentParser) -> None:
    _add_optimizer_options(parser)
    parser.add_argument(
        "--steps", type=int, default=AUDIT_STEPS, help=f"steps per learning rate schedule ({AUDIT_STEPS})"
    )


def _audit(options: argparse.Namespace, _: list[str]) -> int:
    import torch

    with clock(f"collage-fx: measuring {options.optimizer} (about half a minute)"):
        found = collage_fx.audit(
            _maker(options),
            shapes=_shapes(options),
            dtype=getattr(torch, options.dtype),
            steps=options.steps,
            **_choices(options),
        )
    print(found)
    return 0 if found.is_good else FAILED


# checkup ----------------------------------------------------------------------------------------------------


def _add_checkup_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "path",
        type=_existing,
        help="safetensors file, file of torch.save, index of shards, or a folder with one of them",
    )
    add("earlier", type=_existing, nargs="?", help="earlier checkpoint of the same run, to compare with")
    add("--lr", type=float, help="learning rate: adds the share of weights that no such update can move")
    add("--weight-decay", type=float, help="weight decay of the run")
    add("--steps", type=int, help="number of steps since the earlier checkpoint")
    add("--optimizer", type=_existing, metavar="FILE", help="file of the optimizer's state_dict()")
    add("--full", action="store_true", help="print one row per tensor")
    add("--json", action="store_true", help="print JSON")
    add("--html", type=_file, metavar="FILE", help="write an HTML page with histograms")


def _checkup(options: argparse.Namespace, _: list[str]) -> int:
    from collage_fx.errors import CheckpointMismatchError
    from collage_tools.checkup import checkup

    try:
        with clock(f"collage-fx: reading {options.path}"):
            found = checkup(
                options.path,
                options.earlier,
                lr=options.lr,
                weight_decay=options.weight_decay,
                steps=options.steps,
                optimizer=options.optimizer,
            )
    except CheckpointMismatchError as error:  # a file that is no checkpoint; status 1 is for findings
        raise UsageError(str(error)) from error
    print(found.to_json() if options.json else found.to_text(full=options.full))
    if options.html:
        _write(options.html, found.save_html, aside=options.json)
    return 0 if found.is_good else FAILED


# plan -------------------------------------------------------------------------------------------------------


def _positive(text: str) -> int:
    """Return a positive integer; an argparse type."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return int(text)


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("file", nargs="?", type=Path, help="Python file with model(), and loss() if need be")
    source.add_argument("--hf", metavar="CONFIG", help="config.json of a causal language model, or its type")
    add = parser.add_argument
    _add_values(parser, "--set", "entry of the configuration")
    add("--gpu", type=float, required=True, metavar="GB", help="memory of a GPU")
    add("--seq", type=_positive, required=True, metavar="TOKENS", help="length of a sequence")
    add("--fsdp", type=_positive, default=1, metavar="GPUS", help="GPUs that shard the model (1)")
    add("--micro-batch", type=_positive, default=1, help="sequences on a GPU, for the peaks shown (1)")
    add("--reserve", type=float, default=0.06, help="share of a GPU that tensors cannot have (0.06)")
    add("--checkpointing", type=_choice(("on", "off", "both")), default="both", help="on, off or both (both)")
    add("--squares", action="store_true", help="attention keeps its scores, as on a CPU with dropout")
    _add_optimizer(parser, required=False, dtypes=("bfloat16", "float16"))
    add("--json", action="store_true", help="print JSON; sizes are bytes")
    add("--html", type=_file, metavar="FILE", help="write an HTML page with bars")


def _plan(options: argparse.Namespace, _: list[str]) -> int:
    import torch

    from collage_tools.plan import Plan, from_file, from_hf, json_of, page_of, shortage_of, text_of

    if not (options.gpu > 0 and 0 <= options.reserve < 1):
        raise UsageError("--gpu takes a positive number of GB, and --reserve a share from 0 to below 1")
    if options.hf:
        _require("--hf", "transformers", install="transformers")
    with clock("collage-fx: running the model on fake tensors"):
        found = Plan(
            from_hf(options.hf, dict(options.set)) if options.hf else from_file(options.file),
            _maker(options),
            gpu=options.gpu,
            sequence=options.seq,
            fsdp=options.fsdp,
            micro_batch=options.micro_batch,
            dtype=getattr(torch, options.dtype),
            reserve=options.reserve,
            checkpointing={"on": (True,), "off": (False,), "both": (False, True)}[options.checkpointing],
            squares=options.squares,
        )
    print(json_of(found) if options.json else text_of(found))
    if options.html:
        page = page_of(found)
        _write(options.html, lambda path: path.write_text(page, encoding="utf-8"), aside=options.json)
    if shortage := shortage_of(found):
        print(f"\ncollage-fx: {shortage}", file=sys.stderr)
    return FAILED if shortage else 0


# convert ----------------------------------------------------------------------------------------------------


def _add_convert_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="IN", type=_existing, help="file or folder of a checkpoint of model and optimizer")
    add("target", metavar="OUT", type=Path, help="file or folder to write, in the same form")
    dtypes = ("bfloat16", "float32")
    add("--dtype", type=_choice(dtypes), default="bfloat16", help="bfloat16, or float32: the way back")
    add("--keep", action="append", default=[], metavar="NAME", help="tensor or module that stays as it is")
    add("--job", type=Path, metavar="FILE", help="Python file with the job's model() and optimizer(model)")


def _convert(options: argparse.Namespace, _: list[str]) -> int:
    import torch

    from collage_tools.conversion import convert_checkpoint

    with clock(f"collage-fx: reading {options.source}"):
        done = convert_checkpoint(
            options.source,
            options.target,
            getattr(torch, options.dtype),
            job=options.job,
            keep=options.keep,
        )
    print(f"{done}\n\nWritten: {options.target}")
    return 0


# error ------------------------------------------------------------------------------------------------------


def _add_error_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("codes", nargs="+", metavar="CODE", help="code from an error message, such as CFX001")


def _error(options: argparse.Namespace, _: list[str]) -> int:
    """Print the page of each error, which needs no torch."""
    pages = {each.stem: each for each in sorted((Path(__file__).parent / "error_pages").glob("CFX*.md"))}
    for code in options.codes:
        if code.upper() not in pages:
            raise UsageError(f"no error {code!r}; {did_you_mean(code.upper(), pages)}")
    texts = [pages[code.upper()].read_text(encoding="utf-8") for code in options.codes]
    shown = [text.removeprefix("# ").partition("\n[All errors]")[0].strip() for text in texts]
    print(re.sub(r"\[[^]]+\]\(\.\./([^)]+)\)", r"docs/\1", "\n\n".join(shown)))
    return 0


@dataclass(frozen=True)
class Command:
    """Command of the command line: the first word after ``collage-fx``.

    Attributes:
        help: description in a few words.
        run: function of the options, and of the remaining arguments if ``passes_on``; returns the exit
            status.
        add_options: function that adds the command's options to its parser.
        check: function that raises :class:`UsageError` for options that do not fit together.
        needs_torch: whether torch is imported before ``run``.
        passes_on: whether arguments that are not options of the command are passed to ``run``.
    """

    help: str
    run: Callable[[argparse.Namespace, list[str]], int]
    add_options: Callable[[argparse.ArgumentParser], None] = lambda _: None
    check: Callable[[argparse.Namespace], None] = lambda _: None
    needs_torch: bool = True
    passes_on: bool = False


COMMANDS = {
    "explain": Command(
        "show what compiling an optimizer's step would do, and why",
        _explain,
        _add_explain_options,
        _check_explain,
    ),
    "audit": Command(
        "measure the precision of an optimizer in low precision (mostly about half a minute)",
        _audit,
        _add_audit_options,
    ),
    "checkup": Command(
        "tell from a checkpoint whether it was trained without master weights, and what that has frozen",
        _checkup,
        _add_checkup_options,
    ),
    "plan": Command(
        "memory of a training job by kind and budget, and its largest micro-batch; allocates nothing",
        _plan,
        _add_plan_options,
    ),
    "convert": Command(
        "make the checkpoint of a float32 job one of a compensated bfloat16 job, or back, and lose no bit",
        _convert,
        _add_convert_options,
    ),
    "doctor": Command(
        "versions, compiler, devices, and whether roundings survive on each", _doctor, _add_doctor_options
    ),
    "error": Command(
        "what errors mean, by the codes in their messages", _error, _add_error_options, needs_torch=False
    ),
    "demo": Command(
        "train a small GPT in pure bf16 with and without error terms; options go to examples/train_gpt.py",
        _demo,
        passes_on=True,
        needs_torch=False,
    ),
}
