"""Collectives in the cost model, against formulas by hand and what one layer's code starts and waits for."""

import json
import subprocess

import pytest
from support import outside

from benchmarks.model import links, rates, tensor_parallel, trace
from benchmarks.model.links import LINKS, Link

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


def _launches(text):
    """Reads "C0 1.5 W0": collective 0 starts, a matmul of 1.5 ms runs, collective 0 is waited for."""
    kinds = {"C": ("all_reduce 5000x1000", trace.COLLECTIVE), "W": ("wait", trace.WAIT)}
    for word in text.split():
        if word[0] in kinds:
            yield trace.Launch(*kinds[word[0]], 0, 10_000_000, (int(word[1:]),))
        else:
            yield trace.Launch(f"mm {word}", "matmul", 1, 1, (1, 1, 1))


@pytest.mark.parametrize(
    ("launches", "overlap", "seconds", "exposed"),
    [
        ("1 C0 0.25 W0", True, 2.0, 0.75),
        ("1 C0 0.25 W0", False, 2.25, 1.0),
        ("C0 3 W0", True, 3.0, 0.0),
        ("C0 C1 W1 W0", True, 2.0, 2.0),
        ("C0 C1 1.5 W1 W0", True, 2.0, 0.5),
        ("C0 0.5", True, 1.0, 0.5),
        ("1", True, 1.0, 0.0),
    ],
)
def test_a_timeline_by_hand(launches, overlap, seconds, exposed):
    link = TEN._replace(hop=-links.BASE / 2)  # so that a sum of 10 MB over two ranks takes 1 ms
    found = links.timeline(
        [*_launches(launches)], lambda launch: 1e-3 * float(launch.name.split()[1]), 2, link, overlap
    )
    count = launches.count("C")
    assert found == pytest.approx((1e-3 * seconds, 1e-3 * count, 1e-3 * exposed))
    assert found.hidden == pytest.approx(1 - exposed / count if count else 0.0)


# -- one layer


def _between(launches, number):
    """Matmuls between the start of a collective and the wait for it."""
    kinds = [(launch.kind, launch.shape[:1]) for launch in launches]
    part = launches[kinds.index((trace.COLLECTIVE, (number,))) : kinds.index((trace.WAIT, (number,)))]
    return sum(launch.kind == "matmul" for launch in part)


def _traced(variant):
    """Returns, for a replicated layer and for one whose sequence is sharded, the collectives of each pass by name, with their
    bytes and the matmuls that run before the wait."""
    cases = [tensor_parallel.Case("Llama 8B", 2, sequence) for sequence in (False, True)]
    steps = [tensor_parallel.traced(rates.GPUS["h100"], case, [variant])[variant] for case in cases]
    return [
        [
            [
                (one.name.split()[0], one.bytes, _between(part, one.shape[0]))
                for one in part
                if one.kind == trace.COLLECTIVE
            ]
            for part in (step.forward, step.backward)
        ]
        for step in steps
    ]


ALL, GATHER, SCATTER = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"
X = 2 * tensor_parallel.TOKENS * 4096


@pytest.mark.long
def test_collectives_of_our_layer():
    """No recompute has any but the gathers of x; the sum of an input's gradient runs under the weights' matmuls."""
    process = outside.start(__file__, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, error = process.communicate()
    assert process.returncode == 0, error
    replicated, (forward, backward) = json.loads(out)
    assert replicated[0] == [[ALL, X, 0]] * 2
    first, second = (under for _, size, under in replicated[1] if size == X)
    assert first >= 3
    assert second >= 4
    assert [name for name, *_ in forward] == [GATHER, SCATTER] * 2
    assert sorted(name for name, size, _ in backward if size == X) == [GATHER] * 4 + [SCATTER] * 2
    assert [under >= 3 for name, size, under in backward if name == SCATTER] == [True, True]


def test_the_page_shows_the_committed_table():
    text = tensor_parallel.table(outside.ROOT / "benchmarks" / "results" / "model" / "tensor_parallel.csv")
    page = (outside.ROOT / "docs" / "how-to" / "distributed.md").read_text()
    assert f"{tensor_parallel.BEGIN}\n{text}\n{tensor_parallel.END}" in page


def test_a_slower_link_costs_what_is_exposed(tmp_path):
    """Of torch's variant alone, which needs no compiler."""
    case, gpu = tensor_parallel.Case("Llama 8B", 8, False), rates.GPUS["a100"]
    steps = {(case, name): one for name, one in tensor_parallel.traced(gpu, case, [tensor_parallel.TORCH]).items()}
    slow, fast = (next(tensor_parallel.rows(gpu, LINKS[name], steps, pytest.fail)) for name in ("pcie4", "nvlink3"))
    assert fast.ratio == slow.ratio == 1.0
    assert slow.time.seconds - slow.time.exposed == pytest.approx(fast.time.seconds - fast.time.exposed)
    assert slow.time.exposed > 5 * fast.time.exposed
    tensor_parallel.write([slow, fast], tmp_path / "rows.csv")
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 3


if __name__ == "__main__":  # without Triton's interpreter
    print(json.dumps(_traced("ckptkern selective")))
