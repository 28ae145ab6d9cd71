"""The bundled engine: scheduler, KV blocks, step time, policies. It cannot import an oracle."""
