"""``python -m ckptkern demo`` end to end at a tiny size, and what its comparison rests on."""

import csv
import functools
import json
import math
import time

import pytest
import torch
import torch.nn.functional as F

from ckptkern import __main__
from ckptkern.tools import demo
from ckptkern.tools.demo import config, data, model, moe, results, training

TINY = ("--device=cpu", "--dtype=fp32", "--steps=6", "--batch-size=2", "--seq-len=16")
TINY += ("--layers=2", "--d-model=16", "--heads=2", "--threads=1")


@pytest.fixture(scope="module", autouse=True)
def _read_once():
    """The corpus is the standard library, a third of a tiny run's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "load_corpus", functools.cache(demo.load_corpus))
        yield


def run_demo(out, *arguments):
    return __main__.main(["demo", *TINY, "--out", str(out), *arguments])


def losses_by_variant(out):
    losses = {}
    with (out / "losses.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            losses.setdefault(row["variant"], []).append(float(row["loss"]))
    return losses


def tiny(**changes):
    settings = {"steps": 4, "batch_size": 2, "seq_len": 16, "layers": 2, "d_model": 16, "heads": 2, "lr": 1e-3}
    settings |= {"device": "cpu", "dtype": "fp32", "dropout": 0.0, "activation": "gelu", "recompute": "full", "seed": 0}
    settings |= {"head": "eager", "experts": 0, "top_k": 2}
    return config.Config(**(settings | {"variants": config.VARIANTS} | changes))


def test_end_to_end(tmp_path, capsys):
    assert run_demo(tmp_path / "out") == 0
    printed = capsys.readouterr().out
    for text in ("train", "held-out", "saved", "peak", "ms per", "ratio", "of 6", *config.VARIANTS):
        assert text in printed

    losses = losses_by_variant(tmp_path / "out")
    assert tuple(losses) == config.VARIANTS
    for variant in config.VARIANTS:
        assert len(losses[variant]) == 6
        assert losses[variant][-1] < losses[variant][0] < 1.1 * math.log(256)
        torch.testing.assert_close(losses[variant], losses["torch"], rtol=results.AGREEMENT, atol=0.0)

    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {"date", "settings", "text", "table", "agreement", "environment"} <= written.keys()
    assert written["environment"]["versions"]["torch"] == torch.__version__
    assert [row["variant"] for row in written["table"]] == list(config.VARIANTS)
    assert all(agreement["limited"] for agreement in written["agreement"])
    unfused, checkpointed, ours = written["table"]
    # ckptkern at "full" saves the inputs of its blocks, as checkpoint does, and what is saved outside of them
    assert ours["saved_mib"] <= checkpointed["saved_mib"] < unfused["saved_mib"] / 2
    assert ours["peak_mib"] < unfused["peak_mib"]
    assert unfused["ratio"] == 1.0

    png = (tmp_path / "out" / "demo.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 20_000


def test_selective_saves_a_third_at_most(tmp_path):
    assert run_demo(tmp_path, "--recompute", "selective", "--layers", "4", "--variants", "torch", "ckptkern") == 0
    unfused, ours = json.loads((tmp_path / "results.json").read_text())["table"]
    assert ours["saved_mib"] <= unfused["saved_mib"] / 3


def test_curves_that_disagree_fail(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(model.TorchMLP, "forward", lambda self, x: self.fc2(F.relu(self.fc1(x))))
    assert run_demo(tmp_path) == 1
    captured = capsys.readouterr()
    assert "the loss curves do not agree" in captured.err
    assert "more than the limit of 0.001" in captured.out
    assert "checkpoint against torch: equal bit for bit (within" in captured.out


def test_a_loss_that_is_not_a_number_fails():
    runs = [
        training.Run(variant, None, None, None, None, losses=[1.0, last])
        for variant, last in (("torch", 2.0), ("torch.utils.checkpoint", 2.0), ("ckptkern", math.nan))
    ]
    same, broken = results.agreements(tiny(), runs)
    assert not same.failed
    assert broken.failed


def test_dropout_is_replayed(tmp_path, capsys):
    losses = {}
    for mode in ("full", "none"):
        assert run_demo(tmp_path / mode, "--dropout", "0.2", "--recompute", mode) == 0
        losses[mode] = losses_by_variant(tmp_path / mode)
    assert "no limit: their dropout masks come from different random streams" in capsys.readouterr().out
    assert losses["full"]["torch"] == losses["full"]["torch.utils.checkpoint"]
    assert losses["full"]["torch"] != losses["full"]["ckptkern"]
    # a mask that backward drew anew would give other gradients, so other losses from the second step on
    torch.testing.assert_close(losses["full"]["ckptkern"], losses["none"]["ckptkern"], rtol=1e-5, atol=0.0)

    assert run_demo(tmp_path / "none", "--dropout", "0.2", "--seed", "1") == 0
    other = losses_by_variant(tmp_path / "none")
    assert other["ckptkern"] != losses["full"]["ckptkern"]


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "quick_gelu"])
def test_activations_agree(tmp_path, activation):
    assert run_demo(tmp_path, "--activation", activation, "--variants", "torch", "ckptkern") == 0
    assert set(losses_by_variant(tmp_path)) == {"torch", "ckptkern"}


def test_the_fused_head_trains_alike_and_saves_no_logits(tmp_path):
    """Of 256 classes logits and their log-softmax are 2 KiB a token: the curves agree as those of any two variants must."""
    saved = {}
    for head in config.HEADS:
        assert run_demo(tmp_path / head, "--head", head) == 0
        losses = losses_by_variant(tmp_path / head)
        torch.testing.assert_close(losses["ckptkern"], losses["torch"], rtol=results.AGREEMENT, atol=0.0)
        written = json.loads((tmp_path / head / "results.json").read_text())
        saved[head] = {row["variant"]: row["saved_mib"] for row in written["table"]}["ckptkern"]
    assert saved["fused"] < saved["eager"] / 2


@pytest.mark.parametrize(
    "arguments", ["", "--recompute=selective --activation=gelu", "--head=fused --top-k=1", "--dropout=0.2"]
)
def test_a_mixture_of_experts_trains_alike(tmp_path, capsys, arguments):
    """Torch's grouped matmuls, the same in a checkpoint, and ckptkern's experts, which save neither gathered rows nor h."""
    assert run_demo(tmp_path, "--experts", "4", *arguments.split()) == 0
    losses, out = losses_by_variant(tmp_path), capsys.readouterr().out
    assert losses["torch"] == losses["torch.utils.checkpoint"]
    if "dropout" in arguments:
        assert "no limit: their dropout masks come from different random streams" in out
        assert all(map(math.isfinite, losses["ckptkern"]))
    else:
        torch.testing.assert_close(losses["ckptkern"], losses["torch"], rtol=1e-5, atol=0.0)
    assert f"of 4 experts, {1 if 'top-k' in arguments else 2} a token" in out
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["settings"]["experts"] == 4
    assert written["settings"]["lr"] == pytest.approx(1e-3)
    unfused, _, ours = written["table"]
    assert ours["saved_mib"] < unfused["saved_mib"] * (0.6 if "selective" in arguments else 0.4)
    assert ours["peak_mib"] < unfused["peak_mib"]


def test_experts_that_disagree_fail(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(moe, "grouped_experts", lambda x, index, weights, *rest: x * weights.sum(1, keepdim=True))
    assert run_demo(tmp_path, "--experts", "4", "--variants", "torch", "ckptkern", "--lr", "0.01") == 1
    assert "the loss curves do not agree" in capsys.readouterr().err


def one_moe(**changes):
    torch.manual_seed(0)
    return moe.MoE(tiny(experts=4, activation="silu", **changes), moe.GroupedExperts)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_an_moe_by_its_formula(top_k):
    """Each token through its own experts, one at a time; the weights of those that are chosen sum to 1."""
    layer, x = one_moe(top_k=top_k).double(), torch.randn(2, 5, 16, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:  # torch's grouped matmuls know no float64
        patch.setattr(moe.F, "grouped_mm", grouped_by_turns)
        y, _ = layer(x)
    for row, out in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True):
        weights, chosen = layer.router(row).softmax(-1).topk(top_k)
        total = torch.zeros_like(row)
        for weight, e in zip(weights / weights.sum(), chosen, strict=True):
            gate, up = (layer.experts.gate_up_proj[e] @ row).chunk(2)
            total += weight * (layer.experts.down_proj[e] @ (F.silu(gate) * up))
        torch.testing.assert_close(out, total, rtol=1e-5, atol=1e-9)  # the router's probabilities are float32


def grouped_by_turns(a, b, offs):
    starts = [0, *offs.tolist()]
    return torch.cat([a[i:j] @ w for i, j, w in zip(starts, starts[1:], b, strict=False)])


def test_imbalance_is_one_for_equal_shares_and_all_experts_for_one():
    even = torch.full((8, 4), 0.25)
    assert moe.imbalance(even, torch.arange(16).view(8, 2) % 4).item() == pytest.approx(1.0)
    alone = torch.eye(4)[[2]].expand(8, 4)
    assert moe.imbalance(alone, torch.full((8, 1), 2)).item() == pytest.approx(4.0)
    skewed = torch.tensor([[0.7, 0.1, 0.1, 0.1]]).expand(8, 4)
    index = torch.tensor([[0, 1]]).expand(8, 2)
    assert moe.imbalance(skewed, index).item() == pytest.approx(4 * (0.5 * 0.7 + 0.5 * 0.1))


def test_the_router_is_trained_by_loss_and_imbalance():
    config = tiny(experts=4, activation="silu", variants=("torch",), steps=1)
    (run,) = training.start_runs(config)
    (batch,) = training.training_batches(config, torch.arange(200, dtype=torch.uint8))
    nats, total = training.losses_of(config, run.model, batch)
    _, imbalance = run.model.loss(*batch)
    assert total.item() == pytest.approx(nats.item() + 0.01 * imbalance.item())
    routers = [one.router.weight for one in training.moe_layers(run.model)]
    assert len(routers) == 2
    for loss in (nats, imbalance):
        assert all(grad.abs().max() > 0 for grad in torch.autograd.grad(loss, routers, retain_graph=True))


def test_variants_follow_one_choice_of_experts_in_training_alone():
    layer, other = one_moe(top_k=1), one_moe(top_k=1)
    other.choice = layer.choice
    with torch.no_grad():
        other.router.weight.neg_()  # likes others
    x = torch.randn(1, 8, 16)
    layer(x)
    (chosen,) = layer.choice
    other(x)
    assert other.choice[0] is chosen
    own = other.router(x[0]).argmax(-1, keepdim=True)
    assert not torch.equal(own, chosen)
    for one in (layer, other):
        one.eval()
    followed = other(x)[0]
    layer.choice.clear()
    other.train()
    torch.testing.assert_close(other(x)[0], followed, rtol=0, atol=0)
    assert torch.equal(other.choice[0], own)


@pytest.mark.parametrize("experts", [[], ["--experts", "4"]], ids=["mlp", "experts"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_trains(tmp_path, capsys, dtype, experts):
    assert run_demo(tmp_path, "--dtype", dtype, "--steps", "4", *experts) == 0
    assert "no limit: only fp32 on a CPU has one" in capsys.readouterr().out
    for losses in losses_by_variant(tmp_path).values():
        assert all(map(math.isfinite, losses))
        torch.testing.assert_close(losses, losses_by_variant(tmp_path)["torch"], rtol=0.02, atol=0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--experts 0", "--experts: wanted at least 1 but got 0"),
        ("--experts 4 --top-k 5", "--top-k: wanted from 1 to all 4 --experts but got 5"),
        ("--experts 4 --d-model 20", "--d-model: wanted a multiple of 8, as torch's grouped_mm does, but got 20"),
        ("--top-k 2", "--top-k goes with --experts"),
        ("--heads 3", "--d-model: wanted a multiple of --heads 3 but got 16"),
        ("--dropout 1.5", "--dropout: wanted a probability in [0, 1) but got 1.5"),
        ("--steps 0", "--steps: wanted at least 1 but got 0"),
        ("--batch-size -2", "--batch-size: wanted at least 1 but got -2"),
        ("--threads 0", "--threads: wanted at least 1 but got 0"),
        ("--lr 0", "--lr: wanted a positive learning rate but got 0.0"),
        ("--variants torch torch", "--variants: wanted each variant once but got torch torch"),
        ("--seq-len 100000000", "bytes but got 100000000"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path, capsys, arguments, message):
    assert run_demo(tmp_path / "out", *arguments.split()) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is there")
def test_a_missing_gpu_is_named(tmp_path, capsys):
    assert run_demo(tmp_path, "--device", "cuda") == 2
    assert "--device: wanted cuda but torch sees no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--variants", "jax"], ["--activation", "tanh"], ["--dtype", "fp8"], ["--frames", "3"]]
)
def test_unknown_choices_are_refused(tmp_path, capsys, arguments):
    with pytest.raises(SystemExit) as exit_:
        run_demo(tmp_path, *arguments)
    assert exit_.value.code == 2
    assert arguments[-1] in capsys.readouterr().err


def test_nothing_is_on_both_sides_of_the_split():
    corpus = data.load_corpus()
    assert corpus.train_files
    assert corpus.held_out_files
    groups = [
        {path.split("/")[0].removesuffix(".py") for path in files}
        for files in (corpus.train_files, corpus.held_out_files)
    ]
    assert not groups[0] & groups[1]
    assert 0.02 < len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out)) < 0.4
    again = data.load_corpus()
    assert torch.equal(corpus.train, again.train)
    assert torch.equal(corpus.held_out, again.held_out)


def tree(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text)


def test_corpus_takes_sorted_source_files_once(tmp_path):
    train, held_out = (
        next(n for n in map(str, range(1000)) if data.is_held_out(f"m{n}.py") is part) for part in (False, True)
    )
    first, second = f"m{train}/a.py", f"m{train}/sub/b.py"
    tree(
        tmp_path,
        {
            second: b"two",
            first: b"one",
            f"m{held_out}.py": b"held",
            f"m{held_out}/again.py": b"one",
            "empty.py": b"",
            "site-packages/other.py": b"installed",
            f"m{train}/tests/test_a.py": b"test",
            f"m{train}/data.txt": b"text",
        },
    )
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    corpus = data.load_corpus(tmp_path)
    texts = {path: (tmp_path / path).read_bytes() for path in corpus.train_files + corpus.held_out_files}
    assert sorted(texts.values()) == [b"held", b"one", b"two"]
    for files, text in ((corpus.train_files, corpus.train), (corpus.held_out_files, corpus.held_out)):
        assert list(files) == sorted(files)
        assert bytes(text.tolist()) == b"".join(texts[path] for path in files)


def test_corpus_stops_at_its_limit():
    corpus = data.load_corpus(max_bytes=1_000_000)
    assert 500_000 < len(corpus.train) + len(corpus.held_out) <= 1_000_000


def test_no_text_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="wanted Python source files below"):
        data.load_corpus(tmp_path)


def test_batches_come_from_the_seed_and_targets_are_the_next_bytes():
    text = torch.arange(200, dtype=torch.uint8)
    batches, again, other = (list(data.training_batches(tiny(seed=seed), text)) for seed in (3, 3, 4))
    assert len(batches) == 4
    for (tokens, targets), (tokens_again, _) in zip(batches, again, strict=True):
        assert torch.equal(tokens, tokens_again)
        assert tokens.shape == (2, 16)
        assert torch.equal(targets, tokens + 1)
    assert not torch.equal(batches[0][0], other[0][0])
    held_out = data.held_out_batches(tiny(), text, batches=3)
    assert [tokens.shape for tokens, _ in held_out] == [(2, 16)] * 3
    assert held_out[0][0][0, 0] == 0
    assert held_out[-1][1][-1, -1] == 199


@pytest.mark.parametrize("experts", [0, 4])
def test_the_variant_changes_layers_and_not_the_state_dict(experts):
    runs = training.start_runs(tiny(experts=experts, activation="silu"))
    first = runs[0].model.state_dict()
    for run in runs[1:]:
        state = run.model.state_dict()
        assert list(state) == list(first)
        assert all(torch.equal(state[name], first[name]) for name in first)
    kind = "MoEBlock" if experts else "Block"
    assert [type(run.model.blocks[0]).__name__ for run in runs] == [kind, kind, f"Segment{kind}"]
    decayed, unfused = (group["params"] for group in runs[0].optimizer.param_groups)
    assert {p.dim() for p in unfused} == {1}
    assert {p.dim() for p in decayed} == ({2, 3} if experts else {2})


def test_learning_rate_warms_up_and_decays():
    (run,) = training.start_runs(tiny(steps=100, variants=("torch",)))
    rates = []
    for _ in range(100):
        rates.append(run.optimizer.param_groups[0]["lr"])
        run.optimizer.step()
        run.schedule.step()
    assert rates[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(1e-4, rel=0.05)


def test_threads_are_chosen_and_given_back(monkeypatch):
    outer = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with training.cpu_threads(None, tiny()) as threads:
            assert threads in (1, 2)
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 2
        with training.cpu_threads(1, tiny()) as threads:
            assert torch.get_num_threads() == threads == 1
        assert torch.get_num_threads() == 2

        linear = F.linear

        def spinning(*tensors):  # as if a second thread had no core to run on
            time.sleep(0.002 * (torch.get_num_threads() - 1))
            return linear(*tensors)

        monkeypatch.setattr(F, "linear", spinning)
        with training.cpu_threads(None, tiny()) as threads:
            assert threads == 1
    finally:
        torch.set_num_threads(outer)
