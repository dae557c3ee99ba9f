"""A metric of your own for a model of this project.

--config=configs/gpt2_3d.py --config.model.name=docs.examples.accuracy:GPT2WithAccuracy
"""

from models.text.gpt2 import GPT2


class GPT2WithAccuracy(GPT2):
    """A GPT-2 whose logs have the share of tokens that it predicts."""

    can_split_sequence = True  # mesh.context: the metric is a sum over tokens

    def head(self, x, batch):
        """Return (sum of losses, sum of weights, metrics)."""
        loss, weight, metrics = super().head(x, batch)
        is_right = self.outputs(x).predictions() == batch["targets"]
        return loss, weight, metrics | {"accuracy": (is_right * batch["weights"]).sum()}
