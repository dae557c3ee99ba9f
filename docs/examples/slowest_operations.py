"""Prints the operations of a profile that took the most time: `python FILE PROFILE_DIRECTORY`.

docs/profiling.md shows its output.
"""

import collections
import sys
from pathlib import Path

from jax.profiler import ProfileData

#: Beginnings of the names of planes and lines whose events are operations of the first device.
DEVICE_LINES = (("/device:GPU:0", "Stream"), ("/host:CPU", "tf_XLAEigen"))
#: Beginnings of the names of a CPU's functions that run the operations, or wait for them.
RUNTIME = ("ThunkExecutor", "Rendezvous", "Wait")


def main(directory: str) -> None:
    """Print the eight longest operations, in milliseconds per step."""
    (file,) = Path(directory).glob("**/*.xplane.pb")
    milliseconds = collections.Counter()
    num_steps = 0
    for plane in ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            is_device = any(
                plane.name.startswith(name) and line.name.startswith(start)
                for name, start in DEVICE_LINES
            )
            for event in line.events:
                num_steps += event.name == "train"
                if is_device and not event.name.startswith(RUNTIME):
                    milliseconds[event.name] += event.duration_ns / 1e6
    for name, total in milliseconds.most_common(8):
        print(f"{total / num_steps:8.2f} ms  {name}")


if __name__ == "__main__":
    main(sys.argv[1])
