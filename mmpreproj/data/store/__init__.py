"""A content-addressed store of tensors on disk, memory-mapped."""

from mmpreproj.data.store.tensor_store import TensorStore, key_of

__all__ = ["TensorStore", "key_of"]
