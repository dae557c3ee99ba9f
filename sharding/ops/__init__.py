"""Operations that need a `shard_map` of their own."""
