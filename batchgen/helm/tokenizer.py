"""A HELM tokenizer that is loaded from a model's own files, GGUF included, without the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING

from helm.common.cache import CacheConfig
from helm.common.concurrency import ThreadSafeWrapper
from helm.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer, WrappedPreTrainedTokenizer

from batchgen.core.errors import RowError

if TYPE_CHECKING:
    from batchgen.models.tokenizers.chat_template import ChatTemplate

_loaded: dict[str, WrappedPreTrainedTokenizer] = {}
_loading = Lock()


class BatchgenTokenizer(HuggingFaceTokenizer):
    """The tokenizer class to name in tokenizer_configs.yaml.

    Args:
        model: The deployment's model, as `batchgen run --model` takes it.
    """

    def __init__(self, cache_config: CacheConfig, tokenizer_name: str, model: str) -> None:
        super().__init__(cache_config=cache_config, tokenizer_name=tokenizer_name)
        self._model = model

    def get_wrapped_tokenizer(self) -> WrappedPreTrainedTokenizer:
        """The transformers tokenizer, loaded once in a process. Raises InputError where it is missing or broken."""
        from batchgen.models.files import resolve_model
        from batchgen.models.tokenizers.loading import load_parts
        from batchgen.models.tokenizers.transformers_tokenizer import as_hf_tokenizer

        with _loading:
            if self._model not in _loaded:
                _loaded[self._model] = ThreadSafeWrapper(as_hf_tokenizer(load_parts(resolve_model(self._model))))
        return _loaded[self._model]


class PromptTokens:
    """A `rows.PromptTokenizer` that uses a HELM tokenizer which wraps a transformers tokenizer."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._wrapped = tokenizer.get_wrapped_tokenizer()
        self._template: ChatTemplate | None = None

    @property
    def has_chat_template(self) -> bool:
        with self._wrapped as hf:
            return bool(hf.chat_template)

    def encode(self, text: str) -> list[int]:
        with self._wrapped as hf:
            return list(hf(text).input_ids)

    def encode_chat(self, messages: list[dict]) -> list[int]:
        """The token ids of chat messages. Raises RowError where the chat template refuses them."""
        from batchgen.models.tokenizers.chat_template import Chat, ChatTemplate

        with self._wrapped as hf:
            if self._template is None:
                self._template = ChatTemplate.of(hf.chat_template, hf.special_tokens_map)
            (text,) = self._template.render([Chat(messages)])
            if isinstance(text, RowError):
                raise text
            return list(hf(text, add_special_tokens=False).input_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        with self._wrapped as hf:
            return hf.decode(list(token_ids), clean_up_tokenization_spaces=False)
