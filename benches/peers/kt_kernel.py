"""The expert FFN of HiNa's plugin beside kt-kernel's (KTransformers' CPU kernels), in one process, on the same values and threads.

    cargo build --release --package ggml-hina --lib
    python3 -m venv target/kt && target/kt/bin/pip install numpy && target/kt/bin/pip install --no-deps kt-kernel
    export LLAMA_BIN=$PWD/target/llama/bin GGML_BACKEND_PATH=$PWD/target/release/libggml_hina.so
    target/kt/bin/python benches/peers/kt_kernel.py qwen3-30b-a3b/m16

Without an argument all shapes and sizes run; `q8_0` as the first one compares its int8 kernels with our Q8_0. `BENCH_THREADS` sets
the threads. None of kt-kernel's dependencies (torch with CUDA, 9 GB) is needed: its extension module does without.

kt-kernel packs the weights into its own layout first, which is not timed. Its caller waits in a loop while the workers compute, which
takes CPU time from them where every CPU has a worker. So it is timed twice: as it is, and with its caller `aside`: on a CPU without a
worker, or, where there is none, asleep for most of the time (then it may hear of the end a tick late, 4 ms at 250 Hz). Its workers go
on polling for 50 ms: each contender waits longer than that before it starts. Then it runs once untimed, so that its threads are awake
when it is timed, as they are between two layers."""

import ctypes as c
import importlib.metadata
import importlib.util
import mmap
import os
import signal
import struct
import sys
import threading
import time
from pathlib import Path

import numpy as np

# As in benches/common/layer.rs: experts, n_embd, n_ff, experts of a token.
SHAPES = {
    "mixtral-8x7b": (4, 4096, 14336, 2),
    "qwen3-30b-a3b": (128, 2048, 768, 8),
    "qwen3-235b-a22b": (32, 4096, 1536, 8),
    "deepseek-v3": (16, 7168, 2048, 8),
}
TOKENS = [1, 4, 16, 64]
ROUNDS = 9
PAUSE = 0.08
THREADS = int(os.environ.get("BENCH_THREADS") or os.cpu_count())
F32, Q8_0, I32, BF16 = 0, 8, 26, 30


def memory(bytes_):
    """Pages as those of a mapped file: numpy would ask for huge ones, which kt-kernel does not."""
    return np.frombuffer(mmap.mmap(-1, bytes_, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)


def bf16(values):
    return (np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def f32(values):
    return (values.astype(np.uint32) << 16).view(np.float32)


def weights(kind, n, rng):
    """`n` weights as ours takes them, and as BF16. Those of Q8_0 have one scale, so that BF16 and kt-kernel's int8, which has
    one scale for each row, both hold them without loss."""
    if kind == BF16:
        ours = memory(2 * n)
        values = ours.view(np.uint16)
        for part in np.split(values, range(1 << 24, n, 1 << 24)):
            # Near 2^-6, any sign and mantissa.
            part[:] = rng.integers(0, 1 << 16, part.size, dtype=np.uint16) & 0x807F | 0x3C80
        return ours, values
    ours, theirs = memory(n // 32 * 34), np.empty(n, np.uint16)
    blocks = ours.reshape(-1, 34)
    blocks[:, :2] = np.array([2.0**-10], np.float16).view(np.uint8)
    for at in range(0, n // 32, 1 << 19):
        quants = rng.integers(-127, 128, (len(blocks[at : at + (1 << 19)]), 32), dtype=np.int8)
        quants[:, 0] = 127  # the same scale in every row
        blocks[at : at + (1 << 19), 2:] = quants.view(np.uint8)
        theirs[at * 32 :][: quants.size] = bf16(quants.ravel() * np.float32(2.0**-10))
    return ours, theirs


class Ggml:
    """HiNa as llama.cpp loads it, and the chain of nodes that llama.cpp builds; see benches/common/ggml.rs."""

    class InitParams(c.Structure):
        _fields_ = [("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool)]

    def __init__(self):
        folder = Path(os.environ["LLAMA_BIN"])
        c.CDLL(folder / "libggml-base.so", c.RTLD_GLOBAL)
        self.lib = c.CDLL(folder / "libggml.so", c.RTLD_GLOBAL)
        self("backend_load_all_from_path", bytes(folder))  # and what GGML_BACKEND_PATH names
        self.backend = self("backend_init_by_name", b"HiNa", None)
        assert self.backend, "no HiNa: does GGML_BACKEND_PATH name the plugin?"
        reg = self("backend_dev_backend_reg", self("backend_get_device", self.backend))
        set_threads = self("backend_reg_get_proc_address", reg, b"ggml_backend_set_n_threads")
        c.CFUNCTYPE(None, c.c_void_p, c.c_int)(set_threads)(self.backend, THREADS)

    def __call__(self, name, *args):
        """Pointers and sizes are 64 bits wide, and so may every integer be that is passed in a register."""
        function = self.lib[f"ggml_{name}"]
        function.restype = c.c_void_p
        return function(*(c.c_int64(a) if isinstance(a, int) else a for a in args))

    def layer(self, kind, shape, data, x, ids, router):
        """A function that runs the FFN, and one that gives the result of the last run."""
        experts, n_embd, n_ff, n_used = shape
        tokens = len(ids)
        ctx = self("init", self.InitParams(1 << 22, None, True))
        tensor = lambda type_, *ne: self("new_tensor_3d", ctx, type_, *ne)
        dims = [(n_embd, n_ff), (n_embd, n_ff), (n_ff, n_embd)]
        gate, up, down = (tensor(kind, *ne, experts) for ne in dims)
        for t, w in zip((gate, up, down), data):
            buffer = self("backend_cpu_buffer_from_ptr", w.ctypes.data, w.nbytes)
            self("backend_tensor_alloc", buffer, t, w.ctypes.data)
        xs, id_, ws = tensor(F32, n_embd, 1, tokens), tensor(I32, n_used, tokens, 1), tensor(F32, 1, n_used, tokens)
        product = lambda w, y: self("mul_mat_id", ctx, w, y, id_)
        u, g = product(up, xs), product(gate, xs)
        y = self("mul", ctx, product(down, self("swiglu_split", ctx, g, u)), ws)
        row = n_embd * 4
        slots = [self("view_2d", ctx, y, n_embd, tokens, row * n_used, row * i) for i in range(n_used)]
        total = slots[0]
        for slot in slots[1:]:
            total = self("add", ctx, total, slot)
        graph = self("new_graph", ctx)
        self("build_forward_expand", graph, total)
        assert self("backend_alloc_ctx_tensors", ctx, self.backend)
        for t, values in ((xs, f32(x)), (id_, ids.astype(np.int32)), (ws, router)):
            self("backend_tensor_set", t, values.ctypes.data, 0, values.nbytes)

        def run():
            assert not self("backend_graph_compute", self.backend, graph)

        def result():
            out = np.empty((tokens, n_embd), np.float32)
            self("backend_tensor_get", total, out.ctypes.data, 0, out.nbytes)
            return out

        return run, result


class KtKernel:
    """Its extension module alone, in the variant that it would choose itself."""

    def __init__(self):
        installed = importlib.metadata.distribution("kt-kernel")
        self.version = installed.version
        detect_py = installed.locate_file("kt_kernel/_cpu_detect.py")
        spec = importlib.util.spec_from_file_location("cpu_detect", detect_py)
        detect = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(detect)
        self.ext, self.variant = detect.initialize()
        # Not its CPUInfer, which adds a thread that never sleeps.
        self.pool = self.ext.WorkerPool(THREADS)

    def layer(self, kind, shape, data, max_tokens):
        experts, n_embd, n_ff, n_used = shape
        config = self.ext.moe.MOEConfig(experts, n_used, n_embd, n_ff, 0)
        config.max_len, config.pool = max_tokens + -max_tokens % 32, self.pool  # whole tiles
        config.gate_proj, config.up_proj, config.down_proj = (w.ctypes.data for w in data)
        same = np.arange(experts)
        config.physical_to_logical_map = same.ctypes.data
        made = getattr(self.ext.moe, "AMXBF16_MOE" if kind == BF16 else "AMXInt8_MOE")(config)
        made.load_weights()
        return made


class Caller:
    """Keeps this thread out of the way while it waits in another's loop. If there is no CPU to spare, a signal makes it pause(), and a
    second one ends that."""

    DELAY = 2e-4

    def __init__(self):
        self.libc, self.timers = c.CDLL(None), []
        for number, handler in ((signal.SIGUSR1, self.libc.pause), (signal.SIGUSR2, self.libc.abs)):
            self.libc.signal(number, c.cast(handler, c.c_void_p))
            timer, to_thread = c.c_void_p(), 4  # SIGEV_THREAD_ID
            event = struct.pack("qiii44x", 0, number, to_thread, threading.get_native_id())
            assert not self.libc.timer_create(time.CLOCK_MONOTONIC, event, c.byref(timer))
            self.timers.append(timer)

    def aside(self, seconds, run):
        cpus = os.sched_getaffinity(0)
        if spare := sorted(cpus)[THREADS:]:
            os.sched_setaffinity(0, spare)
            run()
            os.sched_setaffinity(0, cpus)
        else:
            # The second signal comes again, as a late first one would sleep for ever.
            self.arm((self.DELAY, 0), (self.DELAY + seconds, 0.01))
            run()
            self.arm((0, 0), (0, 0))

    def arm(self, *times):
        for timer, (first, again) in zip(self.timers, times):
            ns = [int(t * 1e9) for t in (again, first)]
            self.libc.timer_settime(timer, 0, struct.pack("qqqq", *divmod(ns[0], 10**9), *divmod(ns[1], 10**9)), None)


def main(*args):
    kind = Q8_0 if args[:1] == ("q8_0",) else BF16
    patterns = [a for a in args if a != "q8_0"]
    chosen = lambda name: not patterns or any(f"{p}/" in f"{name}/" for p in patterns)
    ggml, kt, caller = Ggml(), KtKernel(), Caller()
    print(f"kt-kernel {kt.version}, variant {kt.variant}; {THREADS} threads; milliseconds, the median of {ROUNDS} rounds")
    for name, shape in SHAPES.items():
        sizes = [m for m in TOKENS if chosen(f"{name}/m{m}")]
        if sizes:
            measure(ggml, kt, caller, kind, name, shape, sizes)


def measure(ggml, kt, caller, kind, name, shape, sizes):
    experts, n_embd, n_ff, n_used = shape
    rng = np.random.default_rng(1)
    pairs = [weights(kind, experts * n_embd * n_ff, rng) for _ in range(3)]
    theirs = kt.layer(kind, shape, [pair[1] for pair in pairs], max(sizes) * experts // n_used)
    ours = [pair[0] for pair in pairs]
    if kind == Q8_0:
        pairs.clear()  # it has its copy
    print(f"\n{name}\n{'m':>4} {'HiNa':>8} {'as is':>8} {'aside':>8} {'as is/HiNa':>11} {'aside/HiNa':>11} {'NMSE':>9}")
    for m in sizes:
        tokens = experts * m // n_used
        ids = np.arange(tokens * n_used).reshape(tokens, n_used) % experts
        x = bf16(rng.standard_normal((tokens, n_embd)))
        router = rng.random((tokens, n_used), dtype=np.float32)
        run, result = ggml.layer(kind, shape, ours, x, ids, router)
        count, out = np.array([tokens], np.int32), np.empty((tokens, n_embd), np.uint16)
        at = [a.ctypes.data for a in (ids, router, x, out)]
        as_is = lambda: theirs.forward(count.ctypes.data, n_used, *at, False)
        times = [[], [], []]
        # What it took as it is, just now, is at most a third longer than it need be. Oversleeping would count against it.
        aside = lambda: caller.aside(0.65 * times[1][-1], as_is)
        for _ in range(ROUNDS):
            for contender, taken in zip((run, as_is, aside), times):
                time.sleep(PAUSE)
                contender()
                start = time.perf_counter()
                contender()
                taken.append(time.perf_counter() - start)
        want, got = result().astype(np.float64), f32(out)
        nmse = ((got - want) ** 2).sum() / (want**2).sum()
        assert nmse < 1e-3, f"they compute something else: NMSE {nmse:g}"
        hina, *both = np.median(times, axis=1) * 1e3
        cells = [f"{t:8.1f}" for t in (hina, *both)] + [f"{t / hina:11.2f}" for t in both]
        print(f"{m:4} {' '.join(cells)} {nmse:9.1e}", flush=True)


main(*sys.argv[1:])
