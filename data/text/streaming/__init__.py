"""Text that is larger than the disk: shards that are fetched, tokenized and deleted again."""
