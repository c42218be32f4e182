"""Transformer-XL weights from elsewhere, and for elsewhere."""

from txl_audio.interop.exporters import write_folder
from txl_audio.interop.importers import Imported, read_folder
from txl_audio.interop.layouts import FIRST_MEMORY, Layout

__all__ = ["FIRST_MEMORY", "Imported", "Layout", "read_folder", "write_folder"]
