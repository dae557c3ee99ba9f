"""Operations that are written for how XLA partitions or compiles them."""
