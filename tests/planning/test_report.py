"""ckptkern.report: its bytes are those of saved-tensor hooks, and the model is afterwards as before."""

import copy
import csv
import itertools
from pathlib import Path

import pytest
import torch
from support.architectures import ARCHITECTURES, ids
from torch import Tensor, nn

import ckptkern
from ckptkern import memory
from ckptkern.planning.live import gradients_as_there
from ckptkern.planning.report import EAGER
from ckptkern.planning.segments import segments_of

NAMES = ["llama", "gpt", "bert", "decoder", "torch attention"]
MODES = ("none", "selective", "full")


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ARCHITECTURES[name].model()


def hooked(model: nn.Module, x: Tensor) -> int:
    """Bytes of the storages that autograd saves, besides parameters: by torch's hooks and addresses alone."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, tuple[Tensor, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = tensor.detach(), storage.nbytes()  # alive, so that no address is used again
        return tensor.detach()

    with torch.random.fork_rng(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.train()(x)
    return sum(nbytes for _, nbytes in saved.values())


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_saved_tensor_hooks(name: str) -> None:
    model, x = model_of(name), ids()
    unfused = hooked(copy.deepcopy(model), x)
    report = ckptkern.report(model, x)
    assert report.totals[EAGER] == unfused
    for mode in MODES:
        other = copy.deepcopy(model)
        ckptkern.convert(other, x, recompute=mode)
        assert report.totals[mode] == hooked(other, x), mode


def test_the_model_is_as_before() -> None:
    model, x = model_of("llama").eval(), ids()
    state, values = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    ckptkern.report(model, x)
    assert not segments_of(model)
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert torch.equal(state, torch.get_rng_state())
    assert not any(m.training for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(model.state_dict(), values, rtol=0, atol=0)
    ckptkern.convert(model, x, recompute="full")
    model.layers[1].forward.recompute = ("selective", "none")
    before = [m.__dict__.get("forward") for m in model.modules()]
    ckptkern.report(model, x)
    assert before == [m.__dict__.get("forward") for m in model.modules()]
    assert [segment.strategy.mode for segment in segments_of(model)] == ["full", ("selective", "none")]


def test_statistics_of_batches_are_as_before() -> None:
    """torch writes them without counting a version."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    before = copy.deepcopy(model.state_dict())
    ckptkern.report(model, torch.randn(5, 8))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_model_without_an_original_forward() -> None:
    model = nn.Sequential(ckptkern.nn.MLP(8, 32), nn.Linear(8, 8))
    report = ckptkern.report(model, torch.randn(3, 8, requires_grad=True))
    assert list(report.totals) == ["none", "selective", "full"]
    assert {line.mode for line in report.lines} == {"none", "selective", "full"}
    assert report.totals["full"] == 3 * 8 * 4 * 2


def test_activation_checkpoints() -> None:
    block = [nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.GELU(), nn.Conv1d(8, 4, 1)) for _ in range(2)]
    model, x = nn.Sequential(nn.Conv1d(4, 4, 1), *block), torch.randn(2, 4, 6)
    report = ckptkern.report(model, x)
    assert {line.replaced_by for line in report.lines} == {"checkpoint"}
    by_mode = {line.mode: line.saved for line in report.lines if line.name == "1"}
    assert by_mode.pop(EAGER) == by_mode["none"]
    # its input; what each convolution and the GELU read
    assert by_mode == {"none": 4 * 2 * 6 * (4 + 8 + 8), "full": 4 * 2 * 6 * 4}
    assert report.totals["none"] == report.totals[EAGER] == hooked(model, x)


def test_drop_ins_of_torchs_layers() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 5, 16)
    report = ckptkern.report(model, x)
    assert report.totals[EAGER] == hooked(model, x)
    assert type(model.layers[0]) is nn.TransformerEncoderLayer
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    ckptkern.convert(model, x, recompute="full")
    assert report.totals["full"] == hooked(model, x)


def test_csv_and_text(tmp_path: Path) -> None:
    report = ckptkern.report(model_of("llama"), ids())
    report.csv(tmp_path / "report.csv")
    rows = list(csv.DictReader((tmp_path / "report.csv").open()))
    assert [(row["name"], row["mode"]) for row in rows] == [
        (f"layers.{i}", mode) for i in range(2) for mode in (EAGER, *MODES)
    ]
    assert [int(row["saved"]) for row in rows] == [line.saved for line in report.lines]
    text = str(report)
    assert "layers.* (2)  transformer_layer  eager PyTorch" in text
    assert all(memory.format_size(saved) in text for saved in report.totals.values())


def test_memory_over_a_step(tmp_path: Path) -> None:
    """It rises in forward to more than what is saved, and in backward falls to nothing."""
    report = ckptkern.report(model_of("llama"), ids())
    assert list(report.timelines) == list(report.totals)
    for mode, timeline in report.timelines.items():
        at_backward = [n for t, n in zip(timeline.milliseconds, timeline.bytes, strict=True)
                       if t <= timeline.marks["backward"]][-1]  # fmt: skip
        assert timeline.peak >= at_backward >= report.totals[mode] - ids().nbytes, mode
        assert timeline.bytes[-1] <= 64, "scalars"
        assert all(a <= b for a, b in itertools.pairwise(timeline.milliseconds))
    assert report.timelines[EAGER].peak > report.timelines["full"].peak * 0.5
    report.figure(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_on_the_meta_device() -> None:
    layers = nn.Sequential(*(ckptkern.nn.MLP(8, 32, device="meta") for _ in range(2)))
    report = ckptkern.report(layers, torch.empty(3, 8, device="meta", requires_grad=True))
    assert report.totals["full"] == 2 * 3 * 8 * 4
    assert {line.seconds for line in report.lines} == {None}
    assert all(line.flops > 0 for line in report.lines)
    assert "ms" not in str(report)
    assert report.timelines["full"].peak == sum(one.bytes for one in report.standing["full"]) > 2 * 3 * 8 * 4


def test_the_loss_of_a_model_that_has_one() -> None:
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = ckptkern.nn.MLP(8, 16)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            y = self.mlp(x)
            return {"logits": y, "loss": nn.functional.mse_loss(y, labels)}

    report = ckptkern.report(WithLoss(), torch.randn(3, 8), labels=torch.randn(3, 8))
    assert report.timelines["full"].peak > 0


def test_gradients_that_are_there_come_back() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.grad = mine = torch.ones(2, 2)
    with gradients_as_there(layer, all_there=True):
        layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is mine
    assert torch.equal(mine, torch.ones(2, 2))
    assert layer.bias.grad is None


def test_nothing_is_added_to_main_grad() -> None:
    model = nn.Sequential(ckptkern.nn.MLP(8, 16))
    sums = [torch.zeros(p.shape) for p in model.parameters()]
    for p, main_grad in zip(model.parameters(), sums, strict=True):
        p.main_grad, p.grad_added_to_main_grad = main_grad, False
    ckptkern.report(model, torch.randn(3, 8))
    for p, main_grad in zip(model.parameters(), sums, strict=True):
        assert p.main_grad is main_grad
        assert not main_grad.any()
        assert not p.grad_added_to_main_grad
    model(torch.randn(3, 8)).sum().backward()
    assert model[0].fc1.weight.main_grad.any(), "a training step does"


def test_an_output_without_a_gradient() -> None:
    model = nn.Sequential(ckptkern.nn.MLP(8, 16)).requires_grad_(False)
    with pytest.raises(ValueError, match="wanted an output with a gradient"):
        ckptkern.report(model, torch.randn(3, 8))


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not int"):
        ckptkern.report(3, ids())
    with pytest.raises(TypeError, match="wanted the inputs of a training step"):
        ckptkern.report(model_of("llama"))
