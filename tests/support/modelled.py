"""What test_model.py learns without Triton's interpreter: launches of ours on meta tensors, and a run of the command."""

import dataclasses
import json
import sys

from benchmarks.model import __main__ as command
from benchmarks.model import rates, sheet, trace
from ckptkern.benchmarks import cases

MLP, LAYER, DROPOUT = "mlp-gelu/d2048x16384", "gpt_layer/d1024x16384-s2048", "attention-dropout/d1024x16384-s2048"
EXPERTS = "moe_mlp-silu/d2048x8192"
SMALL = dataclasses.replace(rates.GPUS["h200"], name="small", memory=2**33)
ITEMS = ((rates.GPUS["h200"], (MLP, LAYER, DROPOUT, EXPERTS)), (rates.GPUS["a100"], (MLP, LAYER)), (SMALL, (MLP,)))


def launched() -> dict[str, dict]:
    """GPU, case and variant -> names and FLOPs of the launches, forward and backward; what is saved, and of experts the
    peak."""
    items = {item.name: item for item in cases.items("cuda")}
    found = {}
    for gpu, names in ITEMS:
        for (case, variant), step in sheet.traces(gpu, [items[name] for name in names]).items():
            model, x = trace.build(items[case])
            found[f"{gpu.name} {case} {variant}"] = {
                "peak": trace.peak(gpu, sheet.modelled(items[case])[variant], model, x) if case == EXPERTS else None,
                "forward": [launch.name for launch in step.forward],
                "backward": [launch.name for launch in step.backward],
                "flops": sum(launch.flops for launch in step.launches),
                "saved": step.saved,
            }
    return found


if __name__ == "__main__":
    out, *arguments = sys.argv[1:]
    with open(out, "w") as file:
        json.dump(launched(), file)
    sys.exit(command.main(arguments))
