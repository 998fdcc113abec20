"""The wire between the three processes: typed messages, tensor frames, channels and errors.

Knows nothing of tensors as objects (no torch), of models, or of what the messages are used for.
"""
