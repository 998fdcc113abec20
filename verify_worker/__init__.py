"""GPU 0: runs the target, draws every committed token, and is the source of truth for every sequence."""
