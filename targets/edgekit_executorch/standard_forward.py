"""Adds the method that ExecuTorch's own runners call: `forward(tokens, start)`, which returns the last token's logits.

It differs from `append` only in its first and last steps, so it is derived from the emitted `append`. Tracing and
lowering it would take as long as for `append`. Both share parts, constants and cache in the file.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from edgekit.errors import TargetFailed
from edgekit_executorch.layout import APPEND, FORWARD

_SIZE, _ADD = ("aten::sym_size", "int"), ("executorch_prim::add", "Scalar")
_SLICE, _SELECT = ("aten::slice_copy", "Tensor_out"), ("aten::index_select", "out")


def with_forward(lowered: Any, config: Any) -> Any:
    """Return the bytes of a lowered program's file as ExecuTorch serialises it, with `forward` as well as `append`."""
    from executorch.exir._serialize._serialize import serialize_for_executorch

    emitted = lowered._emitter_output
    plans = emitted.program.execution_plan
    plans.insert(0, _forward(next(plan for plan in plans if plan.name == APPEND)))
    data, _ = serialize_for_executorch(emitted, config, lowered._data_serializer, lowered._named_data)
    return data


def _forward(append: Any) -> Any:
    """Return a copy of `append` without the input `rows`, which computes the logits of the last token."""
    from executorch.exir.schema import EValue, Instruction, Int, KernelCall

    plan = copy.deepcopy(append)
    plan.name = FORWARD
    tokens, _, rows = plan.inputs
    operators = {(operator.name, operator.overload): index for index, operator in enumerate(plan.operators)}
    code = plan.chains[0].instructions
    kernels = [each.instr_args for each in code if isinstance(each.instr_args, KernelCall)]
    sizes = [call for call in kernels if call.op_index == operators.get(_SIZE) and call.args[0] == tokens]
    readers = [each for each in code if rows in getattr(each.instr_args, "args", ())]
    if not sizes or len(readers) != 1 or readers[0].instr_args.op_index != operators.get(_SELECT):
        raise TargetFailed("executorch: `append` was lowered in another way than expected, so `forward` cannot be made")

    def number(value: int) -> int:
        plan.values.append(EValue(Int(value)))
        return len(plan.values) - 1

    count, last = sizes[0].args[2], number(0)
    hidden, chosen = readers[0].instr_args.args[0], readers[0].instr_args.args[-1]
    position = code.index(readers[0])
    code[position : position + 1] = [
        Instruction(KernelCall(operators[_ADD], [count, number(-1), last])),
        Instruction(KernelCall(operators[_SLICE], [hidden, number(0), last, count, number(1), chosen, chosen])),
    ]
    plan.inputs = plan.inputs[:2]
    version, tree = json.loads(plan.container_meta_type.encoded_inp_str)
    tree["children_spec"][0]["children_spec"].pop()
    plan.container_meta_type.encoded_inp_str = json.dumps([version, tree])
    if len(plan.outputs) > 1:  # hidden states for a drafting head, which `append` alone returns
        plan.outputs = plan.outputs[:1]
        version, tree = json.loads(plan.container_meta_type.encoded_out_str)
        plan.container_meta_type.encoded_out_str = json.dumps([version, tree["children_spec"][0]])
    return plan
