"""Every key that a module of sentence-transformers states is computed with, or refused by its name."""

import json
import shutil

import pyarrow as pa
import pytest
import torch
import transformers
from tiny_encoders import make_encoder, write_modules
from tokenizers import Tokenizer

import batchgen
from batchgen import InputError
from batchgen.models.classifiers import _padding, read_classifier, read_reranker
from batchgen.models.files import read_config, resolve_model
from batchgen.models.pooling import read_head

CLOSE = 1e-4


def edit(file, **values):
    file.parent.mkdir(exist_ok=True)
    stated = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**stated, **values}))


def head_of(path, **options):
    files = resolve_model(str(path))
    return read_head(files, read_config(files), **options)


def classifier_of(path):
    files = resolve_model(str(path))
    return read_classifier(files, read_config(files))


TEXT_WAY = {"method": "forward", "method_output_name": "last_hidden_state"}
TEXTS = "sentence_bert_config.json"
HARMLESS = [
    (TEXTS, {"max_seq_length": 100, "do_lower_case": False, "unpad_inputs": True, "query_length": None}),
    (TEXTS, {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}),
    (TEXTS, {"modality_config": {"text": TEXT_WAY}, "processing_kwargs": {}}),
    (TEXTS, {"model_args": {"torch_dtype": "bfloat16", "attn_implementation": "sdpa"}, "config_args": {}}),
    (TEXTS, {"tokenizer_args": {"padding_side": "left"}, "processor_kwargs": {"model_max_length": 50}}),
    ("1_Pooling/config.json", {"embedding_dimension": 64, "include_prompt": True}),
    ("2_Dense/config.json", {"module_input_name": "sentence_embedding", "use_residual": False}),
    ("3_Normalize/config.json", {"module_input_name": "sentence_embedding", "module_output_name": None}),
]
REFUSED = [
    (TEXTS, {"transformer_task": "fill-mask"}, "transformer_task 'fill-mask'"),
    (TEXTS, {"module_output_name": "sentence_embedding"}, "module_output_name 'sentence_embedding'"),
    (TEXTS, {"modality_config": {"text": TEXT_WAY, "message": TEXT_WAY}}, "texts in a chat template"),
    (
        TEXTS,
        {"modality_config": {"text": {**TEXT_WAY, "method_output_name": "pooler_output"}}},
        "method_output_name 'pooler_output'",
    ),
    (TEXTS, {"processing_kwargs": {"text": {"add_special_tokens": False}}}, "text {'add_special_tokens': False}"),
    (TEXTS, {"query_length": 32}, "query_length 32"),
    (TEXTS, {"query_expansion": {"strategy": "fixed"}}, "query_expansion"),
    (TEXTS, {"config_kwargs": {"hidden_act": "relu"}}, "hidden_act 'relu'"),
    (TEXTS, {"config_args": {"is_causal": True}}, "is_causal true"),
    (TEXTS, {"tokenizer_args": {"truncation_side": "left"}}, "truncation_side 'left'"),
    (TEXTS, {"model_kwargs": {"num_hidden_layers": 2}}, "num_hidden_layers 2"),
    ("1_Pooling/config.json", {"weights": "learned"}, "weights 'learned'"),
    ("2_Dense/config.json", {"use_residual": True}, "use_residual true"),
    ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "module_input_name 'token_embeddings'"),
    ("2_Dense/config.json", {"module_output_name": "scores"}, "module_output_name 'scores'"),
    ("2_Dense/config.json", {"bias": False}, "the bias that .* states differ"),
    ("3_Normalize/config.json", {"module_input_name": "token_embeddings"}, "module_input_name 'token_embeddings'"),
    ("3_Normalize/config.json", {"p": 1}, "p 1 is a key that is not known"),
]


LISTED = "modules.json"


def listed(*types):
    return [{"type": name, "path": "" if "Transformer" in name else f"{i}_"} for i, name in enumerate(types)]


OURS = "sentence_transformers.models."
REFUSED_LISTS = [
    ((f"{OURS}Transformer", "pylate.models.Dense.Dense"), "pylate.models.Dense.Dense is no module of"),
    (("custom_st.Transformer", f"{OURS}Pooling"), "custom_st.Transformer is no module of"),
    ((f"{OURS}Transformer",), "has no Pooling, so it gives no vector of a text: give another model, or --pooling"),
    ((f"{OURS}Transformer", f"{OURS}Normalize", f"{OURS}Pooling"), "a Pooling after Dense or Normalize"),
    ((f"{OURS}Transformer", f"{OURS}LayerNorm", f"{OURS}Pooling"), "modules of type LayerNorm are not supported"),
]


@pytest.fixture
def encoder(tmp_path):
    make_encoder("BertModel", tmp_path)
    write_modules(tmp_path, "mean_tokens", dense=(64, 24))
    return tmp_path


def test_keys_of_modules_that_change_no_vector_are_taken(encoder):
    before = head_of(encoder)
    for file, values in HARMLESS:
        edit(encoder / file, **values)
    after = head_of(encoder)
    assert after.max_tokens == 50
    assert before.identity() == after.identity()


@pytest.mark.parametrize(("file", "values", "message"), REFUSED)
def test_keys_of_modules_that_mean_another_vector_are_refused(file, values, message, encoder):
    edit(encoder / file, **values)
    with pytest.raises(InputError, match=message) as refused:
        head_of(encoder)
    assert "\n" not in str(refused.value)


def test_a_prompt_that_is_not_pooled_is_refused_only_where_there_is_one(encoder):
    before = head_of(encoder)
    edit(encoder / "1_Pooling/config.json", include_prompt=False)
    named = {"query": "query: ", "document": ""}
    (encoder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": named}))
    for asked in ({}, {"prompt_name": "document"}):
        assert head_of(encoder, **asked).identity() == before.identity()
    for asked in ({"prompt_name": "query"}, {"instruction": "Find answers"}):
        with pytest.raises(InputError, match="left out of the pooling"):
            head_of(encoder, **asked)
    stated = {"prompts": named, "default_prompt_name": "query"}
    (encoder / "config_sentence_transformers.json").write_text(json.dumps(stated))
    with pytest.raises(InputError, match="left out of the pooling"):
        head_of(encoder)


@pytest.mark.parametrize(("types", "message"), REFUSED_LISTS)
def test_modules_that_give_no_known_vector_are_refused(types, message, encoder):
    (encoder / LISTED).write_text(json.dumps(listed(*types)))
    with pytest.raises(InputError, match=message):
        head_of(encoder)


def test_a_pooling_that_is_asked_for_takes_the_place_of_one_that_the_files_lack(encoder):
    (encoder / LISTED).write_text(json.dumps(listed(f"{OURS}Transformer")))
    assert head_of(encoder, pooling="cls").pooling == "cls"


@pytest.mark.parametrize("name", ["roberta", "distilbert", "camembert", "xlm-roberta"])
def test_the_longest_text_is_read_by_each_name_of_its_file(name, encoder):
    edit(encoder / f"sentence_{name}_config.json", max_seq_length=33, do_lower_case=True)
    head = head_of(encoder)
    assert (head.max_tokens, head.lowercases) == (33, True)


def cross_encoder(path, name, *types, **stated):
    """A classifier with one label, and the files that sentence-transformers 6 saves of a CrossEncoder."""
    model = make_encoder(name, path, num_labels=1)
    write_cross_encoder(path, *types, **stated)
    return model


def write_cross_encoder(path, *types, **stated):
    (path / LISTED).write_text(json.dumps(listed("sentence_transformers.base.modules.transformer.Transformer", *types)))
    edit(path / "config_sentence_transformers.json", model_type="CrossEncoder", **stated)


def test_a_cross_encoder_has_the_prompt_and_the_texts_that_its_files_state(tmp_path):
    stated = {"prompts": {"web": "The ferry "}, "default_prompt_name": "web"}
    model = cross_encoder(tmp_path, "RobertaForSequenceClassification", **stated)
    edit(
        tmp_path / TEXTS,
        transformer_task="sequence-classification",
        module_output_name="scores",
        modality_config={"text": {"method": "forward", "method_output_name": "logits"}},
        tokenizer_args={"model_max_length": 30},
        do_lower_case=True,
    )
    encode = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode
    ids = encode("the ferry left at six", "onions").ids
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits.sigmoid().item()
    pair = {"query": ["Left at Six", "a" * 99], "document": ["Onions", "b"]}
    table = batchgen.run(str(tmp_path), pa.table(pair), task="rerank", dtype="float32")
    assert abs(table["score"][0].as_py() - wanted) < CLOSE
    assert "the context holds 30" in table["error"][1].as_py()


@pytest.mark.parametrize(
    ("types", "texts", "message"),
    [
        (("sentence_transformers.base.modules.dense.Dense",), {}, "has Transformer, Dense; supported for this model"),
        (("custom.Head",), {}, "custom.Head is no module of"),
        ((), {"transformer_task": "feature-extraction"}, "transformer_task 'feature-extraction' is not supported"),
        ((), {"config_kwargs": {"num_labels": 2}}, "num_labels 2 is a key that is not known"),
    ],
)
def test_modules_of_a_cross_encoder_that_are_not_computed_are_refused(types, texts, message, tmp_path):
    cross_encoder(tmp_path, "BertForSequenceClassification", *types)
    edit(tmp_path / TEXTS, **texts)
    with pytest.raises(InputError, match=message):
        classifier_of(tmp_path)


SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"


class Words:
    """A tokenizer in which "no" is 5 and "yes" is 6."""

    def token_id(self, word):
        return {"no": 5, "yes": 6, "<|im_start|>": 1}.get(word)


@pytest.mark.parametrize(
    ("types", "score", "message"),
    [
        ((SCORE,), {"true_token_id": 6, "false_token_id": 5}, None),
        ((SCORE,), {"true_token_id": 7, "false_token_id": 8}, "a LogitScore of other tokens than no and yes"),
        ((SCORE,), {"true_token_id": 6, "false_token_id": None}, "a LogitScore of other tokens than no and yes"),
        ((SCORE,), {"true_token_id": 6, "false_token_id": 5, "module_input_name": "x"}, "module_input_name 'x'"),
        ((), {}, "supported for this model: Transformer, LogitScore"),
    ],
)
def test_a_decoder_that_reranks_has_the_tokens_and_the_instruction_of_its_files(
    types, score, message, tiny_models, tmp_path
):
    shutil.copytree(tiny_models("qwen3")[0], tmp_path, dirs_exist_ok=True)
    write_cross_encoder(tmp_path, *types, prompts={"q": "Find onions."}, default_prompt_name="q")
    edit(tmp_path / "1_" / "config.json", **score)
    files = resolve_model(str(tmp_path))

    def head():
        return read_reranker(files, read_config(files), Words, None)

    if message is None:
        assert head().dense[0].rows == (5, 6) and "<Instruct>: Find onions.\n" in head().pair_texts[0]
    else:
        with pytest.raises(InputError, match=message):
            head()


@pytest.mark.parametrize(
    "name", ["OPT", "Gemma2", "Phi3", "SmolLM3", "SeedOss", "Olmo2", "Olmo3", "Ministral3", "Llama", "Mistral", "Qwen3"]
)
def test_a_classifier_without_a_padding_token_in_its_file_has_that_of_transformers(name, tmp_path):
    config = getattr(transformers, f"{name}Config")()
    family = config.model_type
    assert _padding({}, family) == config.pad_token_id
    assert _padding({"pad_token_id": None}, family) is None
    assert _padding({"pad_token_id": 4}, family) == 4
