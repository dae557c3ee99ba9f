"""Functions that exceed limits, which tests call in processes with limits."""

import ctypes
import os
import signal
import sys
import time
from typing import Any


def act(action: Any) -> Any:
    """Perform an action; return anything else unchanged."""
    match action:
        case "refuse":
            raise ValueError("the file is bad; replace it")
        case "fail":
            raise KeyError("left")
        case "nest":
            return act(action)
        case "loop":
            while True:
                pass
        case "multiply":
            return 7 ** (10**9)  # one operation of the interpreter, which no signal handler stops
        case "sleep":
            time.sleep(100)
        case "allocate":
            return len("a" * 2**31)
        case "allocate natively":
            return ctypes.memset(ctypes.create_string_buffer(2**31), 1, 2**31)
        case "abort":
            os.abort()
        case "crash":
            ctypes.string_at(0)
        case "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(0)
        case "long reply":
            return "a" * 2**21
        case "describe":
            return {
                "pid": os.getpid(),
                "environment": sorted(os.environ),
                "has_jax": "jax" in sys.modules,
                "open_files": len(os.listdir("/proc/self/fd")),
            }
    return action
