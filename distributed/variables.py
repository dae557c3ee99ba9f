"""Environment variables of a process that is one of several; does not import JAX.

`python -m launch.local` sets them. The variables of other launchers contain the same information,
except for the secret, see distributed/launchers.py; `launch/train.sbatch` sets the secret.
"""

from collections.abc import Mapping

# Set either all of the first three or none of them.
COORDINATOR = "TAIBAI_COORDINATOR"  # address of process 0: host:port, or unix:PATH on one machine
NUM_PROCESSES = "TAIBAI_NUM_PROCESSES"
PROCESS_ID = "TAIBAI_PROCESS_ID"  # 0 .. TAIBAI_NUM_PROCESSES - 1
DEVICES_PER_PROCESS = "TAIBAI_DEVICES_PER_PROCESS"  # CPU devices to simulate in each process
SECRET = "TAIBAI_SECRET"  # the secret with which processes recognize each other

#: Simulated devices share the CPU cores, so one of them can reach a collective minutes after
#: another. By default XLA assumes a deadlock after 40 s and aborts; these flags allow 5 minutes.
CPU_XLA_FLAGS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": "120",
    "xla_cpu_collective_call_terminate_timeout_seconds": "300",
    "xla_cpu_collective_timeout_seconds": "300",
}


def merge_xla_flags(flags: Mapping[str, str], user: str) -> str:
    """Return an XLA_FLAGS string with the given flags and the user's flags.

    A flag that the user has set keeps the user's value:

        merge_xla_flags({"xla_a": "1", "xla_b": "2"}, "--xla_b=9") == "--xla_a=1 --xla_b=9"

    Args:
        flags: values by flag name, without dashes.
        user: XLA_FLAGS that the user has set, '' if none.
    """
    tokens = user.split()
    if tokens and not tokens[0].startswith("-"):
        return user  # XLA reads its flags from a file of this name; nothing can be added to them
    taken = {token.lstrip("-").partition("=")[0] for token in tokens}
    ours = [f"--{name}={value}" for name, value in flags.items() if name not in taken]
    return " ".join(ours + ([user] if tokens else []))
