"""Replay of request traces on the real tree and allocator, to learn cache-hit rates.

The command is `rotaradix replay`; `replay.sweep.sweep` is the same from Python. This package
never imports torch.
"""
