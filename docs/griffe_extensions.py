"""Extensions of griffe, which reads the docstrings for the API reference."""

import dataclasses
import importlib
import inspect
import operator
import re
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
        if cls.docstring:  # which describes the fields for `help`
            cls.docstring.value = re.sub(r"\nArgs:\n(    .*\n?)+", "", cls.docstring.value)
        for field in dataclasses.fields(config):
            if field.name in cls.members and field.metadata.get("help"):
                values = describe_values(field.metadata)
                text = field.metadata["help"] + (f" Expected: {values}." if values else "")
                attribute = cls.members[field.name]
                attribute.docstring = griffe.Docstring(text, parent=attribute)
                attribute.value = None if field.default is dataclasses.MISSING else repr(field.default)


class SharedParameters(griffe.Extension):
    """Give functions that pass their arguments on the parameters that `help` shows."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Replace the parameters of a function or method with one of the decorators of xformer.config."""
        names = ("with_parameters_of(", "with_options(")
        if any(str(decorator.value).startswith(names) for decorator in func.decorators):
            name = func.path.removeprefix(f"{func.module.path}.")
            function = operator.attrgetter(name)(importlib.import_module(func.module.path))
            signature = inspect.signature(function)
            func.parameters = griffe.Parameters(*map(_parameter, signature.parameters.values()))


def _parameter(parameter: inspect.Parameter) -> griffe.Parameter:
    default = None if parameter.default is parameter.empty else repr(parameter.default)
    kind = griffe.ParameterKind(parameter.kind.description)
    return griffe.Parameter(parameter.name, annotation=str(parameter.annotation), kind=kind, default=default)


class ExportedFunctions(griffe.Extension):
    """Let a package export a function that has the name of its module."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Replace the modules among the exports of every package by the functions of the same names."""
        packages = [pkg]
        while packages:
            package = packages.pop()
            for name, member in list(package.members.items()):
                if member.is_alias or not member.is_module:
                    continue
                packages.append(member)
                function = member.members.get(name)
                if function is not None and name in (package.exports or ()):
                    package.members[name] = function
