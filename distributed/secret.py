"""The secret that the processes of a run share, so that strangers cannot join it.

`python -m launch.local` and `launch/train.sbatch` choose a new one for every start. With another
launcher, set TAIBAI_SECRET to the same value in all processes; without it, they share a file in the
user's home that only this user can read.
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from distributed.variables import SECRET

_MAX_BYTES = 4096


def run_secret(env: Mapping[str, str]) -> bytes:
    """Return the secret of this run.

    Raises:
        ValueError: Others may read or have written the file with the secret.
        OSError: The file can be neither read nor created.
    """
    if env.get(SECRET):
        return env[SECRET].encode()
    folder = Path(env.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "taibai"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "secret"
    if not path.exists():
        _create(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        is_private = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077
        content = file.read(_MAX_BYTES).strip() if is_private else b""
    if status.st_uid != os.geteuid() or len(content) < 32:
        raise ValueError(
            f"{path} must be a file with at least 32 characters that only you can read; delete it, "
            f"or set {SECRET} to the same secret in all processes"
        )
    return content


def proof(secret: bytes, *parts: str) -> str:
    """Return a code for these parts of a message that can only be computed with the secret."""
    # The lengths make ("a", "bc") and ("ab", "c") different messages.
    message = "".join(f"{len(part)}:{part}" for part in parts)
    return hmac.new(secret, message.encode(), hashlib.sha256).hexdigest()


def is_proof(found: object, secret: bytes, *parts: str) -> bool:
    """Return whether `found` is the code of these parts of a message."""
    return isinstance(found, str) and hmac.compare_digest(
        found.encode(), proof(secret, *parts).encode()
    )


def _create(path: Path) -> None:
    """Create the file with a new secret, unless another process does so at the same time."""
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(temporary, flags, 0o600), "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    try:
        os.link(temporary, path)  # Fails if the file exists, unlike a rename.
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
