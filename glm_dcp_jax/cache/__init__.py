"""The paged cache: where a token lives, who holds which page, and the device arrays themselves."""
