"""``python -m ckptkern bench --op``, ``--case`` and ``--compare``."""

import dataclasses
import functools
import importlib.util
import itertools
import json
import re

import pytest
import torch
from support import catalog

from ckptkern.benchmarks import baselines, cases, compare, heads, measure, micro, own
from ckptkern.ops.dispatch.choices import choose_workspace

CPU = torch.device("cpu")
# Sizes that take no time and that no default has; of tokens 24, in sequences of 12.
SIZES = dict(
    features=32,
    tokens=24,
    length=12,
    hidden=40,
    out_features=16,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    activation="silu",
    experts=3,
    top_k=2,
)


def sized(op, **more):
    return micro.case(
        op, "cpu", **{name: value for name, value in SIZES.items() if name in micro.OPS[op].defaults}, **more
    )


def test_every_op_is_in_the_table():
    assert micro.OPS.keys() == catalog.OPS.keys()


SHAPES = {  # weights of some ops at SIZES
    "linear_act": {(16, 32)}, "mlp": {(40, 32), (32, 40)}, "moe_mlp": {(3, 80, 32), (3, 32, 40)},
    "attention_block": {(64, 32)},  # 4 heads of queries, and 2 each of keys and values, of 8
    "latent_attention_block": {(48, 32), (36, 32), (64, 32)},  # 4 heads of 8 + 4 rotated dimensions, a latent of 32
    "transformer_layer": {(64, 32), (40, 32), (32, 40)},
}  # fmt: skip


@pytest.mark.parametrize("op", micro.OPS)
@pytest.mark.parametrize(
    "variant", [{}, {"bias": True, "norm": "rms", "gated": True, "causal": False, "dropout": 0.25}]
)
def test_ours_are_right_at_any_sizes(op, variant):
    """Sizes that were given are those of the parameters."""
    case = sized(op, **{name: value for name, value in variant.items() if name in micro.OPS[op].defaults})
    model, x, dy = cases.build(case, CPU)
    assert model.training == (not case.drops)
    checker = measure.Checker(model, x, dy)
    for mode in case.modes:
        assert checker.ratio(case.ours(model, mode))[0] <= 2
    if not variant:
        assert SHAPES.get(op, set()) <= {tuple(p.shape) for p in model.parameters()}
        assert op != "linear_stack" or len(list(model.parameters())) == 6
    assert x.shape[:-1].numel() == 24


@pytest.mark.parametrize("op", ["baseline", *(op for op in micro.OPS if "dropout" in micro.OPS[op].defaults)])
def test_dropout_is_drawn_where_it_is_timed(op):
    case = sized("mlp" if op == "baseline" else op, dropout=0.5)
    model, x, _ = cases.build(case, CPU)
    if op == "baseline":  # the model itself, as a module of one's own
        functions = [own.baseline_of("copy:copy")[1](model, x)]
        assert next(own.shared(model).parameters()) is next(model.parameters())
    else:
        functions = [model, case.ours(model, case.modes[0])]
    for training in (False, True):
        model.train(training)
        assert [torch.equal(f(x), f(x)) for f in functions] == [not training] * len(functions)


def test_an_op_from_the_command_line(bench, tmp_path):
    arguments = "--op mlp --features 16 --hidden 24 --tokens 8 --activation relu --dtype bf16 --modes selective,full"
    status, rows, printed = bench(*arguments.split())
    assert status == 0
    assert {"eager", *cases.CHECKPOINTS, "ckptkern selective", "ckptkern full"} <= set(rows)
    assert "ckptkern none" not in rows
    assert {(row["case"], row["dtype"]) for row in rows.values()} == {("mlp-h24-relu-bias/d16x8", "bfloat16")}
    assert int(rows["ckptkern full"]["saved_bytes"]) == 8 * 16 * 2
    assert int(rows["ckptkern selective"]["saved_bytes"]) == 8 * (16 + 24) * 2
    assert rows["flash-attn FusedMLP"]["status"] == "missing"
    assert "| ckptkern full |" in printed
    assert (tmp_path / "out" / "report.md").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--op mlp --heads 4", "--heads does not apply to --op mlp, which takes --features, --tokens, --hidden, "),
        (
            "--op dropout --no-bias",
            "--bias does not apply to --op dropout, which takes --features, --tokens, --dropout",
        ),
        ("--heads 4", "--heads goes with --op, which names one of linear_act, "),
        ("--op mlp --cases mlp", "--op, --case and --cases exclude each other"),
        ("--op mlp --features 0", "--features: wanted at least 1 but got 0"),
        ("--op mlp --dropout 1", "--dropout: wanted a probability in [0, 1) but got 1.0"),
        ("--op dropout --dropout 0", "--dropout: wanted more than 0"),
        ("--op attention_block --features 30 --heads 4", "--features 30 is not a multiple of --heads 4"),
        ("--op attention_block --heads 8 --kv-heads 3", "--heads 8 is not a multiple of --kv-heads 3"),
        ("--op attention_block --length 100", "--tokens 1024 is not a multiple of --length 100"),
        ("--op varlen_attn --modes full", "--modes does not apply to --op varlen_attn"),
        (
            "--op mlp --modes some",
            "--modes: wanted modes of none, selective, full, separated by commas, but got 'some'",
        ),
        ("--case nowhere.py:f", "there is no file nowhere.py"),
        ("--op mlp --baseline nowhere.py:f", "--baseline: there is no file nowhere.py"),
        (
            "--op mlp --baseline math:sqrt --baseline math:sqrt",
            "--baseline: wanted functions of different names but got math",
        ),
        ("--op mlp --compare nowhere.csv", "--compare: cannot read nowhere.csv"),
        ("--op mlp --workspace much", "--workspace: workspace must be a positive number of bytes"),
    ],
)
def test_what_is_wrong_is_said(bench, arguments, message, tmp_path):
    status, _, printed = bench(*arguments.split())
    assert status == 2
    assert message in printed
    assert not (tmp_path / "out").exists()


def test_float64_heads_take_rows_in_chunks_with_the_results_of_all_at_once(monkeypatch):
    """Each head with each reduction gives the same loss and gradients, and saves no logits."""
    for op, reduction in itertools.product(
        ("linear_cross_entropy", "linear_distillation", "linear_topk_distillation"), ("none", "mean")
    ):
        case = sized(op, classes=50, reduction=reduction)
        results = []
        for chunk in (7 * 50, 2**27):  # seven rows, and all
            monkeypatch.setattr(heads.LMHeadLoss, "CHUNK", chunk)
            model, x, dy = cases.build(case, CPU)
            model, x = model.double(), x.detach().double().requires_grad_()
            with measure.saved_tensors(model) as saved:
                y = model(x)
            y.backward(dy.double())
            results.append((y.detach(), x.grad, model.linear.weight.grad))
            assert saved.bytes < 24 * 50 * 8
        for chunked, whole in zip(*results, strict=True):
            torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-14)


def test_a_loss_that_is_a_scalar_has_a_gradient_of_one():
    model, x, dy = cases.build(sized("linear_cross_entropy", classes=50, reduction="mean"), CPU)
    assert (dy.shape, dy.item()) == ((), 1.0)
    rows = model.losses(x, model.targets(x))
    torch.testing.assert_close(model(x), rows.mean())


@pytest.mark.skipif(not importlib.util.find_spec("liger_kernel"), reason="needs liger-kernel")
@pytest.mark.parametrize(
    ("op", "changes", "variant"),
    [
        ("linear_cross_entropy", {"classes": 50, "bias": True}, "liger-kernel loss"),
        ("linear_cross_entropy", {"classes": 50, "bias": True, "reduction": "mean"}, "liger-kernel loss"),
        ("selected_log_probs", {"classes": 50}, "liger-kernel loss"),
        ("linear_distillation", {"classes": 50, "reduction": "mean"}, "liger-kernel JSD"),
    ],
)
def test_ligers_functions_are_called_as_they_want(op, changes, variant):
    """In Triton's interpreter, which cannot run Liger's norms, SwiGLU and autotuned experts."""
    case = sized(op, **changes)
    model, x, dy = cases.build(case, CPU)
    error, worst = measure.Checker(model, x, dy).ratio(case.baselines[variant](model, x))
    assert error <= measure.BASELINES_AT_MOST, worst


def test_other_libraries_chunks_and_tiles_are_right():
    """The loop over chunks of rows of each head, torch's chunks if they are there, and tiled MLPs."""
    for op in ("linear_cross_entropy", "selected_log_probs", "linear_distillation", "linear_topk_distillation"):
        case = sized(op, classes=50)
        model, x, dy = cases.build(case, CPU)
        checker = measure.Checker(model, x, dy)
        assert checker.ratio(baselines.in_chunks(7)(model, x))[0] <= 2
        if "torch chunks" in case.baselines and hasattr(torch.nn, "LinearCrossEntropyOptions"):
            assert checker.ratio(baselines.torch_chunks(model, x))[0] <= measure.BASELINES_AT_MOST


def test_help_names_the_options_of_each_op():
    text = micro.epilog()
    for op, entry in micro.OPS.items():
        assert f"\n  {op}\n" in text
        lines = re.match(r"(    .*\n?)+", text.split(f"\n  {op}\n")[1]).group()
        assert re.findall(r"--[a-z-]+", lines.replace("--no-", "--")) == [micro.flag(name) for name in entry.defaults]


MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.unused = nn.Embedding(9, 8), nn.BatchNorm1d(8), nn.Linear(2, 2)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.25), nn.Linear(32, 8))

    def forward(self, ids, scale):
        y = self.mlp(self.norm(self.embedding(ids)))
        return {"logits": y, "loss": (y * scale).square().mean()}

def build():
    return Model(), {"ids": torch.randint(0, 9, (16,)), "scale": torch.randn(8)}

def plain():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(4, 8)

def fused(model):
    assert isinstance(model, Model)
    model.mlp[1] = nn.GELU("none")  # of the copy

    def call(ids, scale):
        return model(ids, scale)["loss"]

    return call

def module(model):
    return nn.Sequential(model)

def halved(model):
    return lambda x: 0.5 * model(x)

def nothing(model):
    return None

class Reads(nn.Linear):
    def forward(self, x):
        return super().forward(x) * x.sum().item()

def reads():
    return Reads(8, 8), torch.randn(4, 8)

def wide():
    return nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 32)), torch.randn(512, 32)

def own_dispatch():
    return nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)), torch.randn(4, 2, 3)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a_module.py"
    path.write_text(MODEL)
    return path


@pytest.mark.slow
def test_a_module_of_ones_own(bench, file):
    """Dropout, batch statistics, a loss, an input that is no x, an unused parameter: each variant is right."""
    status, rows, _ = bench("--case", f"{file}:build")
    assert status == 0, rows
    assert rows.keys() == {"eager", *cases.CHECKPOINTS, *(f"ckptkern {mode}" for mode in (*cases.MODES, "checkpoint"))}
    assert {(row["case"], row["status"], row["note"]) for row in rows.values()} == {
        ("a_module.build/8", "ok", measure.DROPS)
    }
    assert int(rows["ckptkern full"]["saved_bytes"]) < int(rows["ckptkern none"]["saved_bytes"])

    rows = bench("--case", f"{file}:plain", "--modes=full", "--dtype=bf16").rows
    assert (rows["ckptkern full"]["saved_bytes"], rows["ckptkern full"]["dtype"]) == (str(4 * 8 * 2), "bfloat16")
    assert "ckptkern none" not in rows


@pytest.mark.slow
def test_a_function_of_ones_own_is_a_variant(bench, file):
    """Of a user's module and of an op, with a dictionary of inputs and dropout, as a function and as a module."""
    status, rows, printed = bench("--case", f"{file}:build", "--baseline", f"{file}:fused", "--modes=full")
    assert status == 0
    assert rows["your fused"]["status"] == rows["ckptkern full"]["status"] == "ok"
    assert rows["your fused"]["saved_bytes"] == rows["eager"]["saved_bytes"]
    assert "| your fused |" in printed

    expected = {"module": "ok", "halved": "wrong", "nothing": "failed"}
    functions = [f"--baseline={file}:{name}" for name in expected]
    status, rows, _ = bench("--op=linear_act", "--features=8", "--tokens=4", *functions)
    assert status == 0
    assert {name: rows[f"your {name}"]["status"] for name in expected} == expected
    assert "FUNCTION must return what is called as the model is, not NoneType" in rows["your nothing"]["note"]


@pytest.mark.parametrize(
    "options", ["--op=mlp --features=32 --hidden=512 --tokens=512", "--case={}:wide", "--cases=^mlp-relu/d128"]
)
def test_variants_within_a_workspace_say_so_and_take_less(bench, file, tmp_path, options):
    """In one folder beside those of another run, of which none is measured again."""
    arguments = [*options.format(file).split(), "--modes=full"]
    before = bench(*arguments).rows
    status, rows, _ = bench(*arguments, "--workspace=256KiB", "--resume")
    assert status == 0
    assert before.items() <= rows.items()
    assert "| ckptkern full, 256 KiB |" in (tmp_path / "out" / "report.md").read_text()
    assert json.loads((tmp_path / "out" / "env.json").read_text())["settings"]["workspace"] == "256KiB"
    default, less = (int(rows[f"ckptkern full{size}"]["peak_bytes"]) for size in ("", ", 256 KiB"))
    assert less < 0.8 * default
    assert rows.keys() - before.keys() <= {"ckptkern full, 256 KiB", "ckptkern checkpoint, 256 KiB"}


def test_a_workspace_is_there_in_forward_and_backward():
    """Of each variant of ckptkern that has none of its own; PyTorch's and a user's keep the one that is set."""
    asked = {}

    def asks(name, model, x):
        def ask(*_):
            asked[name].append(choose_workspace("here", None, x))

        def function(x):
            ask()
            y = model(x)
            y.register_hook(ask)
            return y

        asked[name] = []
        return function

    names = ("ckptkern other", "ckptkern full, 1 MiB", "your own")
    case = sized("mlp")
    baselines = {name: functools.partial(asks, name) for name in names}
    case = dataclasses.replace(case, baselines=baselines, modes=(), workspace=1000001)
    makers = cases.variants(case)
    assert [*makers][2:5] == ["ckptkern other, 1000001 bytes", *names[1:]]
    measure.measure(case, makers, CPU, lambda row: None, rounds=1)
    assert {name: set(sizes) for name, sizes in asked.items() if len(sizes) > 4} == {
        name: {1000001 if name == names[0] else choose_workspace("here", None, torch.ones(1))} for name in names
    }


def test_a_module_in_which_nothing_is_fused(bench, file):
    status, rows, printed = bench("--case", f"{file}:own_dispatch")
    assert status == 0
    assert [variant for variant in rows if variant.startswith("ckptkern")] == ["ckptkern checkpoint"]
    assert "convert fuses nothing of it" in printed


def test_a_replica_follows_its_model(file):
    case = own.case_of(f"{file}:build", CPU, None, None)
    model, _, _ = cases.build(case, CPU)
    replica = case.ours(model, "full")
    assert not replica.module.mlp.training
    model.train()
    assert replica.module.mlp.training
    assert next(replica.parameters()) is next(model.parameters())


# -- two runs


def run_of(torch_version="2.13.0", **variants):
    """variants: (ms, p20, p80, saved bytes)."""
    rows = {}
    for variant, (ms, p20, p80, saved) in variants.items():
        fields = dict(variant=variant, ms=ms, p20_ms=p20, p80_ms=p80, saved_bytes=saved, peak_bytes=2 * saved)
        rows["c", variant, "float32"] = dict.fromkeys(measure.FIELDS, "") | {
            name: str(value) for name, value in fields.items()
        }
    return compare.Run(rows, {"device": "cpu", "torch": torch_version, "triton": "3.7.1"})


def test_what_moved_beyond_noise():
    old = run_of(eager=(10, 9, 11, 64), a=(20, 19, 21, 32), b=(20, 19, 21, 32), gone=(1, 1, 1, 1))
    new = run_of(eager=(10, 9, 11, 64), a=(29, 28, 30, 32), b=(22, 21, 23, 16), new=(1, 1, 1, 1))
    lines = compare.compare(old, new).splitlines()
    assert "| c | a | 2 | 2.9 | slower, 1.45x |  |" in lines  # 19/11 .. 21/9 and 28/11 .. 30/9 do not meet
    assert "| c | b | 2 | 2.2 | within noise | saved 3.05176e-05 MiB -> 1.52588e-05 MiB, " in "\n".join(lines)
    assert "| c | eager | 10 ms | 10 ms | within noise |  |" in lines
    assert {"- c gone: only in the old file", "- c new: not in the old file"} <= set(lines)
    assert compare.RULE in "\n".join(lines)
    assert "quicker, 0.69x" in compare.compare(new, old)


def test_times_of_another_torch_are_not_compared_and_bytes_are():
    old = run_of("2.11.0", eager=(10, 9, 11, 64), a=(20, 19, 21, 32))
    new = run_of(eager=(10, 9, 11, 64), a=(99, 99, 99, 16))
    text = compare.compare(old, new)
    assert text.startswith("WARNING: times are not compared, because these differ: torch: 2.11.0, now 2.13.0\n")
    assert "slower" not in text
    assert "| c | a |  |  |  | saved 3.05176e-05 MiB -> 1.52588e-05 MiB" in text
    assert "device: unknown, now cpu" in compare.compare(old._replace(setting=compare.setting_of({})), new)


def test_compare_reads_before_it_writes(bench, tmp_path):
    path = tmp_path / "out" / "results.csv"
    arguments = ["--op=linear_act", "--features=8", "--tokens=4", "--modes=full"]
    bench(*arguments)
    path.write_text(path.read_text().replace("ckptkern full", "ckptkern old"))
    status, _, printed = bench(*arguments, "--compare", str(path))
    assert status == 0
    assert "ckptkern old: only in the old file" in printed
    path.write_text("a,b\n1,2\n")
    status, _, printed = bench(*arguments, "--compare", str(path))
    assert status == 2
    assert "is not a results.csv of this command: it lacks case, dtype" in printed
