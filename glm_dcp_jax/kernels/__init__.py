"""The operations the model is made of, one folder each: the public op, and its plain-JAX reference semantics."""
