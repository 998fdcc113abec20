"""Networks and memory: target, draft model, adapter, decoder, caches, loading. Knows no sequences and no sockets."""
