"""Conversion of models from and to the Hugging Face format."""

from taibai import refuse_hidden_packages

refuse_hidden_packages()
