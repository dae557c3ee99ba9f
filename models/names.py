"""The names that configs call models by."""

#: `model.name` -> import path of the class.
MODELS = {
    "gpt2": "models.gpt2:GPT2",
    "opt": "models.opt:OPT",
    "llama": "models.llama:Llama",
    "bert": "models.bert:Bert",
    "t5": "models.t5:T5",
    "vit": "models.vit:ViT",
    "swin": "models.swin:Swin",
    "resmlp": "models.resmlp:ResMLP",
    "mae": "models.mae:MAE",
    "moco": "models.moco:MoCo",
}
