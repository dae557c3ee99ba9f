"""The section `model` of a config: settings of every model, and the fields of the model's own."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from fields.field import field
from fields.section import Section
from models.layers.attention import SETTINGS
from models.registry import MODELS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings(Section, section="model"):
    """The model. All other keys of this section are the fields of the model's dataclass `Config`.

    Each config file defines this section. docs/models.md lists the models.
    """

    name: str = field(
        "",
        f"The model: {', '.join(f'`{name}`' for name in MODELS)}, or the import path of your own, "
        "such as `my_package.my_module:MyModel`. Empty: the model of `init_from`.",
    )
    attention: str = field(
        "auto",
        "Attention kernel. `auto`: the best kernel for the devices. `plain`: an array of all "
        "scores. Not used if the model's own dataclass has a field `attention`.",
        choices=SETTINGS,
    )


class ModelKeys(NamedTuple):
    """The keys of a section `model`, separated by whose they are."""

    settings: dict[str, Any]  # fields of ModelSettings
    own: dict[str, Any]  # fields of the `Config` of the model's class


def split_model_keys(section: Mapping[str, Any], model_class: Any) -> ModelKeys:
    """Separate the settings of every model from the fields of the model's own dataclass.

    Args:
        section: section `model`.
        model_class: class that its `name` stands for.
    """
    config_fields = {each.name for each in dataclasses.fields(model_class.Config)}
    settings = {each.name for each in dataclasses.fields(ModelSettings)} - config_fields | {"name"}
    return ModelKeys(
        settings={key: value for key, value in section.items() if key in settings},
        own={key: value for key, value in section.items() if key not in settings},
    )
