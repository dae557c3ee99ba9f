"""Maps the model names used in configs to classes."""

#: `model.name` -> import path of the class.
MODELS = {
    "gpt2": "models.text.gpt2:GPT2",
    "opt": "models.text.opt:OPT",
    "llama": "models.text.llama:Llama",
    "bert": "models.text.bert:Bert",
    "t5": "models.text.t5:T5",
    "vit": "models.vision.vit:ViT",
    "swin": "models.vision.swin:Swin",
    "resmlp": "models.vision.resmlp:ResMLP",
    "mae": "models.vision.mae:MAE",
    "moco": "models.vision.moco:MoCo",
}
