"""Transformer-XL for streams: speech sample by sample, codec frames, characters, words.

Importing this is free; the parts are modules of their own: `txl_audio.model.sequence` (the model),
`txl_audio.codecs`, `txl_audio.data`, `txl_audio.sampling`, and `txl_audio.recipe`, which puts them together.
"""

__version__ = "0.1.0"
