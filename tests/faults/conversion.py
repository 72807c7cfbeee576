"""Faults of ckptkern/conversion: the guard, bindings, the grammar, numerical checks, heads and masks."""

from __future__ import annotations

from .anchors import Fault

CONVERSION = [
    Fault(
        "guard: weights that are no longer tied",
        "ckptkern/conversion/guard.py",
        "any(«a._parameters[name] is not b._parameters[as_]» for a, name, b, as_ in self.ties)",
        "False",
        ("tests/conversion/test_convert.py",),
    ),
    Fault(
        "guard: pre-hooks inside are not seen",
        "ckptkern/conversion/guard.py",
        "for d in (m._forward_hooks, «m._forward_pre_hooks,» m._backward_hooks",
        "",
        ("tests/conversion/test_convert.py -k later_change",),
    ),
    Fault(
        "binding: an MLP saves its hidden layer at selective",
        "ckptkern/conversion/binding.py",
        'return mode «if (op, activation) == ("linear_act", "relu") else "full"»',
        "",
        ("tests/conversion/test_heads.py -k modes", "tests/conversion/test_convert.py"),
    ),
    Fault(
        "binding: a model that generates in training mode gets empty caches",
        "ckptkern/conversion/binding.py",
        "if not («torch.is_grad_enabled() and» self.module.training) or any(one.get_seq_length() for one in caches)",
        "",
        ("tests/conversion/test_convert.py -k cache", "tests/conversion/test_masks.py -k generation"),
    ),
    Fault(
        "binding: every second training call is the original, in silence",
        "ckptkern/conversion/binding.py",
        "«try:» y = segment(flat, self.recompute, self.workspace, functools.partial(self.original, *args, **kwargs))",
        """self.turn = not getattr(self, "turn", False)
        if self.turn and trains:
            return self.original(*args, **kwargs)
        try:""",
        ("tests/conversion/test_training_loops.py -k 'evaluate and Llama'",),
    ),
    Fault(
        "binding: a model and its copy share their forwards",
        "ckptkern/conversion/binding.py",
        '«def __getstate__(self)» -> dict[str, Any]: return self.__dict__ | {"store": None}',
        """def __deepcopy__(self, memo):
        return self

    def __getstate__(self)""",
        ("tests/conversion/test_training_loops.py -k 'EMA and Llama'",),
    ),
    Fault(
        "calls: a name at which no layer looks unfuses it",
        "ckptkern/conversion/calls.py",
        "self.known |= set(«not_looked_at(self.module, call, new)»)",
        "()",
        ("tests/conversion/test_training_loops.py -k 'Trainer and adapters'",),
    ),
    Fault(
        "guard: a change of the configuration that no layer reads counts",
        "ckptkern/conversion/guard.py",
        "if «id(one) in self.whole»: return None",
        "True",
        ("tests/conversion/test_calls.py -k may_change", "tests/conversion/test_training_loops.py -k 'save and Llama'"),
    ),
    Fault(
        "guard: what forward reads of a configuration may change",
        "ckptkern/conversion/guard.py",
        'names.setdefault(name, None) value = read(self_, name) if «name == "__dict__"»:',
        "True",
        ("tests/conversion/test_calls.py -k a_layer_reads",),
    ),
    Fault(
        "binding: a checkpoint in place of a fused op is silent",
        "ckptkern/conversion/binding.py",
        "if «why is not None and not self.differs»:",
        "False",
        ("tests/conversion/test_calls.py -k a_layer_reads",),
    ),
    Fault(
        "guard: a frozen weight is a change",
        "ckptkern/conversion/guard.py",
        "and «self.kinds.issuperset(map(type, flat(parameters)))» and all([mode",
        "all(p is None or p.requires_grad for p in flat(parameters))",
        ("tests/conversion/test_training_loops.py -k 'freezing and Llama'",),
    ),
    Fault(
        "arguments: a low-rank update that is switched off is added",
        "ckptkern/conversion/arguments.py",
        "if «getattr(layer, SWITCH)»: del found[name]",
        "False",
        ("tests/conversion/test_training_loops.py -k 'adapters and Llama'",),
    ),
    Fault(
        "arguments: dropout goes on in evaluation",
        "ckptkern/conversion/arguments.py",
        "return getattr(module, attribute) «if module.training else 0.0»",
        "",
        ("tests/conversion/test_convert.py",),
    ),
    Fault(
        "arguments: a rotary table that changed in place is not made anew",
        "ckptkern/conversion/arguments.py",
        "state = «tensor._version», tensor.data_ptr()",
        "0",
        ("tests/conversion/test_language_models.py",),
    ),
    Fault(
        "grammar: a residual is looked for on the left alone",
        "ckptkern/conversion/grammar.py",
        "for residual, branch in «node.pairs»: try: part = self.branch(branch, core)",
        "node.pairs[:1]",
        ("tests/conversion/test_convert.py",),
    ),
    Fault(
        "check: results a thousand times as far apart are alike",
        "ckptkern/conversion/check.py",
        "TOLERANCE = «2e-5»",
        "2e-2",
        ("tests/conversion/test_near_misses.py",),
    ),
    Fault(
        "check: another length is not compared",
        "ckptkern/conversion/check.py",
        "difference([wide(ours)], [wide(theirs)])) > «tolerance»: raise Unreadable",
        "math.inf",
        ("tests/conversion/test_near_misses.py", "tests/conversion/test_convert.py"),
    ),
    Fault(
        "head: logits of a weight that has changed",
        "ckptkern/conversion/logits.py",
        "same = «[(one._version, one.data_ptr()) for one in self.tensors] == self.marks»",
        "True",
        ("tests/conversion/test_logits.py",),
    ),
    Fault(
        "head: a bias that is added after a scale is scaled",
        "ckptkern/conversion/tokens.py",
        "values = added.detach().reshape(-1) «/ formula.scale»",
        "",
        ("tests/conversion/test_heads.py", "tests/conversion/test_logits.py"),
    ),
    Fault(
        "head: a sum of log-probabilities forgets the number they are multiplied by",
        "ckptkern/conversion/tokens.py",
        "factor «*=» 1 if returned else {",
        "=",
        ("tests/conversion/test_logits.py",),
    ),
    Fault(
        "head: a copy of detached logits stays lazy",
        "ckptkern/conversion/tokens.py",
        "return «step.name in CASTS and logits.is_cut»",
        "False",
        ("tests/conversion/test_detached.py",),
    ),
    Fault(
        "head: fully_shard does not hear of the backward of a loss outside of its root",
        "ckptkern/conversion/logits.py",
        "for hook in self.before_backward: «result.register_hook(hook)»",
        "pass",
        ("tests/distributed/test_heads.py -k fused_loss",),
    ),
    Fault(
        "masks: a window sees one key more",
        "ckptkern/conversion/masks.py",
        "return -1 if window is None else window «- 1», 0",
        "",
        ("tests/conversion/test_masks.py", "tests/conversion/test_language_models.py"),
    ),
    Fault(
        "protection: NumPy's random state is not given back",
        "ckptkern/conversion/protection.py",
        "«drawn.append(numpy.mtrand._rand)»",
        "pass",
        ("tests/conversion/test_no_trace.py",),
    ),
    Fault(
        "protection: a list with other items of the same number stays so",
        "ckptkern/conversion/protection.py",
        "len(now) != len(was) or not «all(map(operator.is_, now, was))»",
        "True",
        ("tests/conversion/test_no_trace.py",),
    ),
    Fault(
        "unused: a tied head counts as one that was not run",
        "ckptkern/conversion/heads.py",
        "return «taken.isdisjoint(map(id, parameters))»",
        "True",
        ("tests/conversion/test_convert.py -k does_not_run",),
    ),
    Fault(
        "blocks: one whose input is written into is taken",
        "ckptkern/conversion/blocks.py",
        "return «self.is_read_only and» self.size >=",
        "",
        ("tests/conversion/test_blocks.py -k in_place",),
    ),
    Fault(
        "blocks: what a checkpoint recomputes counts as saved",
        "ckptkern/conversion/blocks.py",
        "height, done = «before», cut.stop",
        "height",
        ("tests/conversion/test_blocks.py",),
    ),
    Fault(
        "blocks: a part of a larger checkpoint stays one of its own",
        "ckptkern/conversion/convert.py",
        "if «module not in changed»:",
        "True",
        ("tests/conversion/test_blocks.py",),
    ),
    Fault(
        "a step's loss: the first of the results",
        "ckptkern/conversion/recorder.py",
        "return «[one for one in tensors if one.dim() == 0] or» tensors",
        "",
        ("tests/planning/test_loss.py",),
    ),
]
