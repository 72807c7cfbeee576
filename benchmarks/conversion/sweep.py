"""convert on every model class of transformers that builds from a small configuration: `make convert-sweep`. With --labels on
every causal language model, called with labels, so that its head has a loss.

Each is built with random weights, called in training mode, converted at "full", and compared with what it was: loss, every
gradient, saved bytes, these also under gradient checkpointing, the model's own or round each layer. A row counts if the
compared step ran what convert put in. A model that does not build small, does not run on the inputs that small.py makes, or is
random in training, is counted as such.

Three passes: `plain` without dropout; `sizes` likewise, with another width, batch, length, number of heads, layers and experts;
`dropout` with dropout of 0.2 everywhere, compared in distribution: the means of the loss and of random projections of all
gradients, over many seeds.
"""

from __future__ import annotations

import argparse
import collections
import csv
import signal
import sys
import traceback
import warnings
from pathlib import Path

import torch

from . import measure, small

WRONG = 1e-4  # of a gradient's norm; rounding in float32 gives 1e-6
DEVIATES = 5.5  # standard errors, of means over SEEDS steps
SEEDS = 64
PASSES = {"plain": small.Scale(), "sizes": small.OTHER, "dropout": small.Scale(dropout=0.2)}


class TooLong(BaseException):
    """Of a kind that nobody takes for a failure of a model."""


def _alarm(*_) -> None:
    raise TooLong


def one(
    name: str,
    config_class: type,
    model_class: type,
    seconds: int,
    labels: bool = False,
    scale: small.Scale = PASSES["plain"],
) -> measure.Result:
    signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(seconds)
    result = measure.Result(name)
    try:
        model = small.build(config_class, model_class, scale)
    except small.TooLarge as error:
        result.verdict, result.reasons = "too large", [str(error)]
        return result
    except (Exception, TooLong) as error:
        result.verdict, result.reasons = "does not build", [f"{type(error).__name__}: {str(error)[:200]}"]
        return result
    try:
        for inputs in small.inputs(model, scale):
            inputs |= {"labels": inputs.get("input_ids")} if labels else {}
            try:
                measure.step(model, inputs)
                break
            except TooLong:
                raise
            except Exception as error:  # inputs that this class does not take; the last reason is reported
                failure = error
        else:
            result.verdict, result.reasons = "does not run", [f"{type(failure).__name__}: {str(failure)[:200]}"]
            return result
    except TooLong:
        result.verdict = "does not run"
        return result
    try:
        first, again = measure.step(model, inputs), measure.step(model, inputs, seed=int(not scale.dropout))
        if measure.error(again, first) > 1e-6:
            result.verdict, result.reasons = "does not repeat", []
            return result
        result.saved_checkpoint = measure.saved_under_checkpointing(model, inputs)
        theirs = measure.statistics(model, inputs, SEEDS) if scale.dropout else None
        measure.convert_and_compare(result, model, inputs, recompute="full")
        if theirs is not None:
            result.deviation = measure.deviation(measure.statistics(model, inputs, SEEDS), theirs)
            right = result.deviation < DEVIATES
        else:
            right = result.gradient_error < WRONG and result.loss_error < WRONG
        result.verdict = result.verdict if right else "WRONG"
    except TooLong:
        result.verdict = "too long"
    except Exception as error:  # is what the sweep looks for: reported as CRASHED, with its traceback
        result.verdict = "CRASHED"
        result.reasons = [f"{type(error).__name__}: {str(error)[:300]}", traceback.format_exc(limit=-4)]
    finally:
        signal.alarm(0)
    return result


def classes(causal: bool = False) -> list[tuple[str, type, type]]:
    from transformers.models.auto import modeling_auto

    mapping = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING if causal else modeling_auto.MODEL_MAPPING
    found = []
    for config_class in mapping:
        try:
            model_class = mapping[config_class]
        except Exception:  # a class whose own module does not import here (an optional package)
            continue
        for model in model_class if isinstance(model_class, (list, tuple)) else (model_class,):
            found.append((model.__name__, config_class, model))
    return sorted({name: (name, config, model) for name, config, model in found}.values(), key=lambda one: one[0])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversion.sweep", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("sweep.csv"), help="a row for each class (default: %(default)s)"
    )
    parser.add_argument("--only", default="", help="classes whose names have this in them")
    parser.add_argument("--labels", action="store_true", help="causal language models, called with labels")
    parser.add_argument("--pass", dest="scale", choices=PASSES, default="plain", help="(default: %(default)s)")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth class, from the Ith")
    parser.add_argument("--after", default="", help="classes whose names come after this")
    parser.add_argument("--seconds", type=int, default=90, help="at most for one class (default: %(default)s)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    i, n = map(int, args.part.split("/"))
    chosen = [one for one in classes(args.labels)[i::n] if args.only.lower() in one[0].lower() and one[0] > args.after]
    counts: collections.Counter[str] = collections.Counter()
    within = compared = 0
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(measure.Result("").row()))
        writer.writeheader()
        for k, (name, config_class, model_class) in enumerate(chosen, 1):
            result = one(name, config_class, model_class, args.seconds, args.labels, PASSES[args.scale])
            counts[result.verdict] += 1
            within += result.saved_checkpoint > 0 and result.saved_converted <= 1.05 * result.saved_checkpoint
            compared += result.saved_converted > 0 and result.saved_checkpoint > 0
            writer.writerow(result.row())
            file.flush()
            ratios = [
                f"{result.saved_converted / of:.2f} of {what}"
                for of, what in ((result.saved_eager, "eager"), (result.saved_checkpoint, "checkpointing"))
                if of and result.saved_converted
            ]
            print(f"{k}/{len(chosen)} {name}: {result.verdict}", *ratios, flush=True)
            if result.verdict in ("WRONG", "CRASHED"):
                print(
                    "   ",
                    result.replaced,
                    result.gradient_error,
                    result.deviation,
                    *result.reasons,
                    file=sys.stderr,
                    flush=True,
                )
    print(dict(counts))
    print(f"{within} of {compared} save at most 1.05 of what gradient checkpointing saves")


if __name__ == "__main__":
    main()
