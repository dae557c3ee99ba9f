"""The device mesh, the rules that map logical axes to it, and how arrays are laid out on it."""
