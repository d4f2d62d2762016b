"""Other people's clients, each in an environment of its own, run as programs that answer in JSON.

An environment of its own, because a peer's pins would fight with ours; a program that stays up between its
turns, because starting an interpreter would be most of a turn.
"""
