"""The modules of a model of sentence-transformers: routes, places, and one line for what is not understood."""

import json

import pytest
from tiny_encoders import write_router

from batchgen import InputError
from batchgen.models.sentence_modules import module_folders, read_routes, transformer_folder

SHARED = {"query": ["a_Transformer", "q_Pooling"], "document": ["a_Transformer", "d_Pooling"]}


def write_listed(path, *modules):
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": place} for kind, place in modules]
    (path / "modules.json").write_text(json.dumps(listed))


def test_a_router_shares_a_transformer(tmp_path):
    write_router(tmp_path, SHARED, "document")
    routes = read_routes(tmp_path)
    assert [module.place.name for module in routes.of("query")] == SHARED["query"]
    assert routes.of(None) == routes.of("document") == routes.of("a prompt that is no route")
    assert transformer_folder(tmp_path) == tmp_path / "a_Transformer"
    assert module_folders(tmp_path) == ["a_Transformer", "q_Pooling", "d_Pooling"]


def test_a_router_after_the_transformer_has_the_rest(tmp_path):
    write_listed(tmp_path, ("Transformer", ""), ("Router", "1_Router"), ("Normalize", "2_Normalize"))
    (tmp_path / "1_Router").mkdir()
    write_router(tmp_path / "1_Router", {"query": ["q_Pooling"], "document": ["d_Pooling"]}, "query")
    kinds = [module.kind for module in read_routes(tmp_path).of("document")]
    assert kinds == ["Transformer", "Pooling", "Normalize"]
    assert transformer_folder(tmp_path) == tmp_path
    assert module_folders(tmp_path) == ["1_Router", "2_Normalize", "1_Router/q_Pooling", "1_Router/d_Pooling"]


def test_a_directory_without_modules_is_its_own(tmp_path):
    assert transformer_folder(tmp_path) == tmp_path and module_folders(tmp_path) == []


@pytest.mark.parametrize(
    ("routes", "parameters", "message"),
    [
        (
            {"query": ["q_Transformer", "q_Pooling"], "document": ["d_Transformer", "d_Pooling"]},
            {},
            r"leads to another Transformer by route \(query: q_Transformer, document: d_Transformer\), and a job reads"
            r" one: give the directory .*--model .*q_Transformer, with the --pooling of that route",
        ),
        (SHARED, {"route_mappings": {"('query', 'image')": "query"}}, "route_mappings, which are not supported: give"),
        ({"query": ["q_Router"]}, {}, "has a Router in a route, which is not supported: give"),
        ({"query": [None]}, {}, "has no modules for its route query: fetch it again"),
        ({}, {}, "has no types and structure of its routes: fetch it again"),
        ({"query": ["../q_Transformer"]}, {}, "has a module in ../q_Transformer, outside of it"),
    ],
)
def test_routers_that_are_not_understood_are_refused_in_one_line(tmp_path, routes, parameters, message):
    write_router(tmp_path, {}, "query")
    stated = json.loads((tmp_path / "router_config.json").read_text())
    ids = {place for of_route in routes.values() for place in of_route if place}
    stated |= {"structure": routes, "types": {place: f"models.{place.rpartition('_')[2]}" for place in ids}}
    stated["parameters"] |= parameters
    (tmp_path / "router_config.json").write_text(json.dumps(stated))
    with pytest.raises(InputError, match=message) as refused:
        transformer_folder(tmp_path)
    assert "\n" not in str(refused.value)


def test_routers_with_other_routes_are_refused(tmp_path):
    write_listed(tmp_path, ("Router", "0_Router"), ("Router", "1_Router"))
    for place, routes in {"0_Router": SHARED, "1_Router": {"query": ["x_Dense"]}}.items():
        (tmp_path / place).mkdir()
        write_router(tmp_path / place, routes, "query")
    with pytest.raises(InputError, match="Routers have different routes, which is not supported: give"):
        read_routes(tmp_path)
