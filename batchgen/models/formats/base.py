"""The base classes for formats of weights: a stored part of a tensor, and a checkpoint's quantization scheme.

docs/adding_a_format.md describes how to add a format. Nothing here imports torch. A format imports torch only when a
weight is read, so that a model can be planned for, or refused, at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from batchgen.models.layouts import Part
from batchgen.models.tensor_files.headers import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from batchgen.models.shard import Cut
    from batchgen.models.tensor_files.rows_in_file import FilePart
    from batchgen.models.tensor_files.table_rows import TableRows

# The name of a tensor in its file, and where it lies.
NamedTensor = tuple[str, TensorInfo]
# All tensors of a model by name. The one that a checkpoint hands over raises InputError for a name that is not there.
Tensors = Mapping[str, TensorInfo]


class StoredPart(ABC):
    """A part of a model's tensor (`layouts.py`) in a file. Shape and dtype were checked when the object was made."""

    @abstractmethod
    def fill(self, out: Tensor) -> None:
        """Read the whole part into a tensor.

        Args:
            out: Tensor to fill. It has the part's shape and any float dtype; or it is for packed rows in the format
                that `Scheme.packed_format` names: uint8 or int8, [rows, bytes of a row].

        Raises:
            InputError: The file cannot be read, or a weight is NaN or infinite.
        """

    def fill_cut(self, out: Tensor, cut: Cut) -> bool:
        """Read only a tensor-parallel rank's share of the part into a tensor.

        Args:
            out: Tensor to fill, of the share's shape.
            cut: The rank's share.

        Returns:
            False if this format can only read the whole part; then `out` is not filled.
        """
        return False

    def table_rows(self) -> TableRows:
        """The part as a table whose rows are read one by one. Only parts that are stored as numbers or rows have it."""
        raise NotImplementedError

    def in_file(self) -> FilePart:
        """The place of the part's packed rows in a file, for readers that read them piece by piece.

        Only parts of GGUFs have it.
        """
        raise NotImplementedError


# A change of stored parts, whose rows are in the order that transformers has them in: what an adapter adds to them.
Change = Callable[[Part, StoredPart], StoredPart]


def unchanged(part: Part, stored: StoredPart) -> StoredPart:
    """The stored part of a model that has no adapter."""
    return stored


class Scheme(ABC):
    """A quantization scheme of the matrices of a Hugging Face checkpoint.

    Subclasses are frozen dataclasses of the values in `quantization_config`. Each has a file of its own, and an entry
    in `schemes.py`.
    """

    @abstractmethod
    def describe(self) -> str:
        """Name and sizes of the scheme for messages: "GPTQ of 4 bits, groups of 128"."""

    @abstractmethod
    def find(self, tensors: Tensors, stem: str, shape: tuple[int, int], *, in_layer: bool) -> StoredPart | None:
        """The quantized matrix that a checkpoint stores under a name; None: it is stored as plain numbers.

        Args:
            tensors: All tensors of the checkpoint.
            stem: Name of the linear layer: "model.layers.0.mlp.up_proj".
            shape: Rows and columns that the configuration requires.
            in_layer: Whether the matrix belongs to a decoder layer. The embedding and the output matrix do not.

        Raises:
            InputError: A tensor of the matrix is missing, or has a wrong shape or dtype.
        """

    def packed_format(self, tensors: Tensors, columns: Collection[int]) -> str | None:
        """The packed format that can store the checkpoint's matrices without loss; None: matrices are dequantized.

        Args:
            tensors: All tensors of the checkpoint; empty if only the configuration is known.
            columns: Numbers of columns of the layers' matrices.

        Returns:
            "int8", or one of `core.dtypes.NATIVE_FORMATS`.
        """
        return None

    def supports(self, family: str) -> bool:
        """True if models of a family can be read in this scheme."""
        return family != "gpt_oss"
