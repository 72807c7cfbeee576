"""Measures a case: checks every variant against float64, then times all that pass, interleaved."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import math
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..conversion.protection import seeded, unmoved
from ..memory import peak_memory, saved_tensors
from ..ops.dispatch.choices import workspace
from ..tools.selftest import error_ratio, gradients, relative_errors
from .cases import CHECKPOINTS, EAGER, Case, Figure, Function, Maker, build

# Steps per round, of which the quickest counts, because whatever else runs on the CPU only adds time.
CPU_BATCH = 3
AHEAD = 2_000_000  # cycles of the GPU, a millisecond, in which the host gets ahead of it
GRAPH_BELOW_MS = 2.0  # below this step time of eager, gaps between launches matter
# Limits, in units of eager's error. Baselines round where they like (inductor's column sums on a CPU: 3.6) up to theirs.
OURS_AT_MOST, BASELINES_AT_MOST = 2.0, 8.0
MOST_COPIES = 256  # of operands: of smaller ones a graph would take longer to capture than to run
ENOUGH = 7  # rounds at least, whatever time they take
DROPS = "timed with dropout, checked without it: every variant samples its own masks"


def load_warning(threads: int) -> str | None:
    """Returns a warning if other programs use the cores that a measurement with this many threads needs; else None.

    Call it before the measurement: the load average, of the last minute, counts this process too.
    """
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    if load <= max(cores - threads, 0) + 0.5:
        return None
    return (
        f"Other programs run here (load average {load:.1f} on {cores} cores): times are less certain than their spread."
    )


@dataclass
class Row:
    """A line of results.csv. Times in ms of forward + backward; ratio: of the medians, to eager's of the same run."""

    case: str
    variant: str
    device: str
    dtype: str
    # checked: right, and not timed yet; wrong: not timed; failed: raised; missing: not installed; dropped: over budget
    status: str = "ok"
    ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    ratio: float | None = None
    rounds: int | None = None
    graph_ms: float | None = None  # the same step as a CUDA graph, where it was captured
    saved_bytes: int | None = None
    peak_bytes: int | None = None
    error_ratio: float | None = None  # largest error of output and gradients, in eager's own: at most 2 for ours
    note: str = ""
    tokens: int | None = None  # of a step of a whole model
    longest: int | None = None  # tokens of the longest sequence whose step fits the memory
    source: str = ""  # of a figure that others published; its status is "published"
    commit: str = ""  # that was measured

    def add_note(self, text: str) -> None:
        self.note = "; ".join(filter(None, (self.note, text)))


def row_of_figure(case: str, device: str, figure: Figure) -> Row:
    """Returns the row of a published figure."""
    peak, saved = (None if size is None else round(size) for size in (figure.peak, figure.saved))
    row = Row(case, figure.variant, device, "bfloat16", "published", figure.ms, note=figure.note, source=figure.source)
    return dataclasses.replace(row, peak_bytes=peak, saved_bytes=saved)


OVER_TIME, OUT_OF_MEMORY = "over the budget of time", "out of memory"
LOST = "the GPU was lost: "  # begins the note of a variant that broke the process's CUDA context, or that did not end
LOST_STATUS = 75  # exit status of a process that goes on with --resume, in another process
HANGS = 150.0  # seconds in which a variant is checked, or timed, at most


class GpuLost(Exception):
    """Raised if no other launch of this process can succeed."""


def raise_if_lost(rows: list[Row], emit: Emit) -> None:
    """Raises GpuLost, after writing the rows, if a variant's failure has broken this process's CUDA context."""
    try:
        torch.cuda.synchronize()
        torch.empty(1, device="cuda").normal_()  # raises after a capture that was not ended
    except Exception as error:  # of a device that is lost, whichever class the driver's error has
        for row in rows:
            emit(dataclasses.replace(row, status="failed", note=LOST + (row.note or one_line(error))))
        raise GpuLost(f"{LOST}{one_line(error)}") from None


@contextlib.contextmanager
def watched(rows: list[Row], emit: Emit, seconds: float = HANGS) -> Iterator[None]:
    """Stops the process with LOST_STATUS if the block, which waits for a GPU, does not end in time; the rows say so."""

    def end() -> None:
        for row in rows:
            emit(dataclasses.replace(row, status="failed", note=f"{LOST}it did not end within {seconds:.0f} s"))
        os._exit(LOST_STATUS)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


FIELDS = [field.name for field in dataclasses.fields(Row)]
Emit = Callable[[Row], None]


def one_line(error: BaseException, length: int = 200) -> str:
    """Returns the class and first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:length]


# -- right ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills every empty tensor with NaN inside the block, so that an unwritten element shows.

    torch does so only under deterministic algorithms, which may differ from those that are timed. So variants are checked
    without it too.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*determinis")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class Checker:
    """Compares a variant's output and gradients with float64, in units of eager's own error.

    Where float64 raises, out of memory or for want of an operation, it compares with eager's results. A tensor may then be off
    by half of its dtype's digits: ||ours - eager|| <= sqrt(eps) ||eager||, 0.09 for bfloat16.
    """

    def __init__(self, model: nn.Module, x: Tensor, dy: Tensor):
        self.x, self.dy, self.reason = x, dy, ""
        self.leaves = self.leaves_of(x, model)
        try:
            self.exact = self._exact(model)
            self.eager = self._errors(model)
        except Exception as error:  # whatever float64 raises
            self.reason = f"checked against eager: float64: {one_line(error, 120)}"
        if self.reason:
            if x.is_cuda:
                torch.cuda.empty_cache()
            self.exact = self.known(gradients(lambda: model(x), self.leaves, dy))
        elif not dy.dim():  # eager's error of a single number is luck, so the gradients' largest stands for it
            self.eager["y"] = max(self.eager.values())

    @staticmethod
    def leaves_of(x: Tensor, model: nn.Module) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in [("x", x), *model.named_parameters()] if tensor.requires_grad}

    @staticmethod
    def known(gradients: dict[str, Tensor | None]) -> dict[str, Tensor]:
        """Leaves out the gradients of parameters on which y does not depend."""
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def _exact(self, model: nn.Module) -> dict[str, Tensor]:
        double, x = copy.deepcopy(model).double(), self.x.detach()
        x = x.double().requires_grad_(self.x.requires_grad) if x.is_floating_point() else x
        return self.known(gradients(lambda: double(x), self.leaves_of(x, double), self.dy.double()))

    def _errors(self, function: Function) -> dict[str, float]:
        return relative_errors(gradients(lambda: function(self.x), self.leaves, self.dy), self.exact)

    def ratio(self, function: Function) -> tuple[float, str]:
        """Returns the largest error in units of eager's, and the name of its tensor."""
        return error_ratio(self._errors(function), self.eager, self.dy.dtype)

    def verdict(self, function: Function, row: Row) -> str:
        """Returns what is wrong with a variant's results; "" if nothing. Writes into the row the largest error of its
        checks, or a note of the distance from eager's."""
        if not self.reason:
            error, worst = self.ratio(function)
            row.error_ratio = max(error, row.error_ratio or 0.0)
            right = error <= (OURS_AT_MOST if row.variant.startswith("ckptkern") else BASELINES_AT_MOST)
            return "" if right else f"error of {worst} is {error:.3g} times eager's"
        distances, bound = self._errors(function), torch.finfo(self.dy.dtype).eps ** 0.5
        worst = max(distances, key=lambda name: distances[name])
        row.note = f"{self.reason}; {worst} is {distances[worst]:.2g} of its norm from eager's, at most {bound:.2g}"
        return "" if distances[worst] <= bound else row.note


# -- fast -------------------------------------------------------------------------------------------------------------

Step = Callable[[int], None]
Clock = Callable[[Step, int], Callable[[], float]]  # runs a step; what it returns gives ms once the round is over


def quickest(batch: int, now: Callable[[], float], step: Step, index: int) -> Callable[[], float]:
    seconds = float("inf")
    for _ in range(batch):
        begin = now()
        step(index)
        seconds = min(seconds, now() - begin)
    return lambda: 1e3 * seconds


def cpu_clock(step: Step, index: int) -> Callable[[], float]:
    """Returns a single thread's CPU time: on a busy machine half of the wall time may be another process's."""
    return quickest(CPU_BATCH, time.thread_time if torch.get_num_threads() == 1 else time.perf_counter, step, index)


def cuda_clock(step: Step, index: int) -> Callable[[], float]:
    """Returns the GPU's time of launches that are queued before the first begins, even in the first step of a round."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD)
    begin.record()
    step(index)
    end.record()
    return lambda: begin.elapsed_time(end)


def interleaved(
    steps: dict[str, Step], clock: Clock, rounds: int, seconds: float = float("inf"), cuda: bool = False
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Returns the ms of every round and the errors, by name. Ends after `rounds`, or after `seconds` and ENOUGH rounds.

    A step that raises is left out of later rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    errors: dict[str, str] = {}
    begin = time.perf_counter()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            takes = {}
            for name, step in steps.items():
                if name in errors:
                    continue
                try:
                    takes[name] = clock(step, index)
                except Exception as error:  # it is the variant's result, reported in its row
                    errors[name] = one_line(error)  # as text: the error would hold its frames' tensors
            if cuda:
                torch.cuda.synchronize()
            for name, take in takes.items():
                times[name].append(take())
            if index + 1 >= ENOUGH and time.perf_counter() - begin > seconds:
                break
    finally:
        if collecting:
            gc.enable()
    return {name: taken for name, taken in times.items() if name not in errors}, errors


def spread(times: list[float]) -> tuple[float, float, float]:
    """Returns the median, the 20th and the 80th percentile."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return statistics.median(times), fifths[0], fifths[3]


def captured(step: Callable[[], object]) -> Callable[[], None]:
    """Returns the replay of the step as a CUDA graph on the current device. The step runs three times before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def copies(nbytes: int, cache: int) -> int:
    """Returns how many sets of operands of `nbytes` to interleave, so that a cache of that many bytes holds none of a set
    when its turn comes again."""
    return min(1 + -(-cache // max(1, nbytes)), MOST_COPIES)


def rotation(x: Tensor, dy: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns copies of the input, enough that none is still in L2 in the next round; on a CPU the input itself."""
    if not x.is_cuda:
        return [(x, dy)]
    count = copies(x.nbytes + dy.nbytes, torch.cuda.get_device_properties(x.device).L2_cache_size)
    return [(x.detach().clone().requires_grad_(x.requires_grad), dy.clone()) for _ in range(count)]


def stepper(function: Function, model: nn.Module, inputs: list[tuple[Tensor, Tensor]]) -> Step:
    """Returns a function of an index: forward and backward on one of the inputs, with gradients set to None first."""
    parameters = list(model.parameters())

    def step(index: int) -> None:
        x, dy = inputs[index % len(inputs)]
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        function(x).backward(dy)

    return step


# -- a case -----------------------------------------------------------------------------------------------------------


def measure(
    case: Case,
    makers: dict[str, Maker],
    device: torch.device,
    emit: Emit,
    rounds: int = 30,
    seconds: float = 4.0,
    deadline: float = math.inf,
) -> None:
    """Measures one case in all its variants. `emit` gets a variant's row when it is checked, and again, complete, when it is
    timed.

    deadline: by time.monotonic(); variants that are not ready by then are dropped, and the others timed.
    """
    torch._dynamo.reset()  # a new size would make the shapes of an old graph dynamic
    cuda = device.type == "cuda"
    rows, steps = _ready_all(case, makers, device, emit, deadline)
    times = time_rows(rows, steps, cuda_clock if cuda else cpu_clock, rounds, seconds, emit, cuda)
    if cuda and EAGER in times and statistics.median(times[EAGER]) < GRAPH_BELOW_MS:
        _time_graphs({name: steps[name] for name in times}, rows, rounds, emit)


def _ready_all(
    case: Case, makers: dict[str, Maker], device: torch.device, emit: Emit, deadline: float
) -> tuple[dict[str, Row], dict[str, Step]]:
    """Emits all rows, and returns the rows and warm steps of the variants whose results are right."""
    cuda = device.type == "cuda"
    model, x, dy = build(case, device)
    checker = Checker(model, x, dy)
    inputs = rotation(x, dy)
    dtype = str((x if x.is_floating_point() else dy).dtype).removeprefix("torch.")  # a loss is float32 in any model
    rows: dict[str, Row] = {}
    steps: dict[str, Step] = {}
    for name, make in makers.items():
        row = Row(case.name, name, device.type, dtype)
        if steps and time.monotonic() > deadline:
            row.status, row.note = "dropped", OVER_TIME
            emit(row)
            continue
        watch = watched([row], emit) if cuda else contextlib.nullcontext()
        size = getattr(make, "workspace", None)
        # no variant checks or times the batch statistics that another one moved
        with seeded(), unmoved(model), watch, bounded(size):
            step = _ready(case, model, make, checker, inputs, device, row)
        if step is None:
            emit(row)
            if cuda and row.status == "failed":
                raise_if_lost([row], emit)
        else:
            rows[name], steps[name] = row, functools.partial(_stepped, size, step) if size else step
            emit(dataclasses.replace(row, status="checked"))
    model.train()
    return rows, steps


def time_rows(
    rows: dict[str, Row], steps: dict[str, Step], clock: Clock, rounds: int, seconds: float, emit: Emit, cuda: bool
) -> dict[str, list[float]]:
    """Times the steps interleaved, completes their rows and emits them. Returns the times. Raises GpuLost."""
    others = [row for name, row in rows.items() if name != EAGER]
    with watched(others, emit, HANGS + seconds) if cuda else contextlib.nullcontext():
        try:
            times, errors = interleaved(steps, clock, rounds, seconds, cuda)
        except Exception as error:  # the device's own, from a kernel of whichever variant
            times, errors = {}, dict.fromkeys(steps, one_line(error))
    for name, row in rows.items():
        if name in errors:
            row.status, row.note = "failed", errors[name]
        else:
            add_times(row, times[name], times.get(EAGER))
        emit(row)
    if cuda and errors:
        raise_if_lost(others, emit)
    return times


def add_times(row: Row, times: list[float], eager: list[float] | None) -> None:
    """Writes a variant's times into its row. eager: eager's times."""
    row.ms, row.p20_ms, row.p80_ms = spread(times)
    row.rounds = len(times)
    row.ratio = row.ms / statistics.median(eager) if eager else None


def bounded(size: int | None) -> contextlib.AbstractContextManager:
    """Returns a workspace of `size` bytes; None leaves the current one."""
    return workspace(size) if size else contextlib.nullcontext()


def _stepped(size: int, step: Step, index: int) -> None:
    """Runs a step within a workspace."""
    with workspace(size):
        step(index)


def _ready(
    case: Case,
    model: nn.Module,
    make: Maker,
    checker: Checker,
    inputs: list[tuple[Tensor, Tensor]],
    device: torch.device,
    row: Row,
) -> Step | None:
    """Returns a variant's warm step if its results are right; None if its row says what is wrong."""
    x = checker.x
    try:
        model.train(not case.drops)
        function = make(model, x)
        wrong = checker.verdict(function, row)
        if row.variant.startswith("ckptkern"):
            with poisoned():
                wrong = checker.verdict(function, row) or wrong
        if wrong:
            row.status, row.note = "wrong", wrong
            return None
        model.train()
        row.add_note(DROPS if case.drops else "")
        step = stepper(function, model, inputs)
        with saved_tensors(exclude=[*model.parameters(), *model.buffers()]) as saved:
            function(x)
        row.saved_bytes = saved.bytes + (function.unseen_bytes() if hasattr(function, "unseen_bytes") else 0)
        for tensor in (*model.parameters(), *(x for x, _ in inputs)):
            tensor.grad = None  # the previous variant's gradient, which this step would free
        with peak_memory(device) as peak:
            step(0)
        row.peak_bytes = peak.bytes
        for index in range(3):
            step(index)
        return step
    except ImportError as error:
        row.status, row.note = "missing", one_line(error)
    except Exception as error:  # whatever a variant raises is its result, and the others still run
        row.status, row.note = "failed", one_line(error)
    return None


def _replayed(replay: Callable[[], None], index: int) -> None:
    """Returns a graph's step, which has the input with which it was captured."""
    replay()


def _time_graphs(steps: dict[str, Step], rows: dict[str, Row], rounds: int, emit: Emit) -> None:
    """Emits the rows again, with the time of the step as a CUDA graph or why there is none. Raises GpuLost."""
    replays: dict[str, Step] = {}
    for name, step in steps.items():
        if name in CHECKPOINTS:
            rows[name].add_note("no CUDA graph: it reads the random state, which fails in a capture")
            continue
        try:
            replays[name] = functools.partial(_replayed, captured(functools.partial(step, 0)))
        except Exception as error:  # not every variant can be captured
            rows[name].add_note(f"no CUDA graph: {one_line(error, 120)}")
            raise_if_lost([], emit)
    with watched([rows[name] for name in replays if name != EAGER], emit):
        times, _ = interleaved(replays, cuda_clock, rounds, cuda=True)
    for name, row in rows.items():
        row.graph_ms = statistics.median(times[name]) if name in times else None
        emit(row)
