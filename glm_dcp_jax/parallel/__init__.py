"""The mesh, what is sharded over it, and attention over a sharded cache."""
