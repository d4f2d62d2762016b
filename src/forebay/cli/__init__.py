"""The `forebay` command."""
