"""Faults of ckptkern/ops: formulas of a few options together, chunks and groups, costs, casts, sums and what is saved."""

from __future__ import annotations

from .anchors import Fault

PROPERTIES = "tests/ops/test_properties.py"
AUTOGRAD = "tests/ops/test_properties_autograd.py"
MEMORY = "tests/ops/test_properties_memory.py"
PRECISION = "tests/ops/test_properties_precision.py"


def values(*cases: str) -> str:
    """Returns pytest's arguments: values and gradients of cases whose names contain these, of entries with pairs
    of options and other arguments, in several chunks and groups."""
    return f"{PROPERTIES} -k '(pairs_of_options or other_values) and ({' or '.join(cases)})'"


def cost(*cases: str) -> str:
    """Returns pytest's arguments: each input alone, and what its gradient costs."""
    return f"{AUTOGRAD} -k 'each_input_alone and ({' or '.join(cases)})'"


def memory(*cases: str) -> str:
    """Returns pytest's arguments: what is saved, and the peak of both passes."""
    return f"{MEMORY} -k '{' or '.join(cases)}'"


OPS = [
    Fault(
        "mlp: a gated gradient by steps without the activation",
        "ckptkern/ops/mlp/branch.py",
        "dh * «p.act_fwd(before[0], None, o.activation)»)",
        "before[0]",
        (values("[mlp_block-gate", "[mlp_block-lora"),),
    ),
    Fault(
        "mlp: every chunk samples the mask of the first rows",
        "ckptkern/ops/mlp/branch.py",
        "return self.p.apply_dropout(h, self.dropout, «start»)",
        "0",
        (values("[mlp-", "[mlp_block-dropout"),),
    ),
    Fault(
        "mlp: a gated branch counts the bytes of a plain one",
        "ckptkern/ops/mlp/branch.py",
        "drops, held = self.t.rng is not None, «5 if self.gated else 2»",
        "2",
        (
            memory("[gated_mlp"),
            MEMORY,
        ),
    ),
    Fault(
        "mlp: a float32 weight is not cast under autocast",
        "ckptkern/ops/mlp/branch.py",
        "copy = «cast_parameter(parameter, self.dtype)»",
        "parameter",
        (f"{PRECISION} -k '(autocast or cast_once) and [mlp'",),
    ),
    Fault(
        "linear_stack: gradients below the lowest trained layer are formed",
        "ckptkern/ops/mlp/linear.py",
        "lowest = «0 if needs_x else next((i for i in range(L) if weight_grads[i] or bias_grads[i]), L)»",
        "0",
        (cost("[linear_stack"),),
    ),
    Fault(
        "sublayer: the branch's gradient is not dropped",
        "ckptkern/ops/sublayer/residual.py",
        "return dy, «self.drop(df.to(o.dtype))», grads",
        "df.to(o.dtype)",
        (values("[mlp_block-resid"),),
    ),
    Fault(
        "sublayer: layer_scale's gradient leaves out the post-norm",
        "ckptkern/ops/sublayer/residual.py",
        'grads["layer_scale"] = eager.column_sum(df * «self.post_normed(f)», dtype)',
        "f",
        (values("[mlp_block-layer_scale", "[mlp_block-post_norm"),),
    ),
    Fault(
        "sublayer: a trailing norm's backward reads x alone",
        "ckptkern/ops/sublayer/residual.py",
        "self.norm_gradients(dy, «self.total(f)», need)",
        "self.x",
        (values("[mlp_block-norm"),),
    ),
    Fault(
        "sublayer: every chunk drops the first samples",
        "ckptkern/ops/sublayer/residual.py",
        "rows = torch.arange(«self.first_row, self.first_row + z.shape[0]», device=z.device)",
        "z.shape[0]",
        (values("[mlp_block-drop_path", "[mlp_block-layer_scale"),),
    ),
    Fault(
        "lora: du is not scaled",
        "ckptkern/ops/sublayer/lora.py",
        "return torch.mm(dy.to(self.b.dtype), self.b)«.mul_(self.scale)»",
        "",
        (
            values("[mlp_block-lora"),
            values("[mlp_block"),
        ),
    ),
    Fault(
        "lora: all updates of a sublayer drop the same elements",
        "ckptkern/ops/sublayer/lora.py",
        "dropout_arguments(t.lora_rng if p else None, p), «place * rows»)",
        "0",
        (
            values("[mlp_block-lora"),
            values("[mlp_block"),
        ),
    ),
    Fault(
        "dropout: every sample has the mask of the first",
        "ckptkern/ops/sublayer/dropout.py",
        "parts = [drop(sample, *arguments, row_base=o.row_base «+ i * o.row_step») for i, sample in enumerate(samples)]",
        "",
        ("tests/ops/test_dropout.py",),
    ),
    Fault(
        "attention: the output gate's gradient has the other factor",
        "ckptkern/ops/attention/sublayer.py",
        "return (product * torch.sigmoid(«-gate»)).to(gate.dtype)",
        "gate",
        (values("[attention_block-gate"),),
    ),
    Fault(
        "attention: a norm before a gate gets no gradient through it",
        "ckptkern/ops/attention/sublayer.py",
        '"g": linear_operands(«"h"», gate) if gate else {},',
        '"x"',
        (cost("[attention_block"),),
    ),
    Fault(
        "attention: all three core gradients whatever is trained",
        "ckptkern/ops/attention/core_sublayer.py",
        "        if «not formed.isdisjoint(operands)»:",
        "name in quantities",
        (cost("[attention_block"),),
    ),
    Fault(
        "attention: all groups of heads drop the same scores",
        "ckptkern/eager/attention_core.py",
        "plane_base=self.plane_base «+ first»,",
        "",
        (
            values("[attention_block-dropout"),
            values("[attention_block"),
        ),
    ),
    Fault(
        "attention: every group writes the first columns of the output weight's gradient",
        "ckptkern/ops/attention/core_sublayer.py",
        "part.places[name] = (slice(None),) * dim + (part_of(whole.shape[dim], «index», count),)",
        "0",
        (values("[attention_block-none"),),
    ),
    Fault(
        "attention: theta's tables go on over packed sequences",
        "ckptkern/ops/attention/core_sublayer.py",
        "positions = positions_of(whole, t.wo.device, «t.cu»)",
        "None",
        (values("[attention_block-sequences"),),
    ),
    Fault(
        "attention: a window one row short of all is none",
        "ckptkern/ops/attention/arguments.py",
        "surely(left >= rows - «1»)",
        "2",
        (
            "tests/ops/test_attention_core.py -k window",
            values("[scaled_dot_product_attention"),
        ),
    ),
    Fault(
        "latent attention: 16-bit sums over groups of heads",
        "ckptkern/ops/attention/latent_sublayer.py",
        "qk, rows, wide = self.sizes, self.sizes.qk, self.x.shape[0], «self.count > 1»",
        "False",
        (
            f"{PRECISION} -k 'grow and [latent'",
            PRECISION,
        ),
    ),
    Fault(
        "latent attention: the shared part of k has the gradient of one head",
        "ckptkern/ops/attention/latent_sublayer.py",
        "shared = dk[«...,» nope:qk].sum(1,",
        ":, :1, ...,",
        (values("[latent_attention_block-none"),),
    ),
    Fault(
        "moe: the shared expert's gate has half of its slope",
        "ckptkern/ops/moe.py",
        "* gate «* (1 - gate)»",
        "",
        (values("[moe_block-shared"),),
    ),
    Fault(
        "moe: the normalised weights' sum has no gradient",
        "ckptkern/ops/moe.py",
        "ds = «(ds - (ds * s).sum(-1, keepdim=True) / total) / total»",
        "ds / total",
        (values("[moe_block-none", "[moe_block-normalize"),),
    ),
    Fault(
        "experts: a routing weight has no gradient of the bias",
        "ckptkern/ops/experts.py",
        'gradients["ds"] = «ds if bd is None else ds + _bias_share(dy, index, bd)»',
        "ds",
        (values("[moe_block-down_bias", "[moe_block-gate_up_bias"),),
    ),
    Fault(
        "experts: an expert without rows has the gradient that torch's kernel leaves it",
        "ckptkern/ops/dispatch/implementations.py",
        "«dw.masked_fill_((groups.offs[1:] == groups.offs[:-1])[:, None, None], 0)»",
        "pass",
        ("tests/ops/test_grouped.py",),
    ),
    Fault(
        "experts: gradients beside a recomputed [g | u] are not written over it",
        "ckptkern/ops/dispatch/implementations.py",
        "experts_hidden_grad(gu, dh, s, groups, activation, **wanted, over_gu=«True»",
        "False",
        ("tests/ops/test_grouped.py -k workspace",),
    ),
    Fault(
        "loss: class weights of the first chunk for all",
        "ckptkern/ops/cross_entropy/op.py",
        "here = slice(«o.vocab_start + start, o.vocab_start + stop»)",
        "o.vocab_start, o.vocab_start + stop - start",
        (values("[linear_cross_entropy-weight"),),
    ),
    Fault(
        "loss: an entropy's gradient leaves out the entropy",
        "ckptkern/ops/cross_entropy/statistics.py",
        "«of_p.append(-(dy.entropy * entropy))»",
        "pass",
        (values("[linear_cross_entropy-return_entropy"),),
    ),
    Fault(
        "loss: the entropy of parts leaves out their shares",
        "ckptkern/ops/cross_entropy/statistics.py",
        "parts_of_it = log_p.exp() * «(ranks.entropy - log_p)»",
        "ranks.entropy",
        (values("[linear_cross_entropy-return_entropy", "[linear_cross_entropy-lora"),),
    ),
    Fault(
        "loss: gradients of forward are scaled in place under retain_graph",
        "ckptkern/ops/cross_entropy/loss.py",
        "is_last = «not torch._C._autograd._get_current_graph_task_keep_graph()»",
        "True",
        ("tests/ops/test_head_in_forward.py -k retained",),
    ),
    Fault(
        "distillation: every chunk has the teacher's first classes",
        "ckptkern/ops/distillation.py",
        "of_entries(teacher, «start, stop»)",
        "0, stop - start",
        (values("[linear_distillation-none", "[linear_distillation-mask"),),
    ),
    Fault(
        "distillation: a logsumexp is one rounded number",
        "ckptkern/eager/distillation.py",
        "z.sub_(«normalizer[:, :1]).sub_(normalizer[:, 1:]»)",
        "normalizer.sum(1, keepdim=True)",
        ("tests/ops/test_distillation.py -k 'large_logits and far'",),
    ),
    Fault(
        "distillation: backward trusts that it rounds the likeliest class's logit as forward did",
        "ckptkern/eager/distillation.py",
        "torch.where(here, «0», above_likeliest.gather(1, column))",
        "above_likeliest.gather(1, column)",
        ("tests/ops/test_distillation.py -k rounds_otherwise",),
    ),
    Fault(
        "distillation: a teacher's k log-probabilities lose the digits of their logsumexp",
        "ckptkern/ops/distillation.py",
        "return «log_probs.log_softmax(-1)»",
        "log_probs - torch.logsumexp(log_probs, -1, keepdim=True)",
        ("tests/ops/test_distillation.py -k k_log_probabilities",),
    ),
    Fault(
        "gradients: a bias is summed in 16 bits over chunks",
        "ckptkern/ops/registration/gradients.py",
        "self.part = bias.dtype «if chunks == 1 else True»",
        "",
        (f"{PRECISION} -k 'grow and ([linear_stack or [mlp)'",),
    ),
    Fault(
        "gradients: a hook of a weight does not see what is added in place",
        "ckptkern/ops/registration/gradients.py",
        "or grad.requires_grad «or weight._backward_hooks»",
        "",
        ("tests/ops/test_accumulate_in_place.py",),
    ),
    Fault(
        "needs: a partial backward forms all gradients",
        "ckptkern/ops/registration/op.py",
        "edges = «None if torch.compiler.is_compiling() else state.asked()»",
        "None",
        (cost("[mlp-", "[mlp]"),),
    ),
    Fault(
        "op: x is saved where nothing reads it",
        "ckptkern/ops/registration/op.py",
        "if not op.reads_x(options, needs): «flat[0] = None»",
        "pass",
        (
            cost("[linear_act"),
            memory("[linear_act"),
        ),
    ),
    Fault(
        "split backward: a stash stands for another gradient",
        "ckptkern/ops/registration/functions.py",
        "if «not same or» not all(i in left.grads",
        "",
        ("tests/ops/test_split_backward.py -k another_gradient",),
    ),
    Fault(
        "layer: a trained attention asks for no gradient of what follows",
        "ckptkern/ops/transformer_layer.py",
        "«before |= own != 0»",
        "pass",
        (cost("[transformer_layer]"),),
    ),
    Fault(
        "dispatch: an op inside a checkpoint saves for itself",
        "ckptkern/ops/dispatch/choices.py",
        'return «"none" if in_region() or (seen & _BACKWARD and _NESTED.region is False) else recompute»',
        "recompute",
        ("tests/ops/test_op.py -k inside_a_checkpoint",),
    ),
    Fault(
        "attention: a mask's bias is forgotten by cuDNN's backward",
        "ckptkern/eager/fused_attention.py",
        "no_dropout, no_dropout, «bias», None, None, q.shape[2],",
        "None",
        ("tests/ops/test_fused_attention.py",),
    ),
    Fault(
        "attention: flash attention has causal's window on both sides",
        "ckptkern/eager/fused_attention.py",
        '"window_size_left": left, "window_size_right": «right»}',
        "left",
        ("tests/ops/test_fused_attention.py",),
    ),
]
