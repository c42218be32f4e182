"""Transformer-XL weights from elsewhere."""

from txl_audio.interop.importers import Imported, read_folder

__all__ = ["Imported", "read_folder"]
