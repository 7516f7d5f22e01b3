"""Newton-Schulz in keel, PyTorch and JAX; benchmarks/compare/run.sh --help says what is measured and how."""
import argparse
import ctypes
import math
import statistics
import sys

from compare import launch, missing, seconds

KELLER = (3.4445, -4.7750, 2.0315)
STEPS = 5
SHAPES = "512x512,1024x1024,1024x4096,768x3072,64x64x128"
KINDS = {"keel fp32, Keller": 0, "keel bf16, Keller": 1, "keel fp32, Polar Express": 2, "keel bf16, Polar Express": 3}


def arguments():
    parser = argparse.ArgumentParser(prog="benchmarks/compare/run.sh newton_schulz")
    parser.add_argument("--library", help=argparse.SUPPRESS)
    parser.add_argument("--can-run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    options.counts = [int(n) for n in options.threads.split(",")]
    options.extents = [tuple(int(n) for n in shape.split("x")) for shape in options.shapes.split(",")]
    if any(len(shape) not in (2, 3) for shape in options.extents):
        parser.error("--shapes: rows x columns, or matrices x rows x columns")
    options.extents = [(1, *shape) if len(shape) == 2 else shape for shape in options.extents]
    return options


# --- the work: {label: call}; result(label) is what it made, as float32 ------------------------------------------------


class keel_works:
    def __init__(self, path, threads, u):
        import numpy
        self.library = ctypes.CDLL(path)
        self.library.keel_start.restype = ctypes.c_void_p
        self.library.keel_start.argtypes = [ctypes.c_int64]
        self.library.keel_stop.argtypes = [ctypes.c_void_p]
        self.library.keel_newton_schulz_bytes.restype = ctypes.c_int64
        self.pool = ctypes.c_void_p(self.library.keel_start(threads))
        self.u, self.kept = u, {}
        self.calls = {label: self.bind(numpy, label, kind) for label, kind in KINDS.items()}

    def bind(self, numpy, label, kind):
        extents = [ctypes.c_int64(n) for n in self.u.shape]
        size = self.library.keel_newton_schulz_bytes(self.pool, ctypes.c_int(kind), *extents)
        memory = numpy.zeros(size, numpy.uint8)
        o = numpy.zeros(self.u.shape, numpy.uint16 if kind % 2 else numpy.float32)
        self.kept[label] = o, memory
        bound = (self.pool, ctypes.c_int(kind), *extents, *(ctypes.c_void_p(a.ctypes.data) for a in (self.u, o, memory)), ctypes.c_int64(size))

        def call():
            if self.library.keel_newton_schulz(*bound):
                raise RuntimeError("newton_schulz refuses its arguments")
        return call

    def result(self, label):
        import numpy
        o = self.kept[label][0]
        return o if o.dtype == numpy.float32 else (o.astype(numpy.uint32) << 16).view(numpy.float32)

    def stop(self):
        self.library.keel_stop(self.pool)


class torch_works:
    """torch.optim.Muon's own function, in bf16, a matrix at a time as it calls it; and the same iteration in fp32, and on a batch."""

    def __init__(self, threads, u):
        import torch
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        g = torch.from_numpy(u)
        self.made = {}

        def iteration(x, kind):
            """As _zeropower_via_newtonschulz."""
            a, b, c = KELLER
            x = x.to(kind)
            tall = x.shape[-2] > x.shape[-1]
            if tall:
                x = x.mT
            x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
            for _ in range(STEPS):
                gram = x @ x.mT
                x = a * x + (b * gram + c * (gram @ gram)) @ x
            return x.mT if tall else x

        try:
            from torch.optim._muon import _zeropower_via_newtonschulz as own
            self.keep("torch.optim.Muon, bf16", lambda: [own(m, KELLER, STEPS, 1e-7) for m in g])
        except ImportError:
            print(f"torch {torch.__version__} has no torch.optim.Muon: its iteration as written here instead")
            self.keep("PyTorch bf16", lambda: [iteration(m, torch.bfloat16) for m in g])
        compiled = torch.compile(iteration, dynamic=False)
        self.keep("torch.compile bf16", lambda: compiled(g, torch.bfloat16))
        self.keep("PyTorch fp32", lambda: iteration(g, torch.float32))
        self.keep("torch.compile fp32", lambda: compiled(g, torch.float32))

    def keep(self, label, function):
        def call():
            self.made[label] = function()
        self.calls = getattr(self, "calls", {})
        self.calls[label] = call

    def result(self, label):
        import torch
        made = self.made[label]
        return (torch.stack(made) if isinstance(made, list) else made).float().numpy()


class jax_works:
    """Jitted, in fp32 and in bf16, on the whole batch at once. XLA takes its threads from the processors that the process is bound to."""

    def __init__(self, threads, u):
        import jax
        import jax.numpy as jnp
        g = jnp.asarray(u)
        self.made = {}

        def iteration(x, kind):
            a, b, c = KELLER
            x = x.astype(kind)
            tall = x.shape[-2] > x.shape[-1]
            if tall:
                x = jnp.swapaxes(x, -2, -1)
            x = x / jnp.maximum(jnp.sqrt(jnp.sum(x.astype(jnp.float32) ** 2, axis=(-2, -1), keepdims=True)), 1e-7).astype(kind)
            for _ in range(STEPS):
                gram = x @ jnp.swapaxes(x, -2, -1)
                x = a * x + (b * gram + c * (gram @ gram)) @ x
            return jnp.swapaxes(x, -2, -1) if tall else x

        self.calls = {}
        for name, kind in (("fp32", jnp.float32), ("bf16", jnp.bfloat16)):
            compiled = jax.jit(lambda x, kind=kind: iteration(x, kind))
            self.calls[f"JAX jit {name}"] = lambda f=compiled, label=f"JAX jit {name}": self.made.__setitem__(label, jax.block_until_ready(f(g)))

    def result(self, label):
        import numpy
        return numpy.asarray(self.made[label].astype("float32"))


# --- measuring -------------------------------------------------------------------------------------------------------


def orthogonality_error(o):
    """The largest of ||O O^T - I|| / sqrt(short side), in double."""
    import numpy
    most = 0.0
    for m in o:
        m = (m if m.shape[0] <= m.shape[1] else m.T).astype(numpy.float64)
        n = m.shape[0]
        most = max(most, float(numpy.linalg.norm(m @ m.T - numpy.eye(n))) / math.sqrt(n))
    return most


def compare(options, threads, shape):
    import numpy
    u = numpy.random.default_rng(1).standard_normal(shape, dtype=numpy.float32)
    parts = [keel_works(options.library, threads, u)]
    parts += [works(threads, u) for name, works in (("torch", torch_works), ("jax", jax_works)) if name not in missing()]
    calls = {}
    for part in parts:
        for label, call in part.calls.items():
            try:
                call()  # compiles
                calls[label] = part, call
            except Exception as error:
                print(f"{label}: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}; left out")
    times = {label: [] for label in calls}
    for _ in range(options.rounds):
        for label, (_, call) in calls.items():
            times[label].append(seconds(call))
    print(f"\n{threads} thread{'s' if threads > 1 else ''}, {' x '.join(str(n) for n in (shape if shape[0] > 1 else shape[1:]))}, {STEPS} steps", flush=True)
    own = {kind: label for label in KINDS for kind in ("fp32", "bf16") if kind in label and "Keller" in label}
    print(f"{'':28}{'ms':>10}{'error':>9}{'x keel fp32':>13}{'x keel bf16':>13}    (keel: the same set)")
    for label, (part, call) in calls.items():
        ratios = "".join(f"{statistics.median(t / k for t, k in zip(times[label], times[own[kind]])):13.2f}" for kind in ("fp32", "bf16"))
        print(f"{label:28}{1e3 * statistics.median(times[label]):10.2f}{orthogonality_error(part.result(label)):9.4f}{ratios}", flush=True)
    parts[0].stop()


def run_child(options):
    for shape in options.extents:
        compare(options, options.child, shape)


if __name__ == "__main__":
    sys.exit(launch(arguments(), __file__, run_child))
