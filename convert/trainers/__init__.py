"""Read the checkpoints of other trainers: Megatron-LM, LiBai and MaxText.

Each reader merges the shards of a checkpoint and gives its tensors the names that the same model
has in the Hugging Face format, together with a config.json. From there on, the model is read as if
it came from Hugging Face.
"""
