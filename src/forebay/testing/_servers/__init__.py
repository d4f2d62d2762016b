"""How real servers are had, started, watched and ended. The door is `forebay.testing.servers`."""
