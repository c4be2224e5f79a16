"""The checkpoint format, version 1: values to bytes, and bytes to validated values. No I/O.

A step folder holds safetensors part files, one index per part, and one manifest whose creation is
the commit; docs/format.md describes them. Everything decoded here is bounded and validated before
memory is taken, and raises FormatError (CorruptError, VersionError) when it is not right.
"""

from holdfast.format.checksum import (
    BLOCK,
    block_digest,
    block_range,
    block_seed,
    digest,
    num_blocks,
)
from holdfast.format.ids import (
    MANIFEST,
    SaveId,
    data_name,
    index_name,
    parse_file_name,
    parse_step_folder,
    step_folder,
)
from holdfast.format.index import (
    VERSION,
    PartFile,
    PartIndex,
    Slice,
    arrays_in,
    check_block,
    check_digest,
    check_slice,
    decode_index,
    encode_index,
)
from holdfast.format.limits import MAX_HEADER, MAX_INDEX, MAX_MANIFEST
from holdfast.format.manifest import (
    HEAD,
    ArrayEntry,
    ArrayTable,
    Manifest,
    PartEntry,
    ScalarEntry,
    decode_manifest,
    encode_manifest,
    part_index,
    saved_by,
)
from holdfast.format.meta import check_meta
from holdfast.format.owners import cells, decode_owners, encode_owners, num_cells, owner_array
from holdfast.format.packing import ALIGN, pack
from holdfast.format.part import Piece, lay_out
from holdfast.format.safetensors import Tensor, decode_header, encode_header
from holdfast.format.verify import (
    Problem,
    check_size,
    read_index,
    read_manifest,
    read_some,
    verify_step,
)
from holdfast.format.versions import versions

__all__ = [
    "ALIGN",
    "BLOCK",
    "HEAD",
    "MANIFEST",
    "MAX_HEADER",
    "MAX_INDEX",
    "MAX_MANIFEST",
    "VERSION",
    "ArrayEntry",
    "ArrayTable",
    "Manifest",
    "PartEntry",
    "PartFile",
    "PartIndex",
    "Piece",
    "Problem",
    "SaveId",
    "ScalarEntry",
    "Slice",
    "Tensor",
    "arrays_in",
    "block_digest",
    "block_range",
    "block_seed",
    "cells",
    "check_block",
    "check_digest",
    "check_meta",
    "check_size",
    "check_slice",
    "data_name",
    "decode_header",
    "decode_index",
    "decode_manifest",
    "decode_owners",
    "digest",
    "encode_header",
    "encode_index",
    "encode_manifest",
    "encode_owners",
    "index_name",
    "lay_out",
    "num_blocks",
    "num_cells",
    "owner_array",
    "pack",
    "parse_file_name",
    "parse_step_folder",
    "part_index",
    "read_index",
    "read_manifest",
    "read_some",
    "saved_by",
    "step_folder",
    "verify_step",
    "versions",
]
