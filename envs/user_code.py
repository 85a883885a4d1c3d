"""Environments and functions from outside this project, named on a command line.

A name is one of these: `package.module:NAME`, found as `import` finds it; `folder/file.py:NAME`; the name of an installed
package's entry point; or `gymnasium:ID` for an environment that Gymnasium registers (`gym_text.py`), with `module:ID` or
`file.py:ID` as ID if user code registers it. A file is executed once in a process, as a module of its own that worker
processes find again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pydantic
import yaml

from hgpo_jax.envs.command_line import nearest, one_line

# Groups of entry points.
ENVIRONMENTS, ESTIMATORS, REWARDS = "hgpo_jax.rollout.environments", "hgpo_jax.estimators", "hgpo_jax.rollout.rewards"
LOSSES, STATE_KEYS = "hgpo_jax.losses", "hgpo_jax.state_keys"

GYMNASIUM = "gymnasium:"
ERRORS = (Exception, SystemExit)  # whatever a user's code raises; sys.exit() there must not end a command without a word


@functools.cache
def installed(group: str) -> dict[str, str]:
    """Returns name -> place (`package.module:NAME`) of the entry points that installed packages have in a group."""
    return {entry.name: entry.value for entry in importlib.metadata.entry_points(group=group)}


def locate(name: str, group: str) -> str:
    """Returns the full name: an entry point's target, a file with its absolute path."""
    if name.startswith(GYMNASIUM):
        return "hgpo_jax.envs.gym_text:GymnasiumText"
    name = installed(group).get(name, name)
    place, _, attribute = name.rpartition(":")
    return f"{Path(place).resolve()}:{attribute}" if place.endswith(".py") else name


def implied(name: str) -> dict[str, str]:
    """Returns the options that a name itself implies, a file with its absolute path."""
    if not name.startswith(GYMNASIUM):
        return {}
    place, colon, id = name.removeprefix(GYMNASIUM).rpartition(":")
    return {"id": f"{Path(place).resolve() if place.endswith('.py') else place}{colon}{id}"}


def code_in(options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options whose value is the place of code in a file, like gymnasium:ID's `describe`: option -> full place."""
    places = {name: value.rpartition(":") for name, value in options.items() if isinstance(value, str)}
    return {
        name: f"{Path(file).resolve()}:{attribute}"
        for name, (file, _, attribute) in places.items()
        if file.endswith(".py") and re.fullmatch(r"[\w/.-]+", attribute) and Path(file).is_file()
    }


def load(name: str) -> tuple[ModuleType, Any]:
    """Loads the module and the object of a full name (`locate`). Raises ValueError, in one line, if there is none."""
    place, _, attribute = name.rpartition(":")
    module = module_of(place)
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            names = [each for each in vars(target) if not each.startswith("_")] if hasattr(target, "__dict__") else []
            raise ValueError(f"{place} has no {part}; {nearest(part, names, 'look there for its name')}")
        target = getattr(target, part)
    if not callable(target):
        raise ValueError(f"{attribute} is a {type(target).__name__}; name a class or a function")
    return module, target


def load_function(name: str, group: str, form: str) -> Callable:
    """Loads a function of one argument. Raises ValueError, in one line, if there is none.

    name, group: as in `locate`. form: how the function is written, as in `key(observation)`.
    """
    _, function = load(locate(name, group))
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise ValueError(f"does not take one argument; write it as {form}") from None
    return function


def module_of(place: str) -> ModuleType:
    """Imports the module with this name or in this file. Raises ValueError, in one line, if there is none."""
    if place.endswith(".py"):
        return _executed(Path(place))
    try:
        module = importlib.import_module(place)
        if place not in _READ and (file := getattr(module, "__file__", None)) and Path(file).is_file():
            _READ[place] = Path(file), _digest(Path(file))
        return module
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise ValueError(f"its import fails: {describe_error(error)}") from None
        raise ValueError(f"no module {error.name!r}; write package.module:NAME or path/to/file.py:NAME") from None
    except ERRORS as error:
        raise ValueError(f"its import fails: {describe_error(error)}") from None


_READ: dict[str, tuple[Path, str]] = {}  # file or module that this process has read -> its file, and the SHA-256 then


def is_stale(name: str) -> bool:
    """Whether the file of a full name (`locate`) has changed since this process read it."""
    file, digest = _READ.get(name.rpartition(":")[0], (None, ""))
    return file is not None and file.is_file() and _digest(file) != digest


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _executed(file: Path) -> ModuleType:
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise ValueError(f"no file {file}; a relative path begins where the command runs")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # the name ends with .py
    module = importlib.util.module_from_spec(spec)
    _READ[str(file)] = file, _digest(file)
    if (neighbours := str(file.absolute().parent)) not in sys.path:  # as when the file is run; last, so that it hides nothing
        sys.path.append(neighbours)
    sys.modules[name] = module  # dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    except ERRORS as error:
        del sys.modules[name]
        raise ValueError(f"its import fails: {describe_error(error)}") from None
    return module


def describe_error(error: BaseException) -> str:
    line = traceback.extract_tb(error.__traceback__)[-1]
    return one_line(f"{type(error).__name__}: {error} ({line.filename}, line {line.lineno})")


def parameters(function: Callable) -> list[inspect.Parameter]:
    """Returns the parameters of a function; none if it does not tell them, like some that are written in C."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return []


def star(parameters: Sequence[inspect.Parameter]) -> str:
    """Returns the first parameter that takes any number of arguments, as in `**kwargs`; "" if there is none."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return next((str(parameter) for parameter in parameters if parameter.kind in kinds), "")


def options(make: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Converts keyword arguments for a class or function to the types of its annotations, or else of its defaults.

    Raises ValueError, which begins with `name=value: `, for an unknown, wrongly typed or missing argument.
    """
    signature = inspect.signature(make)
    parameters = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    anything = any(parameter.kind == parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    try:
        function = make.func if isinstance(make, functools.partial) else make
        hints = get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except Exception:  # annotations name imports for type checkers only, so the defaults are used
        hints = {}
    typed = {}
    for name, value in arguments.items():
        if name not in parameters and not anything:
            raise ValueError(f"{name}={value}: no such option; {nearest(name, list(parameters), _list_names(parameters))}")
        default = parameters[name].default if name in parameters else None
        annotation = hints.get(name, Any if default in (None, inspect.Parameter.empty) else type(default))
        typed[name] = _typed(name, value, annotation)
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in typed:
            raise ValueError(f"{name}=: is needed")
    return typed


def _list_names(names) -> str:
    return f"there are {', '.join(names)}" if names else "there are none"


def _typed(name: str, value: Any, annotation: Any) -> Any:
    if annotation is Any and isinstance(value, str):  # as in a configuration
        with contextlib.suppress(yaml.YAMLError):
            return yaml.safe_load(value)
    kinds = {annotation, *get_args(annotation)}
    optional = get_origin(annotation) in (Union, UnionType)
    if value in ("none", "null") and type(None) in kinds:  # as in a configuration
        return None
    choices = kinds if optional else {annotation}
    origins = [origin for kind in choices if inspect.isclass(origin := get_origin(kind) or kind)]
    if isinstance(value, str) and any(issubclass(origin, Mapping) for origin in origins):
        with contextlib.suppress(yaml.YAMLError):
            value = yaml.safe_load(value)
    sequence = any(issubclass(origin, Collection) and not issubclass(origin, (str, Mapping)) for origin in origins)
    sequence = sequence and str not in choices
    parts = value.split(",") if sequence and isinstance(value, str) else [value] if sequence and _single(value) else value
    try:
        if isinstance(value, bool) and not kinds & {bool, Any, object}:
            raise ValueError("true and false are not values of it")
        config = pydantic.ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True)
        return pydantic.TypeAdapter(annotation, config=config).validate_python(parts)
    except pydantic.ValidationError as error:
        reason = error.errors()[0]["msg"].replace("Input should be", "must be")
    except (pydantic.PydanticUserError, ValueError) as error:
        reason = str(error)
    raise ValueError(one_line(f"{name}={value}: {reason}"))


def _single(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def make(name: str, arguments: Mapping[str, Any]) -> Any:
    """Makes the object of a full name (`locate`) with checked options; worker processes call it, too."""
    return load(name)[1](**arguments)


def version(name: str) -> dict[str, str | None]:
    """Describes a full name at load time: its file, the file's SHA-256, and the version of module or distribution."""
    module = module_of(name.rpartition(":")[0])
    file = getattr(module, "__file__", None)
    number = getattr(module, "__version__", None)
    if number is None:
        for distribution in importlib.metadata.packages_distributions().get(module.__name__.partition(".")[0], []):
            number = importlib.metadata.version(distribution)
    digest = _digest(Path(file)) if file else None
    return {"file": file, "sha256": digest, "version": number and str(number)}
