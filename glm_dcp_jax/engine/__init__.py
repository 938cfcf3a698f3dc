"""Requests to steps: scheduling, compiled steps, sampling, text, and the `LLM` front."""
