"""Keel, PyTorch and JAX on the same row primitives; benchmarks/compare/run.sh --help says what is measured and how."""
import argparse
import ctypes
import importlib.util
import os
import statistics
import subprocess
import sys
import time

PEERS = ("torch", "jax")
NOTHING_TO_COMPARE = 77
EPSILON = 1e-6
E4M3_MAX = 448.0
LEAST_AMAX = E4M3_MAX * 2.0**-126  # keel's floor: neither scale nor multiplier is subnormal


def arguments():
    parser = argparse.ArgumentParser(prog="benchmarks/compare/run.sh")
    parser.add_argument("--library", help=argparse.SUPPRESS)
    parser.add_argument("--can-run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--shapes", default="64x4096,16384x4096")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    options.counts = [int(n) for n in options.threads.split(",")]
    options.extents = [tuple(int(n) for n in shape.split("x")) for shape in options.shapes.split(",")]
    for shape in options.extents:
        if len(shape) != 2 or shape[1] % 128:
            parser.error("--shapes: rows x columns, columns a multiple of 128")
    return options


def missing():
    return [name for name in ("numpy", *PEERS) if importlib.util.find_spec(name) is None]


# --- the work --------------------------------------------------------------------------------------------------------


def bf16_bits(x):
    """float32 to the bits of bf16, nearest even (no NaN)."""
    import numpy
    u = x.view(numpy.uint32)
    return ((u + 0x7fff + ((u >> 16) & 1)) >> 16).astype(numpy.uint16)


class matrices:
    """The inputs of all, as bits, and keel's outputs."""

    def __init__(self, rows, columns):
        import numpy
        draw = numpy.random.default_rng(1)
        self.rows, self.columns = rows, columns
        self.x = bf16_bits(draw.standard_normal((rows, columns), dtype=numpy.float32))
        self.up = bf16_bits(draw.standard_normal((rows, columns), dtype=numpy.float32))
        # one plus this is a bf16 number, as PyTorch wants its gain to be
        self.delta = (draw.integers(-16, 17, columns) / 128).astype(numpy.float32)
        self.codes = numpy.zeros((rows, columns), numpy.uint8)
        self.scales = numpy.zeros((rows, columns // 128), numpy.float32)
        self.y = numpy.zeros((rows, columns), numpy.uint16)


class keel_library:
    def __init__(self, path, threads, m):
        self.library, self.m = ctypes.CDLL(path), m
        self.library.keel_start.restype = ctypes.c_void_p
        self.library.keel_start.argtypes = [ctypes.c_int64]
        self.library.keel_stop.argtypes = [ctypes.c_void_p]
        self.pool = self.library.keel_start(threads)
        self.works = {"quantise": self.bind("keel_quantise", m.x, m.codes, m.scales),
                      "dequantise": self.bind("keel_dequantise", m.codes, m.scales, m.y),
                      "rms_norm": self.bind("keel_rms_norm", m.x, m.delta, m.y, EPSILON),
                      "swiglu": self.bind("keel_swiglu", m.x, m.up, m.y)}

    def bind(self, name, *parts):
        function = getattr(self.library, name)
        pointers = [ctypes.c_float(p) if isinstance(p, float) else ctypes.c_void_p(p.ctypes.data) for p in parts]
        bound = (ctypes.c_void_p(self.pool), ctypes.c_int64(self.m.rows), ctypes.c_int64(self.m.columns), *pointers)

        def call():
            if function(*bound):
                raise RuntimeError(f"{name} refuses its arguments")
        return call

    def stop(self):
        self.library.keel_stop(self.pool)


def torch_works(threads, m):
    """{label: {work: call}}; the formula of quantise is that of DeepGEMM's per_token_cast_to_fp8 with keel's floor."""
    import numpy
    import torch
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    bf16 = lambda bits: torch.from_numpy(bits.view(numpy.int16)).view(torch.bfloat16)
    x, up, gain = bf16(m.x), bf16(m.up), (1 + torch.from_numpy(m.delta)).to(torch.bfloat16)
    codes, scales = torch.from_numpy(m.codes).view(torch.float8_e4m3fn), torch.from_numpy(m.scales)

    def quantise(x):
        blocks = x.view(x.shape[0], -1, 128)
        amax = blocks.abs().float().amax(dim=2).clamp(min=LEAST_AMAX)
        return (blocks * (E4M3_MAX / amax).unsqueeze(2)).to(torch.float8_e4m3fn).view(x.shape), amax / E4M3_MAX

    def dequantise(codes, scales):
        return (codes.float().view(codes.shape[0], -1, 128) * scales.unsqueeze(2)).to(torch.bfloat16).view(codes.shape)

    def rms_norm(x, gain):
        return torch.nn.functional.rms_norm(x, (x.shape[1],), gain, EPSILON)

    def swiglu(gate, up):
        return torch.nn.functional.silu(gate) * up

    inputs = {quantise: (x,), dequantise: (codes, scales), rms_norm: (x, gain), swiglu: (x, up)}
    eager = {f.__name__: (lambda f=f, a=a: f(*a)) for f, a in inputs.items()}
    compiled = {f.__name__: (lambda c=torch.compile(f, dynamic=False), a=a: c(*a)) for f, a in inputs.items()}
    return {"PyTorch eager": eager, "torch.compile": compiled}


def jax_works(threads, m):
    """As torch_works. XLA takes its threads from the processors that the process is bound to."""
    import jax
    import jax.numpy as jnp
    import ml_dtypes
    bf16 = lambda bits: jnp.asarray(bits.view(ml_dtypes.bfloat16))
    x, up, gain = bf16(m.x), bf16(m.up), 1 + jnp.asarray(m.delta)
    codes, scales = jnp.asarray(m.codes.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(m.scales)

    def quantise(x):
        blocks = x.reshape(x.shape[0], -1, 128).astype(jnp.float32)
        amax = jnp.maximum(jnp.max(jnp.abs(blocks), axis=2), LEAST_AMAX)
        return (blocks * (E4M3_MAX / amax)[..., None]).astype(jnp.float8_e4m3fn).reshape(x.shape), amax / E4M3_MAX

    def dequantise(codes, scales):
        blocks = codes.reshape(codes.shape[0], -1, 128).astype(jnp.float32)
        return (blocks * scales[..., None]).astype(jnp.bfloat16).reshape(codes.shape)

    def rms_norm(x, gain):
        v = x.astype(jnp.float32)
        return (v * jax.lax.rsqrt(jnp.mean(v * v, axis=1, keepdims=True) + EPSILON) * gain).astype(jnp.bfloat16)

    def swiglu(gate, up):
        return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(jnp.bfloat16)

    inputs = {quantise: (x,), dequantise: (codes, scales), rms_norm: (x, gain), swiglu: (x, up)}
    return {"JAX jit": {f.__name__: (lambda c=jax.jit(f), a=a: jax.block_until_ready(c(*a))) for f, a in inputs.items()}}


MOVED = {"quantise": 3 + 4 / 128, "dequantise": 3 + 4 / 128, "rms_norm": 4, "swiglu": 6}  # bytes an element

# --- measuring -------------------------------------------------------------------------------------------------------


def seconds(call, least=0.05):
    """Of one call, after one that is not counted; short ones are repeated. Before them a pause in which the threads of whoever ran before
    go to sleep: OpenMP's spin for up to 200 ms after their work, on the processors that this call needs."""
    time.sleep(0.21)
    began = time.perf_counter()
    call()
    times = max(1, int(least / max(1e-6, time.perf_counter() - began)))
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def bytes_of(outputs):
    """Outputs of a peer as numpy bytes."""
    import numpy
    found = []
    for output in outputs:
        if hasattr(output, "data_ptr"):
            import torch
            found.append(output.contiguous().view(torch.uint8).numpy().reshape(-1))
        else:
            found.append(numpy.asarray(output).view(numpy.uint8).reshape(-1))
    return found


def agreement(peers, m):
    """How many codes and scales of each peer are not keel's."""
    import numpy
    wanted = [m.codes.copy().view(numpy.uint8).reshape(-1), m.scales.copy().view(numpy.uint8).reshape(-1)]
    for label, works in peers.items():
        if "quantise" not in works:
            continue
        codes, scales = bytes_of(works["quantise"]())
        other = int(numpy.count_nonzero(codes != wanted[0]))
        scaled = int(numpy.count_nonzero((scales != wanted[1]).reshape(-1, 4).any(axis=1)))
        print(f"    {label}: {other} of {m.codes.size} codes and {scaled} of {m.scales.size} scales are not keel's")


def compare(options, threads, rows, columns):
    m = matrices(rows, columns)
    keel = keel_library(options.library, threads, m)
    keel.works["quantise"]()  # its codes are what dequantise reads, in all of them
    peers = {}
    for name, works in (("torch", torch_works), ("jax", jax_works)):
        if name not in missing():
            peers.update(works(threads, m))
    names = [name for name in keel.works if options.only in name]
    for label, works in peers.items():
        for name in names:
            try:
                works[name]()  # compiles
            except Exception as error:
                print(f"{label}, {name}: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}; left out")
                del works[name]

    print(f"\n{threads} thread{'s' if threads > 1 else ''}, {rows} x {columns}: times as long as keel", flush=True)
    print(f"{'':12}{'keel':>12}{'GB/s':>8}" + "".join(f"{label:>16}" for label in peers))
    for name in names:
        own, ratios = [], {label: [] for label in peers}
        for _ in range(options.rounds):
            own.append(seconds(keel.works[name]))
            for label, works in peers.items():
                if name in works:
                    ratios[label].append(seconds(works[name]) / own[-1])
        middle = statistics.median(own)
        print(f"{name:12}{1e6 * middle:9.0f} us{MOVED[name] * rows * columns / middle * 1e-9:8.1f}" + "".join(
            f"{statistics.median(r):16.1f}" if r else f"{'-':>16}" for r in ratios.values()), flush=True)
    if "quantise" in names:
        agreement(peers, m)
    keel.stop()


def run_child(options):
    for rows, columns in options.extents:
        compare(options, options.child, rows, columns)


def launch(options, program, run_child):
    """run_child for each number of threads, in a process of its own on as many processors; libraries are loaded after that is settled."""
    lacking = missing()
    if options.can_run:
        for name in lacking:
            print(f"{sys.executable} has no {name}" + ("" if name == "numpy" else ": left out"))
        if "numpy" in lacking or set(PEERS) <= set(lacking):
            print("nothing to compare with; --python or KEEL_PYTHON names a Python that has numpy, and torch or jax")
            return NOTHING_TO_COMPARE
        return 0
    if options.child:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:options.child])
        run_child(options)
        return 0
    for threads in options.counts:
        if threads > len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())):
            print(f"{threads} threads: there are fewer processors, left out")
            continue
        # Freed memory stays in the process: otherwise a peer would wait for new pages at each call.
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), JAX_PLATFORMS="cpu", MALLOC_MMAP_MAX_="0",
                           MALLOC_TRIM_THRESHOLD_=str(1 << 40), MALLOC_TOP_PAD_=str(1 << 28), MALLOC_ARENA_MAX="1")
        code = subprocess.run([sys.executable, program, *sys.argv[1:], "--child", str(threads)], env=environment).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(launch(arguments(), __file__, run_child))
