"""How the built-in model is trained: its texts, its network, its stages. `scripts/train_demo.py` runs it."""
