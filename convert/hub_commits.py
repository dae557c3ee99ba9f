"""The commits of repositories on the Hugging Face hub that a run has recorded.

    train.hub_commits=("init_from org/name@main 8e1f…", "adapter_base org/base 02bc…")

An entry has a key of the config, the repository as it was named, and the commit that it was
resolved to. The base of an adapter of PEFT is among them, because adapter_config.json seldom names
a commit.
"""

from collections.abc import Mapping
from typing import Any

#: The key of the base of an adapter.
ADAPTER_BASE = "adapter_base"


def base_commits(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the base of the adapter that a run started from -> its commit; empty for none."""
    entries = recorded_commits(config).items()
    return {repository: commit for (key, repository), commit in entries if key == ADAPTER_BASE}


def recorded_commits(config: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Return (key, repository as it was named) -> commit, from `train.hub_commits` of a run.

    Entries of another form are ignored, so their repositories are resolved newly.
    """
    section: Any = config.get("train")
    entries = section.get("hub_commits") if hasattr(section, "get") else None
    parts = [str(entry).split() for entry in entries] if isinstance(entries, list | tuple) else []
    return {(part[0], part[1]): part[2] for part in parts if len(part) == 3}
