"""Lowers torch modules to a program: traces with dynamic shapes, delegates to a backend, plans memory, and writes.

Passes are slow, because each one traces every graph again. So functions are decomposed once instead of three times, as
the usual entry point does, and only the partitioner of XNNPACK that these graphs need is run.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from edgekit.common.progress import Progress
from edgekit.errors import TargetFailed
from edgekit_executorch.decoder import Append, ExecutorchDecoder, StepForward
from edgekit_executorch.layout import APPEND, FORWARD, STEP, Sizes, exit_after
from edgekit_executorch.sharing import share_constants

# Operators of the method that ExecuTorch's own runners call, `forward(tokens, start)`, which returns the last token's
# logits. It differs from `append` in its first and last steps only, so it is derived from the emitted one: tracing and
# lowering it would take as long again. Both share parts, constants and cache in the file.
_SIZE, _ADD = ("aten::sym_size", "int"), ("executorch_prim::add", "Scalar")
_SLICE, _SELECT = ("aten::slice_copy", "Tensor_out"), ("aten::index_select", "out")


class LoweredMethod(NamedTuple):
    """One method: a module, example inputs, and their dynamic dimensions."""

    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    dynamic: tuple[dict[int, Any] | None, ...]


def entries(
    decoder: ExecutorchDecoder, sizes: Sizes, *, windowed: bool, exits: Sequence[int] = (), features: Sequence[int] = ()
) -> dict[str, LoweredMethod]:
    """Return the methods to trace: `append`, `step`, and an `append` for each early exit.

    `features`: layers whose hidden states `append` also returns.
    """
    count, rows = min(3, sizes.chunk), 2
    tokens = torch.export.Dim("tokens", min=1, max=sizes.chunk)
    logits = torch.export.Dim("rows", min=1, max=sizes.rows)
    text = torch.zeros(1, count, dtype=torch.long)
    positions, chosen = torch.arange(count), torch.arange(rows)
    masks = tuple(torch.zeros(count, sizes.slots) for _ in range(2 if windowed else 1))
    appended = (text, torch.tensor([1]), chosen), ({1: tokens}, None, {0: logits})
    return {
        APPEND: LoweredMethod(Append(decoder, features), *appended),
        **{exit_after(layer): LoweredMethod(Append(decoder.leaving_after(layer)), *appended) for layer in exits},
        STEP: LoweredMethod(
            StepForward(decoder),
            (text, positions, positions.clone(), chosen, *masks),
            ({1: tokens}, {0: tokens}, {0: tokens}, {0: logits}, *({0: tokens} for _ in masks)),
        ),
    }


def lower_xnnpack(
    methods: Mapping[str, LoweredMethod], constants: Mapping[str, Any], out: Path, progress: Progress
) -> None:
    """Write a program of these methods, which share weights and cache, to `out`."""
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
    from executorch.exir.passes import MemoryPlanningPass

    steps = len(methods) + 3
    exported = {}
    for index, (name, entry) in enumerate(methods.items()):
        progress(index, steps, f"tracing {name}")
        exported[name] = trace(entry)
    progress(steps - 3, steps, "decomposing")
    # Keep linears whole; every tensor has the default dimension order.
    config = EdgeCompileConfig(
        _check_ir_validity=False, _skip_dim_order=True, preserve_ops=[torch.ops.aten.linear.default]
    )
    edge = to_edge(exported, compile_config=config, constant_methods=dict(constants))
    progress(steps - 2, steps, "lowering to XNNPACK")
    lowered = edge.to_backend({name: _partitioner() for name in methods})
    progress(steps - 1, steps, "planning memory")
    planning = MemoryPlanningPass(alloc_graph_input=False, share_mutable_buffers=True)
    # Write buffer names, by which a host finds the caches.
    config = ExecutorchBackendConfig(memory_planning_pass=planning, emit_mutable_buffer_names=True)
    program = lowered.to_executorch(config)
    with out.open("wb") as file:
        (_with_forward(program, config) if APPEND in methods else program).write_to_file(file)
    share_constants(out)
    progress(steps, steps, "lowered")


def trace(entry: LoweredMethod) -> torch.export.ExportedProgram:
    """Export a method with its dynamic dimensions."""
    with torch.no_grad():
        return torch.export.export(entry.module.eval(), entry.inputs, dynamic_shapes=entry.dynamic, strict=False)


def _partitioner() -> Any:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir.backend.compile_spec_schema import CompileSpec
    from executorch.exir.backend.partitioner import DelegationSpec

    partitioner = XnnpackPartitioner()
    only_linears = CompileSpec("dqlinear_partitioner", b"")
    partitioner.delegation_spec = DelegationSpec(partitioner.delegation_spec.backend_id, [only_linears])
    return partitioner


def _with_forward(lowered: Any, config: Any) -> Any:
    """Return the bytes of a lowered program's file as ExecuTorch serialises it, with `forward` as well as `append`."""
    from executorch.exir._serialize._serialize import serialize_for_executorch

    emitted = lowered._emitter_output
    plans = emitted.program.execution_plan
    plans.insert(0, _standard_forward(next(plan for plan in plans if plan.name == APPEND)))
    data, _ = serialize_for_executorch(emitted, config, lowered._data_serializer, lowered._named_data)
    return data


def _standard_forward(append: Any) -> Any:
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
