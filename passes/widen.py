"""The pass for ``wide`` arithmetic: compute the step in float32, and round each value once, when stored.

The captured graph computes in the storage format: each of its nodes rounds. This pass carries every
low-precision value in float32 from load to store, explicitly in the graph, so that the result does not depend
on Inductor's own choice of intermediate precision.

Note [Products in float32]
--------------------------
A product of matrices keeps its operands and its result in the storage format, as the hardware wants it: each
rounds by 2**-9 of itself, which is little beside an update (the iterations of Muon). For state without
a bound (Note [State without a bound] in ``graph/matrices.py``) it may be much: the roundings of an
ill-conditioned inverse root are larger than its product with a gradient. So products are computed in float32
if such state is made of them, or computed from them, and if they read such state or values computed from it.
A product of a parameter that ends in a float32 tensor is computed in float32, too: from step to step, the
parameter moves by less than such a rounding.
"""

from __future__ import annotations

from torch.fx import Node

from collage_fx import graph
from collage_fx.graph import GraphEditor, Kind, Retyper, Role, StepProgram
from collage_fx.passes.base import Pass


class Widen(Pass):
    """Pass that turns low-precision arithmetic into float32 arithmetic; opaque operators keep their dtype.

    Products of matrices that state is made of, or that read such state, are computed in float32.
    """

    name = "widen"
    after = ("allocate",)

    def applies_to(self, program: StepProgram) -> bool:
        return program.arithmetic == "wide"

    def run(self, program: StepProgram) -> str:
        products = _products_of_state(program)
        Retyper(GraphEditor(program.gm, self.name), rounding=False, also=products).run()
        what = f", {len(products)} matrix products" if products else ""
        return f"low-precision arithmetic{what} carried in float32"


def _products_of_state(program: StepProgram) -> set[Node]:
    """Return the low-precision matrix products of Note [Products in float32]."""
    step = program.gm.graph
    low = filter(graph.is_low_precision_tensor, step.nodes)
    products = {node for node in low if graph.is_matrix_product(node.target)}
    if not products:
        return products
    sources = [read.placeholder for read in program.reads if read.info.role is Role.STATE]
    weights = [read.placeholder for read in program.reads if read.info.role is Role.PARAMETER]
    found = set[Node]()
    for state in program.states:
        if state.is_unbounded and not state.is_weight_sized:
            sources += [state.placeholder, state.stored]
            found |= graph.addends_of(state)
            if state.recurrence.kind is Kind.OVERWRITE:
                found |= graph.reached([state.stored], graph.operands_of)
        if state.is_weight_sized or state.info.role is Role.PARAMETER:
            weights.append(state.placeholder)
    results = [*map(graph.stored, graph.copies_to_inputs(step).values()), *step.output_node().all_input_nodes]
    found |= graph.reached(weights, graph.readers_of) & graph.reached(
        filter(graph.is_float32_tensor, results), graph.operands_of
    )
    return (found | graph.reached(sources, graph.readers_of)) & products
