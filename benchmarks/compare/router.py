"""Keel's router and the chain of PyTorch operations that does the same; benchmarks/compare/run.sh --help says what is measured."""
import argparse
import ctypes
import os
import statistics
import subprocess
import sys

from compare import bf16_bits, missing, seconds

CAPACITY = (5, 4)  # of the mean load
WANTED = {"forward": 10, "forward + backward": 6}  # times as fast as the fastest chain
FARTHEST = 8       # times the floor


def arguments():
    parser = argparse.ArgumentParser(prog="benchmarks/compare/run.sh router")
    parser.add_argument("--library", help=argparse.SUPPRESS)
    parser.add_argument("--can-run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shapes", default="64x8,256x8,512x10,896x16")
    parser.add_argument("--formats", default="bf16,fp32")
    parser.add_argument("--score", choices=("softmax", "sigmoid"), default="softmax")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    options.counts = [int(n) for n in options.threads.split(",")]
    options.extents = [tuple(int(n) for n in shape.split("x")) for shape in options.shapes.split(",")]
    options.formats = options.formats.split(",")
    if any(len(shape) != 2 or not 1 <= shape[1] <= shape[0] for shape in options.extents) or options.tokens < 1:
        parser.error("--shapes: experts x choices, as 64x8; --tokens: 1 or more")
    if not set(options.formats) <= {"bf16", "fp32"}:
        parser.error("--formats: bf16, fp32 or both")
    return options


# --- the work --------------------------------------------------------------------------------------------------------


class router_memory(ctypes.Structure):
    """As in router_calls.cpp."""
    _fields_ = [(name, ctypes.c_int64) for name in ("tokens", "experts", "k", "halves", "sigmoid", "numerator", "denominator")] + \
               [(name, ctypes.c_void_p) for name in ("logits", "bias", "ids", "weights", "asked", "given", "slots", "offsets", "dweights",
                                                     "dlogits", "scratch")] + [("scratch_size", ctypes.c_int64)]


class batch:
    """The inputs of all, and keel's outputs."""

    def __init__(self, library, tokens, experts, k, form, score):
        import numpy
        draw = numpy.random.default_rng(1)
        self.tokens, self.experts, self.k, self.form, self.score = tokens, experts, k, form, score
        logits = draw.standard_normal((tokens, experts), dtype=numpy.float32)
        self.arrays = {
            "logits": bf16_bits(logits) if form == "bf16" else logits,
            "bias": (draw.standard_normal(experts) * (0.1 / experts if score == "softmax" else 0.02)).astype(numpy.float32),
            "ids": numpy.zeros((tokens, k), numpy.int32), "weights": numpy.zeros((tokens, k), numpy.float32),
            "asked": numpy.zeros(experts, numpy.int64), "given": numpy.zeros(experts, numpy.int64),
            "slots": numpy.zeros((tokens, k), numpy.int64), "offsets": numpy.zeros(experts + 1, numpy.int64),
            "dweights": draw.standard_normal((tokens, k), dtype=numpy.float32), "dlogits": numpy.zeros_like(logits),
            "scratch": numpy.zeros(max(1, library.keel_router_scratch(tokens, experts)), numpy.uint8)}
        if form == "bf16":
            self.arrays["dlogits"] = numpy.zeros((tokens, experts), numpy.uint16)
        self.memory = router_memory(tokens, experts, k, form == "bf16", score == "sigmoid", *CAPACITY,
                                    **{name: a.ctypes.data for name, a in self.arrays.items()}, scratch_size=self.arrays["scratch"].nbytes)
        size = lambda *names: sum(self.arrays[name].nbytes for name in names)
        results = size("ids", "weights", "slots", "asked", "given", "offsets")
        self.moved = {"forward": size("logits", "bias") + results,  # read once, written once
                      "forward + backward": size("logits", "bias") + results + size("logits", "ids", "weights", "dweights", "dlogits")}
        self.room = [numpy.ones(max(self.moved.values()) // 2 + 1, numpy.uint8) for _ in range(2)]


class keel_pool:
    """Keel's calls on one number of threads."""

    def __init__(self, library, threads, b):
        self.library, self.b = library, b
        self.pool = ctypes.c_void_p(library.keel_start(threads))

    def work(self, name):
        function = self.library.keel_router_forward if name == "forward" else self.library.keel_router_both

        def call():
            if function(self.pool, ctypes.byref(self.b.memory)):
                raise RuntimeError("keel refuses its arguments")
        return call

    def floor(self, name):
        source, target = (ctypes.c_void_p(a.ctypes.data) for a in self.b.room)
        return lambda: self.library.keel_copy(self.pool, source, target, ctypes.c_int64(self.b.moved[name] // 2))

    def stop(self):
        self.library.keel_stop(self.pool)


def torch_works(threads, b):
    """{label: {work: call}}, a call returns (ids, weights, demand, slots, offsets) or the gradient of the logits."""
    import numpy
    import torch
    torch.set_num_threads(threads)
    logits = torch.from_numpy(b.arrays["logits"].view(numpy.int16)).view(torch.bfloat16) if b.form == "bf16" else torch.from_numpy(b.arrays["logits"])
    leaf = logits.clone().requires_grad_()
    bias, dweights = torch.from_numpy(b.arrays["bias"]), torch.from_numpy(b.arrays["dweights"])
    numerator, denominator = CAPACITY
    capacity = min(b.tokens, -(-b.tokens * b.k * numerator // (b.experts * denominator)))

    def select(z):
        s = z.float()
        s = s.softmax(1) if b.score == "softmax" else s.sigmoid()
        ids = torch.topk(s + bias, b.k, dim=1).indices
        w = s.gather(1, ids)
        return ids, w / w.sum(1, keepdim=True) if b.k > 1 else w

    def place_by_one_hot(ids):
        """The chain of the first public routers: a row of zeros and a one for each assignment."""
        hot = torch.nn.functional.one_hot(ids.reshape(-1), b.experts)
        return hot.sum(0), ((hot.cumsum(0) - 1) * hot).sum(1).view(ids.shape)

    def place_by_map(ids):
        """A map of tokens by experts instead, k times smaller: an expert is chosen once a token at most."""
        chosen = torch.zeros(b.tokens, b.experts, dtype=torch.int32).scatter_(1, ids, 1)
        return chosen.sum(0), (chosen.cumsum(0, dtype=torch.int32) - 1).gather(1, ids).long()

    def finish(ids, demand, place):
        offsets = torch.zeros(b.experts + 1, dtype=torch.int64)
        offsets[1:] = demand.clamp(max=capacity).cumsum(0)
        return torch.where(place < capacity, offsets[ids] + place, -1), offsets

    def chain(z, place_of):
        ids, w = select(z)
        demand, place = place_of(ids)
        return ids, w, demand, *finish(ids, demand, place)

    def works(place_of, wrap=lambda f: f):
        run = wrap(lambda z: chain(z, place_of))

        def forward():
            with torch.no_grad():
                return run(logits)

        def both():
            leaf.grad = None
            run(leaf)[1].backward(dweights)
            return leaf.grad
        return {"forward": forward, "forward + backward": both}

    return {"one_hot chain": works(place_by_one_hot), "map chain": works(place_by_map),
            "map, torch.compile": works(place_by_map, lambda f: torch.compile(f, dynamic=False))}


# --- measuring -------------------------------------------------------------------------------------------------------


def agreement(label, call, b):
    """How much of a peer's choice is not keel's: scores within a rounding of each other may come in either order."""
    ids, _, demand, slots, offsets = (x.numpy() for x in call())
    other = int((ids != b.arrays["ids"]).any(axis=1).sum())
    counts = "all counts, slots and offsets are equal" if (demand == b.arrays["asked"]).all() and (slots == b.arrays["slots"]).all() and \
        (offsets == b.arrays["offsets"]).all() else f"{int(abs(demand - b.arrays['asked']).sum()) // 2} of {b.tokens * b.k} assignments elsewhere"
    print(f"    {label}: {other} of {b.tokens} tokens choose in another order; {counts}")


def compare(options, library, threads, experts, k, form):
    b = batch(library, options.tokens, experts, k, form, options.score)
    keel = keel_pool(library, threads, b)
    alone = keel_pool(library, 1, b) if threads > 1 else None
    peers = torch_works(threads, b) if "torch" not in missing() else {}
    for label in list(peers):
        for name in list(peers[label]):
            try:
                peers[label][name]()  # compiles
            except Exception as error:
                print(f"{label}, {name}: {(str(error).strip() or type(error).__name__).splitlines()[0]}; left out")
                del peers[label][name]

    print(f"\n{threads} thread{'s' if threads > 1 else ''}, {options.tokens} tokens, {experts} experts, {k} a token, {form} logits, {options.score}: "
          "times as long as keel", flush=True)
    print(f"{'':20}{'keel':>12}{'of floor':>10}{'1 thread':>10}" + "".join(f"{label:>20}" for label in peers))
    for name in WANTED:
        own, floors, ratios, singles = [], [], {label: [] for label in peers}, []
        for _ in range(options.rounds):
            own.append(seconds(keel.work(name)))
            floors.append(own[-1] / seconds(keel.floor(name)))
            if alone:
                singles.append(seconds(alone.work(name)) / own[-1])
            for label, works in peers.items():
                if name in works:
                    ratios[label].append(seconds(works[name]) / own[-1])
        medians = {label: statistics.median(r) for label, r in ratios.items() if r}
        middle = lambda values: f"{statistics.median(values):10.2f}" if values else f"{'-':>10}"
        short = [f"{FARTHEST} of the floor"] if statistics.median(floors) > FARTHEST else []
        short += [f"{WANTED[name]} times as fast"] if medians and min(medians.values()) < WANTED[name] else []
        short += ["1.75 of one thread"] if threads == 2 and statistics.median(singles) < 1.75 else []
        print(f"{name:20}{1e6 * statistics.median(own):9.0f} us{middle(floors)}{middle(singles)}" +
              "".join(f"{medians[label]:20.1f}" if label in medians else f"{'-':>20}" for label in peers) +
              (f"   short of {', '.join(short)}" if short else ""), flush=True)
    keel.work("forward")()
    for label, works in peers.items():
        if "forward" in works:
            agreement(label, works["forward"], b)
    keel.stop()
    if alone:
        alone.stop()


def run_child(options):
    """One number of threads, on as many processors; libraries are loaded after that is settled."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:options.child])
    library = ctypes.CDLL(options.library)
    library.keel_start.restype = ctypes.c_void_p
    library.keel_start.argtypes = [ctypes.c_int64]
    library.keel_stop.argtypes = [ctypes.c_void_p]
    library.keel_router_scratch.restype = ctypes.c_int64
    library.keel_router_scratch.argtypes = [ctypes.c_int64, ctypes.c_int64]
    for experts, k in options.extents:
        for form in options.formats:
            compare(options, library, options.child, experts, k, form)


def main():
    options = arguments()
    lacking = [name for name in missing() if name != "jax"]
    if options.can_run:
        for name in lacking:
            print(f"{sys.executable} has no {name}" + ("" if name == "numpy" else ": keel alone, beside the floor"))
        if "numpy" in lacking:
            print("nothing can be run; --python or KEEL_PYTHON names a Python that has numpy, and torch to compare with")
            return 77
        return 0
    if options.child:
        return run_child(options)
    for threads in options.counts:
        if threads > len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())):
            print(f"{threads} threads: there are fewer processors, left out")
            continue
        # Freed memory stays in the process: otherwise a peer would wait for new pages at each call.
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_=str(1 << 40),
                           MALLOC_TOP_PAD_=str(1 << 28), MALLOC_ARENA_MAX="1")
        code = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--child", str(threads)], env=environment).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
