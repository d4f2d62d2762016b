"""File formats: one module each, pure functions over bytes, no input or output."""

__all__: list[str] = []
