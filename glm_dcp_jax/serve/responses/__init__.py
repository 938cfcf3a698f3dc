"""/v1/responses: a conversation that comes as items, goes on as items, and is kept nowhere."""
