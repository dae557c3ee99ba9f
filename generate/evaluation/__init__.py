"""Parts of evaluations: the scores of texts, and the checkpoints of a run that still trains."""
