"""The two extension points for formats of weights: a part of a tensor, and a quantization that a checkpoint states.

docs/adding_a_format.md has the steps. Nothing here imports torch, and no format does before a weight is looked for, so
that a model is planned for, or refused, at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from batchgen.models.tensor_files.headers import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from batchgen.models.shard import Cut
    from batchgen.models.tensor_files.rows_in_file import FilePart

# The name of a tensor in its file, and where it lies.
NamedTensor = tuple[str, TensorInfo]
# All tensors of a model by name. The one that a checkpoint hands over raises InputError for a name that is not there.
Tensors = Mapping[str, TensorInfo]


class StoredPart(ABC):
    """A part of a model's tensor (`layouts.py`) as a file has it; shapes and dtypes are checked before it is made."""

    @abstractmethod
    def fill(self, out: Tensor) -> None:
        """Read the whole part.

        Args:
            out: Tensor to fill: the part's shape in any float dtype; or rows of bytes, uint8 or int8 [rows, bytes of a
                row], in the format that `Scheme.packed_format` names.

        Raises:
            InputError: The file cannot be read, or holds what is no weight.
        """

    def fill_cut(self, out: Tensor, cut: Cut) -> bool:
        """Read a rank's share of the part without the rest of it; False where this format has to read the whole."""
        return False

    def in_file(self) -> FilePart:
        """The rows of bytes that `fill` would read, for readers that pack them piece by piece; GGUFs have them."""
        raise NotImplementedError


class Scheme(ABC):
    """A quantization of the matrices of a Hugging Face checkpoint's linear layers.

    Subclasses are frozen dataclasses of what `quantization_config` states, one file each, with a row in `schemes.py`.
    """

    @abstractmethod
    def describe(self) -> str:
        """Name and sizes for people: "GPTQ of 4 bits, groups of 128"."""

    @abstractmethod
    def find(self, tensors: Tensors, stem: str, shape: tuple[int, int], *, in_layer: bool) -> StoredPart | None:
        """The matrix that a checkpoint calls `stem`; None where it is in plain numbers.

        Args:
            tensors: All tensors of the checkpoint.
            stem: Name of the linear layer: "model.layers.0.mlp.up_proj".
            shape: Rows and columns that the configuration asks for.
            in_layer: Whether it is of a decoder layer; embeddings and the output matrix are not.

        Raises:
            InputError: A tensor that belongs to the matrix is missing, or of another shape or dtype.
        """

    def packed_format(self, tensors: Tensors, columns: Collection[int]) -> str | None:
        """The format in which matrices stay as they are; None: they are dequantized.

        Args:
            tensors: All tensors of the checkpoint; none where its configuration alone is known.
            columns: Columns of the layers' matrices.

        Returns:
            int8, or one of `core.dtypes.NATIVE_FORMATS`.
        """
        return None

    def supports(self, family: str) -> bool:
        """True where models of a family are read in this scheme."""
        return family != "gpt_oss"
