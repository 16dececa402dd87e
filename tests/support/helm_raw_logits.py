"""HELM's Hugging Face client with the model's own log-probabilities of what it generates.

As it is, it reports those after the temperature is applied, which for greedy decoding is 1e-7: 0.0 for every token.
"""

from __future__ import annotations

from typing import Any

from helm.clients.huggingface_client import HuggingFaceClient, HuggingFaceServerFactory


class RawLogitsClient(HuggingFaceClient):
    def __init__(self, cache_config, tokenizer, model_name, end_of_text_token=None, **arguments: Any) -> None:
        super().__init__(cache_config, tokenizer, end_of_text_token=end_of_text_token, **arguments)
        path = self._pretrained_model_name_or_path
        model = HuggingFaceServerFactory.get_server(model_name, path, self._wrapped_tokenizer, **self._kwargs).model
        generate = model.generate

        def with_raw_logits(**settings: Any):
            output = generate(**(settings | {"output_logits": True}))  # HELM may make several clients of a model
            output.scores = output.logits
            return output

        model.generate = with_raw_logits
