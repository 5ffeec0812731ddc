"""Context managers that replace private parts of the library: the only file of the tests that names them.

A test that needs a step to go another way than it would enters one of these, and asserts that the step went
that way: ``backend.report().routes()``. ``tests/test_map.py`` finds replacements elsewhere. A part that moves
is renamed here alone.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from collage_fx.capture.compiled import Compiled
from collage_fx.capture.matching import Matcher
from collage_fx.capture.recorder import Recorder
from collage_fx.capture.segment import RecordedFunction
from collage_fx.codegen import NoSpelling
from collage_fx.graph import DEVICES, Reason, StepProgram, Unit
from collage_fx.lowering import forget_kernels, kernels
from collage_fx.lowering.rules import Rule
from collage_fx.metrics.samples import Observer
from collage_fx.numerics import AuxiliarySpec
from collage_fx.pipeline import Pass, run_pipeline
from collage_fx.runtime import Kernel
from collage_fx.runtime.batches import Batch
from collage_fx.runtime.step import CompensatedStep
from collage_fx.state.fingerprints import fingerprint
from collage_fx.state.replaced_state import _Held
from collage_fx.torch_compat import PATCHES, TableKernel, inductor_compile_inner, patching, records
from collage_fx.torch_compat.patching import Patch
from collage_fx.wings.gradient_release import GradientRelease

_OF_THE_TEST = Reason("of the test")

#: What compiles graphs and printed kernels.
_COMPILERS = (
    "collage_fx.lowering.attempts.inductor_compile_inner",
    "collage_fx.torch_compat.load_cpp_library",
)


def forget_steps() -> None:
    """Forget what all optimizers of the process held after their last steps."""
    records.clear(_Held)


@contextlib.contextmanager
def components_compiled() -> Iterator[list[RecordedFunction]]:
    """Context manager: components of recorded steps that are compiled are added to the list."""
    found: list[RecordedFunction] = []
    compile_one = Recorder._compile

    def compiled(recorder: Recorder, function: RecordedFunction, **options: Any) -> Any:
        found.append(function)
        return compile_one(recorder, function, **options)

    with mock.patch.object(Recorder, "_compile", compiled):
        yield found


@contextlib.contextmanager
def code_called() -> Iterator[list[int]]:
    """Context manager: counts the calls of code that is compiled for parts of recorded steps.

    The list that it gives has one entry, their number so far.
    """
    call, count = Compiled.__call__, [0]

    def counting(self: Compiled, function: RecordedFunction) -> Any:
        count[0] += 1
        return call(self, function)

    with mock.patch.object(Compiled, "__call__", counting):
        yield count


# The way that a step takes. --------------------------------------------------------------------------------


@contextlib.contextmanager
def lowered_as(unit: Unit) -> Iterator[None]:
    """Context manager: graphs are lowered as this unit. By family or in parts, the pipeline decides."""
    if unit == "whole":
        with mock.patch("collage_fx.lowering.lower.lower_in_parts", return_value=_OF_THE_TEST):
            yield
    elif unit == "operation by operation":
        with mock.patch("collage_fx.lowering.lower.why_not_compiled", return_value=_OF_THE_TEST):
            yield
    else:
        yield


@contextlib.contextmanager
def comparing_by_torch(elements: int) -> Iterator[None]:
    """Context manager: elements that differ from a copy are found by torch, some at a time."""
    with (
        mock.patch("collage_fx.codegen.whole_values.is_library_loaded", return_value=False),
        mock.patch("collage_fx.codegen.whole_values.CHUNK_OF_A_DEVICE", elements),
    ):
        yield


@contextlib.contextmanager
def by_inductor() -> Iterator[None]:
    """Context manager: Inductor writes all kernels, none is printed."""
    with mock.patch("collage_fx.lowering.kernels.printed", return_value=_OF_THE_TEST):
        forget_kernels()
        yield
    forget_kernels()


@contextlib.contextmanager
def no_compiler(error: Exception) -> Iterator[None]:
    """Context manager: whatever compiles raises this error."""
    with contextlib.ExitStack() as stack:
        for name in _COMPILERS:
            stack.enter_context(mock.patch(name, side_effect=error))
        yield


@contextlib.contextmanager
def no_kernel_over_a_table() -> Iterator[None]:
    """Context manager: no kernel over a table can be printed."""
    forget_kernels()
    with mock.patch("collage_fx.codegen.table_kernel", side_effect=NoSpelling("such operation")):
        yield
    forget_kernels()


def no_tables_of_addresses(error: Exception) -> AbstractContextManager[Any]:
    """Context manager: the C++ that writes tables of addresses is not compiled."""
    return mock.patch("collage_fx.codegen.load_library", side_effect=error)


def failing_prediction(error: Exception) -> AbstractContextManager[Any]:
    """Context manager: sizes of updates are not computed, for an error in the library."""
    return mock.patch("collage_fx.report.prediction._motions", side_effect=error)


def no_fast_passes() -> AbstractContextManager[Any]:
    """Context manager: whole tensors are hashed and joined by torch's operators, not by C++."""
    return mock.patch("collage_fx.codegen.whole_values.is_library_loaded", return_value=False)


def failing_steps_of_the_lowering(error: Exception) -> contextlib.ExitStack:
    """Context manager: the steps of the lowering that only save time raise this error."""
    stack = contextlib.ExitStack()
    for name in ("in_order_of_memory", "in_stacks"):
        stack.enter_context(mock.patch(f"collage_fx.lowering.lower.{name}", side_effect=error))
    return stack


def numbers_frozen() -> AbstractContextManager[Any]:
    """Context manager: this torch reads a number of the host's once for a CUDA graph."""
    return mock.patch("collage_fx.lowering.lower.FREEZES_NUMBERS", True)


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Context manager: Inductor compiles nothing; calling a step that it should have compiled raises."""

    def call(arguments: list[Any]) -> Any:
        raise AssertionError("this step was not compiled: set the backend's engine")

    with mock.patch("collage_fx.lowering.attempts.inductor_compile_inner", return_value=call):
        yield


@contextlib.contextmanager
def without_pinning() -> Iterator[None]:
    """Context manager: steps are compiled as if ``pin-roundings`` did not exist."""

    def run_others(program: StepProgram, passes: Sequence[Pass], **options: Any) -> None:
        others = [each for each in passes if each.name != "pin-roundings"]
        assert len(others) == len(passes) - 1
        run_pipeline(program, others, **options)

    with mock.patch("collage_fx.backend.compilation.run_pipeline", run_others):
        yield


def compiled_for_vectors(kind: str) -> AbstractContextManager[Any]:
    """Context manager: this machine has these vectors."""
    return mock.patch("torch.backends.cpu.get_cpu_capability", return_value=kind)


def meta_device_as(kind: str) -> AbstractContextManager[Any]:
    """Context manager: tensors on the meta device are treated as those on a kind of device."""
    return mock.patch.dict("collage_fx.graph.devices.DEVICES", {"meta": DEVICES[kind]})


def threads_of_a_warp(count: int) -> AbstractContextManager[Any]:
    """Context manager: a warp of the GPU has so many threads."""
    return mock.patch("collage_fx.torch_compat.warp_size", return_value=count)


def processor(features: str) -> AbstractContextManager[Any]:
    """Context manager: this machine's processor has these instruction sets."""
    return mock.patch("collage_fx.torch_compat.inductor_libraries.processor_features", return_value=features)


def revision_of_torch_compat(name: str) -> AbstractContextManager[Any]:
    """Context manager: the package torch_compat is another revision."""
    return mock.patch("collage_fx.torch_compat.inductor._revision", return_value=name)


def tracing_roundings(function: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Context manager: the trace of a rounding to bfloat16, which Inductor is given, calls this function."""
    return mock.patch("collage_fx.numerics.arithmetic._round_to_bfloat16", function)


def is_entered(patch: Patch) -> bool:
    """Whether a patch is active in this thread, between entering and leaving."""
    return patching._layers.get(patch) in patching._entered.get()


# What a device, a version or a file says. -------------------------------------------------------------------


@contextlib.contextmanager
def captured_into_a_cuda_graph() -> Iterator[None]:
    """Context manager: the program captures its steps into a CUDA graph."""
    with contextlib.ExitStack() as stack:
        for name in ("collage_fx.runtime.launches.is_captured", "collage_fx.metrics.meter.is_captured"):
            stack.enter_context(mock.patch(name, return_value=True))
        yield


def e4m3_as_on(device: torch.device) -> AbstractContextManager[Any]:
    """Context manager: peers' formats are to be stored on this device."""
    from collage_fx.examples import peer_formats  # which registers them

    require = peer_formats.require_e4m3
    return mock.patch.object(peer_formats, "require_e4m3", side_effect=lambda _: require(device))


def torch_without(told: str) -> AbstractContextManager[Any]:
    """Context manager: this torch lacks what patches need, in these words."""
    return mock.patch("collage_fx.torch_compat.misfits", return_value=[told])


def no_triton() -> AbstractContextManager[Any]:
    """Context manager: Triton is not installed."""
    return mock.patch("collage_tools.gpu_code.kernels.have_triton", return_value=False)


def error_terms_pickled_as_they_are() -> AbstractContextManager[Any]:
    """Context manager: error terms are not pickled as a checkpoint holds them."""
    return mock.patch("collage_fx.state.checkpoint._as_saved", lambda _, expansion: expansion.auxiliaries)


# Limits. ----------------------------------------------------------------------------------------------------


def parts_of_elements(count: int) -> AbstractContextManager[Any]:
    """Context manager: tensors are converted in parts of so many elements."""
    return mock.patch("collage_fx.state.error_terms.PART", count)


def fingerprints_of_elements(count: int) -> AbstractContextManager[Any]:
    """Context manager: fingerprints are computed in chunks of so many elements."""
    return mock.patch("collage_fx.state.fingerprints._CHUNK_ON_CPU", count)


def fingerprints_without_scales() -> AbstractContextManager[Any]:
    """Context manager: checkpoints get the fingerprints of earlier versions."""

    def earlier_fingerprint(hi: Any, auxiliaries: Any, *, earlier: bool = True) -> Any:
        return fingerprint(hi, auxiliaries, earlier=True)

    return mock.patch("collage_fx.state.checkpoint.fingerprint", earlier_fingerprint)


def functions_compiled_as_often_as_steps() -> AbstractContextManager[Any]:
    """Context manager: a function around a step has the limit of recompilations that a step has."""
    return mock.patch("collage_fx.capture.watch.COMPILATIONS", 1)


def recorded_steps_that_compile(count: int) -> AbstractContextManager[Any]:
    """Context manager: after so many recorded steps that each compiled something, a warning says so."""
    return mock.patch("collage_fx.capture.recording.COMPILING_STEPS", count)


# The doctor. ------------------------------------------------------------------------------------------------


def doctor_finds(*devices: str) -> AbstractContextManager[Any]:
    """Context manager: the machine has these devices."""
    return mock.patch("collage_tools.doctor.devices", return_value=list(devices))


def doctor_expects(patch: Patch) -> AbstractContextManager[Any]:
    """Context manager: one more patch is listed."""
    return mock.patch("collage_tools.doctor.PATCHES", (*PATCHES, patch))


def doctor_compiles(fails: Exception) -> AbstractContextManager[Any]:
    """Context manager: the steps of the self-test fail."""
    return mock.patch("collage_tools.doctor._compiled_steps", side_effect=fails)


def doctor_interrupted() -> AbstractContextManager[Any]:
    """Context manager: Ctrl-C is pressed while the command ``doctor`` runs."""
    return mock.patch("collage_tools.doctor.examine", side_effect=KeyboardInterrupt)


# Spies: what is seen is in no report. -----------------------------------------------------------------------


@contextlib.contextmanager
def uploading_to_a_gpu(table: Any) -> Iterator[list[int]]:
    """Context manager: a table of launches is on a GPU; the uploads that have been waited for, in turn."""
    waited: list[int] = []
    begun = itertools.count()

    class Event:
        def record(self) -> None:
            self.upload = next(begun)

        def synchronize(self) -> None:
            waited.append(self.upload)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(table, "device", torch.device("cuda")))
        stack.enter_context(mock.patch("collage_fx.runtime.launches.is_captured", return_value=False))
        stack.enter_context(mock.patch("collage_fx.runtime.launches.on_device", contextlib.nullcontext))
        stack.enter_context(mock.patch("torch.cuda.Event", Event))
        stack.enter_context(mock.patch("torch.empty_like", lambda like, pin_memory: like.clone()))
        yield waited


@contextlib.contextmanager
def given_to_inductor() -> Iterator[list[tuple[set[int], set[int]]]]:
    """Context manager: for each graph, the inputs that are mutated and those that are said to be static."""
    seen: list[tuple[set[int], set[int]]] = []

    def spy(gm: Any, inputs: Sequence[Any], **options: Any) -> Any:
        compiled: Any = inductor_compile_inner(gm, inputs, **options)
        seen.append((set(compiled.mutated_input_idxs), set(options["static_input_idxs"])))
        return compiled

    with mock.patch("collage_fx.lowering.attempts.inductor_compile_inner", spy):
        yield seen


@contextlib.contextmanager
def settings_given_to_inductor() -> Iterator[list[dict[str, Any]]]:
    """Context manager: settings for each rule that Inductor would compile. It compiles none."""
    seen: list[dict[str, Any]] = []

    def leave_out(rule: Rule, gm: Any, no_table: Reason, settings: dict[str, Any]) -> Kernel:
        seen.append(settings)
        return Kernel(None, device=rule.device)

    with mock.patch("collage_fx.lowering.kernels._by_inductor", leave_out):
        yield seen


@contextlib.contextmanager
def failing_at_first(fail: Callable[[Any], None]) -> Iterator[list[str]]:
    """Context manager: ``fail`` gets the first graph that Inductor is given; the text of all of them."""
    seen: list[str] = []

    def compile_inner(gm: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(str(gm.graph))
        if len(seen) == 1:
            fail(gm)
        return inductor_compile_inner(gm, *arguments, **options)

    with mock.patch("collage_fx.lowering.attempts.inductor_compile_inner", compile_inner):
        yield seen


@contextlib.contextmanager
def kernels_begun() -> Iterator[list[TableKernel]]:
    """Context manager: yield kernels of cards whose compilation is begun; none is compiled."""
    begun: list[TableKernel] = []
    with mock.patch.object(TableKernel, "begin", autospec=True) as begin:
        yield begun
        begun.extend(call.args[0] for call in begin.call_args_list)


@contextlib.contextmanager
def rules_compiled() -> Iterator[list[Rule]]:
    """Context manager: the rules that kernels are compiled for, in a list."""
    compile_rule, seen = kernels.compile_rule, list[Rule]()

    def spy(rule: Rule) -> Any:
        seen.append(rule)
        return compile_rule(rule)

    with mock.patch("collage_fx.lowering.kernels.compile_rule", spy):
        yield seen


@contextlib.contextmanager
def temporaries_of_bytes(count: int) -> Iterator[None]:
    """Context manager: above so many bytes between kernels, the members of a step take turns."""
    with (
        mock.patch("collage_fx.runtime.temporaries.LIMIT", count),
        mock.patch("collage_fx.runtime.temporaries.LIMIT_OF_DEVICES", count),
    ):
        yield


@contextlib.contextmanager
def scratch_on(device: str) -> Iterator[None]:
    """Context manager: asserts that C++ functions are given scratch memory on this device."""
    call = Batch.__call__

    def spy(batch: Batch, addresses: Any, scratch: torch.Tensor, present: Any) -> None:
        assert scratch.device.type == device
        call(batch, addresses, scratch, present)

    with mock.patch.object(Batch, "__call__", spy):
        yield


@contextlib.contextmanager
def launches_noted() -> Iterator[list[Any]]:
    """Context manager: launches of kernels over tables are noted, and nothing is launched."""
    noted: list[Any] = []
    with (
        mock.patch("collage_fx.runtime.launches.launch", lambda *launch: noted.append(launch)),
        mock.patch("collage_fx.torch_compat.TableKernel.loaded", lambda kernel, *, aligned: kernel),
    ):
        yield noted


@contextlib.contextmanager
def memory_for_error_terms(count: int) -> Iterator[None]:
    """Context manager: there is memory for so many auxiliaries, and then no more."""
    zeros, made = AuxiliarySpec.zeros, list[AuxiliarySpec]()

    def allocate(self: AuxiliarySpec, device: torch.device) -> torch.Tensor:
        made.append(self)
        if len(made) > count:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return zeros(self, device)

    with mock.patch.object(AuxiliarySpec, "zeros", allocate):
        yield


@contextlib.contextmanager
def observing_within(mode: TorchDispatchMode) -> Iterator[None]:
    """Context manager: operations that measure a step are run in a dispatch mode."""
    read = Observer.read

    def within(*given: Any, **options: Any) -> Any:
        with mode:
            return read(*given, **options)

    with mock.patch.object(Observer, "read", within):
        yield


@contextlib.contextmanager
def lookups_of_parameters() -> Iterator[mock.Mock]:
    """Context manager: counts how often a step in the backward pass asks its optimizer for its parameters."""
    asked = mock.Mock(side_effect=GradientRelease._ask)
    with mock.patch.object(GradientRelease, "_ask", lambda release: asked(release)):
        yield asked


@contextlib.contextmanager
def lookups_of_error_terms(*, always: bool = False) -> Iterator[list[int]]:
    """Context manager: counts the calls of steps that look up their error terms, or lets all calls do so.

    The list that it gives has one entry, their number so far.
    """
    call, look_up, count = CompensatedStep.__call__, CompensatedStep._add_error_terms, [0]

    def calling(self: CompensatedStep, *args: Any) -> Any:
        if always:
            self._version = None
        return call(self, *args)

    def counting(self: CompensatedStep, *args: Any) -> None:
        count[0] += 1
        look_up(self, *args)

    with (
        mock.patch.object(CompensatedStep, "__call__", calling),
        mock.patch.object(CompensatedStep, "_add_error_terms", counting),
    ):
        yield count


@contextlib.contextmanager
def steps_matched(*, allowed: bool = True) -> Iterator[list[int]]:
    """Context manager: counts the segments of recorded steps that are matched, or lets none be.

    The list that it gives has one entry, their number so far.
    """
    begin, run, count = Matcher.begin, Matcher._run, [0]

    def beginning(self: Matcher, *, is_matching: bool) -> None:
        begin(self, is_matching=is_matching and allowed)

    def counting(self: Matcher) -> bool:
        has_run = run(self)
        count[0] += has_run
        return has_run

    with mock.patch.object(Matcher, "begin", beginning), mock.patch.object(Matcher, "_run", counting):
        yield count
