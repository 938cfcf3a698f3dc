"""The network as mathematics (arrays in, arrays out), and the loading of its checkpoints."""
