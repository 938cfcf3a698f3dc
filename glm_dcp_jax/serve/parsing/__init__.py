"""What a model writes, taken apart as it comes: reasoning, content, tool calls. Imports nothing of the HTTP server."""
