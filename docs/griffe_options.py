"""Extension of griffe: document the fields of `Config` classes from the metadata that `option` declares."""

import dataclasses
import importlib
from typing import Any

import griffe

from xformer.config import Config, describe_values


class Options(griffe.Extension):
    """Give every field of a configuration its help text, type and valid values."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Document the fields of one class."""
        config = getattr(importlib.import_module(cls.module.path), cls.name, None)
        if not isinstance(config, type) or not issubclass(config, Config) or config is Config:
            return
        for field in dataclasses.fields(config):
            if field.name in cls.members and field.metadata.get("help"):
                values = describe_values(field.metadata)
                text = field.metadata["help"] + (f" Expected: {values}." if values else "")
                attribute = cls.members[field.name]
                attribute.docstring = griffe.Docstring(text, parent=attribute)
                attribute.value = None if field.default is dataclasses.MISSING else repr(field.default)
