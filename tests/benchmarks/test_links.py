"""Collectives in the cost model, against formulas by hand and what one layer's code starts and waits for."""

import json
import subprocess
from pathlib import Path

import pytest
from support import outside

from benchmarks.model import links, rates, tensor_parallel, trace
from benchmarks.model.links import LINKS, MICRO, Link

TEN = Link("ten", 20e9, 0.5, 1e-6)  # 10 GB/s


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("all_reduce", 2, 8.4e-6 + 2e-6 + 1e-3),
        ("all_reduce", 4, 8.4e-6 + 6e-6 + 1.5e-3),
        ("reduce_scatter_tensor", 4, 8.4e-6 + 3e-6 + 0.75e-3),
        ("all_gather_into_tensor", 4, 8.4e-6 + 3e-6 + 0.75e-3),
    ],
)
def test_a_ring_by_hand(name, ranks, expected):
    assert links.seconds(name, 10_000_000, ranks, TEN) == pytest.approx(expected)


def test_a_tree_is_for_small_sums_between_nodes():
    """16 ranks: 30 steps of a ring, 2 x 4 levels of a tree."""
    network = TEN._replace(between_nodes=True)
    assert links.seconds("all_reduce", 10, 16, network) == pytest.approx(8.4e-6 + 8e-6, rel=1e-2)
    assert links.seconds("all_reduce", 10, 16, TEN) == pytest.approx(8.4e-6 + 30e-6, rel=1e-2)
    large = 10**9
    assert links.seconds("all_reduce", large, 16, network) == links.seconds("all_reduce", large, 16, TEN)


def test_a_collective_without_a_time():
    with pytest.raises(ValueError, match="no time of all_to_all_single"):
        links.seconds("all_to_all_single", 10, 2, TEN)


def _collective(number: int) -> trace.Launch:
    return trace.Launch("all_reduce 5000x1000", trace.COLLECTIVE, 0, 10_000_000, (number,))


def _wait(number: int) -> trace.Launch:
    return trace.Launch("wait", trace.WAIT, 0, 0, (number,))


def _matmul(ms: float) -> trace.Launch:
    return trace.Launch(f"mm {ms}", "matmul", 1, 1, (1, 1, 1))


@pytest.mark.parametrize(
    ("launches", "overlap", "seconds", "exposed"),
    [
        ([_matmul(1), _collective(0), _matmul(0.25), _wait(0)], True, 2.0, 0.75),
        ([_matmul(1), _collective(0), _matmul(0.25), _wait(0)], False, 2.25, 1.0),
        ([_collective(0), _matmul(3), _wait(0)], True, 3.0, 0.0),
        ([_collective(0), _collective(1), _wait(1), _wait(0)], True, 2.0, 2.0),
        ([_collective(0), _collective(1), _matmul(1.5), _wait(1), _wait(0)], True, 2.0, 0.5),
        ([_collective(0), _matmul(0.5)], True, 1.0, 0.5),
        ([_matmul(1)], True, 1.0, 0.0),
    ],
)
def test_a_timeline_by_hand(launches, overlap, seconds, exposed):
    link = TEN._replace(hop=-links.BASE / 2)  # so that a sum of 10 MB over two ranks takes 1 ms
    found = links.timeline(launches, lambda launch: 1e-3 * float(launch.name.split()[1]), 2, link, overlap)
    count = sum(launch.kind == trace.COLLECTIVE for launch in launches)
    assert found == pytest.approx((1e-3 * seconds, 1e-3 * count, 1e-3 * exposed))
    assert found.hidden == pytest.approx(1 - exposed / count if count else 0.0)


def test_links_are_those_of_the_data_sheets():
    assert LINKS["nvlink4"].peak == 18 * 25e9
    assert LINKS["nvlink3"].peak == 12 * 25e9
    assert LINKS["pcie5"].peak == pytest.approx(32e9 * 16 / 8 * 128 / 130, rel=1e-3)
    assert LINKS["400gb"].peak == 400e9 / 8
    assert all(link.bandwidth < link.peak and link.hop > MICRO for link in LINKS.values())


# -- one layer


def _between(launches, number: int) -> int:
    """Matmuls between the start of a collective and the wait for it."""
    kinds = [(launch.kind, launch.shape[:1]) for launch in launches]
    part = launches[kinds.index((trace.COLLECTIVE, (number,))) : kinds.index((trace.WAIT, (number,)))]
    return sum(launch.kind == "matmul" for launch in part)


def _told(one: trace.Trace) -> list:
    """Of each pass: the collectives by name, with their bytes and the matmuls that run before the wait."""

    def told(part, launch):
        return launch.name.split()[0], launch.bytes, _between(part, launch.shape[0])

    return [
        [[*told(part, launch)] for launch in part if launch.kind == trace.COLLECTIVE]
        for part in (one.forward, one.backward)
    ]


def main() -> None:
    """Without Triton's interpreter: what _told says of ours."""
    for sequence in (False, True):
        case = tensor_parallel.Case("Llama 8B", 2, sequence)
        (one,) = tensor_parallel.traced(rates.GPUS["h100"], case, ["ckptkern selective"]).values()
        print(json.dumps(_told(one)))


ALL, GATHER, SCATTER = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"


def test_collectives_of_torchs_layer():
    """Its recompute ends before the last sum; what the norms' gradients take is left out."""
    x = 2 * tensor_parallel.TOKENS * 4096
    found = {}
    for sequence in (False, True):
        case = tensor_parallel.Case("Llama 8B", 2, sequence)
        (one,) = tensor_parallel.traced(rates.GPUS["h100"], case, [tensor_parallel.TORCH]).values()
        found[sequence] = _told(one)
        assert {size for part in found[sequence] for _, size, _ in part} == {x}
    assert [[name for name, *_ in part] for part in found[False]] == [[ALL, ALL], [ALL, ALL, ALL]]
    forward, backward = ([name for name, *_ in part] for part in found[True])
    assert forward == [GATHER, SCATTER, GATHER, SCATTER]
    assert sorted(backward) == [GATHER] * 4 + [SCATTER] * 3


def test_collectives_of_our_layer():
    """No recompute has any but the gathers of x; the sum of an input's gradient runs under the weights' matmuls."""
    process = outside.start(__file__, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, error = process.communicate()
    assert process.returncode == 0, error
    replicated, sequence = map(json.loads, out.splitlines())
    x = 2 * tensor_parallel.TOKENS * 4096
    assert replicated[0] == [[ALL, x, 0], [ALL, x, 0]]
    sums = [under for name, size, under in replicated[1] if size == x]
    assert len(sums) == 2
    assert sums[0] >= 3
    assert sums[1] >= 4
    assert [name for name, *_ in sequence[0]] == [GATHER, SCATTER, GATHER, SCATTER]
    names = [name for name, size, _ in sequence[1] if size == x]
    assert sorted(names) == [GATHER] * 4 + [SCATTER] * 2
    assert [under >= 3 for name, size, under in sequence[1] if name == SCATTER] == [True, True]


def test_the_page_shows_the_committed_table():
    root = Path(outside.ROOT)
    text = tensor_parallel.table(root / "benchmarks" / "results" / "model" / "tensor_parallel.csv")
    page = (root / "docs" / "how-to" / "distributed.md").read_text()
    assert f"{tensor_parallel.BEGIN}\n{text}\n{tensor_parallel.END}" in page


def test_a_slower_link_costs_what_is_exposed(tmp_path):
    """Of torch's variant alone, which needs no compiler."""
    case, gpu = tensor_parallel.Case("Llama 8B", 8, False), rates.GPUS["a100"]
    steps = {(case, name): one for name, one in tensor_parallel.traced(gpu, case, [tensor_parallel.TORCH]).items()}

    def no_codes(caught):
        raise AssertionError(f"{caught} was to be no launch of ours")

    slow, fast = (next(tensor_parallel.rows(gpu, LINKS[name], steps, no_codes)) for name in ("pcie4", "nvlink3"))
    assert fast.ratio == slow.ratio == 1.0
    assert slow.time.seconds - slow.time.exposed == pytest.approx(fast.time.seconds - fast.time.exposed)
    assert slow.time.exposed > 5 * fast.time.exposed
    tensor_parallel.write([slow, fast], tmp_path / "rows.csv")
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 3


if __name__ == "__main__":
    main()
