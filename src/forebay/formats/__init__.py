"""File formats: one module each, pure functions over bytes, no input or output.

Import the modules: `from forebay.formats import bytes_batch`. They are not loaded here, so that whoever needs
one of them does not pay for the libraries of the others.
"""

from forebay.formats._errors import Corrupt, UnsupportedEncoding

__all__ = ["Corrupt", "UnsupportedEncoding"]
