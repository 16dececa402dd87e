"""The modules of a model of sentence-transformers, by its `modules.json`, and where the files of each lie.

A Router (`router_config.json`) has a list of modules for each route, such as "query" and "document". Its default route
is taken where none is named. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from batchgen.core.errors import InputError, one_line
from batchgen.core.typed_json import parse_json
from batchgen.models.hf.config_files import read_json_object

MODULES, ROUTER = "modules.json", "router_config.json"


@dataclass(frozen=True)
class Module:
    """A module of a model of sentence-transformers.

    Attributes:
        type: Name of its class with its module.
        place: Directory of its files.
    """

    type: str
    place: Path

    @property
    def kind(self) -> str:
        """Last part of the name of its class, such as "Pooling"."""
        return self.type.rpartition(".")[2]


@dataclass(frozen=True)
class Routes:
    """The modules that a text goes through.

    Attributes:
        by_name: Modules in order, by the name of the route; with the name "" alone, where there is no Router.
        default: Name of the route of a text for which none is named.
    """

    by_name: Mapping[str, Sequence[Module]]
    default: str

    def of(self, name: str | None) -> Sequence[Module]:
        """The modules of a route; of the default one where there is none of the name."""
        return self.by_name.get(name or "", self.by_name[self.default])


def read_routes(folder: Path) -> Routes:
    """The modules of a model, by route.

    Args:
        folder: Directory with a modules.json.

    Raises:
        InputError: A file is missing or broken, or a Router is of a form that is not supported.
    """
    modules = [_module(folder, listed.get("type"), listed.get("path")) for listed in _listed(folder / MODULES)]
    routers = {module.place: _read_router(module.place) for module in modules if module.kind == "Router"}
    if not routers:
        return Routes({"": modules}, "")
    first = next(iter(routers.values()))
    if any((set(other.by_name), other.default) != (set(first.by_name), first.default) for other in routers.values()):
        raise InputError(f"{folder / MODULES}: its Routers have different routes, which is not supported: {_FIX}")

    def through(route: str) -> list[Module]:
        expanded = [routers[m.place].by_name[route] if m.kind == "Router" else (m,) for m in modules]
        return [module for part in expanded for module in part]

    return Routes({route: through(route) for route in first.by_name}, first.default)


def module_folders(folder: Path) -> list[str]:
    """The subdirectories that a model's modules have, relative to its directory; none where it has no modules.json."""
    if not (folder / MODULES).exists():
        return []
    places = [_module(folder, listed.get("type"), listed.get("path")) for listed in _listed(folder / MODULES)]
    for router in [module.place for module in places if module.kind == "Router"]:
        if (router / ROUTER).exists():
            places += [module for route in _read_router(router).by_name.values() for module in route]
    return [name for name in dict.fromkeys(m.place.relative_to(folder).as_posix() for m in places) if name != "."]


def transformer_folder(folder: Path) -> Path:
    """The directory of a model's Transformer, which all routes share; the model's own where its files name none.

    Raises:
        InputError: Routes lead to different Transformers, or a file is broken.
    """
    if not (folder / MODULES).exists():
        return folder
    routes = read_routes(folder).by_name
    places = {name: [m.place for m in modules if m.kind == "Transformer"] for name, modules in routes.items()}
    distinct = list(dict.fromkeys(place for of_route in places.values() for place in of_route))
    if len(distinct) > 1:
        told = ", ".join(f"{name}: {of_route[0].name}" for name, of_route in places.items() if of_route)
        raise InputError(
            f"{folder} has a Router that leads to another Transformer by route ({told}), and a job reads one: give the"
            f" directory of the route that the texts need, such as --model {distinct[0]}, with the --pooling of that"
            " route"
        )
    return distinct[0] if distinct else folder


_FIX = "give the directory of the Transformer that the texts need as --model, with --pooling"


def _read_router(place: Path) -> Routes:
    stated = read_json_object(place / ROUTER)
    types, structure, parameters = (stated.get(key) for key in ("types", "structure", "parameters"))
    parameters = parameters if isinstance(parameters, dict) else {}
    if not isinstance(types, dict) or not isinstance(structure, dict) or not structure:
        raise InputError(f"{place / ROUTER} has no types and structure of its routes: fetch it again")
    if parameters.get("route_mappings"):
        raise InputError(f"{place / ROUTER} chooses routes by route_mappings, which are not supported: {_FIX}")
    routes: dict[str, list[Module]] = {}
    for name, ids in structure.items():
        if not isinstance(ids, list) or not all(types.get(module) for module in ids):
            raise InputError(f"{place / ROUTER} has no modules for its route {one_line(name)}: fetch it again")
        routes[name] = [_module(place, types[module], module) for module in ids]
    if any(module.kind == "Router" for modules in routes.values() for module in modules):
        raise InputError(f"{place / ROUTER} has a Router in a route, which is not supported: {_FIX}")
    default = parameters.get("default_route")
    return Routes(routes, default if default in routes else next(iter(routes)))


def _module(folder: Path, kind: Any, path: Any) -> Module:
    place = PurePosixPath(str(path or ""))
    if place.is_absolute() or ".." in place.parts:
        raise InputError(f"{folder} has a module in {one_line(str(place))}, outside of it: fetch it again")
    return Module(str(kind or ""), folder / place)


def _listed(path: Path) -> list[dict[str, Any]]:
    try:
        modules = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: fetch it again") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise InputError(f"{path} is not a list of modules: fetch it again")
    return modules
