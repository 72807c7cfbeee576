"""Faults of regions, stores, plans, parallelism, drop-in modules, the reference implementations and the C++ extension."""

from __future__ import annotations

from .anchors import Fault

SEGMENTS = [
    Fault(
        "checkpoint: recompute samples new random numbers",
        "ckptkern/segments/segment.py",
        "state = SegmentState(args, kwargs, «preserve_rng_state», self.checksums is not None, own, reachable)",
        "False",
        ("tests/segments/test_regions.py -k dropout",),
    ),
    Fault(
        "checkpoint: parameters are those of backward",
        "ckptkern/segments/segment.py",
        "state = SegmentState(args, kwargs, preserve_rng_state, self.checksums is not None, «own, reachable»)",
        "None, ()",
        ("tests/conversion/test_training_loops.py -k 'forwards and Llama'",),
    ),
    Fault(
        "checkpoint: recompute runs to its end",
        "ckptkern/segments/segment.py",
        "self.stops_early = «early_stop and self.checksums is None»",
        "False",
        ("tests/segments/test_checkpoint.py -k early_stop", "tests/segments/test_checkpoint.py"),
    ),
    Fault(
        "checkpoint: running statistics are updated twice",
        "csrc/module_state.cpp",
        "const bool statistics = «space.norm» && space.kind == Kind::buffers &&",
        "false",
        ("tests/segments/test_regions.py -k statistics",),
    ),
    Fault(
        "checkpoint: modules are as backward finds them",
        "csrc/module_state.cpp",
        ": «value» && (value.ptr() != entry.value.ptr() || !is_there) &&",
        "false",
        ("tests/segments/test_seen.py -k 'sees and eval'", "tests/segments/test_seen.py"),
    ),
    Fault(
        "checkpoint: a small buffer is as forward left it",
        "csrc/module_state.cpp",
        "entry.before = «copy_of(x, copies_)»;",
        "at::Tensor()",
        ("tests/segments/test_seen.py -k 'sees and updates'", "tests/segments/test_seen.py"),
    ),
    Fault(
        "checkpoint: modes of torch functions are those of backward",
        "csrc/segment_state.cpp",
        "modules_.enter(outer_states().back().modules); «at::impl::PythonTorchFunctionTLS::set_state(function_modes_);»",
        "",
        ("tests/segments/test_seen.py -k Mode", "tests/segments/test_regions.py -k default_device"),
    ),
    Fault(
        "checkpoint: a recompute reads what was changed in place",
        "ckptkern/segments/segment.py",
        "return _Unreadable(changed, self) if «changed» else _NOTHING",
        "False",
        ("tests/segments/test_seen.py -k 'place or captured'",),
    ),
    Fault(
        "checkpoint: a recompute ends before the kernel that fills what was saved",
        "csrc/saved_tensors.cpp",
        "return «run.unfilled != now» &&",
        "true",
        ("tests/segments/test_seen.py -k kernel",),
    ),
    Fault(
        "checkpoint: containers are handed on as forward left them",
        "csrc/segment_state.cpp",
        "return «parts.is_none()» ? py::object() : parts;",
        "true",
        ("tests/segments/test_seen.py -k consumed",),
    ),
    Fault(
        "precision: attention's kernels are those of backward",
        "csrc/precision.cpp",
        "«{read_attention_order, read_attention_order, write_attention_order}»,",
        "{read_deterministic, read_deterministic, write_deterministic}",
        ("tests/test_state.py -k attention",),
    ),
    Fault(
        "checkpoint: recompute decides for itself",
        "ckptkern/segments/decisions.py",
        "self.place += 1 return «unpack(taken).clone()»",
        "decision",
        ("tests/segments/test_decisions.py",),
    ),
    Fault(
        "checkpoint: saved-tensor hooks never see what a policy saves",
        "ckptkern/segments/checkpoint.py",
        "contexts = with_hooks(contexts, «respect_saved_tensors_hooks»)",
        "None",
        ("tests/segments/test_torch_api.py",),
    ),
    Fault(
        "checkpoint: a region around is taken for the user's hooks",
        "ckptkern/segments/decisions.py",
        'getattr(hooks[1], "__module__", "") in «RECOMPUTING»:',
        "()",
        ("tests/segments/test_torch_api.py -k nested",),
    ),
    Fault(
        "checkpoint: a decorated function's keyword arguments are options",
        "ckptkern/segments/checkpoint.py",
        "def call(*args, **kwargs): return «_checkpoint(function, args, kwargs, **options)»",
        "checkpoint(function, *args, **kwargs)",
        ("tests/segments/test_torch_api.py -k decorated",),
    ),
    Fault(
        "tiled: 16-bit gradients are rounded after each chunk",
        "ckptkern/segments/slices.py",
        "«sums.redirect(written[min(with_graph)])»",
        "pass",
        ("tests/segments/test_tiled.py",),
    ),
    Fault(
        "tiled: chunks share autocast's cast of a weight",
        "ckptkern/segments/tiled.py",
        "torch.set_autocast_cache_enabled(«False»)",
        "before",
        ("tests/segments/test_tiled.py -k rounded",),
    ),
    Fault(
        "groups: a later layer's recompute decides for itself",
        "ckptkern/segments/segment.py",
        "torch._C._push_on_torch_function_stack(«self.recompute_context»)",
        "self.context",
        ("tests/conversion/test_groups.py -k router", "tests/conversion/test_groups.py"),
    ),
    Fault(
        "parts: what mixes the entries of an axis is cut along it",
        "ckptkern/segments/axes.py",
        "if «dim in mixed»: return None",
        "False",
        ("tests/segments/test_axes.py",),
    ),
    Fault(
        "parts: some channels of a convolution have all groups",
        "ckptkern/segments/axes.py",
        "*cut], «((8, None, groups // n),)»)",
        "()",
        ("tests/segments/test_axes.py",),
    ),
    Fault(
        "parts: a view takes blocks for what is between them",
        "ckptkern/segments/axes.py",
        "return Cut([(source, «Axis(dim, size // (inner * n), inner)»)], sizes)",
        "Axis(dim, inner, size // (inner * n))",
        ("tests/segments/test_axes.py",),
    ),
    Fault(
        "parts: an operator that reads a tensor along two axes gets one slice of it",
        "ckptkern/segments/axes.py",
        "return cut if cut and «len(dict(cut.inputs)) == len(set(cut.inputs))» else None",
        "True",
        ("tests/segments/test_axes.py",),
    ),
    Fault(
        "parts: a slice of what only begins as its result",
        "ckptkern/segments/axes.py",
        "elif «shape[at] != shape_of(node)[axis.dim]»: return None",
        "False",
        ("tests/segments/test_axes.py",),
    ),
    Fault(
        "slices: the gradient of an input is that of its last slice",
        "ckptkern/segments/slices.py",
        "if «(task, i) not in ctx.wholes»: ctx.wholes[task, i] =",
        "True",
        ("tests/segments/test_axes.py -k whole",),
    ),
    Fault(
        "slices: a graph holds its results",
        "ckptkern/segments/slices.py",
        "ctx.axes, ctx.places, ctx.sums = «axes, places, sums»",
        "axes, places, (sums, wholes)",
        ("tests/conversion/test_parts.py -k known_one",),
    ),
    Fault(
        "slices: the last slice is left out",
        "ckptkern/segments/slices.py",
        "for first in range(0, «max(n, 1)», length):",
        "n - length",
        ("tests/segments/test_axes.py -k whole",),
    ),
    Fault(
        "parts: a fused MLP in a slice runs without autocast",
        "ckptkern/segments/parts.py",
        "with «own_modes() if call else torch._C._DisableAutocast()»:",
        "torch._C._DisableAutocast()",
        ("tests/conversion/test_parts.py -k autocast",),
    ),
    Fault(
        "parts: what a reentrant checkpoint recomputes has placeholders for attention's weights, too",
        "ckptkern/conversion/binding.py",
        "later = «torch._C._current_graph_task_id() == -1 or in_region()»",
        "True",
        ("tests/conversion/test_parts.py -k weights_are",),
    ),
    Fault(
        "parts: a fused MLP in a slice computes with its module's own parameters",
        "ckptkern/segments/parts.py",
        "with _reparametrize_module(module, «dict(zip(names, parameters, strict=True))», tie_weights=True):",
        "{}",
        ("tests/conversion/test_parts.py -k second",),
    ),
    Fault(
        "parts: what a recording changed in a module stays",
        "ckptkern/segments/recorded.py",
        "changed |= «refilled(container, old)»",
        "False",
        ("tests/segments/test_parts.py -k changes",),
    ),
    Fault(
        "parts: a list that a forward fills stays empty",
        "ckptkern/segments/parts.py",
        "if «after != kind or any(value is not other for value, other in zip(now, before, strict=True))»:",
        "False",
        ("tests/segments/test_parts.py -k lists",),
    ),
    Fault(
        "parts: gradients that a forward switches off flow",
        "ckptkern/segments/recorded.py",
        "if «function is torch._C._set_grad_enabled»:",
        "False",
        ("tests/segments/test_parts.py -k switches",),
    ),
    Fault(
        "parts: a plan is of parameters of any kind",
        "ckptkern/segments/parts.py",
        "key = (spec, workspace, later, self.slices, module.training, autocast_dtype(tensors[0]), «*kinds»)",
        "*kinds[:1]",
        ("tests/segments/test_parts.py -k another",),
    ),
]

STORAGE = [
    Fault(
        "compress: small elements become zeros",
        "ckptkern/storage/compress.py",
        "codes[row : row + step] = «torch.where(rounded == 0, x.sign() * code.smallest, rounded)»",
        "rounded",
        ("tests/storage/test_compress.py",),
    ),
    Fault(
        "offload: a change during the copy is not seen",
        "ckptkern/storage/offload.py",
        "if «flight.resident._version != copy.version»: # before the copy or after it: the host cannot tell",
        "False",
        ("tests/storage/test_offload.py",),
    ),
    Fault(
        "store: a changed tensor has the values of before",
        "ckptkern/storage/store.py",
        "key = StorageWeakRef(tensor.untyped_storage()), «tensor._version,» around if any(around) else (), *at",
        "",
        ("tests/storage/test_store.py",),
    ),
]

PLANNING = [
    Fault(
        "solve: of layers that are alike the first save most",
        "ckptkern/planning/search.py",
        "strategies.insert(«0», w)",
        "len(strategies)",
        ("tests/planning/test_solve.py",),
    ),
    Fault(
        "solve: a choice may exceed the budget by a KiB",
        "ckptkern/planning/search.py",
        "if excess <= «0»: return chosen",
        "KIB",
        ("tests/planning/test_solve.py",),
    ),
    Fault(
        "table: a region's own backward does not count what it saves",
        "ckptkern/planning/table.py",
        "regions, rise = stretch.done «| {i}», are[i].backward - were[i].backward",
        "",
        ("tests/planning/test_predictions.py",),
    ),
    Fault(
        "certify: a gradient of NaN passes",
        "ckptkern/planning/certify.py",
        "for error in errors if «not error.ours <= self.allowed(error.eager)»]",
        "error.ours > self.allowed(error.eager)",
        ("tests/planning/test_certify.py",),
    ),
]

PARALLEL = [
    Fault(
        "tensor parallel: a leading norm's gradient is one rank's part",
        "ckptkern/parallel/roles.py",
        'return «INSIDE if sublayer.get("norm_first", True) else AROUND»',
        "AROUND",
        ("tests/distributed/test_blocks.py",),
    ),
    Fault(
        "tensor parallel: every rank drops the first heads' scores",
        "ckptkern/ops/sharded.py",
        "heads = dict(first_plane=«self.rank * o.num_heads», planes=self.size * o.num_heads)",
        "0",
        ("tests/distributed/test_blocks.py",),
    ),
    Fault(
        "context parallel: all ranks drop the same elements of their rows",
        "ckptkern/ops/attention/context.py",
        "return rng «if self.rank == 0 else rng ^ (self.rank * 0x9E3779B97F4A7C15 & 0x7FFFFFFFFFFFFFFF)»",
        "",
        ("tests/distributed/test_split_sequences.py -k masks_of_rows", "tests/distributed/test_split_sequences.py"),
    ),
]

NN = [
    Fault(
        "nn: a bound in bytes is measured in one mode for both",
        "ckptkern/nn/sequential.py",
        "input.requires_grad, autocast_dtype(input)«, self.training»",
        "",
        ("tests/segments/test_sequential.py", "tests/nn/test_sequential.py"),
    ),
    Fault(
        "nn: a dropout module's own mode is not read",
        "ckptkern/nn/transformer.py",
        "return dropout.p «if dropout.training else 0.0»",
        "",
        ("tests/nn/test_transformer.py",),
    ),
    Fault(
        "nn: a stack recomputes its last group too",
        "ckptkern/nn/sequential.py",
        "if «start == starts[-1] or» not torch.is_grad_enabled()",
        "",
        ("tests/nn/test_sequential.py",),
    ),
]

EAGER = [
    Fault(
        "state: the scale of dropout is that of the unrounded p",
        "ckptkern/state/__init__.py",
        "return threshold, «65536 / (65536 - threshold)» if threshold < 65536 else 0.0",
        "1 / (1 - p)",
        ("tests/test_state.py -k threshold",),
    ),
    Fault(
        "state: in tensor operations planes overlap where rows are no multiple of 16",
        "ckptkern/state/__init__.py",
        "c1 = 8 * (plane * «-(-total_rows // 16)» + row_blocks)",
        "(total_rows // 16)",
        ("tests/test_state.py -k 'layout or parts or meta'", "tests/test_state.py"),
    ),
    Fault(
        "eager: blocks of heads drop the same scores",
        "ckptkern/eager/attention_core.py",
        "plane_base=core.plane_base + self.samples.start * planes «+ self.heads.start»",
        "",
        ("tests/ops/test_properties.py -k 'pairs_of_options and [scaled_dot_product_attention-dropout'",),
    ),
    Fault(
        "eager: large scores take an lse that has no digits",
        "ckptkern/eager/attention.py",
        "and not (lse.abs() > «2**10»).any():",
        "2**20",
        ("tests/ops/test_attention.py -k extreme_scores", "tests/ops/test_attention.py"),
    ),
]

FROZEN = [
    Fault(
        "frozen: the two values of a byte are swapped",
        "ckptkern/frozen.py",
        "torch.stack((«own & 15, own >> 4»), -1)",
        "own >> 4, own & 15",
        ("tests/frozen/test_kinds.py",),
    ),
    Fault(
        "frozen: an expert of 4 bits has the scales of the first one",
        "ckptkern/frozen.py",
        "torch.arange(«blocks * expert, blocks * (expert + 1)», device",
        "blocks",
        ("tests/frozen/test_kinds.py -k parametrized",),
    ),
    Fault(
        "frozen: grouped_mm dequantises all experts",
        "ckptkern/frozen.py",
        "if «function is aten._grouped_mm.default and» len(args) == 3",
        "False and",
        ("tests/frozen/test_kinds.py -k grouped",),
    ),
]

IN_PYTHON = "CKPTKERN_EXTENSION=python "
STATE = [
    Fault(
        "saved tensors in Python: a held value that has changed is given",
        "ckptkern/state/saved.py",
        "return x if x is not None «and version_of(x) == version» else None",
        "",
        (IN_PYTHON + "tests/ops/test_split_backward.py -k changes_between",),
    ),
    Fault(
        "saved tensors in Python: each chunk's gradient is rounded",
        "ckptkern/state/saved.py",
        "elif «following._input_metadata[slot].dtype in HALVES»:",
        "False",
        (IN_PYTHON + "tests/segments/test_tiled.py",),
    ),
    Fault(
        "precision in Python: cast weights outlive the region",
        "ckptkern/state/precision.py",
        "«_C.clear_autocast_cache()»",
        "pass",
        (IN_PYTHON + "tests/test_state.py -k outlive",),
    ),
    Fault(
        "modules in Python: statistics are updated twice",
        "ckptkern/state/modules.py",
        "is_statistic = «x is not None and space.norm and (space.own or space.updated) and is_plain(x)»",
        "False",
        (IN_PYTHON + "tests/segments",),
    ),
    Fault(
        "region in Python: a cache that forward fills is an error",
        "ckptkern/state/region.py",
        "if x is not None and «x._version != version»:",
        "False",
        (IN_PYTHON + "tests/segments",),
    ),
    Fault(
        "region in Python: a recompute samples other random numbers",
        "ckptkern/state/region.py",
        "«restore(self.random)»",
        "pass",
        (IN_PYTHON + "tests/segments/test_regions.py",),
    ),
]

CSRC = [
    Fault(
        "philox: planes overlap where rows are no multiple of 16",
        "csrc/philox.cpp",
        "const int64_t blocks_per_plane = «ceil_div(total_rows, kBlockRows)»;",
        "total_rows / kBlockRows",
        ("tests/test_state.py -k 'layout or parts or planes'", "tests/test_state.py"),
    ),
    Fault(
        "saved tensors: a held value that has changed is given",
        "csrc/saved_tensors.cpp",
        "return «version_of(i->object) == i->version» ? Py_NewRef(i->object.object) : nullptr;",
        "true",
        ("tests/ops/test_split_backward.py -k changes_between", "tests/ops/test_split_backward.py"),
    ),
    Fault(
        "precision: cast weights outlive the region",
        "csrc/precision.cpp",
        "«at::autocast::clear_cache();»",
        "",
        ("tests/test_state.py -k outlive", "tests/test_state.py"),
    ),
    Fault(
        "parts: a recompute decides anew",
        "ckptkern/segments/parts.py",
        "torch.ops.ckptkern.stopped.default: Tensor.detach, «**DECIDES,»",
        "",
        ("tests/segments/test_parts.py -k decisions",),
    ),
    Fault(
        "parts: a large table of a small parameter is computed by each stage that reads it",
        "ckptkern/segments/stages.py",
        "if «size_of(node) <= max(size, workspace // SMALL)»:",
        "True",
        ("tests/segments/test_parts.py -k table",),
    ),
    Fault(
        "parts: what an index chooses is cut as what it is chosen of",
        "ckptkern/segments/axes.py",
        "return Cut([(x, None), (places, «axis.at(axis.dim - first)»)])",
        "axis",
        ("tests/segments/test_axes.py",),
    ),
    Fault(
        "parts: what is fused in a layer that is not cut saves its hidden layer",
        "ckptkern/segments/parts.py",
        "with «own_modes()»:  # fused layers inside bound their own memory",
        "torch.enable_grad()",
        ("tests/conversion/test_parts.py -k not_cut",),
    ),
]
