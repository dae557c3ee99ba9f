"""Generates text with trained models, on the same blocks and meshes as training.

from generate import Sampling, load_generator

generator = load_generator("runs/gpt2_3d")
generator.generate_texts(["def main("], max_new_tokens=64, sampling=Sampling(temperature=0.0))
"""

# ruff: noqa: E402
from taibai import refuse_hidden_packages

refuse_hidden_packages()

from generate.beam_search import Beams
from generate.drafts import Drafts
from generate.generator import Generator
from generate.loading import load_generator
from generate.sampling import Sampling

__all__ = ["Beams", "Drafts", "Generator", "Sampling", "load_generator"]
