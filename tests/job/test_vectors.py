"""Jobs that embed, classify and rerank: vectors and scores of transformers, columns, and one line for a mistake."""

import base64
import functools
import gc
import itertools
import json
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from command_line import invoke
from lora_adapters import save_adapter
from model_tables import VOCAB_SIZE
from safetensors.torch import load_file, save_file
from thorough import covering
from tiny_encoders import (
    CLASSIFIERS,
    ENCODERS,
    add_special_tokens,
    into_transformer_folder,
    make_encoder,
    write_modules,
    write_router,
)
from tiny_tokenizers import SPECIAL_TOKENS, TEXT, make_tiny_tokenizer
from tokenizers import Tokenizer

import batchgen
from batchgen import InputError
from batchgen.engine import engine
from batchgen.job import deduplication
from batchgen.models.hf.config import config_of_hf
from batchgen.output.part_writer import PartWriter

CLOSE = 1e-4
WORDS = TEXT.split()


def texts(count=30, seed=0, most=40):
    rng = random.Random(seed)
    lengths = [rng.choice((1, 2, 5, 12, most)) for _ in range(count)]
    return [" ".join(WORDS[start : start + n]) for n in lengths for start in [rng.randrange(len(WORDS) - n)]]


def hidden_of(model, path, text, pair=None):
    """The hidden states of a text's tokens, [tokens, hidden], of a model of transformers without a head."""
    encoding = Tokenizer.from_file(str(Path(path) / "tokenizer.json")).encode(text, pair)
    types = {"token_type_ids": torch.tensor([encoding.type_ids])} if pair and "Bert" in type(model).__name__ else {}
    with torch.inference_mode():
        return model(torch.tensor([encoding.ids]), **types).last_hidden_state[0]


def run(path, column, task="embed", **options):
    """The rows of a job over a column of texts, or over a dict of columns."""
    table = pa.table(column if isinstance(column, dict) else {"text": column})
    options = {"dtype": "float32", "task": task, **options}
    with tempfile.TemporaryDirectory() as folder:  # without an output of its own, a job finds an earlier one's rows
        batchgen.run(str(path), table, Path(folder, "out.parquet"), **options)
        return pq.read_table(Path(folder, "out.parquet"))


def vectors(table):
    return np.array(table["embedding"].to_pylist(), np.float32)


def kind_of(table):
    kind = table.schema.field("embedding").type
    return kind.list_size, kind.value_type


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """class -> (path, transformers model), made when first asked for."""

    @functools.cache
    def get(name):
        path = tmp_path_factory.mktemp(name)
        return path, make_encoder(name, path)

    return get


@pytest.fixture(scope="module", params=sorted(ENCODERS))
def encoder(request, made):
    return made(request.param)


def test_padding_that_a_text_names_has_the_positions_of_transformers(encoder):
    path, model = encoder
    pad = SPECIAL_TOKENS[model.config.pad_token_id]
    rows = [f"the sea {pad} was flat", f"{pad}{pad} the sea", f"the sea {pad}", pad, f"a {pad} b{pad}{pad}", *texts(8)]
    wanted = torch.stack([F.normalize(hidden_of(model, path, text).mean(0), dim=0) for text in rows])
    assert np.abs(vectors(run(path, rows, pooling="mean", normalize=True)) - wanted.numpy()).max() < CLOSE


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_of_an_encoder_are_those_of_transformers(encoder, pooling):
    path, model = encoder
    rows = texts()
    wanted = [
        F.normalize(states.mean(0) if pooling == "mean" else states[0], dim=0)
        for states in (hidden_of(model, path, text) for text in rows)
    ]
    found = vectors(run(path, rows, pooling=pooling))
    assert np.abs(found - torch.stack(wanted).numpy()).max() < CLOSE


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_of_a_decoder_are_those_of_transformers(family, pooling, tiny_models):
    path, model = tiny_models(family)
    rows, decoder = texts(), model.model
    wanted = [
        F.normalize(states.mean(0) if pooling == "mean" else states[-1], dim=0)
        for states in (hidden_of(decoder, path, text) for text in rows)
    ]
    found = vectors(run(path, rows, pooling=pooling, max_num_batched_tokens=64, max_num_seqs=5))
    assert np.abs(found - torch.stack(wanted).numpy()).max() < CLOSE


@pytest.mark.parametrize("vectors_first", [True, False])
def test_jobs_of_vectors_and_of_texts_find_stores_of_their_own(vectors_first, tiny_models, tmp_path):
    """A model's output matrix is in no store of a job of vectors, which a job of texts must not take for its own."""
    path, _ = tiny_models("llama")
    rows, options = texts(4), {"weights": "int4"}

    def answers(folder, *tasks):
        options["offload_dir"] = tmp_path / folder
        return {
            task: vectors(run(path, rows, **options)).tolist()
            if task == "embed"
            else run(path, rows, task, max_tokens=4, **options)["gen_text"].to_pylist()
            for task in tasks
        }

    tasks = ["embed", "generate"] if vectors_first else ["generate", "embed"]
    assert answers("both", *tasks) == answers("texts", "generate") | answers("vectors", "embed")


def test_a_model_in_a_folder_of_its_transformer_has_the_vectors_of_one_that_is_not(tmp_path):
    make_encoder("BertModel", tmp_path)
    write_modules(tmp_path, "cls_token", dense=(64, 24), prompts={"query": "query: "})
    rows = texts(8)
    wanted = vectors(run(tmp_path, rows, prompt_name="query"))
    into_transformer_folder(tmp_path)
    assert (vectors(run(tmp_path, rows, prompt_name="query")) == wanted).all()
    assert kind_of(run(tmp_path, rows)) == (24, pa.float32())


def test_each_route_of_a_router_has_its_modules(tmp_path):
    model = make_encoder("BertModel", tmp_path)
    dense = write_modules(tmp_path, "mean_tokens", dense=(64, 24), prompts={"query": "query: "})
    into_transformer_folder(tmp_path)
    (tmp_path / "of_documents_Pooling").mkdir()
    (tmp_path / "of_documents_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    write_router(
        tmp_path,
        {
            "query": ["0_Transformer", "1_Pooling", "2_Dense", "3_Normalize"],
            "document": ["0_Transformer", "of_documents_Pooling"],
        },
        "document",
    )
    rows, folder = texts(8), tmp_path / "0_Transformer"

    def query(text):
        pooled = hidden_of(model, folder, f"query: {text}").mean(0)
        return F.normalize(torch.tanh(F.linear(pooled, dense["linear.weight"], dense["linear.bias"])), dim=0)

    queries = torch.stack([query(text) for text in rows]).numpy()
    documents = torch.stack([hidden_of(model, folder, text)[0] for text in rows]).numpy()
    assert np.abs(vectors(run(tmp_path, rows, prompt_name="query")) - queries).max() < CLOSE
    for options in ({}, {"prompt_name": "document"}):  # the default, and one that has no prompt
        assert np.abs(vectors(run(tmp_path, rows, **options)) - documents).max() < CLOSE
    with pytest.raises(InputError, match="--prompt-name passage: the model has no such prompt"):
        run(tmp_path, rows, prompt_name="passage")


def test_modules_of_the_files_are_applied_in_their_order(tmp_path):
    model = make_encoder("BertModel", tmp_path)
    dense = write_modules(
        tmp_path, "mean_tokens", dense=(64, 24), prompts={"query": "query: "}, default_prompt_name=None
    )
    rows = texts(8)

    def vector(text):
        pooled = hidden_of(model, tmp_path, text).mean(0)
        return torch.tanh(F.linear(pooled, dense["linear.weight"], dense["linear.bias"]))

    whole = vectors(run(tmp_path, rows))
    assert np.abs(whole - torch.stack([F.normalize(vector(text), dim=0) for text in rows]).numpy()).max() < CLOSE
    queries = vectors(run(tmp_path, rows, prompt_name="query", dimensions=10))
    wanted = [F.normalize(vector(f"query: {text}")[:10], dim=0) for text in rows]
    assert np.abs(queries - torch.stack(wanted).numpy()).max() < CLOSE
    with pytest.raises(InputError, match="--prompt-name passage: the model has no such prompt, its prompts: query"):
        run(tmp_path, rows, prompt_name="passage")
    with pytest.raises(InputError, match="--dimensions must be between 1 and the 24 of the model, not 25"):
        run(tmp_path, rows, dimensions=25)


def test_dimensions_that_the_files_state_are_those_of_the_normalised_vector(tmp_path):
    make_encoder("BertModel", tmp_path)
    write_modules(tmp_path, "mean_tokens")
    rows = texts(4)
    whole = vectors(run(tmp_path, rows))
    edit_json(tmp_path / "config_sentence_transformers.json", truncate_dim=10)
    assert np.abs(vectors(run(tmp_path, rows)) - whole[:, :10]).max() < CLOSE
    asked = vectors(run(tmp_path, rows, dimensions=20))
    assert np.abs(asked - whole[:, :20] / np.linalg.norm(whole[:, :20], axis=1, keepdims=True)).max() < CLOSE


@pytest.fixture(scope="module")
def plain(made):
    """class -> the vectors of twelve texts on the CPU."""
    return functools.cache(lambda name: vectors(run(made(name)[0], texts(12), device="cpu")))


DEVICE = "emulated:gpu-memory=256MiB,h2d=2GiB/s,d2h=2GiB/s"
ELSEWHERE = [(DEVICE, "native"), (DEVICE, "int8"), ("cpu", "int8")]


@pytest.mark.parametrize(
    ("name", "where"), covering(itertools.product(sorted(ENCODERS), ELSEWHERE), 12, "vectors on a device")
)
def test_vectors_are_the_same_on_a_device_and_close_with_weights_in_8_bits(name, where, made, plain):
    device, weights = where
    # The search for a plan is tested elsewhere.
    found = vectors(run(made(name)[0], texts(12), device=device, weights=weights, max_num_seqs=8, num_gpu_batches=1))
    plain = plain(name)
    if weights == "native":
        assert np.abs(found - plain).max() < CLOSE
    else:
        assert (found * plain).sum(1).min() > 0.98


@pytest.mark.parametrize(
    ("name", "modules"),
    [("BertModel", ["query", "value", "output.dense"]), ("ModernBertModel", ["Wqkv", "Wi", "Wo"])],
)
def test_vectors_of_an_adapted_encoder_are_those_of_the_model_that_peft_merges(name, modules, tmp_path):
    model = make_encoder(name, tmp_path / "base")
    merged = save_adapter(model, tmp_path / "lora", target_modules=modules, use_rslora=True).merge_and_unload().eval()
    rows = texts(6)
    wanted = [F.normalize(hidden_of(merged, tmp_path / "base", text).mean(0), dim=0) for text in rows]
    found = vectors(run(tmp_path / "base", rows, lora=str(tmp_path / "lora")))
    assert np.abs(found - torch.stack(wanted).numpy()).max() < CLOSE
    assert np.abs(found - vectors(run(tmp_path / "base", rows))).max() > CLOSE


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("BertForSequenceClassification", ["query", "dense"]),  # of the pooler too
        ("RobertaForSequenceClassification", ["query", "value"]),
        ("ModernBertForSequenceClassification", ["Wqkv", "dense"]),
        ("LlamaForSequenceClassification", ["q_proj"]),
    ],
)
def test_probabilities_of_an_adapted_classifier_are_those_of_the_model_that_peft_merges(name, modules, tmp_path):
    model = make_encoder(name, tmp_path / "base", num_labels=3)
    head = ["score"] if "Llama" in name else ["classifier"]  # as SEQ_CLS saves them
    adapted = save_adapter(model, tmp_path / "lora", target_modules=modules, modules_to_save=head, exclude_modules=head)
    merged, rows = adapted.merge_and_unload().eval(), texts(6)
    wanted = torch.stack([logits_of(merged, tmp_path / "base", text).softmax(0) for text in rows])
    table = run(tmp_path / "base", rows, "classify", lora=str(tmp_path / "lora"))
    found = np.array([list(row.values()) for row in table["probabilities"].to_pylist()])
    assert np.abs(found - wanted.numpy()).max() < CLOSE


@pytest.mark.parametrize("labels", [1, 5])
@pytest.mark.parametrize("name", ["Llama", "Bert", "Roberta", "ModernBert"])
def test_an_adapter_of_a_head_of_another_size_is_refused(name, labels, tmp_path):
    name = f"{name}ForSequenceClassification"
    make_encoder(name, tmp_path / "base", num_labels=3)
    other = make_encoder(name, tmp_path / "other", num_labels=labels)
    heads = {"Llama": ["score"], "Robe": ["classifier.out_proj"]}
    save_adapter(other, tmp_path / "adapter", target_modules=heads.get(name[:4], heads.get(name[:5], ["classifier"])))
    with pytest.raises(InputError, match=r"adapter adds a product .* is \[3, 64\] in this model: give the model that"):
        run(tmp_path / "base", ["a"], "classify", lora=str(tmp_path / "adapter"))


def test_workers_share_the_rows_of_a_job_of_vectors(tmp_path):
    make_encoder("BertForSequenceClassification", tmp_path)
    rows = texts(9)
    alone = run(tmp_path, rows, "classify")
    shared = run(tmp_path, rows, "classify", share=True)
    scores = [np.array(table["score"].to_pylist()) for table in (alone, shared)]
    assert np.abs(scores[0] - scores[1]).max() < 1e-5


def test_an_instruction_comes_before_each_query(tiny_models):
    path, model = tiny_models("qwen3")
    found = vectors(run(path, ["Which day?"], instruction="Find ferries"))
    states = hidden_of(model.model, path, "Instruct: Find ferries\nQuery:Which day?")
    assert np.abs(found[0] - F.normalize(states[-1], dim=0).numpy()).max() < CLOSE


def test_smaller_numbers_are_close_and_cosines_need_no_scale(tiny_models):
    path, _ = tiny_models("llama")
    rows = texts(6)
    whole = run(path, rows)
    assert kind_of(whole) == (64, pa.float32())
    halves = run(path, rows, vector_dtype="float16")
    assert kind_of(halves) == (64, pa.float16())
    assert np.abs(vectors(halves) - vectors(whole)).max() < 1e-3
    bytes_ = run(path, rows, vector_dtype="int8")
    assert kind_of(bytes_) == (64, pa.int8())
    scales = np.array(bytes_["embedding_scale"].to_pylist())[:, None]
    assert np.abs(vectors(bytes_) * scales - vectors(whole)).max() <= scales.max() / 2 * 1.001


@pytest.mark.parametrize(
    ("file", "name"), [("sentence_bert_config", "max_seq_length"), ("tokenizer_config", "model_max_length")]
)
def test_a_long_text_fails_or_is_cut_between_its_special_tokens(file, name, tmp_path):
    model = make_encoder("BertModel", tmp_path)
    write_modules(tmp_path, "mean_tokens")
    edit_json(tmp_path / f"{file}.json", **{name: 20})
    long, empty = " ".join(WORDS[:40]), ""
    table = run(tmp_path, [long, "short", empty])
    overlong = f"the text has {len(hidden_of(model, tmp_path, long))} tokens, the context holds 20"
    errors = [error and error.split(":")[0] for error in table["error"].to_pylist()]
    assert errors == [overlong, None, None]
    assert table["embedding"].to_pylist()[0] is None
    of_special_tokens = F.normalize(hidden_of(model, tmp_path, empty).mean(0), dim=0).numpy()
    assert table["prompt_tokens"].to_pylist()[2] == 2
    assert np.abs(np.array(table["embedding"].to_pylist()[2]) - of_special_tokens).max() < CLOSE
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(long).ids
    for side, kept in {"right": [*ids[:19], ids[-1]], "left": [ids[0], *ids[-19:]]}.items():
        with torch.inference_mode():
            states = model(torch.tensor([kept])).last_hidden_state[0]
        found = vectors(run(tmp_path, [long], on_overlong=f"truncate-{side}"))
        assert np.abs(found[0] - F.normalize(states.mean(0), dim=0).numpy()).max() < CLOSE


def test_an_empty_text_without_special_tokens_fails(tiny_models):
    path, _ = tiny_models("llama")
    assert run(path, ["", "a"])["error"].to_pylist() == ["the text is empty", None]


def test_a_vector_that_float16_cannot_hold_fails_its_row(tmp_path):
    make_encoder("BertModel", tmp_path)
    write_modules(tmp_path, "mean_tokens", dense=(64, 24))
    edit_json(tmp_path / "2_Dense" / "config.json", activation_function="torch.nn.Identity")
    file = tmp_path / "2_Dense" / "model.safetensors"
    tensors = load_file(file)
    tensors["linear.bias"][3] = -7e4
    save_file(tensors, file)
    rows = texts(2)
    whole = run(tmp_path, rows, normalize=False)
    assert np.abs(vectors(whole)).max() > 65504
    with pytest.raises(batchgen.BatchgenError, match=r"a value is 69.*, and --vector-dtype holds 65,504: give float32"):
        run(tmp_path, rows, normalize=False, vector_dtype="float16")
    assert run(tmp_path, rows, vector_dtype="float16")["error"].to_pylist() == [None, None]


def test_a_job_goes_on_with_the_rows_that_are_left(tiny_models, tmp_path):
    path, _ = tiny_models("llama")
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table({"text": texts(12)}), source)
    options = {"task": "embed", "dtype": "float32"}
    stopped = batchgen.run(str(path), source, output, max_time="0.000001s", **options)
    assert stopped["state"] == "stopped"
    batchgen.run(str(path), source, output, **options)
    again = run(path, pq.read_table(source)["text"].to_pylist())
    assert np.abs(vectors(pq.read_table(output)) - vectors(again)).max() < 1e-5
    assert batchgen.run(str(path), source, output, **options)["state"] == "already complete"
    with pytest.raises(batchgen.BatchgenError):
        batchgen.run(str(path), source, output, pooling="mean", **options)


def test_lines_for_the_embeddings_endpoint_are_answered_in_its_form(tiny_models, tmp_path):
    path, _ = tiny_models("llama")
    rows = texts(3)
    bodies = [
        {"input": rows[0]},
        {"input": rows[1:], "dimensions": 8, "encoding_format": "base64"},
        {"input": rows[0], "dimensions": 65},
        {"input": []},
    ]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", **body}}
        for i, body in enumerate(bodies)
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = batchgen.run(str(path), source, output, task="embed", dtype="float32")
    whole = vectors(run(path, rows))
    first, second = (json.loads(line)["response"]["body"] for line in output.read_text().splitlines())
    assert np.abs(np.array(first["data"][0]["embedding"]) - whole[0]).max() < 1e-5
    cut = whole[1:, :8] / np.linalg.norm(whole[1:, :8], axis=1, keepdims=True)
    found = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in second["data"]]
    assert np.abs(np.array(found) - cut).max() < 1e-5
    assert first["usage"]["prompt_tokens"] == first["usage"]["total_tokens"] > 0
    errors = [json.loads(line) for line in Path(report["errors_output"]).read_text().splitlines()]
    assert [(line["custom_id"], line["error"]["message"]) for line in errors] == [
        ("2", "dimensions 65 are more than the 64 of the model"),
        ("3", "the input is empty"),
    ]


def logits_of(model, path, text, pair=None):
    encoding = Tokenizer.from_file(str(Path(path) / "tokenizer.json")).encode(text, pair)
    typed = type(model).__name__.startswith(("Bert", "NomicBert"))
    types = {"token_type_ids": torch.tensor([encoding.type_ids])} if typed else {}
    with torch.inference_mode():
        return model(torch.tensor([encoding.ids]), **types).logits[0]


@pytest.mark.parametrize("name", sorted(CLASSIFIERS))
def test_probabilities_of_labels_are_those_of_transformers(name, tmp_path):
    labels = {0: "good", 1: "bad", 2: "ugly"}
    model = make_encoder(name, tmp_path, id2label=labels, label2id={v: k for k, v in labels.items()})
    rows = texts(12)
    wanted = torch.stack([logits_of(model, tmp_path, text).softmax(0) for text in rows])
    table = run(tmp_path, rows, "classify")
    found = np.array([[row[label] for label in labels.values()] for row in table["probabilities"].to_pylist()])
    assert np.abs(found - wanted.numpy()).max() < CLOSE
    assert table["label"].to_pylist() == [labels[i] for i in wanted.argmax(1).tolist()]
    assert np.abs(np.array(table["score"].to_pylist()) - wanted.max(1).values.numpy()).max() < CLOSE


@pytest.mark.parametrize(("pooling", "activation"), [("mean", "gelu"), ("cls", "silu")])
def test_the_head_of_modernbert_is_as_its_file_states(pooling, activation, tmp_path):
    stated = {"classifier_pooling": pooling, "classifier_activation": activation, "classifier_bias": True}
    model = make_encoder("ModernBertForSequenceClassification", tmp_path, num_labels=1, **stated)
    rows = texts(8)
    table = run(tmp_path, rows, "classify")
    wanted = torch.cat([logits_of(model, tmp_path, text) for text in rows])
    assert np.abs(np.array(table["score"].to_pylist()) - wanted.numpy()).max() < CLOSE
    for name, value in (("classifier_pooling", "max"), ("classifier_activation", "gelu_new")):
        edit_json(tmp_path / "config.json", **(stated | {name: value}))
        with pytest.raises(InputError, match=f"{name} '{value}' is not supported; supported:"):
            run(tmp_path, rows, "classify")


def test_a_reward_model_gives_one_number(tmp_path):
    model = make_encoder("LlamaForSequenceClassification", tmp_path, num_labels=1)
    rows = texts(6)
    table = run(tmp_path, rows, "classify")
    wanted = torch.cat([logits_of(model, tmp_path, text) for text in rows])
    assert table.column_names == ["text", "score", "prompt_tokens", "error"]
    assert np.abs(np.array(table["score"].to_pylist()) - wanted.numpy()).max() < CLOSE


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_padding_at_the_end_of_a_text_is_left_out_as_in_transformers(family, tmp_path):
    model = make_encoder(f"{family}ForSequenceClassification", tmp_path, num_labels=1)
    rows = [*texts(4), "<|im_end|>"]
    last = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a").ids[-1]
    edit_json(tmp_path / "config.json", pad_token_id=last)
    model.config.pad_token_id = last
    wanted = torch.cat([logits_of(model, tmp_path, text) for text in rows])
    table = run(tmp_path, rows, "classify")
    assert np.abs(np.array(table["score"].to_pylist()) - wanted.numpy()).max() < CLOSE


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"problem_type": "regression"}, "3 labels of problem_type 'regression' are not supported"),
        ({"id2label": {"1": "a", "2": "b", "3": "c"}}, "must have the numbers from 0 on as keys"),
        ({"id2label": None, "num_labels": "three"}, "num_labels 'three' and id2label null, which name no labels"),
        ({"id2label": None, "num_labels": -1}, "num_labels -1"),
        ({"id2label": ["a", "b", "c"]}, "id2label"),
    ],
)
def test_labels_that_are_not_understood_are_refused(stated, message, tmp_path):
    make_encoder("BertForSequenceClassification", tmp_path, num_labels=3)
    edit_json(tmp_path / "config.json", **stated)
    with pytest.raises(InputError, match=message):
        run(tmp_path, ["a"], "classify")


SIGMOID = {"activation_fn": "torch.nn.modules.activation.Sigmoid"}


@pytest.mark.parametrize(
    ("name", "file", "stated"),
    [
        ("Bert", "config", {"sentence_transformers": SIGMOID}),
        ("Roberta", "config_sentence_transformers", SIGMOID),
        ("NomicBert", "config_sentence_transformers", {"model_type": "CrossEncoder"}),
    ],
)
def test_a_cross_encoder_scores_queries_with_documents(name, file, stated, tmp_path):
    model = make_encoder(f"{name}ForSequenceClassification", tmp_path, num_labels=1)
    edit_json(tmp_path / f"{file}.json", **stated)
    pairs = {"query": texts(10, most=12), "document": texts(10, seed=1, most=20)}
    table = run(tmp_path, pairs, "rerank")
    wanted = [logits_of(model, tmp_path, *pair).sigmoid() for pair in zip(*pairs.values(), strict=True)]
    assert np.abs(np.array(table["score"].to_pylist()) - torch.cat(wanted).numpy()).max() < CLOSE
    edit_json(tmp_path / "tokenizer_config.json", model_max_length=8)
    (error,) = run(tmp_path, {"query": [WORDS[0]], "document": [" ".join(WORDS[:30])]}, "rerank", max_failed=1)["error"]
    assert "the context holds 8" in error.as_py()


def make_reranker(model, folder):
    """Copy a tiny decoder to a folder, with words of its tokenizer for the answers; returns their token ids."""
    from batchgen.models.classifiers import NO_YES

    folder.mkdir(exist_ok=True)
    for file in Path(model).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    # The tiny vocabulary has neither word whole: two of its tokens stand for them.
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    ids = dict(zip(NO_YES, sorted(vocab.values())[-2:], strict=True))
    names = {number: word for word, number in ids.items()}
    tokenizer["model"]["vocab"] = {names.get(number, token): number for token, number in vocab.items()}
    kept = set(tokenizer["model"]["vocab"])
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in tokenizer["model"]["merges"]]
    tokenizer["model"]["merges"] = [pair for pair in pairs if {*pair, "".join(pair)} <= kept]
    file.write_text(json.dumps(tokenizer))
    return ids


@pytest.mark.parametrize(
    ("name", "stated", "is_told"),
    [("chat", {}, True), ("My-Reranker", {}, False), ("chat", {"model_type": "CrossEncoder"}, False)],
)
def test_a_decoder_that_does_not_say_that_it_is_a_reranker_gets_one_line(tiny_models, tmp_path, name, stated, is_told):
    make_reranker(tiny_models("qwen3")[0], tmp_path / name)
    edit_json(tmp_path / name / "config_sentence_transformers.json", **stated)
    pq.write_table(pa.table({"query": ["Which day?"], "document": ["Monday."]}), tmp_path / "rows.parquet")
    command = ["run", "-m", tmp_path / name, "-i", tmp_path / "rows.parquet", "--task", "rerank", "--progress", "plain"]
    code, *said = invoke(*command, "--dry-run")
    assert code == 0 and ("say that it is a reranker" in "".join(said)) == is_told


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_decoder_of_another_family_is_no_reranker(tiny_models, tmp_path, family):
    make_reranker(tiny_models(family)[0], tmp_path)
    with pytest.raises(InputError, match="is neither a cross-encoder nor a Qwen3-Reranker in safetensors: give one"):
        run(tmp_path, {"query": ["Which day?"], "document": ["Monday."]}, "rerank")


PAIRS = {"query": ["Which day?", "Fish?"], "document": ["Monday.", "Onions."]}


def scores_by(model, folder, ids):
    """The scores of `PAIRS` by a decoder of transformers. ids: token ids of the answers, in a tokenizer of a folder."""
    for query, document in zip(*PAIRS.values(), strict=True):
        text = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
            ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given'
            f" a web search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>:"
            f" {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        token_ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
        with torch.inference_mode():
            logits = model(torch.tensor([token_ids])).logits[0, -1]
        yield logits[[ids["no"], ids["yes"]]].softmax(0)[1].item()


def test_a_decoder_reranks_by_its_answers_yes_and_no(tiny_models, tmp_path):
    path, model = tiny_models("qwen3")
    ids = make_reranker(path, tmp_path)
    assert run(tmp_path, PAIRS, "rerank")["score"].to_pylist() == pytest.approx([*scores_by(model, tmp_path, ids)])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ],
    ids=str,
)
def test_scores_of_an_adapted_decoder_are_those_of_the_model_with_its_adapter(tiny_models, tmp_path, tied, fields):
    path, model = tiny_models("qwen3", tie_word_embeddings=tied)
    ids = make_reranker(path, tmp_path / "base")
    adapted = save_adapter(model, tmp_path / "lora", **fields).eval()
    if tied and "embed_tokens" in fields.get("modules_to_save", ()):
        with pytest.raises(InputError, match="changes the embedding, which this model ties to its output matrix"):
            run(tmp_path / "base", PAIRS, "rerank", lora=str(tmp_path / "lora"))
        return
    found = run(tmp_path / "base", PAIRS, "rerank", lora=str(tmp_path / "lora"))["score"].to_pylist()
    assert found == pytest.approx([*scores_by(adapted, tmp_path / "base", ids)], abs=CLOSE)
    assert found != pytest.approx(run(tmp_path / "base", PAIRS, "rerank")["score"].to_pylist(), abs=CLOSE)


@pytest.mark.parametrize("fields", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_an_adapter_of_a_reranker_of_another_size_is_refused(tiny_models, tmp_path, fields):
    make_reranker(tiny_models("qwen3", tie_word_embeddings=False)[0], tmp_path / "base")
    other = tiny_models("qwen3", tie_word_embeddings=False, vocab_size=VOCAB_SIZE + 64)[1]
    save_adapter(other, tmp_path / "lora", **{"target_modules": ["q_proj"], **fields})
    with pytest.raises(InputError, match=r"lm_head.* in this model: give the model that the adapter was trained on"):
        run(tmp_path / "base", PAIRS, "rerank", lora=str(tmp_path / "lora"))


@pytest.mark.parametrize("tied", [True, False])
def test_vectors_of_an_adapted_decoder_are_those_of_its_embedding_and_without_its_output_matrix(
    tiny_models, tmp_path, tied
):
    path, model = tiny_models("qwen3", tie_word_embeddings=tied)
    fields = {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]}
    adapted = save_adapter(model, tmp_path / "lora", **fields).eval()
    rows = texts(3)
    wanted = [F.normalize(hidden_of(adapted.base_model.model.model, path, text)[-1], dim=0) for text in rows]
    found = vectors(run(path, rows, lora=str(tmp_path / "lora"), pooling="last"))
    assert np.abs(found - torch.stack(wanted).numpy()).max() < CLOSE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "generate"}, "gives no text, as it has no output matrix: give --task embed, classify, rerank"),
        ({"task": "classify"}, r"is no \*ForSequenceClassification: --task classify needs one"),
        ({"task": "rerank", "prompt_column": "text", "pair_column": "text"}, "is neither a cross-encoder nor a Qwen3"),
        ({"max_tokens": 5}, "--max-tokens has no meaning with --task embed"),
        ({"choices": ["a"]}, "--choices has no meaning with --task embed"),
        ({"drafts": 3}, "--drafts has no meaning with --task embed, which generates nothing: leave it out"),
        ({"logprobs": 2}, "--logprobs has no meaning with --task embed"),
        ({"attention_budget": "64"}, "--attention-budget has no meaning with --task embed"),
        ({"pipeline": 2}, "--task embed needs the whole model in one process: leave --pipeline out"),
        ({"pair_column": "text"}, "--pair-column is for --task classify or rerank"),
        ({"instruction": "a", "prompt_name": "b"}, "--instruction and --prompt-name exclude each other"),
    ],
)
def test_a_mistake_gets_one_clear_line(options, message, tmp_path):
    make_encoder("BertModel", tmp_path)
    with pytest.raises(InputError, match=message):
        run(tmp_path, ["a"], **options)


def test_options_of_vectors_are_refused_where_text_is_generated(tiny_models):
    path, _ = tiny_models("llama")
    with pytest.raises(InputError, match="--dimensions is for --task embed: give that task, or leave --dimensions out"):
        run(path, ["a"], "generate", dimensions=3)


def test_special_tokens_are_put_around_texts(tmp_path):
    add_special_tokens(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    from batchgen.models.files import ModelFiles
    from batchgen.models.tokenizers.loading import load_tokenizer

    tokenizer = load_tokenizer(ModelFiles(tmp_path, "hf", "tiny"))
    assert tokenizer.num_added == (1, 1)
    (first, types), (cut, _) = tokenizer.encode_pair("The ferry", "left"), tokenizer.encode_pair("The ferry", "left", 4)
    assert types[0] == 0 and types[-1] == 1 and len(first) > len(cut) == 4


def test_the_choices_of_options_are_those_of_the_modules_that_know_them():
    from batchgen.job import options
    from batchgen.models import pooling
    from batchgen.output import embed_columns

    assert options.POOLINGS == pooling.POOLINGS
    assert options.VECTOR_DTYPES == embed_columns.VECTOR_DTYPES


def test_a_pair_whose_template_would_be_cut_fails():
    from batchgen.core.errors import RowError
    from batchgen.core.request import Request
    from batchgen.engine.embedding import prompted, tokens_to_embed
    from batchgen.engine.encode import LengthLimit
    from batchgen.models.pooling import VectorSpec

    class Letters:
        num_added = (0, 0)

        def least_tokens(self, text):
            return 0

        def encode_batch(self, texts, add_special_tokens=True):
            return [list(map(ord, text)) for text in texts]

    spec = VectorSpec("last", pair_texts=("[", "|", "]"))
    request = prompted(Request("ab", pair="cd"), spec)
    limit = LengthLimit.of(7, "truncate-right")
    assert tokens_to_embed(Letters(), spec, request, limit, "truncate-right") == list(map(ord, "[ab|cd]"))
    with pytest.raises(RowError, match="the text has 7 tokens, the context holds 6: cut the document before"):
        tokens_to_embed(Letters(), spec, request, LengthLimit.of(6, "truncate-right"), "truncate-right")


def test_a_job_does_not_go_on_with_another_weight_after_the_pooling(tmp_path):
    make_encoder("BertModel", tmp_path)
    write_modules(tmp_path, "mean_tokens", dense=(64, 24))
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table({"text": texts(3)}), source)
    batchgen.run(str(tmp_path), source, output, task="embed", dtype="float32")
    file = tmp_path / "2_Dense" / "model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file)
    with pytest.raises(batchgen.BatchgenError, match="made with other settings"):
        batchgen.run(str(tmp_path), source, output, task="embed", dtype="float32")


def edit_json(path, **values):
    stated = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(stated | values))


@pytest.mark.parametrize("task", ["embed", "classify"])
def test_a_number_that_is_none_in_what_follows_the_layers_fails_the_row(task, tmp_path):
    if task == "embed":
        make_encoder("BertModel", tmp_path)
        file, name = tmp_path / "2_Dense" / "model.safetensors", "linear.bias"
        write_modules(tmp_path, "mean_tokens", dense=(64, 24))
    else:
        make_encoder("BertForSequenceClassification", tmp_path)
        file, name = tmp_path / "model.safetensors", "classifier.bias"
    tensors = load_file(file)
    tensors[name][0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(batchgen.BatchgenError, match="all rows failed: vectors are not finite in float32"):
        run(tmp_path, texts(2), task)


def test_a_conversation_is_judged_without_the_beginning_of_another_answer(tmp_path):
    model = make_encoder("LlamaForSequenceClassification", tmp_path, num_labels=1)
    tokenizer = make_tiny_tokenizer(tmp_path)
    chat = [{"role": "user", "content": "Which day?"}, {"role": "assistant", "content": "Monday."}]
    table = run(tmp_path, {"messages": [chat]}, "classify")
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
    token_ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    with torch.inference_mode():
        wanted = model(torch.tensor([token_ids])).logits[0]
    assert table["prompt_tokens"].to_pylist() == [len(token_ids)]
    assert abs(table["score"].to_pylist()[0] - wanted.item()) < CLOSE


def test_earlier_files_of_modernbert_state_the_same_layers(tmp_path):
    make_encoder("ModernBertModel", tmp_path)
    file = tmp_path / "config.json"
    stated = json.loads(file.read_text())
    now = config_of_hf(stated)
    assert now.windows == (None, 5, 5) and now.rope_of(0).theta == 160000.0 and now.rope_of(1).theta == 10000.0
    earlier = {name: value for name, value in stated.items() if name not in ("layer_types", "rope_parameters")}
    notes = {"layer_norm_eps": 1e-5, "position_embedding_type": "absolute", "repad_logits_with_grad": False}
    thetas = {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "global_attn_every_n_layers": 3}
    assert config_of_hf(earlier | notes | thetas) == now
    for name, value in (("norm_bias", True), ("hidden_activation", "quick_gelu")):
        with pytest.raises(InputError, match=f"{name} .* is not supported"):
            config_of_hf(stated | {name: value})


def test_earlier_files_of_nomicbert_state_the_same_layers(tmp_path):
    make_encoder("NomicBertModel", tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    now = config_of_hf(stated)
    earlier = {
        "n_embd": 64, "n_inner": 96, "n_layer": 3, "n_head": 4, "n_positions": 8192, "max_trained_positions": 260,
        "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_scaling_factor": None,
        "activation_function": "swiglu", "qkv_proj_bias": False, "causal": False, "prenorm": False,
        "scale_attn_weights": True, "summary_type": "cls_index",
    }  # fmt: skip
    names = ("architectures", "model_type", "vocab_size", "type_vocab_size", "dtype")
    assert config_of_hf({name: stated[name] for name in names} | earlier) == now
    for name, value in (("qkv_proj_bias", True), ("rotary_scaling_factor", 2.0), ("activation_function", "gelu")):
        with pytest.raises(InputError, match=f"{name} .* is not supported"):
            config_of_hf(stated | earlier | {name: value})
    with pytest.raises(InputError, match="n_embd 32 contradicts hidden_size 64"):
        config_of_hf(stated | {"n_embd": 32})


def test_an_encoder_whose_file_names_no_class_gives_no_text(tmp_path):
    make_encoder("BertModel", tmp_path)
    edit_json(tmp_path / "config.json", architectures=None)
    with pytest.raises(InputError, match="gives no text, as it has no output matrix"):
        run(tmp_path, ["a"], "generate", max_tokens=2)


def test_an_encoder_with_more_layers_than_its_file_says_is_refused(tmp_path):
    make_encoder("BertModel", tmp_path)
    edit_json(tmp_path / "config.json", num_hidden_layers=2)
    with pytest.raises(InputError, match=r"has a layer 2 .* its config.json says that there are 2, counted from 0"):
        run(tmp_path, ["a"])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"0": "a", "1": "b", "2": "c"}, "names 3 labels, and classifier.weight has 2: correct it"),
        ({}, "names 0 labels, and classifier.weight has 2: correct it"),
        ({"0": "a", "1": "a"}, "has the same name twice"),
    ],
)
def test_labels_that_do_not_fit_the_last_layer_are_refused(labels, message, tmp_path):
    make_encoder("BertForSequenceClassification", tmp_path)
    edit_json(tmp_path / "config.json", id2label=labels)
    with pytest.raises(InputError, match=message):
        run(tmp_path, ["a"], "classify")


def test_an_activation_of_a_cross_encoder_that_is_not_computed_is_refused(tmp_path):
    make_encoder("BertForSequenceClassification", tmp_path, num_labels=1)
    edit_json(tmp_path / "config.json", sentence_transformers={"activation_fn": "torch.nn.modules.activation.Tanh"})
    with pytest.raises(InputError, match="activation Tanh of the label is not supported; supported: Identity, Sigmoid"):
        run(tmp_path, {"query": ["a"], "document": ["b"]}, "rerank")


def test_files_that_state_longer_texts_than_there_are_positions_keep_to_the_positions(tmp_path):
    make_encoder("BertModel", tmp_path)
    write_modules(tmp_path, "mean_tokens")
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))
    fine, overlong = run(tmp_path, ["short", " ".join(WORDS * 5)])["error"].to_pylist()
    assert fine is None and "the context holds 260" in overlong


@pytest.mark.parametrize(("stated", "sizes"), [({"in_features": 32}, (32, 24)), ({"out_features": 30}, (64, 24))])
def test_a_dense_module_of_another_size_is_refused(stated, sizes, tmp_path):
    make_encoder("BertModel", tmp_path)
    write_modules(tmp_path, "mean_tokens", dense=sizes)
    edit_json(tmp_path / "2_Dense" / "config.json", **stated)
    with pytest.raises(InputError, match=r"has no linear.weight of .* rows and 64 columns: fetch the model again"):
        run(tmp_path, ["a"])


def test_texts_are_in_lower_case_where_the_files_say_so(tmp_path):
    model = make_encoder("BertModel", tmp_path)
    write_modules(tmp_path, "mean_tokens")
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 100, "do_lower_case": True}))
    wanted = F.normalize(hidden_of(model, tmp_path, "the ferry left at six").mean(0), dim=0)
    assert np.abs(vectors(run(tmp_path, ["The FERRY left at six"]))[0] - wanted.numpy()).max() < CLOSE


@pytest.mark.parametrize("task", ["classify", "generate"])
def test_a_format_of_vectors_is_refused_where_there_are_none(task, tmp_path):
    with pytest.raises(InputError, match="--vector-dtype is for --task embed: give that task, or leave"):
        run(tmp_path, ["a"], task, vector_dtype="int8")


def test_an_encoder_that_cuts_pairs_is_copied_once(tmp_path, monkeypatch):
    add_special_tokens(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    from batchgen.models.files import ModelFiles
    from batchgen.models.tokenizers.loading import load_tokenizer

    tokenizer = load_tokenizer(ModelFiles(tmp_path, "hf", "tiny"))
    first, _ = tokenizer.encode_pair("The ferry left", "at six", 6)
    monkeypatch.setattr("tokenizers.Tokenizer", None)
    again, _ = tokenizer.encode_pair("The ferry left", "at six", 6)
    assert again == first and len(first) == 6


@pytest.mark.parametrize(
    ("task", "kept_bytes"), [("embed", 20_000), ("classify", 20_000), ("rerank", 20_000), ("embed", 64 << 20)]
)
def test_no_object_of_a_row_outlives_it_but_results_for_duplicates(task, kept_bytes, tmp_path, monkeypatch):
    """When 1,000 rows are saved, no more objects than at 300 are alive, where few results are kept for duplicates."""
    monkeypatch.setattr(deduplication, "_MOST_RESULT_BYTES", kept_bytes)
    monkeypatch.setattr(engine, "_INPUT_AHEAD", 16)
    name = "BertModel" if task == "embed" else "BertForSequenceClassification"
    make_encoder(name, tmp_path, num_hidden_layers=1, num_labels=1 if task == "rerank" else 3)
    num_rows, alive, add = 0, [], PartWriter.add

    def counted(writer, row, result):
        nonlocal num_rows
        num_rows += 1
        add(writer, row, result)
        if num_rows in (300, 1000):
            writer.flush()
            gc.collect()
            alive.append(sys.getallocatedblocks())

    monkeypatch.setattr(PartWriter, "add", counted)
    rows = [f"{WORDS[i % 7]} {i}" for i in range(1100)]
    run(tmp_path, {"query": rows, "document": rows[::-1]} if task == "rerank" else rows, task, max_num_seqs=8)
    grown = alive[1] - alive[0]
    # A request or a result is more than two; caches of the libraries grow by fewer.
    assert (grown > 2 * 700) == (kept_bytes > 1 << 20), f"{grown} more objects"
