"""Peak memory of a UNet call: on CUDA what PyTorch allocated, on Linux what the process had resident.

The latter is only right in a process whose memory is not yet in use. So a server process builds the model once,
without a thread pool, and every measurement is a fork of it: the weights are there, the heap is fresh.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import signal
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from elfatt_sd.benchmarking.models import Model, make_model, unet_call
from elfatt_sd.benchmarking.timing import Call, synchronise
from elfatt_sd.benchmarking.variants import Variant
from elfatt_sd.config import ElfattError
from elfatt_sd.devices import is_out_of_memory
from elfatt_sd.evaluation.measure import PeakMeter

_MMAP_THRESHOLD, _SMALL = -3, 1 << 17  # glibc's M_MMAP_THRESHOLD; bytes above which a tensor has pages of its own


def peak_memory(call: Call, device: torch.device) -> int | None:
    """Return the bytes that a call needs beyond what is in use before it.

    None where that cannot be read, where an earlier peak cannot be forgotten, or where there are not as many.
    """
    gc.collect()
    try:
        meter = PeakMeter(device)
    except ElfattError:
        return None
    if not meter.resets:
        return None
    before = meter.read()
    try:
        call()
        synchronise(device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    return max(0, round((meter.read() - before) * 2**30))


def _give_back_what_is_freed() -> None:
    """Let glibc return every freed tensor to the system at once.

    By default it keeps some of them, how many is up to chance, and a call that fills what is kept seems to need less.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _SMALL)
        library.malloc_trim(0)


class FreshPeaks:
    """Measures peaks on a CPU, each in a process of its own; a context manager.

    Args:
        model: as `make_model` takes it, or a model.
        dtype: of its weights.
    """

    def __init__(self, model: str | Model, dtype: torch.dtype) -> None:
        self._order = model, dtype, torch.get_num_threads()
        self._server: Any = None
        self._pipe: Any = None

    def __enter__(self) -> FreshPeaks:
        """Return this; the server starts with the first measurement."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the server end; it does so when its pipe is closed."""
        if self._server is not None:
            self._pipe.close()
            self._server.join()

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._server = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, *self._order))
        self._server.start()
        theirs.close()

    def peak(self, variant: Variant, size: int, batch: int) -> int | None:
        """Return the bytes that a call needs; None where they cannot be read, or where there are not as many."""
        if self._server is None:
            self._start()
        try:
            self._pipe.send((variant, size, batch))
            reply: int | Exception | None = self._pipe.recv()
        except (EOFError, BrokenPipeError) as error:
            raise RuntimeError("the process that measures the memory has ended") from error
        if isinstance(reply, Exception):
            raise reply
        return reply


def _serve(pipe: Connection, model: str | Model, dtype: torch.dtype, threads: int) -> None:
    """Build the model, and answer every order by a fork, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the fork, and this process when its pipe is closed
    torch.set_num_threads(1)
    made = make_model(model, torch.device("cpu"), dtype) if isinstance(model, str) else model
    forking = multiprocessing.get_context("fork")
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            order = pipe.recv()
            receiver, sender = forking.Pipe(duplex=False)
            child = forking.Process(target=_answer, args=(sender, made, threads, *order))
            child.start()
            sender.close()
            reply = None
            with contextlib.suppress(EOFError):
                reply = receiver.recv()
            child.join()
            pipe.send(reply)


def _answer(sender: Connection, model: Model, threads: int, *order: Any) -> None:
    """Measure, in the fork, and send the figure or the error."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(threads)
    try:
        sender.send(_measure(model, *order))
    except Exception as error:
        sender.send(None if is_out_of_memory(error) else error)


def _measure(model: Model, variant: Variant, size: int, batch: int) -> int | None:
    unet: Any = variant.install(model.unet)
    unet = torch.compile(unet, dynamic=False) if variant.compiled else unet
    small = size if variant.compiled else model.least_size
    unet_call(unet, model.inputs(small, batch))()  # loads, or compiles, the code that is about to run
    _give_back_what_is_freed()
    return peak_memory(unet_call(unet, model.inputs(size, batch)), torch.device("cpu"))
